"""Reconstruction: a region's weights are rounded so that its output, not each weight, is nearest to the float model's.

Region after region, in the order of the graph, with both models walked side by side (``walk.py``): the inputs are those
that the quantized network really makes so far, the target is the float network's output of the same region, after its
activation, so that a region also makes up for what those before it did wrong. It starts from the integers and biases
that second-order rounding fits to the same inputs (``gptq.py``). Over random minibatches

    L = Σ_c g_c ‖ŷ_c − y_c‖² / Σ_c g_c ‖ŷ⁰_c − y_c‖² + λ(t) Σ mean(1 − (2h − 1)²)

is minimised by Adam in the soft rounding of each weight (``soft.py``) and in the biases, where ŷ⁰ is made of the
integers at the start. Where the region is a single layer its channels do not depend on each other, and g_c is
1 / ‖ŷ⁰_c − y_c‖², so that λ means the same for each; in a block g_c is the channel's importance for the network's
outputs (``importance.py``). The second term is left out during the first fifth (the warm-up). With ``drop`` each value
that is quantized inside the region, or comes into it, is left in float with that probability (QDrop, arXiv 2203.05740),
which keeps the rounding from fitting the calibration samples' own quantization errors.

What makes samples held out (``part.py``) worse is undone: channel by channel for a layer alone, else the whole region,
and the note says which regions kept what they had. Everything drawn is drawn by seed and region, so a run that goes on
from its journal (``journal.py``) draws the same. Layer inputs and targets stand in the walks, spooled beyond a budget.

A ResNet-20 for CIFAR-10 at W4A8, 33.5 dB at its logits by second-order rounding, came to 33.8, 34.1 and 34.1 dB in
300, 500 and 1,000 steps a layer, for 1.7, 2.2 and 3.9 times the time: hence 500 unless told otherwise.

Left out on purpose: activation steps, which are learned for the whole network at once (``steps.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from qtool.form import quantized
from qtool.graphs.edits import parameter
from qtool.graphs.shapes import batch_symbols
from qtool.nested import num_samples
from qtool.quantization.algorithms.bias import add_to_bias, channel_axis, source_of
from qtool.quantization.algorithms.gptq import fit
from qtool.quantization.algorithms.importance import importance
from qtool.quantization.algorithms.journal import Journal, State
from qtool.quantization.algorithms.layers import Layer, leave_shared
from qtool.quantization.algorithms.part import HELD, MINIBATCH, Given, Part, tells_samples
from qtool.quantization.algorithms.regions import Region, counterparts, unit_ends
from qtool.quantization.algorithms.rows import reason
from qtool.quantization.algorithms.soft import SoftWeight, soften, strength
from qtool.quantization.algorithms.subject import Declined, Subject, is_data_sized
from qtool.quantization.algorithms.walk import Beside, Segment, Walk
from qtool.quantization.algorithms.walk import cut as segments_of
from qtool.quantization.residence import CPU
from qtool.quantization.stored_weights import store_integers
from qtool.units import few, many

WARMUP = 0.2
TRAVEL, BIAS_RATE = 30.0, 0.002
"""How far a logit of the soft rounding can go in all steps, and how far a bias in one, in deviations of the output."""
_QUANTIZE = quantized.quantize_per_tensor.default
_DRAWN = 128  # samples on which the error at first is read
Cut = Callable[[list[Segment], list[Node]], list[Region]]


def reconstruct(subject: Subject, name: str, cut: Cut, *, drop: float = 0.0) -> None:
    """Learns integers and biases of every region that ``cut`` makes of the graph's segments, in order, in place.

    Raises Declined without layers to learn, and for fewer than ``HELD`` calibration samples.
    """
    layers = _learnable(subject, name)
    sizes = [num_samples(batch) for batch in subject.batches]
    if sum(sizes) < HELD:
        raise Declined(f"{many(sum(sizes), 'calibration sample')}, and fewer than {HELD} cannot judge what is learned")
    ends = unit_ends(segments_of(subject.graph), layers)
    regions = cut(segments_of(subject.graph, ends), list(layers))
    goals = _goals(subject, name, regions, drop > 0)
    held = [other for goal in goals.values() for other in goal.values()]
    held += [source_of(layers[layer]) for region in goals for layer in region.layers if not reason(layer)]
    entries = [node for region in goals for node in region.reads if len(region.segments) > 1]
    with (
        Walk(subject.graph, subject.batches, held=[*entries, *ends]) as walk,
        Walk(subject.reference, subject.batches, held=held) as plain,
    ):
        for node in set(ends) - set(entries):
            walk.release(node)
        beside = Beside(plain, held)
        learner = _Learner(subject, layers, sizes, walk, beside, drop, _importance(subject, goals))
        kept = _each(learner, regions, goals, name)
    subject.graph.recompile()
    subject.note(f"{name}: learned the rounding of {len(goals) - len(kept)} of {len(goals)} regions")
    if kept:
        subject.note(f"{name}: undone where it made samples held out worse: {few(kept)}")


def _learnable(subject: Subject, name: str) -> dict[Node, Node]:
    """The layers with integers of their own, each with its node in the float graph; notes the others."""
    anchors = subject.anchors()
    shared = leave_shared(subject, name)
    found = {layer: other for layer, other in anchors.items() if layer not in shared}
    if not found:
        raise Declined("no convolution or linear layer is integer with a weight of its own")
    return found


def _goals(subject: Subject, name: str, regions: list[Region], entries: bool) -> dict[Region, dict[Node, Node]]:
    """For each region with layers the float counterparts of its output and, if wanted, of the integers it reads."""
    found, lost, mixed = {}, [], []
    symbols = batch_symbols(subject.graph.graph) | batch_symbols(subject.reference.graph)
    for region in (region for region in regions if region.layers):
        wanted = [n for n in region.reads if n.target is _QUANTIZE] if entries else []
        goal = counterparts(subject, [region.output, *wanted])
        if region.output not in goal or not all(map(_is_comparable, goal.values())):
            lost.append(region.name)
        elif not tells_samples(region, goal, symbols):
            mixed.append(region.name)
        else:
            found[region] = goal
    if lost:
        subject.note(f"{name} left what the float model has no counterpart of: {few(lost)}")
    if mixed:
        subject.note(f"{name} left what samples cannot be told apart in: {few(mixed)}")
    return found


def _is_comparable(node: Node) -> bool:
    """Whether a value is floating point numbers, as many in the quantized graph as in the float one."""
    value = node.meta.get("val")
    whole = isinstance(value, Tensor) and not value.is_floating_point()
    return not whole and not is_data_sized(node)


def _each(
    learner: _Learner, regions: list[Region], goals: Mapping[Region, Mapping[Node, Node]], name: str
) -> list[str]:
    """Fits and learns one region after the other; returns the names of those that keep what was fitted."""
    kept: list[str] = []
    done, walk, journal = 0, learner.walk, Journal(learner.subject, name)
    last = {node: region for region in goals for node in region.reads}
    for number, region in enumerate(regions):
        changed = True
        if region in goals:
            learner.subject.report(f"{name} {region.name}", done, len(goals))
            learner.fit(region, journal)
            learn = partial(learner.learn, region, goals[region], number)
            changed = learner.store(region, journal.once(f"region_{number}", learn))
            for other in goals[region].values():
                learner.beside.finish(other)
            kept += [] if changed else [region.name]
            done += 1
        for segment in region.segments if changed or len(region.segments) == 1 else ():
            walk.advance(segment)
        for node in [node for node in region.reads if last.get(node) is region]:
            walk.release(node)
    learner.subject.report(name, done, len(goals))
    return kept


def _importance(subject: Subject, goals: Mapping[Region, Mapping[Node, Node]]) -> dict[Node, Tensor]:
    """The importance of the channels of the outputs of all regions of several layers."""
    axes = {goal[r.output]: channel_axis(r.layers[-1]) for r, goal in goals.items() if len(r.layers) > 1}
    return importance(subject.reference, axes, subject.batches) if axes else {}


@dataclass
class _Learner:
    """Learns the weights of regions on stored values; ``sizes`` counts the samples of each batch."""

    subject: Subject
    layers: Mapping[Node, Node]
    sizes: list[int]
    walk: Walk
    beside: Beside
    drop: float
    importance: Mapping[Node, Tensor]

    def fit(self, region: Region, journal: Journal) -> None:
        """Gives the layers of a region the integers that second-order rounding does; a block is walked on the way."""
        for segment in region.segments:
            for node in segment.nodes:
                if node in region.layers and not reason(node):
                    fit(Layer(self.walk, segment, node, self.beside, self.layers[node]), journal)
                    self.walk.forget()
                    self.beside.finish(source_of(self.layers[node]))
            if len(region.segments) > 1:
                self.walk.advance(segment)

    def learn(self, region: Region, goal: Mapping[Node, Node], number: int) -> State:
        """Integers and a shift of the bias for each layer of a region; ``kept`` where these are no gain."""
        for other in goal.values():
            self.beside.reach(other)
        axis = channel_axis(region.layers[-1])
        part = Part(region, goal, self.walk, self.beside.walk, self.sizes, axis, self.drop)
        seed = self.subject.config.seed * 1_000_003 + number
        before, soft = part.held_errors({}), self._soften(part)
        gains = _gains(part, self.importance.get(goal[region.output]))
        _minimise(part, soft, gains, seed, self.subject.config.rounding_steps)
        if len(soft) == 1:
            _choose(next(iter(soft.values())), part.held_errors(_hard(soft)) < before)
        if not bool((part.held_errors(_hard(soft)) * gains).sum() < (before * gains).sum()):
            return {"kept": torch.ones(1)}
        state = {f"{layer.name}.weight": weight.integers().to(torch.int8) for layer, weight in soft.items()}
        return state | {f"{layer.name}.bias": weight.shifts().double() for layer, weight in soft.items()}

    def store(self, region: Region, state: State) -> bool:
        """Writes what was learned into the graph; returns whether there is anything."""
        if "kept" in state:
            return False
        for layer in region.layers:
            store_integers(self.walk.graph, layer, state[f"{layer.name}.weight"])
            add_to_bias(self.walk.graph, layer, state[f"{layer.name}.bias"])
        self.walk.forget()
        return True

    def _soften(self, part: Part) -> dict[Node, SoftWeight]:
        """The soft weight of each layer."""
        draws, seen, outputs = part.minibatches(_drawing(0)), 0, []
        while seen < MINIBATCH[0]:  # of fewer rows no spread is told
            index, rows = next(draws)
            seen += len(rows)
            with torch.no_grad():
                env = part.run(index, rows, {})
            outputs.append({n: env[n].movedim(channel_axis(n), 0).flatten(1) for n in part.region.layers})
        made = {}
        for layer in part.region.layers:
            real = parameter(self.subject.reference, self.layers[layer].args[1])
            assert real is not None
            spread = torch.cat([each[layer] for each in outputs], 1).std(1)
            made[layer] = soften(self.walk.graph, layer, real, spread)
        return made


@torch.no_grad()
def _gains(part: Part, importance: Tensor | None) -> Tensor:
    """g_c over Σ g_c ‖ŷ⁰_c − y_c‖², float32; without ``importance`` each channel's error counts as much."""
    draws, seen, errors = part.minibatches(_drawing(1)), 0, torch.zeros(())
    while seen < _DRAWN:
        index, rows = next(draws)
        errors = errors + part.errors({}, index, rows) * len(rows)
        seen += len(rows)
    errors = errors / seen
    if importance is None or importance.shape != errors.shape:
        importance = 1 / errors.clamp(min=max(1e-3 * float(errors.mean()), 1e-30))
    return importance / (importance * errors).sum().clamp(min=1e-30)


