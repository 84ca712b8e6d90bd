"""Yes or no to questions that ask others before they can be answered, each of them once.

Whether an operator may be integer depends on whether what it reads and what reads it may be, and so on through a graph.
Asked again at every place, joins of joins (DenseNet's) would take time that doubles with each; and a question may
lead back to itself. Such a one is taken for yes, so that what is said on that assumption is said to its asker only. All
else is kept until a first question is asked anew, before which anything may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Answers:
    """What was answered, and what is being asked."""

    def __init__(self) -> None:
        self._asked: set[Hashable] = set()
        self._known: dict[tuple[Hashable, Hashable], bool] = {}
        self._assumed = False

    def ask(self, about: Hashable, what: Hashable, find: Callable[[], bool]) -> bool:
        """The answer to ``what`` is asked ``about`` something, which ``find`` finds where it is not known."""
        if about in self._asked:
            self._assumed = True
            return True
        if not self._asked:
            self._known.clear()
        if (about, what) in self._known:
            return self._known[about, what]
        self._asked.add(about)
        before, self._assumed = self._assumed, False
        found = find()
        if not self._assumed:
            self._known[about, what] = found
        self._assumed |= before
        self._asked.discard(about)
        return found
