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

Last the bias takes up the mean, b̂ = W E[x] + b − Ŵ E[x̂], which is sequential bias correction for free.

λ is a part of the mean of H's diagonal, and there are two of them, since real weights that are fitted follow noise
sooner than rounded ones do. Both are settled on rows that were not fitted to (every other batch): first that of W*, by
the error that real weights leave there, W itself being among them; then that of the rounding. Plain rounding is a
candidate too: a layer that all else makes worse keeps its rounded weights, and the note says which. With one λ for both
two MobileNetV2s, one on CIFAR-10 and one with 200 photographs to calibrate, came out 0.2 dB worse.

The order is that of the graph, both models walked side by side (``layers.py``), layer inputs spooled beyond a budget.
The cost is one pass through each, and algebra of the order K³ + outputs · K² for each layer.

Each layer's result is kept in a journal (``journal.py``) where there is a folder for it.

Left out on purpose: reordering columns by curvature. Layers that share a weight keep its rounding, since what is fitted
to the inputs of one is wrong for the other; their biases are their own.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from qtool.quantization.algorithms.journal import Journal, State
from qtool.quantization.algorithms.layers import ROWS, Layer, Moments, in_order, leave_shared, output_error
from qtool.quantization.algorithms.subject import Subject
from qtool.units import few, many

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
    subject.note(f"gptq: refitted {many(sum(better.values()), 'layer')}")
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


def damped(moments: Moments, damping: float) -> Tensor:
    """H + λI, float64; λ is ``damping`` times the mean of H's diagonal."""
    _, _, h = moments.centred()
    return (h + h.mT) / 2 + _ridge(h, damping)


def fitted(real: Tensor, moments: Moments, damping: float) -> Tensor:
    """W* for one ridge parameter (see :func:`damped`), float64. Raises LinAlgError where it is too small."""
    _, c, h = moments.centred()
    solved: Tensor = torch.linalg.solve(damped(moments, damping), (real @ (c + _ridge(h, damping))).mT)
    return solved.mT


def _ridge(h: Tensor, damping: float) -> Tensor:
    spread = h.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    least = 1e-6 * float(spread.mean()) + 1e-30  # a group whose inputs never change
    return torch.diag_embed((spread * damping + least).expand(h.shape[:2]))


def rounded(weight: Tensor, hessian: Tensor, scale: Tensor, ends: tuple[int, int]) -> Tensor:
    """The integers, as floats G × outputs × K, that GPTQ rounds ``weight`` to; ``scale`` is G × outputs × 1 or K.

    ``ends`` are the least and the greatest. Raises LinAlgError where ``hessian`` is not positive definite in float64.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper = torch.linalg.cholesky(inverse).mT.float()
    # columns first: what a step reads and writes lies side by side; rows of ``upper`` in units of their diagonal
    upper = upper / upper.diagonal(dim1=1, dim2=2)[:, :, None]
    left = weight.mT.float().clone(memory_format=torch.contiguous_format)
    steps, made = scale.mT.float().expand_as(left), torch.empty_like(left)
    for start in range(0, left.shape[1], _BLOCK):
        here = slice(start, start + _BLOCK)
        block, errors = left[:, here], torch.empty_like(left[:, here])
        columns = zip(block.unbind(1), steps[:, here].unbind(1), made[:, here].unbind(1), errors.unbind(1), strict=True)
        rows = upper[:, here, here, None].unbind(1)
        for i, (value, step, integer, error) in enumerate(columns):
            torch.div(value, step, out=integer).round_().clamp_(*ends)
            torch.addcmul(value, integer, step, value=-1, out=error)
            block[:, i + 1 :].addcmul_(rows[i][:, i + 1 :], error[:, None], value=-1)
        left[:, start + _BLOCK :] -= upper[:, here, start + _BLOCK :].mT @ errors
    return made.mT.double().contiguous()


def _refit(layer: Layer, alone: bool, num_rows: int) -> State:
    """The integers of one layer and the change of its bias; ``kept`` where they are plain rounding's."""
    seen, unseen = layer.observe(num_rows)
    both = seen if unseen is None else seen + unseen
    settled = _settled(layer, seen, unseen) if unseen is not None and alone else None
    made = None if settled is None else _integers(layer, both, _weights(layer, both, settled[0]), settled[1])
    better = made is not None and output_error(layer.real, made * layer.scale, both) < layer.plain_error(both)
    made = made if made is not None and better else layer.nearest
    state = {"integers": made.to(torch.int8), "bias": layer.bias_change(made, both)}
    return state if better else state | {"kept": torch.ones(1)}


def _settled(layer: Layer, seen: Moments, unseen: Moments) -> tuple[float | None, float] | None:
    """The dampings of fit and rounding that, on one half, do best on the other; None where plain rounding does.

    That of the fit is None where the weights do best as they are.
    """

    def error(made: Tensor | None, scale: Tensor | float = 1.0) -> float:
        return math.inf if made is None else output_error(layer.real, made * scale, unseen)

    fit = min((None, *DAMPINGS), key=lambda damping: error(_weights(layer, seen, damping)))
    weights = _weights(layer, seen, fit)
    errors = {damping: error(_integers(layer, seen, weights, damping), layer.scale) for damping in DAMPINGS}
    best = min(errors, key=errors.__getitem__)
    return (fit, best) if errors[best] < layer.plain_error(unseen) else None


def _weights(layer: Layer, moments: Moments, damping: float | None) -> Tensor | None:
    """The real weights that are to be rounded; None where the ridge is too small for these inputs."""
    try:
        return layer.real if damping is None else fitted(layer.real, moments, damping)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None


def _integers(layer: Layer, moments: Moments, weights: Tensor | None, damping: float) -> Tensor | None:
    """What the weights are rounded to; None where there are none, or the ridge is too small for these inputs."""
    try:
        return None if weights is None else rounded(weights, damped(moments, damping), layer.scale, layer.ends)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