def _hard(soft: Mapping[Node, SoftWeight]) -> Given:
    return {layer: (weight.integers() * weight.scale, weight.shifts()) for layer, weight in soft.items()}


@torch.enable_grad()
def _minimise(part: Part, soft: Mapping[Node, SoftWeight], gains: Tensor, seed: int, steps: int) -> None:
    """Trains the soft weights of a region."""
    groups = [
        {"params": [weight.logits for weight in soft.values()], "lr": min(0.3, TRAVEL / steps)},
        {"params": [weight.shift for weight in soft.values()], "lr": BIAS_RATE},
    ]
    optimizer, batches = torch.optim.Adam(groups, betas=(0.9, 0.99)), part.minibatches(_drawing(seed))
    drops = _drawing(seed, part.walk.device) if part.drop else None
    for step in range(steps):
        made = {layer: weight() for layer, weight in soft.items()}
        given = {layer: (weight, shift) for layer, (weight, shift, _) in made.items()}
        loss = (part.errors(given, *next(batches), drops) * gains).sum()
        if step >= WARMUP * steps:
            undecided = torch.stack([each for _, _, each in made.values()]).sum()
            loss = loss + strength((step / steps - WARMUP) / (1 - WARMUP)) * undecided
        if not loss.requires_grad:  # what the layers give only decides, as a gate does that shares tokens out
            return
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _drawing(seed: int, device: torch.device = CPU) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _choose(soft: SoftWeight, better: Tensor) -> None:
    """Takes back the channels that are not better, where the weight has as many."""
    if len(better) == max(soft.outputs) == len(soft.shift):
        soft.take_back(~better)
