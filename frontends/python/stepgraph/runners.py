"""The three executors behind one interface, with torch's current stream and captures."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch

from . import _core
from ._core import TensorWatch, UsageError


def _stream_handle(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The handle of torch's current stream of a device. The public way builds an object at every call,
# ten times dearer.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)


def is_capturing(index: int) -> bool:
    """Whether torch's current stream of the device is being captured."""
    if index < 0:
        return False
    if torch.cuda.current_device() == index:
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(index):
        return bool(torch.cuda.is_current_stream_capturing())


class Runner(Protocol):
    """One step that can be run."""

    executor: Any
    index: int
    """CUDA ordinal; -1 is the host."""
    captured: bool
    """A step was recorded into a capture of the caller's, so replays may run it at any time."""

    def check_launch(self) -> None:
        """Refuses to step inside a capture that this runner cannot be part of."""

    def launch(self, pending: bool) -> None:
        """Runs, enqueues or records one step, which delivers what was set and re-bound. `pending`:
        something was, since the last delivery."""

    def deliver(self) -> bool:
        """Delivers what is pending without a step; False where only steps deliver."""

    def rebind_gradients(self, watch: TensorWatch) -> tuple[int, list[int]]:
        """As TensorWatch.rebind_gradients."""

    def update(self, plan: Any) -> Any:
        """Goes on with another plan; returns the report."""

    def release(self) -> None:
        """Waits for the steps made so far and frees the executor."""


class _ExecutorRunner:
    """What does not depend on the kind of executor."""

    executor: Any

    def rebind_gradients(self, watch: TensorWatch) -> tuple[int, list[int]]:
        return watch.rebind_gradients(self.executor)

    def release(self) -> None:
        self.executor.release()


class HostRunner(_ExecutorRunner):
    """Runs steps on the processor."""

    index = -1
    captured = False

    def __init__(self, plan: Any) -> None:
        self.executor = _core.HostExecutor(plan)
        self._launch = self.executor.launch

    def check_launch(self) -> None:
        return None

    def launch(self, pending: bool) -> None:
        self._launch()

    def deliver(self) -> bool:
        return False

    def update(self, plan: Any) -> Any:
        return self.executor.update(plan)


def _check_has_cuda(index: int) -> None:
    if not _core.HAS_CUDA:
        raise UsageError(
            f"the parameters are on cuda:{index}, but this build of stepgraph runs CPU tensors only"
        )


class StreamRunner(_ExecutorRunner):
    """Enqueues the kernels of a step, eagerly."""

    captured = False

    def __init__(self, plan: Any, index: int) -> None:
        _check_has_cuda(index)
        self.index = index
        self.executor = _core.StreamExecutor(plan, _current_stream(index))

    def check_launch(self) -> None:
        if is_capturing(self.index):
            raise UsageError(
                "step: the current stream is being captured, expected "
                "FusedAdam(..., capturable=True) for a step that can be recorded"
            )

    def launch(self, pending: bool) -> None:
        self.executor.launch(_current_stream(self.index))

    def deliver(self) -> bool:
        self.executor.deliver(_current_stream(self.index))
        return True

    def update(self, plan: Any) -> Any:
        return self.executor.update(plan, _current_stream(self.index))


class GraphRunner(_ExecutorRunner):
    """Replays the step's own graph; the first `warmup` steps and steps inside a capture of the
    caller's are enqueued as kernels. One executor owns the counters of all three."""

    def __init__(self, plan: Any, index: int, warmup: int = 1) -> None:
        _check_has_cuda(index)
        self.index = index
        self.captured = False
        self._to_warm_up = warmup
        self.executor = _core.GraphExecutor(plan, _current_stream(index))

    def check_launch(self) -> None:
        return None

    def launch(self, pending: bool) -> None:
        stream = _current_stream(self.index)
        if is_capturing(self.index):
            # Recorded, a delivery would be repeated by every replay.
            if pending:
                self.executor.deliver_beside_capture()
            self.executor.enqueue(stream)
            self.captured = True
        elif self._to_warm_up > 0:
            self.executor.enqueue(stream)
            self._to_warm_up -= 1
        else:
            self.executor.launch(stream)

    def deliver(self) -> bool:
        if is_capturing(self.index):
            self.executor.deliver_beside_capture()
        else:
            self.executor.deliver(_current_stream(self.index))
        return True

    def update(self, plan: Any) -> Any:
        # A rebuilt step would leave captured replays with freed memory.
        ceiling = "table_write" if self.captured else "instantiate"
        return self.executor.update(plan, _current_stream(self.index), ceiling)


def make_runner(plan: Any, index: int, capturable: bool, warmup: int) -> Runner:
    """The runner for tensors of a device; -1 is the host."""
    if index < 0:
        return HostRunner(plan)
    guard = (
        contextlib.nullcontext()
        if torch.cuda.current_device() == index
        else torch.cuda.device(index)
    )
    with guard:
        return GraphRunner(plan, index, warmup) if capturable else StreamRunner(plan, index)
