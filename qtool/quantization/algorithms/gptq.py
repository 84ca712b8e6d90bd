"""GPTQ: weights fitted and rounded so that each layer's output, not each weight, is nearest to the float model's.

For one layer let rows ``x`` be its inputs in the float model and ``x̂`` those that it really gets, out of layers that
are quantized already (means taken out; they are the bias's business). Over a sample of positions of every calibration
sample the integers are to make

    E ‖W x − Ŵ x̂‖²  =  tr(W S Wᵀ) − 2 tr(W C Ŵᵀ) + tr(Ŵ H Ŵᵀ),    S = E[x xᵀ],  C = E[x x̂ᵀ],  H = E[x̂ x̂ᵀ]

small. First the real weights that do, ridge-regularised towards W, so that a layer also makes up for what those before
it did wrong (GPTAQ, arXiv 2504.02692, has the same aim):

    W* = W (C + λI) (H + λI)⁻¹

Then column after column is rounded, and what rounding one column did is made good by those that are not rounded yet
(GPTQ, arXiv 2210.17323), with U the upper Cholesky factor of (H + λI)⁻¹:

    w_j ← round(w_j),    W_{j+1:} ← W_{j+1:} − (w_j − ŵ_j) / U_jj · U_{j,j+1:}

Last the bias takes up the mean, b̂ = W E[x] + b − Ŵ E[x̂], which is sequential bias correction for free. λ is a part of
the mean of H's diagonal; which one is settled on rows that the fit did not see (every other batch), plain rounding
being among the candidates: a layer that fitting makes worse there keeps its rounded weights, and the note says which.

The order is that of the graph, both models walked side by side (``layers.py``), layer inputs spooled beyond a budget.
The cost is one pass through each, and algebra of the order K³ + outputs · K² for each layer.

Each layer's result is kept in a journal (``journal.py``) where there is a folder for it.

Left out on purpose: reordering columns by curvature. Layers that share a weight keep its rounding, since what is fitted
to the inputs of one is wrong for the other; their biases are their own.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qtool.quantization.algorithms.journal import Journal, State
from qtool.quantization.algorithms.layers import ROWS, Layer, Moments, in_order, leave_shared, output_error
from qtool.quantization.algorithms.subject import Subject, few

DAMPINGS = (0.003, 0.03, 0.3, 3.0)
"""Ridge parameters that are tried, as parts of the mean of H's diagonal."""
_BLOCK = 128


@torch.no_grad()
def gptq(subject: Subject) -> None:
    """Refits the integers and the bias of every integer convolution and linear layer, in order, in place."""
    journal, total, shared = Journal(subject, "gptq"), len(subject.anchors()), leave_shared(subject, "gptq")
    better: dict[str, bool] = {}
    for layer in in_order(subject):
        subject.report(f"gptq {layer.name}", len(better), total)
        better[layer.name] = fit(layer, journal, alone=layer.node not in shared)
    subject.report("gptq", total, total)
    subject.note(f"gptq: refitted {sum(better.values())} layers")
    left = {str(node.meta["unit"]) for node in shared}
    kept = [name for name, fitting in better.items() if not fitting and name not in left]
    if kept:
        subject.note(f"gptq: {len(kept)} layers keep their rounded weights, which fitting made worse: {few(kept)}")


def fit(layer: Layer, journal: Journal, *, alone: bool = True, num_rows: int = ROWS) -> bool:
    """Gives one layer its integers and bias, the bias only where its integers are not its ``alone``.

    Returns whether the integers are another than plain rounding's.
    """
    state = journal.once(layer.node.name, partial(_refit, layer, alone, num_rows))
    layer.store(state["integers"].double(), state["bias"])
    return "kept" not in state


def fitted(real: Tensor, moments: Moments, damping: float) -> tuple[Tensor, Tensor]:
    """W* and H + λI for one ridge parameter, float64; λ is ``damping`` times the mean of H's diagonal."""
    _, c, h = moments.centred()
    spread = h.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    least = 1e-6 * float(spread.mean()) + 1e-30  # a group whose inputs never change
    ridge = torch.diag_embed((spread * damping + least).expand(h.shape[:2]))
    damped = (h + h.mT) / 2 + ridge
    return torch.linalg.solve(damped, (real @ (c + ridge)).mT).mT, damped


def rounded(weight: Tensor, damped: Tensor, scale: Tensor, qmax: int) -> Tensor:
    """The integers, as floats G × outputs × K, that GPTQ rounds ``weight`` to; ``scale`` is G × outputs × 1 or K.

    Raises LinAlgError where ``damped`` is not positive definite in float64.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse).mT.float()
    left, scale = weight.float().clone(), scale.float().expand_as(weight)
    made = torch.empty_like(left)
    size = left.shape[2]
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        errors = torch.empty_like(left[:, :, start:stop])
        for column in range(start, stop):
            value, step = left[:, :, column : column + 1], scale[:, :, column : column + 1]
            made[:, :, column : column + 1] = (value / step).round().clamp(-qmax, qmax)
            error = (value - made[:, :, column : column + 1] * step) / upper[:, column, column, None, None]
            left[:, :, column:stop] -= error * upper[:, column, None, column:stop]
            errors[:, :, column - start] = error[:, :, 0]
        left[:, :, stop:] -= errors @ upper[:, start:stop, stop:]
    return made.double()


def _refit(layer: Layer, alone: bool, num_rows: int) -> State:
    """The integers of one layer and the change of its bias; ``kept`` where they are plain rounding's."""
    seen, unseen = layer.observe(num_rows)
    both = seen if unseen is None else seen + unseen
    best = _best_damping(layer, seen, unseen) if unseen is not None and alone else None
    made = None if best is None else _solve(layer, both, best)
    better = made is not None and output_error(layer.real, made * layer.scale, both) < layer.plain_error(both)
    made = made if made is not None and better else layer.nearest
    state = {"integers": made.to(torch.int8), "bias": layer.bias_change(made, both)}
    return state if better else state | {"kept": torch.ones(1)}


def _solve(layer: Layer, moments: Moments, damping: float) -> Tensor | None:
    """The integers for one ridge parameter; None where it is too small for these inputs."""
    try:
        weight, damped = fitted(layer.real, moments, damping)
        return rounded(weight, damped, layer.scale, layer.qmax)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None


def _best_damping(layer: Layer, seen: Moments, unseen: Moments) -> float | None:
    """The ridge parameter that, fitted on one half, does best on the other; None where plain rounding does."""
    solved = ((damping, _solve(layer, seen, damping)) for damping in DAMPINGS)
    errors = {d: output_error(layer.real, made * layer.scale, unseen) for d, made in solved if made is not None}
    best = min(errors, key=errors.__getitem__, default=None)
    return best if best is not None and errors[best] < layer.plain_error(unseen) else None
