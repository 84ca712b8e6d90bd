"""Fully sharded data parallelism: each process keeps a part of every weight (FSDP2, arXiv 2304.11277, 1910.02054).

A weight is cut along its first dimension, and so are its gradient and its optimizer states: with n processes
each holds 1/n of them. Before a block runs, its weights are gathered; after it they are freed again, and
gathered once more for its backward pass (``reshard``; off, they stay between the two). Gradients are summed
and cut as each block's backward pass ends. Blocks are those of activation checkpointing, without its plain sequences
(one that a model takes apart is never called, and would not be gathered); what lies outside of them forms a last one,
and so do blocks that share weights with what is outside of them. A model without blocks of its own weights is gathered
whole, which a warning tells.

In mixed precision the gathered weights and what a block is given are 16-bit, gradients are summed in float32,
and autocast goes on choosing for each operator. Norms with running statistics keep float32 weights and are gathered by
themselves, since all weights of one gathering have one dtype.

With ``weight_offload`` a process's part is in (pinned) host memory and goes to the GPU for the
gathering; gradients come back to the host, where the optimizer steps. On one device that is offloading alone.

When training is over, :func:`_gather` turns the model back into what it was, with the whole weights in the
first process, one after the other; other processes keep none, so that the host holds them once.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from qtool.errors import QtoolError, QtoolWarning, kind_of
from qtool.models.materialise import fill
from qtool.nested import map_tensors, tensors
from qtool.norms import keeps_statistics
from qtool.steps.setup import Setup
from qtool.system import processes
from qtool.training.checkpointing import blocks
from qtool.training.sharded_files import ShardedFiles


def apply(setup: Setup, example: Any) -> None:
    """Shards the model over all processes (a group of one is made where there is none)."""
    _require_shardable(setup.model)
    group = ExitStack()
    group.enter_context(processes.joined(setup.device))
    setup.on_close.append(group.close)
    mesh = processes.mesh(setup.device)
    _tell_whole(setup.model)
    before, names = _unsharded(setup.model), _attributes(setup.model)
    with _parameters_of_integers():
        for module in _groups(setup.model):
            module.register_forward_hook(_of_its_own)
            fully_shard(
                module, mesh=mesh, reshard_after_forward=None if setup.config.reshard else False,
                mp_policy=_policy(setup, module),
                offload_policy=_offload(setup),
            )  # fmt: skip
    marks = _attributes(setup.model) - names
    fill(setup.model)
    for buffer in setup.model.buffers():
        buffer.data = buffer.data.to(setup.device)
    setup.files = ShardedFiles()
    setup.on_close.append(lambda: _gather(setup.model, before, marks))


@contextmanager
def _parameters_of_integers() -> Iterator[None]:
    """Lets 4-bit weights be cut: torch 2.11 makes each part require a gradient first, and then what the whole did."""
    original = nn.Parameter.__dict__["__new__"]

    def made(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        whole = data is not None and not (data.is_floating_point() or data.is_complex())
        return original.__func__(cls, data, requires_grad and not whole)

    setattr(nn.Parameter, "__new__", staticmethod(made))  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Parameter, "__new__", original)  # noqa: B010


def _offload(setup: Setup) -> OffloadPolicy:
    """Parts in pinned host memory where that is asked for. Fake parts, which are nowhere, cannot be pinned."""
    if not setup.config.weight_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=not any(isinstance(p, FakeTensor) for p in setup.model.parameters()))


def _require_shardable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        kind, do = ("a single number", "give it a dimension") if parameter.dim() == 0 else ("", "")
        if parameter.requires_grad and not parameter.is_floating_point():
            kind, do = f"of {parameter.dtype}", "keep its parts as real numbers (torch.view_as_real)"
        if parameter.requires_grad and not parameter.numel():
            kind, do = "without values", "take it out"
        if kind:
            raise QtoolError(
                "--strategy fsdp", "real parameters with a dimension to cut", f"'{name}', which is {kind}",
                f"{do}, or pass --strategy ddp",
            )  # fmt: skip
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _groups(model: nn.Module) -> list[nn.Module]:
    """What is gathered together, inner first: each norm with statistics, each block, the rest."""
    inner = [*_norms(model), *_blocks(model)]
    return [*inner, *([] if model in inner else [model])]


def _norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if keeps_statistics(m) and next(m.parameters(), None) is not None]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that share no weight with what is outside of them: one is gathered in one place."""
    found = list(dict.fromkeys(blocks(model).values()))  # one that stands in several places is one
    apart = set(_norms(model))
    inside = [{module for module in block.modules() if module not in apart} for block in found]
    outside = set(model.modules()).difference(apart, *inside)
    held = [{p for module in modules for p in module.parameters(recurse=False)} for modules in (outside, *inside)]
    users = Counter(p for parameters in held for p in parameters)
    return [block for block, own in zip(found, held[1:], strict=True) if all(users[p] == 1 for p in own)]


def _tell_whole(model: nn.Module) -> None:
    if not _blocks(model):
        warnings.warn(
            f"--strategy fsdp: {kind_of(model)} without repeated blocks that share no weights is gathered whole: each "
            "device holds all of its weights while it computes, and a share of gradients and optimizer states",
            QtoolWarning,
            stacklevel=2,
        )


def _of_its_own(module: nn.Module, inputs: Any, output: Any) -> Any:
    """What a module gives, in memory of its own: of a view that is written over, sharding loses the backward pass."""
    if not any(map(_is_learned_view, tensors(output))):
        return output
    return map_tensors(lambda tensor: tensor.clone() if _is_learned_view(tensor) else tensor, output)


def _is_learned_view(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor._is_view()


def _policy(setup: Setup, module: nn.Module) -> MixedPrecisionPolicy:
    width, kind = setup.config.precision.split("-")
    if width == "32" or keeps_statistics(module):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    dtype = torch.float16 if width == "16" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=dtype if kind == "mixed" else None, reduce_dtype=torch.float32)


Before = dict[nn.Module, tuple[type[nn.Module], dict[str, Any]]]


def _unsharded(model: nn.Module) -> Before:
    """Each module's class and hooks: what sharding changes beside the parameters."""
    return {
        module: (type(module), {key: copy.copy(value) for key, value in vars(module).items() if "hooks" in key})
        for module in model.modules()
    }


def _attributes(model: nn.Module) -> set[tuple[nn.Module, str]]:
    return {(module, name) for module in model.modules() for name in vars(module)}


@torch.no_grad()
def _gather(model: nn.Module, before: Before, marks: set[tuple[nn.Module, str]]) -> None:
    """Undoes the sharding: whole parameters on the host in the first process, on the meta device in the others."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without a backward pass, gathered 16-bit weights are in its place
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for module, (kind, hooks) in before.items():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in whole:
                value = _whole(parameter)
                whole[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[name] = whole[parameter]
        module.__class__ = kind
        vars(module).update(hooks)
        _module_state_mapping.pop(module, None)
    for module, name in marks:  # the state of the sharding, which holds the group of processes, too
        vars(module).pop(name, None)


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    full = processes.whole(parameter.detach())
    if processes.rank() > 0:
        return torch.empty_like(full, device="meta")
    padded = full.untyped_storage().nbytes() > full.nbytes  # of a weight that does not divide: a part of a larger block
    return full.cpu().clone() if padded else full.cpu()
