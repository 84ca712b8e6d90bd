"""What watches a step on fake tensors: MemTracker that knows the moment, the place and the work of it.

torch's own keeps a sum for each module and forgets when the highest was reached; what an operator takes for itself, and
what it computes, it does not see.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.hooks import RemovableHandle

from qtool.memory.accumulation import Accumulation
from qtool.memory.gpu_scratch import Gpu
from qtool.memory.pace import StepWork, Work
from qtool.memory.scratch import COPIED, LSTM, Scratch
from qtool.system import processes

GROUP_NORM = "native_group_norm_backward"
THREADS = 2
"""Of gloo's, that make exchanges."""
_NO_HOOKS: Any = (RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict()))
PARTS = {
    "Parameter": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer_states",
    "Activation": "activations",
    "Buffer": "buffers",
    "Temp": "temporary",
    "Other": "batch",
}
"""MemTracker's kinds of tensors, and what they are called here. ``batch`` is the inputs and targets."""


@dataclass(frozen=True)
class Prediction:
    """The predicted peak in bytes, what it consists of, and when and where it is reached."""

    peak_bytes: int
    parts: dict[str, int]
    moment: str
    module: str
    device: str
    seconds: float = 0.0
    late_bytes: int = 0
    """What gloo's threads may hold beyond it, on a busy CPU, of exchanges that are over."""
    guessed: bool = False
    """Whether the step asked for values that are not known: a mask is then taken to select all, a number to be one."""
    work: StepWork = field(default_factory=StepWork)
    """What the last of the steps computed."""


class _Watch(mod_tracker.ModTracker):
    """ModTracker, whose hooks are those of all modules, that lets pass what other threads do for real meanwhile.

    It also knows that a backward pass may be part of a forward one, as of a model that gives forces.
    """

    def _maybe_set_engine_callback(self) -> None:
        if self._has_callback:
            return
        before, counts = set(self.parents), dict(self._active_module_cnt)
        super()._maybe_set_engine_callback()  # type: ignore[no-untyped-call]

        def go_on() -> None:
            self.parents, self._active_module_cnt = before, counts

        torch.autograd.Variable._execution_engine.queue_callback(go_on)  # after ModTracker's, which forgets them

    def _fw_pre_hook(self, mod: Any, input: Any) -> None:
        if active_fake_mode() is not None:
            super()._fw_pre_hook(mod, input)  # type: ignore[no-untyped-call]

    def _fw_post_hook(self, mod: Any, input: Any, output: Any) -> None:
        if active_fake_mode() is not None:
            super()._fw_post_hook(mod, input, output)  # type: ignore[no-untyped-call]


