"""Labels of tokens in the dicts of Hugging Face's tools: whether each is compared with the output at the place before.

transformers' causal models move ``labels`` on themselves, and are given ``input_ids`` again wherever they count; its
models of masked tokens and of a class for each compare them as they stand. Here nothing but the dict tells, so it is
decided once for a data set: by the model's class where that is known; else by the labels, since those of masked tokens
differ from what the model sees (but for one in ten) and classes do. Few labels, all repeating their input, leave it
open: then those in a row, or at the end, are taken for those of the next token, and it is told. Labels that are the
next tokens already are left as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolWarning

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = -100
"""The target of a token or a pixel that no loss and no metric counts: the ``ignore_index`` of torch's cross-entropy."""
ENOUGH = 8
"""Labels that repeat their input by chance once in 10⁸ sets of masked tokens."""
MOVED = ("ForCausalLM", "LMHeadModel")
AS_THEY_STAND = ("ForMaskedLM", "ForTokenClassification")


@dataclass(frozen=True)
class Verdict:
    """Whether labels are moved on, and whether that is more than a guess."""

    moved: bool
    sure: bool = True

    def tell(self, where: str) -> None:
        """Warns of a guess."""
        if not self.sure:
            taken = "those of the next token" if self.moved else "those of their own place"
            warnings.warn(
                f"{where}: its 'labels' repeat 'input_ids' in the few places that count, and are taken for {taken}; "
                "give (input, target), where the target is what each output is compared with, to say so yourself",
                QtoolWarning,
                stacklevel=2,
            )


def of_model(model: nn.Module | None) -> bool | None:
    """Whether ``model`` moves labels on, by the name of its class or of one that it holds; None where none tells."""
    for module in model.modules() if model is not None else ():
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            return False
        names = [kind.__name__ for kind in type(module).__mro__]
        for endings, moved in ((MOVED, True), (AS_THEY_STAND, False)):
            if any(name.endswith(endings) for name in names):
                return moved
    return None


def judged(items: Iterable[tuple[Any, Any]]) -> Verdict | None:
    """What (tokens, labels) of samples or batches tell; None where none are labels of tokens."""
    import torch

    known = [(tokens, labels) for tokens, labels in items if _of_tokens(tokens, labels)]
    if not known:
        return None
    if not all(_repeat(tokens, labels) for tokens, labels in known):
        return Verdict(False)
    counted = [labels != IGNORED for _, labels in known]
    total = sum(int(c.sum()) for c in counted)
    in_a_row = sum(int((c[..., 1:] & c[..., :-1]).sum()) for c in counted)
    at_the_end = any(bool(torch.any(c[..., -1])) for c in counted)
    return Verdict(True) if total >= ENOUGH else Verdict(2 * in_a_row >= total or at_the_end, sure=False)


def moved_on(tokens: Any, labels: Any, moved: bool) -> Any:
    """``labels`` one place on, if they are ``moved``, but where they are no tokens' or the next tokens already."""
    import torch

    if not (moved and _of_tokens(tokens, labels)):
        return labels
    if not _repeat(tokens, labels) and _repeat(tokens[..., 1:], labels[..., :-1]):
        return labels
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORED)], -1)


def _of_tokens(tokens: Any, labels: Any) -> bool:
    from torch import Tensor

    same = isinstance(tokens, Tensor) and isinstance(labels, Tensor) and tokens.shape == labels.shape
    return same and labels.dim() > 0 and not labels.is_floating_point()


def _repeat(tokens: Tensor, labels: Tensor) -> bool:
    return bool(((labels == tokens) | (labels == IGNORED)).all())
