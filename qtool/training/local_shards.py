"""An optimizer for sharded parameters: it steps the part that this process holds, as an ordinary tensor.

AdamW, SGD, Lion and their 8-bit forms update each weight by itself, so a process can update its part alone:
on ordinary tensors every optimizer works that works on one device, fused kernels and bitsandbytes' 8-bit ones
among them, which know nothing of sharded tensors. Clipping and the gradient scaler see the sharded parameters,
whose norms and overflows are those of all parts together. An optimizer whose update needs whole rows (Adafactor) is
refused. A part is looked up anew in each step: one that was read from a file after the cut (``materialise``) is
padded, or pinned, as the model first runs, and is another tensor from then on.

States. A state with one number per weight is sharded like its parameter, and a checkpoint of it can be cut
anew for another number of processes. An 8-bit state has one scale per block of 256 neighbours of the *part*: its
codes mean nothing without that part's scales, and so each process stores its own, as they are. On the same
number of processes that is exact. On another, ``qtool.training.block_states`` says what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from qtool.steps.setup import Setup
from qtool.system import processes

Make = Callable[[list[nn.Parameter]], Optimizer]


def apply(setup: Setup, example: Any) -> None:
    """Has the optimizer that was set up so far step local parts."""
    inner, own = setup.make_optimizer, setup.config.optimizer not in ("adamw", "sgd")
    setup.make_optimizer = lambda parameters: LocalShards(parameters, inner, own_states=own)


class LocalShards(Optimizer):
    """Steps ``make``'s optimizer on the local parts of sharded ``parameters``.

    ``own_states`` says that states are not all shaped like weights (8-bit ones are not): they stay with this process.
    """

    def __init__(self, parameters: list[nn.Parameter], make: Make, *, own_states: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.own_states = own_states
        self.parts = [nn.Parameter(processes.local(p.detach()), requires_grad=False) for p in parameters]
        self.inner = make(self.parts)
        self.param_groups[0].update({k: v for k, v in self.inner.param_groups[0].items() if k != "params"})

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every part that has a gradient and is not empty."""
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            part.data = processes.local(parameter)  # elsewhere since sharding has padded or pinned it
            has_gradient = parameter.grad is not None and part.numel()
            part.grad = processes.local(parameter.grad) if has_gradient else None  # type: ignore[arg-type]
        self.inner.step()
        for part in self.parts:
            part.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with sharded tensors in it where that is what a state is."""
        return dict(self._each_state(self.inner.state_dict(), self._sharded))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave."""
        self.inner.load_state_dict(self._each_state(state, lambda part, value: processes.local(value)))

    def _sharded(self, index: int, value: Tensor) -> Tensor:
        return value if self.own_states else like(self.parameters[index], value)

    def _each_state(self, tree: Any, change: Callable[[int, Tensor], Tensor]) -> Any:
        """``tree`` with ``change`` applied to every tensor in the state of a part, here or in an optimizer within."""
        if not isinstance(tree, Mapping):
            return tree
        states = {
            index: {key: change(index, v) if isinstance(v, Tensor) else v for key, v in state.items()}
            for index, state in tree.get("state", {}).items()
        }
        rest = {key: self._each_state(value, change) for key, value in tree.items() if key != "state"}
        return {**rest, "state": states} if "state" in tree else rest


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """``part`` as a tensor sharded like ``parameter``, where it is shaped like the local part of it; else as it is."""
    if not isinstance(parameter, DTensor) or part.shape != processes.local(parameter).shape:
        return part
    # Not ``DTensor.from_local``, which would move a part that is kept in host memory to the mesh's device.
    meta = TensorMeta(parameter.shape, parameter.stride(), part.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
