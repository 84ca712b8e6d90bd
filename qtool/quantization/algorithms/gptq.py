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

The order is that of the graph, both models walked side by side (``walk.py``), layer inputs spooled beyond a budget. The
cost is one pass through each, and algebra of the order K³ + outputs · K² for each layer.

Left out on purpose: reordering columns by curvature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qtool.quantization.algorithms.bias import add_to_bias
from qtool.quantization.algorithms.rows import reason, rows
from qtool.quantization.algorithms.streams import groups_of
from qtool.quantization.algorithms.subject import Declined, Subject
from qtool.quantization.algorithms.walk import Segment, Walk
from qtool.quantization.capture import parameter, set_parameter

DAMPINGS = (0.003, 0.03, 0.3, 3.0)
"""Ridge parameters that are tried, as parts of the mean of H's diagonal."""
ROWS = 16384
"""About how many rows a layer is fitted on; four for each of its K inputs where that is more."""
_BLOCK = 128


def gptq(subject: Subject) -> None:
    """Refits the integers and the bias of every integer convolution and linear layer, in order, in place."""
    anchors = {node: other for node, other in subject.anchors().items() if not reason(node)}
    if not anchors:
        raise Declined("no convolution or linear layer is integer and of one or two dimensions")
    sources = {other: other.args[0] for other in anchors.values()}
    kept = []
    held = {source for source in sources.values() if isinstance(source, Node)}
    with Walk(subject.graph, subject.batches) as walk, Walk(subject.reference, subject.batches, held=held) as plain:
        beside = _Beside(plain)
        for segment in walk.segments:
            for node in segment.nodes:
                if node in anchors:
                    beside.reach(sources[anchors[node]])
                    kept += [] if _refit(walk, segment, node, plain, anchors[node]) else [str(node.meta["unit"])]
                    walk.forget()
            beside.release(segment, anchors)
            walk.advance(segment)
    subject.graph.recompile()
    subject.note(f"gptq: refitted {len(anchors) - len(kept)} layers")
    if kept:
        subject.note(f"gptq: {len(kept)} layers keep their rounded weights, which fitting made worse: {_few(kept)}")


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


class _Beside:
    """The float model's walk, taken only as far as the quantized one needs it."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.next = walk, 0
        self.made = {node for node in walk.graph.graph.nodes if node.op == "placeholder"}
        self.done: set[Node] = set()

    def reach(self, source: object) -> None:
        """Advances until the value of ``source`` was made."""
        while source not in self.made:
            segment = self.walk.segments[self.next]
            self.walk.advance(segment)
            self.made.add(segment.output)
            self.next += 1

    def release(self, segment: Segment, anchors: dict[Node, Node]) -> None:
        """Drops the inputs of the layers of a segment that no later layer reads."""
        self.done |= {anchors[node] for node in segment.nodes if node in anchors}
        for other in [anchors[node] for node in segment.nodes if node in anchors]:
            source = other.args[0]
            waiting = [n for n in anchors.values() if n.args[0] is source and n not in self.done]
            if isinstance(source, Node) and not waiting:
                self.walk.release(source)


@dataclass
class Moments:
    """Means of the float inputs ``x`` and the quantized ones ``q``, G × K, and S, C, H summed about them, G × K × K.

    float64. Products are taken about each batch's own means, so that nothing cancels (Chan, Golub and LeVeque 1979).
    """

    x: Tensor
    q: Tensor
    sums: tuple[Tensor, Tensor, Tensor]
    count: int

    @classmethod
    def of(cls, x: Tensor, q: Tensor) -> Moments:
        """The moments of one batch of rows, G × N × K."""
        mean_x, mean_q = x.mean(1, keepdim=True), q.mean(1, keepdim=True)
        x, q = x - mean_x, q - mean_q
        sums = ((x.mT @ x).double(), (x.mT @ q).double(), (q.mT @ q).double())
        return cls(mean_x[:, 0].double(), mean_q[:, 0].double(), sums, x.shape[1])

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        part = other.count / count
        x, q = other.x - self.x, other.q - self.q
        between = [a[:, :, None] * b[:, None] * self.count * part for a, b in ((x, x), (x, q), (q, q))]
        s, c, h = (a + b + d for a, b, d in zip(self.sums, other.sums, between, strict=True))
        return Moments(self.x + x * part, self.q + q * part, (s, c, h), count)

    def centred(self) -> tuple[Tensor, Tensor, Tensor]:
        """S, C and H about the means."""
        s, c, h = (value / self.count for value in self.sums)
        return s, c, h


def output_error(real: Tensor, made: Tensor, moments: Moments) -> float:
    """E ‖W x − Ŵ x̂‖² about the means, summed over outputs; weights G × outputs × K, float64."""
    s, c, h = moments.centred()
    return float(((real @ s) * real).sum() - 2 * ((real @ c) * made).sum() + ((made @ h) * made).sum())


def fitted(real: Tensor, moments: Moments, damping: float) -> tuple[Tensor, Tensor]:
    """W* and H + λI for one ridge parameter, float64; λ is ``damping`` times the mean of H's diagonal."""
    _, c, h = moments.centred()
    spread = h.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    least = 1e-6 * float(spread.mean()) + 1e-30  # a group whose inputs never change
    ridge = torch.diag_embed((spread * damping + least).expand(h.shape[:2]))
    damped = (h + h.mT) / 2 + ridge
    return torch.linalg.solve(damped, (real @ (c + ridge)).mT).mT, damped


