"""bitsandbytes' optimizers, in few kernels: on a GPU a small update costs what its launch costs, not its arithmetic.

bitsandbytes launches one kernel for each parameter, and waits for it. Neither is needed:

* nothing has to wait on one stream, but where states are paged;
* AdamW's small parameters, more than half of a transformer's, have 32-bit states and are updated together by torch's
  kernel for many tensors;
* an 8-bit update is made block by block of 256 neighbours, whatever they belong to. Parameters that lie side by side,
  in weights, gradients, codes and scales alike, are one long parameter to it. States are made side by side
  (``reserve``) for who lays weights and gradients out so, and loaded into the memory that they were made in. Codes
  begin with a block: after a parameter that is not made of whole ones there is a gap, and nothing is joined to it.

What is computed for each weight stays what it is one by one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from qtool.training.block_states import BLOCK, SMALLEST

SMALLEST_PAGED = 100_000
"""Values from which on bitsandbytes pages a moment."""
BLOCKWISE = ("state1", "state2", "absmax1", "absmax2")


def batched(kind: Any) -> Any:
    """``kind``, an optimizer class of bitsandbytes, that launches few kernels and waits for none."""

    class Batched(kind):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if not self.initialized:  # type: ignore[has-type]
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            for place, group in enumerate(self.param_groups):
                small: dict[int, list[nn.Parameter]] = {}
                large: list[tuple[int, nn.Parameter]] = []
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, place, index)
                    if self._is_small(parameter):
                        small.setdefault(self.state[parameter]["step"], []).append(parameter)
                    else:
                        self.prefetch_state(parameter)
                        large.append((index, parameter))
                for index, run in self._runs(large):
                    self._update_run(group, run, place, index)
                for count, parameters in small.items():
                    self._update_together(group, parameters, count + 1)
            if self.is_paged and torch.cuda.is_available():
                torch.cuda.synchronize()

        def _is_small(self, parameter: nn.Parameter) -> bool:
            float32 = parameter.dtype == torch.float32  # as torch's kernel wants it beside such moments
            return bool(self.optimizer_name == "adam" and float32 and parameter.numel() < SMALLEST)

        def _update_together(self, group: Any, parameters: list[nn.Parameter], step: int) -> None:
            states = [self.state[parameter] for parameter in parameters]
            for state in states:
                state["step"] = step
            count = torch.full((), float(step), device=parameters[0].device)
            torch._fused_adamw_(
                [*parameters], [p.grad for p in parameters if p.grad is not None],
                [state["state1"] for state in states], [state["state2"] for state in states], [],
                [count] * len(states), lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip

        def _runs(self, large: list[tuple[int, nn.Parameter]]) -> Iterator[tuple[int, list[nn.Parameter]]]:
            """Parameters that lie side by side, after the position of the first of them."""
            run: list[nn.Parameter] = []
            first, last = 0, None
            for index, parameter in large:
                lies = _lie(parameter, self.state[parameter])
                if run and (last is None or lies is None or not _follows(last, lies)):
                    yield first, run
                    run = []
                first, last = (first if run else index), lies
                run.append(parameter)
            if run:
                yield first, run

        def _update_run(self, group: Any, run: list[nn.Parameter], place: int, index: int) -> None:
            if len(run) == 1:
                self.update_step(group, run[0], place, index)
                return
            states = [self.state[parameter] for parameter in run]
            whole = nn.Parameter(_span([p.data for p in run]), requires_grad=False)
            whole.grad = _span([p.grad for p in run if p.grad is not None])
            spans = {key: _span([s[key] for s in states]) for key in BLOCKWISE if key in states[0]}
            self.state[whole] = states[0] | spans
            self.update_step(group, whole, place, index)
            step = self.state.pop(whole)["step"]
            for state in states:
                state["step"] = step

        # States

        def reserve(self, sizes: list[int]) -> None:
            """Has the 8-bit states of parameters of these sizes, which are made next and in order, side by side."""
            blocks = sum(-(-size // BLOCK) for size in sizes if size >= SMALLEST)
            self._room = {"state": blocks * BLOCK, "absmax": blocks}
            self._pools: dict[str, tuple[Tensor, int]] = {}

        def make_state(self, parameter: nn.Parameter) -> None:
            """Makes the states of a parameter that has values: later, they would lie scattered among activations."""
            group = self.param_groups[0]
            if not parameter.numel():
                return
            self.init_state(group, parameter, 0, next(i for i, p in enumerate(group["params"]) if p is parameter))
            state = self.state[parameter]
            if hasattr(self, "_room") and state["state1"].dtype == torch.uint8 and not self.is_paged:
                state.update({key: self._beside(key, state[key]) for key in BLOCKWISE if key in state})

        def _beside(self, key: str, like: Tensor) -> Tensor:
            """Zeros like ``like``, after those that were made for the parameter before."""
            if key not in self._pools:
                self._pools[key] = (like.new_zeros(self._room[key[:-1]]), 0)
            pool, start = self._pools[key]
            align = BLOCK if key.startswith("state") else 1
            end = start - (-like.numel() // align) * align
            self._pools[key] = (pool, end)
            if end == pool.numel():
                del self._pools[key]
            return pool[start : start + like.numel()].view(like.shape)

        def load_state_dict(self, state_dict: Any, move_to_device: bool = True) -> None:
            before = {parameter: dict(state) for parameter, state in self.state.items()}
            super().load_state_dict(state_dict, move_to_device=False)
            for parameter, state in self.state.items():
                made = before.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        state[key] = _loaded(made.get(key), value, parameter.device)

    return Batched


def _lie(parameter: nn.Parameter, state: dict[str, Any]) -> tuple[int, list[tuple[int, int, int]]] | None:
    """Where a parameter with 8-bit states and all that belongs to it lies; None where that is not one stretch each."""
    if state["state1"].dtype != torch.uint8:
        return None
    tensors = [parameter.data, parameter.grad, *(state[key] for key in BLOCKWISE if key in state)]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    stretches = [(t.untyped_storage()._cdata, t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors]
    return state["step"], stretches


def _follows(last: Any, lies: Any) -> bool:
    """Whether one parameter, at the same step as the last, begins where that ends, in all that belongs to it."""
    pairs = zip(last[1], lies[1], strict=True)
    return bool(last[0] == lies[0]) and all(a[0] == b[0] and a[2] == b[1] for a, b in pairs)


def _span(parts: list[Tensor]) -> Tensor:
    """All of the memory of ``parts``, which lie side by side, as one vector."""
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))


@torch.no_grad()
def _loaded(made: Tensor | None, value: Tensor, device: torch.device) -> Tensor:
    """A loaded state, in the memory of the one that was made for it: it stays paged, or beside its neighbours."""
    if made is None or (made.shape, made.dtype) != (value.shape, value.dtype):
        return value.to(device)
    return made.copy_(value)


def paged_when_fake(kind: Any) -> Any:
    """``kind``, a paged optimizer, whose moments of fake parameters are fake too, and outside of the GPU's memory."""

    class Paged(kind):  # type: ignore[misc]
        def get_state_buffer(self, p: Any, dtype: torch.dtype = torch.float32) -> Any:
            if not isinstance(p, FakeTensor) or p.numel() < SMALLEST_PAGED:
                return super().get_state_buffer(p, dtype)
            state = torch.zeros(p.shape, dtype=dtype, device="cpu")
            state.is_paged = True  # type: ignore[attr-defined]
            return state

        def prefetch_state(self, p: Any) -> None:
            if not isinstance(p, FakeTensor):
                super().prefetch_state(p)

    return Paged