class Tracker(MemTracker):
    """MemTracker that also remembers the moment and the module of the highest sum on one device."""

    def __init__(self, device: torch.device, scratch: Scratch) -> None:
        super().__init__()
        self._mod_tracker = _Watch()  # type: ignore[no-untyped-call]
        self.device = device
        self.highest, self.at = 0, ("start", "")
        self.scratch, self.gpu = scratch, Gpu.of(device)
        self.accumulation = Accumulation()
        self.with_scratch: dict[str, int] | None = None
        self.late = 0
        self.work, self._in_forward = StepWork(), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = self.accumulation.operator(func, args)
        if func.overloadpacket.__name__ == GROUP_NORM and args[4] is not None:
            result = self._of_group_norm(args)
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func.overloadpacket.__name__ == LSTM:
            result = self._with_what_it_keeps(result, func, args, kwargs)
        taken = self._taken(func, args, kwargs)
        if func.overloadpacket.__name__ in COPIED and processes.size() > 1:
            self.late = max(self.late, THREADS * 2 * taken)
        now = self._peak_mem.get(self.device, 0) if not taken else self._current() + taken
        if now > self.highest:
            self.highest, self.at = now, (self._moment(), self._innermost())
            self.with_scratch = self._parts("current", taken) if taken else None
        self._phase().count(func, args, kwargs, result)
        return result

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside it a micro-batch goes forward."""
        self.work.passes += 1
        self._in_forward = True
        try:
            yield
        finally:
            self._in_forward = False

    def _phase(self) -> Work:
        if self._in_forward:
            return self.work.forward
        return self.work.backward if self._mod_tracker.is_bw else self.work.update

    def hooked(self, tensors: Any, function: Any, **mode: Any) -> Any:
        """Has the function called once when a module's tensors have their gradients, and the hook removed.

        It would hold the pass's graph for ever, and with it an input that asks for a gradient, as some models have
        theirs do. When a module with such an input is done is seen at the end of the pass.
        """
        inner = [tensor for tensor in tensors if tensor.grad_fn is not None]
        if not inner and not mode:
            return self._mod_tracker._post_bw_callbacks_to_enqueue.append(function)

        def once(*gradients: Any) -> None:
            function(*gradients)
            handle.remove()

        handle = register_multi_grad_hook(inner or tensors, once, **mode)
        return handle

    def _of_group_norm(self, args: Any) -> Any:
        """The gradients of input, weight and bias, each as wide as what it is of; a fake one has that of the widest."""
        empty = torch.ops.aten.empty_like.default
        return tuple(
            super(Tracker, self).__torch_dispatch__(empty, (), (like,), {}) if wanted else None  # type: ignore[no-untyped-call]
            for like, wanted in zip((args[1], args[4], args[4]), args[-1], strict=True)
        )

    def _with_what_it_keeps(self, result: Any, func: Any, args: Any, kwargs: Any) -> Any:
        size, options = self.scratch.kept(func, args, kwargs), {"dtype": torch.uint8, "device": self.device}
        kept = super().__torch_dispatch__(torch.ops.aten.empty.memory_format, (), ([size],), options)  # type: ignore[no-untyped-call]
        return (*result[:-1], kept)

    def _taken(self, func: Any, args: Any, kwargs: Any) -> int:
        """What the operator takes for itself while it runs."""
        if self.gpu is None:
            return self.scratch.of(func, args, kwargs)
        return self.gpu.summed(args) if func.overloadpacket is torch.ops.aten.sum else 0

    def _current(self) -> int:
        return int(self.get_tracker_snapshot("current")[self.device]["Total"])

    def _parts(self, moment: str, scratch: int) -> dict[str, int]:
        snapshot: dict[Any, int] = self.get_tracker_snapshot(moment)[self.device]
        parts = {PARTS[kind.value]: int(size) for kind, size in snapshot.items() if kind != "Total"}
        return parts | {"temporary": parts.get("temporary", 0) + scratch}

    def _track_optimizer_states(self, reftype: Any, optimizer: Any) -> None:
        if active_fake_mode() is not None:  # else another thread's own
            super()._track_optimizer_states(reftype, optimizer)

    def _update_and_maybe_create_winfos(self, t: Any, reftype: Any, update_existing: bool = False) -> set[Any]:
        if t is None:  # a gradient that was used as soon as it was there
            return set()
        found: set[Any] = super()._update_and_maybe_create_winfos(t, reftype, update_existing)
        return found

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:  # MemTracker would ask it for its gradient, which it does not have
                self._param_to_grad_hook_handles[parameter] = _NO_HOOKS
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    def _track_inputs_or_outputs(self, args: Any) -> int:
        """Not asked for here. MemTracker would make named tuples anew, which packed sequences refuse."""
        return 0

    def _update_peak_stats(self, peak_state: Any) -> None:
        """The peak of the whole. MemTracker would also go through all modules, at every operator, for theirs."""
        for device, snapshot in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < snapshot["Total"]:
                self._peak_mem[device], self._peak_mem_snap[device] = snapshot["Total"], dict(snapshot)

    def _moment(self) -> str:
        if self._in_opt:
            return "optimizer step"
        return "backward" if self._mod_tracker.is_bw else "forward"

    def _innermost(self) -> str:
        """The module at work, without the model's own name before it."""
        names = [name for name in self._mod_tracker.parents if name != "Global"]
        return max(names, key=lambda name: name.count("."), default="").partition(".")[2]

    def prediction(self) -> Prediction:
        parts = self.with_scratch or self._parts("peak", 0)
        held = self.gpu.workspace() if self.gpu else 0
        parts |= {"temporary": parts["temporary"] + held}
        return Prediction(self.highest + held, parts, *self.at, str(self.device), late_bytes=self.late, work=self.work)