def rounded(weight: Tensor, damped: Tensor, scale: Tensor, qmax: int) -> Tensor:
    """The integers, as floats G × outputs × K, that GPTQ rounds ``weight`` to; ``scale`` is G × outputs × 1.

    Raises LinAlgError where ``damped`` is not positive definite in float64.
    """
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse).mT.float()
    left, scale = weight.float().clone(), scale.float()
    made = torch.empty_like(left)
    size = left.shape[2]
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        errors = torch.empty_like(left[:, :, start:stop])
        for column in range(start, stop):
            value = left[:, :, column : column + 1]
            made[:, :, column : column + 1] = (value / scale).round().clamp(-qmax, qmax)
            error = (value - made[:, :, column : column + 1] * scale) / upper[:, column, column, None, None]
            left[:, :, column:stop] -= error * upper[:, column, None, column:stop]
            errors[:, :, column - start] = error[:, :, 0]
        left[:, :, stop:] -= errors @ upper[:, start:stop, stop:]
    return made.double()


@torch.no_grad()
def _refit(walk: Walk, segment: Segment, node: Node, plain: Walk, other: Node) -> bool:
    """Gives one layer its integers and bias; returns whether the integers are another than plain rounding's."""
    layer = _Layer(walk.graph, node, plain.graph, other)
    halves = layer.observe(walk, segment, plain)
    both = halves[0] if halves[1] is None else halves[0] + halves[1]
    best = None if halves[1] is None else layer.best_damping(halves[0], halves[1])
    made = None if best is None else layer.solve(both, best)
    better = made is not None and output_error(layer.real, made * layer.scale, both) < layer.plain_error(both)
    layer.store(made if made is not None and better else layer.nearest, both)
    return better


class _Layer:
    """One layer as matrices: real weights G × outputs × K, the scales of its integers, the integers it came with."""

    def __init__(self, graph: GraphModule, node: Node, reference: GraphModule, other: Node) -> None:
        self.graph, self.node, self.other = graph, node, other
        weight = parameter(reference, other.args[1])
        stored = node.args[1]
        assert weight is not None
        assert isinstance(stored, Node)
        self.weight, self.stored, self.qmax = weight, stored, int(str(stored.args[5]))
        self.groups = groups_of(node)
        self.real = self._matrix(weight)
        integers, scales = parameter(graph, stored.args[0]), parameter(graph, stored.args[1])
        assert integers is not None
        assert scales is not None
        self.scale = scales.double().reshape(self.groups, -1, 1)
        self.nearest = self._matrix(integers)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.double().flatten(1).reshape(self.groups, -1, weight[0].numel())

    def observe(self, walk: Walk, segment: Segment, plain: Walk) -> tuple[Moments, Moments | None]:
        """The moments of the even and of the odd batches; None for the second where there is one batch."""
        source, other_source = self.node.args[0], self.other.args[0]
        assert isinstance(source, Node)
        assert isinstance(other_source, Node)
        wanted = max(ROWS, 4 * self.real.shape[2])
        halves: list[Moments | None] = [None, None]
        for index, (q, x) in enumerate(zip(walk.values(segment, source), plain.held(other_source), strict=True)):
            each = -(-wanted // (walk.num_batches * len(x)))
            drawn = [
                rows(self.node, self.weight, value, each, torch.Generator().manual_seed(index)) for value in (x, q)
            ]
            found, before = Moments.of(*drawn), halves[index % 2]
            halves[index % 2] = found if before is None else before + found
        assert halves[0] is not None
        return halves[0], halves[1]

    def solve(self, moments: Moments, damping: float) -> Tensor | None:
        """The integers for one ridge parameter; None where it is too small for these inputs."""
        try:
            weight, damped = fitted(self.real, moments, damping)
            return rounded(weight, damped, self.scale, self.qmax)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return None

    def plain_error(self, moments: Moments) -> float:
        """The output error of the integers that the layer came with."""
        return output_error(self.real, self.nearest * self.scale, moments)

    def best_damping(self, seen: Moments, unseen: Moments) -> float | None:
        """The ridge parameter that, fitted on one half, does best on the other; None where plain rounding does."""
        solved = ((damping, self.solve(seen, damping)) for damping in DAMPINGS)
        errors = {d: output_error(self.real, made * self.scale, unseen) for d, made in solved if made is not None}
        best = min(errors, key=errors.__getitem__, default=None)
        return best if best is not None and errors[best] < self.plain_error(unseen) else None

    def store(self, made: Tensor, moments: Moments) -> None:
        """Writes the integers and a bias that keeps the mean output."""
        integers = parameter(self.graph, self.stored.args[0])
        assert integers is not None
        path = str(self.stored.args[0].target)  # type: ignore[union-attr]
        set_parameter(self.graph, path, made.reshape(integers.shape).to(integers.dtype))
        wanted = (self.real @ moments.x[:, :, None]).flatten()
        got = (made * self.scale) @ moments.q[:, :, None]
        add_to_bias(self.graph, self.node, wanted - got.flatten())
