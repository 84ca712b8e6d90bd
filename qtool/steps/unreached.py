"""Parameters that are to be trained and that no gradient reaches: they stay as they came, and nothing else would tell.

An auxiliary head that no loss reads is meant to be so; an adapter of a layer whose weight other code reads, past the
adapter, is not. A layer that some steps leave out (drop paths, experts) is reached within a few of them.

A parameter that a forward pass has made is refused: gradients reach it, and no optimizer has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor, nn

from qtool.errors import QtoolError, QtoolWarning
from qtool.units import few

LOOKED = 8
"""The first steps of a training, in which gradients are looked for."""
Tell = Callable[[list[str], str], None]
"""Is given the names of parameters, and in which steps no gradient has reached them."""


class Unreached:
    """Those of a model's trained parameters that no gradient has reached yet.

    With ``used_at_once`` gradients are gone when a step is over, and seen as they come.
    """

    def __init__(self, model: nn.Module, *, used_at_once: bool) -> None:
        self.model, self.there = model, dict.fromkeys(name for name, _ in model.named_parameters())
        self.left = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
        watched = self.left.values() if used_at_once else ()
        self.came: set[Tensor] = set()
        self.handles = [p.register_post_accumulate_grad_hook(self.came.add) for p in watched]  # type: ignore[no-untyped-call]

    def look(self) -> None:
        """Strikes out those that have a gradient, or had one in the step that was just made.

        Raises QtoolError where that step has made others.
        """
        self._require_no_others()
        if not self.left:
            return
        self.left = {name: p for name, p in self.left.items() if p.grad is None and p not in self.came}

    def _require_no_others(self) -> None:
        if not self.there:
            return
        made = [name for name, p in self.model.named_parameters() if p.requires_grad and name not in self.there]
        if made:
            raise QtoolError(
                "model", "all that is trained before its first step", f"{few(made)}, which a forward pass has made",
                "make it in __init__, or call the model on a batch before it is trained (a factory can)",
            )  # fmt: skip

    def close(self) -> list[str]:
        """The names of those that are left; nothing is looked at from then on."""
        for handle in self.handles:
            handle.remove()
        self.came.clear()
        self.there.clear()
        names, self.left = list(self.left), {}
        return names


def tell(names: list[str], when: str) -> None:
    """Warns of them: what the loss does not depend on may be meant to be so."""
    warnings.warn(
        f"training: no gradient has reached {few(names)} in {when}: what the loss does not depend on stays as it came",
        QtoolWarning,
        stacklevel=2,
    )
