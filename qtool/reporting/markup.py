"""HTML and SVG as nested calls, with everything that is text escaped.

``el("p", "a < b", cls="note")`` is ``<p class="note">a &lt; b</p>``. Names of models, layers and files
come from outside; only what :func:`el` itself made is taken as markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


VOID = frozenset({"meta", "br", "line", "rect", "circle", "path", "polyline", "polygon", "col"})


def el(tag: str, /, *children: object, **attributes: object) -> Markup:
    """An element. ``cls`` is its class, ``x_y`` its attribute ``x-y``; children that are None are left out.

    >>> el("a", "R&D", el("b", 1), href="#top", data_unit="ms")
    '<a href="#top" data-unit="ms">R&amp;D<b>1</b></a>'
    """
    given = "".join(f' {_attribute(key)}="{_quoted(value)}"' for key, value in attributes.items() if value is not None)
    inner = "".join(_rendered(children))
    if tag in VOID and not inner:
        return Markup(f"<{tag}{given}/>")
    return Markup(f"<{tag}{given}>{inner}</{tag}>")


def figure(picture: Markup, caption: str) -> Markup:
    """A picture with the sentence that says how to read it."""
    return el("figure", picture, el("figcaption", caption))


def _attribute(key: str) -> str:
    return "class" if key == "cls" else key if key == "viewBox" else key.replace("_", "-")


def _quoted(value: object) -> str:
    return html.escape(f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value))


def _rendered(children: Iterable[object]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, list | tuple):
            yield from _rendered(child)
        else:
            yield html.escape(str(child), quote=False)
