"""One step of a Megatron optimizer in which the host decides nothing.

Megatron's own step runs: its copies, collectives and kernels are what a graph captures. Only the
places where it looks at device memory are replaced, for the time of the call, on the objects at
hand: the loss scaler, the combination of several gradient statistics groups, the two decisions to
skip. A skipped step runs to its end and leaves everything as it is, because FusedAdam takes the
decision as its `found_inf`; copying unchanged main parameters to the model changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgraph._core import UsageError
from stepgraph.megatron.grad_scaler import move_to_device
from stepgraph.megatron.host_reads import NoHostReads
from stepgraph.megatron.parts import (
    check_capturable,
    device_of,
    fused_adams,
    has_parameters,
    leaves,
)

StepResult = tuple[bool, Any, Any]

# The report of a step, f64: it holds an f32 norm and any count of elements exactly.
_OVERFLOW, _TOO_LARGE, _NORM, _ZEROS, _REPORT_SIZE = 0, 1, 2, 3, 4

_MISSING = object()


@contextlib.contextmanager
def _replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """`target.name` is `value` inside the block, on this object only."""
    before = vars(target).get(name, _MISSING)
    setattr(target, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(target, name)
        else:
            setattr(target, name, before)


class DeviceStep:
    """Enqueues steps of `optimizer` by `step`, Megatron's own bound method.

    The first construction for an optimizer moves its loss scalers' state to the device
    (`grad_scaler.move_to_device`). Raises UsageError for an optimizer that cannot be captured.
    """

    def __init__(self, step: Callable[[], StepResult], optimizer: Any) -> None:
        for name in ("prepare_grads", "step_with_ready_grads", "config"):
            if not hasattr(optimizer, name):
                raise UsageError(
                    f"{type(optimizer).__module__}.{type(optimizer).__qualname__} has no attribute "
                    f"{name}: expected a MegatronOptimizer of Megatron-Core 0.18 or newer"
                )
        check_capturable(optimizer)
        self._step = step
        self._optimizer = optimizer
        self._leaves = list(leaves(optimizer))
        adams = fused_adams(optimizer)
        #: The inner optimizers that have something to do on the device, and those that only count.
        self.adams = [adam for adam in adams if has_parameters(adam)]
        self._idle_adams = [adam for adam in adams if not has_parameters(adam)]
        self.device = device_of(optimizer)
        self._move_scalers_to_device()
        self._report = torch.zeros(_REPORT_SIZE, dtype=torch.float64, device=self.device)
        self._arrived = (
            torch.zeros(_REPORT_SIZE, dtype=torch.float64, pin_memory=True)
            if self.device.type == "cuda"
            else self._report
        )
        # What the step returned where that was no tensor: None or a constant.
        self._norm: Any = None
        self._zeros: Any = None
        self._overflow: torch.Tensor | None = None
        self._too_large: torch.Tensor | None = None

    @property
    def can_skip(self) -> bool:
        """Whether a step may turn out to be skipped, so that its result has to be waited for."""
        scaled = any(getattr(leaf, "grad_scaler", None) is not None for leaf in self._leaves)
        return scaled or self._threshold() != math.inf

    def prepare(self) -> None:
        """What has to happen outside a capture: a scaler put in place since joins the others, and
        Megatron asks all ranks once which norm groups exist; a collective call the first time."""
        self._move_scalers_to_device()
        groups = importlib.import_module("megatron.core.optimizer.optimizer")
        for name in getattr(groups, "SEPARATE_GRAD_NORM_GROUPS", ()):
            self._optimizer.has_grad_norm_group(name)

    def enqueue(self) -> None:
        """Enqueues one step on the current stream, which may be being captured."""
        waited_for = self.can_skip
        with contextlib.ExitStack() as stack:
            for replaced in self._replacements():
                stack.enter_context(replaced)
            stack.enter_context(NoHostReads(self.device))
            try:
                _, self._norm, self._zeros = self._step()
                self._write_report()
            finally:
                self._overflow = self._too_large = None
        if waited_for and self._arrived is not self._report:
            self._arrived.copy_(self._report, non_blocking=True)

    def result(self) -> StepResult:
        """What Megatron's step returns, for the step enqueued or replayed last. To be called once
        after each.

        If that step may have been skipped this waits for it: `(False, None, None)` after an
        overflow, `(False, grad_norm, num_zeros)` after a norm above the threshold, numbers
        otherwise. Else nothing waits, and norm and count are 0-dimensional f64 tensors on the
        device that belong to this step alone.
        """
        result = self._waited_for() if self.can_skip else self._not_waited_for()
        if result[0]:
            for adam in self._idle_adams:
                adam.step()
        return result

    def _waited_for(self) -> StepResult:
        if self._arrived is not self._report:
            torch.cuda.current_stream(self.device).synchronize()
        report = self._arrived.tolist()
        if report[_OVERFLOW] != 0.0:
            return False, None, None
        return (
            report[_TOO_LARGE] == 0.0,
            report[_NORM] if isinstance(self._norm, torch.Tensor) else self._norm,
            int(report[_ZEROS]) if isinstance(self._zeros, torch.Tensor) else self._zeros,
        )

    def _not_waited_for(self) -> StepResult:
        own = self._report.clone()
        return (
            True,
            own[_NORM] if isinstance(self._norm, torch.Tensor) else self._norm,
            own[_ZEROS] if isinstance(self._zeros, torch.Tensor) else self._zeros,
        )

    def _move_scalers_to_device(self) -> None:
        for leaf in self._leaves:
            move_to_device(getattr(leaf, "grad_scaler", None))

    def _replacements(self) -> Iterator[contextlib.AbstractContextManager[None]]:
        optimizer = self._optimizer
        yield _replaced(optimizer, "prepare_grads", self._prepare_grads(optimizer.prepare_grads))
        yield _replaced(
            optimizer,
            "step_with_ready_grads",
            self._step_with_ready_grads(optimizer.step_with_ready_grads),
        )
        if hasattr(optimizer, "chained_optimizers"):
            whole_norm = optimizer.get_grad_norm
            if not optimizer.grads_states_parallel_group_is_shared():
                whole_norm = self._combined_norm
                if hasattr(optimizer, "_get_grad_norm_for_group"):
                    yield _replaced(
                        optimizer, "_get_grad_norm_for_group", self._combined_norm_of_group
                    )
            yield _replaced(optimizer, "get_grad_norm", self._get_grad_norm(whole_norm))
        for config in {
            id(leaf.config): leaf.config for leaf in (optimizer, *self._leaves)
        }.values():
            # Megatron's timers wait for the device; a replay has no inside to be timed.
            yield _replaced(config, "timers", None)
            if getattr(config, "grad_norm_skip_threshold", math.inf) != math.inf:
                yield _replaced(config, "grad_norm_skip_threshold", math.inf)

    def _prepare_grads(self, original: Callable[[], Any]) -> Callable[[], bool]:
        def prepare_grads() -> bool:
            found_inf = original()
            if isinstance(found_inf, torch.Tensor):
                self._overflow = found_inf
                return False
            return bool(found_inf)

        return prepare_grads

    def _get_grad_norm(self, original: Callable[[], Any]) -> Callable[[], Any]:
        threshold = self._threshold()

        def get_grad_norm() -> Any:
            norm = original()
            if threshold != math.inf:
                self._too_large = norm > threshold
            return norm

        return get_grad_norm

    def _step_with_ready_grads(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def step_with_ready_grads() -> bool:
            skip = self._overflow
            if self._too_large is not None:
                skip = self._too_large if skip is None else skip | self._too_large
            with contextlib.ExitStack() as stack:
                for adam in self._idle_adams:
                    # They count on the host, when it is known that the step was not skipped.
                    stack.enter_context(_replaced(adam, "step", _do_nothing))
                if skip is not None:
                    found_inf = skip.reshape(()).to(torch.float32)
                    for adam in self.adams:
                        stack.enter_context(_replaced(adam, "found_inf", found_inf))
                return original()

        return step_with_ready_grads

    def _combined_norm(self) -> torch.Tensor:
        """The norm over statistics groups that differ: each has summed up its own already."""
        return _root_of_squares(
            [leaf.get_grad_norm() for leaf in self._optimizer.chained_optimizers]
        )

    def _combined_norm_of_group(self, name: str) -> torch.Tensor:
        clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
        return _root_of_squares(
            [
                clip_grads.get_grad_norm_fp32(
                    leaf.get_grads_for_grad_norm(name),
                    grad_stats_parallel_group=leaf.get_grad_stats_parallel_group(),
                )
                for leaf in self._optimizer.chained_optimizers
            ]
        )

    def _write_report(self) -> None:
        self._report.zero_()
        for place, value in (
            (_OVERFLOW, self._overflow),
            (_TOO_LARGE, self._too_large),
            (_NORM, self._norm),
            (_ZEROS, self._zeros),
        ):
            if isinstance(value, torch.Tensor):
                self._report[place].copy_(value.reshape(()))

    def _threshold(self) -> float:
        """The norm above which the step is skipped; only chains look at it."""
        if not hasattr(self._optimizer, "chained_optimizers"):
            return math.inf
        thresholds = [
            float(threshold)
            for leaf in self._leaves
            if (threshold := getattr(leaf.config, "grad_norm_skip_threshold", math.inf)) != math.inf
            and _has_main_parameters(leaf)
        ]
        return min(thresholds, default=math.inf)


def _do_nothing() -> None:
    return None


def _has_main_parameters(leaf: Any) -> bool:
    """Whether a parameter of `leaf` counts for the norm of the whole, which the threshold means."""
    if getattr(leaf, "is_stub_optimizer", False):
        return False
    return any(getattr(p, "grad_norm_group", None) is None for p in leaf.get_parameters())


def _root_of_squares(norms: list[Any]) -> torch.Tensor:
    values = [norm.reshape(1) for norm in norms if isinstance(norm, torch.Tensor)]
    return torch.cat(values).double().square().sum().sqrt().float().reshape(1)
