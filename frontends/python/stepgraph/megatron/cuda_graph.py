"""The whole optimizer step of Megatron as one CUDA graph."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepgraph._core import UsageError
from stepgraph.megatron.addresses import Fingerprint, Look
from stepgraph.megatron.device_step import DeviceStep, StepResult
from stepgraph.megatron.parts import gradients

logger = logging.getLogger(__name__)


class OptimizerCudaGraphWrapper:
    """Takes the place of Megatron's class of this name: `optimizer.step = Wrapper(optimizer.step)`.

    The first `cuda_graph_warmup_steps` calls (at least one: the state is allocated and the
    communicators are made by it) run the step as kernels; then it is captured once, thread-locally,
    and each call is one graph launch on the current stream. Eager and replayed steps enqueue the
    same work. Every object has its own graph. `del optimizer.step` releases it.

    A call returns what Megatron's step returns (`DeviceStep.result`): it waits for the step only if
    that may have been skipped, and never hands out a value of an earlier step.

    Between calls anything may change that lives in device memory or in the groups: learning rates,
    weight decays, loaded checkpoints. If parameters, gradients or options that kernels hold on to
    changed, the graph is dropped with a warning that says why, the call runs as kernels and the
    next one captures again.

    Wrapper and optimizer refer to each other, so that without `del optimizer.step` or `release()`
    the graph lives until the garbage collector or the end of the process.

    On a machine without a GPU each "replay" enqueues the step again.

    optimizer_step_func: bound `step` of a MegatronOptimizer, ChainedOptimizer included, whose inner
    optimizers are stepgraph.FusedAdam (capturable=True on a GPU). Raises UsageError otherwise.
    use_single_mempool: capture into the pool that Megatron's other captures share.
    """

    def __init__(
        self,
        optimizer_step_func: Callable[[], StepResult],
        cuda_graph_warmup_steps: int = 1,
        use_single_mempool: bool = False,
    ) -> None:
        if isinstance(optimizer_step_func, OptimizerCudaGraphWrapper):
            optimizer_step_func.release()
            optimizer_step_func = optimizer_step_func._step_func
        optimizer = getattr(optimizer_step_func, "__self__", None)
        if optimizer is None:
            raise UsageError(
                "optimizer_step_func: expected the bound method `step` of a MegatronOptimizer, "
                f"found {optimizer_step_func!r}"
            )
        self._step_func: Callable[[], StepResult] = optimizer_step_func
        self._optimizer = optimizer
        self._step = DeviceStep(optimizer_step_func, optimizer)
        self._use_single_mempool = use_single_mempool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._fingerprint: Fingerprint | None = None
        self._look: Look | None = None
        self._gradients: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._eager_steps_left = max(1, cuda_graph_warmup_steps)
        self._replays_of_graph = 0
        self._early_moves = 0
        #: Number of calls, of captures and of replays so far.
        self.calls = 0
        self.captures = 0
        self.replays = 0
        #: Why the last graph was dropped; None if none was.
        self.recapture_reason: str | None = None
        _living.add(self)

    @property
    def __self__(self) -> Any:
        """The optimizer, as a bound method has it."""
        return self._optimizer

    @property
    def captured(self) -> bool:
        """Whether the next call replays, unless something changed that kernels hold on to."""
        return self._fingerprint is not None

    def __call__(self) -> StepResult:
        if self._fingerprint is not None:
            reason = self._why_outdated()
            if reason is not None:
                self._drop(reason)
        if self._eager_steps_left > 0:
            self._step.prepare()
            self._step.enqueue()
            self._eager_steps_left -= 1
        else:
            if self._fingerprint is None:
                self._capture(Fingerprint.of(self._optimizer))
            self._replay()
        self.calls += 1
        return self._step.result()

    def release(self) -> None:
        """Waits for the device and frees the graph. A later call captures again, without warm-up
        steps. Call it, or `del optimizer.step`, before the process groups are destroyed."""
        if self._graph is not None:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self._step.device)
            self._graph.reset()
            self._graph = None
        if self._fingerprint is not None:
            self._fingerprint = self._look = None
            self._gradients.clear()
            for adam in self._step.adams:
                adam.abandon_captured_steps()

    def __del__(self) -> None:
        # Not even constructed, or after CUDA itself: there is nothing to be told then.
        with contextlib.suppress(Exception):
            self.release()

    def _difference(self) -> str | None:
        assert self._fingerprint is not None
        if self._look is not None and self._look.still_holds(self._optimizer):
            return None
        reason = self._fingerprint.difference(Fingerprint.of(self._optimizer))
        if reason is None and (self._look is None or self._look.readable):
            self._look = Look(self._optimizer)
        return reason

    def _why_outdated(self) -> str | None:
        reason = self._difference()
        if reason is None and self._graph is not None:
            for position, adam in enumerate(self._step.adams):
                if not adam.captured:
                    return f"the step of optimizer {position} was released or built anew"
        if reason is None:
            return None
        self._early_moves = self._early_moves + 1 if self._replays_of_graph <= 1 else 0
        if self._early_moves > 1 and reason.startswith("gradient "):
            raise UsageError(
                f"{reason}, as at the step before: a captured step needs gradients that stay where "
                "they are. Wrap the model in Megatron's DistributedDataParallel (main_grad), or "
                "zero gradients with set_to_none=False"
            )
        return reason

    def _drop(self, reason: str) -> None:
        logger.warning("the captured optimizer step is captured again: %s", reason)
        self.recapture_reason = reason
        self.release()
        self._eager_steps_left = 1

    def _capture(self, now: Fingerprint) -> None:
        self._step.prepare()
        if self._step.device.type == "cuda":
            self._graph = self._captured_graph()
        # Megatron drops them before the next step, but they are what replays write and read.
        self._gradients = gradients(self._step.adams)
        self._fingerprint = now
        self._replays_of_graph = 0
        self.captures += 1

    def _captured_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = stream = None
        if self._use_single_mempool:
            shared = importlib.import_module("megatron.core.full_cuda_graph")
            pool, stream = shared.get_graph_pool(True), shared.get_shared_capture_stream()
        first_error: BaseException | None = None
        with torch.cuda.device(self._step.device), _no_garbage_collection():
            try:
                with torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    try:
                        self._step.enqueue()
                    except BaseException as error:
                        first_error = error
                        raise
            except BaseException:
                for adam in self._step.adams:
                    adam.abandon_captured_steps()
                # The end of a broken capture reports only that it is broken.
                if first_error is not None:
                    raise first_error from None
                raise
        return graph

    def _replay(self) -> None:
        if self._step.device.type == "cuda":
            assert self._graph is not None
            self._before_replay()
            self._graph.replay()
        else:
            self._step.enqueue()
        self._replays_of_graph += 1
        self.replays += 1

    def _before_replay(self) -> None:
        """After it the optimizers look as after an eager step, and the graph sees their values."""
        for parameter, attribute, gradient in self._gradients:
            if getattr(parameter, attribute, None) is not gradient:
                setattr(parameter, attribute, gradient)
        for adam in self._step.adams:
            adam.deliver()


_living: weakref.WeakSet[OptimizerCudaGraphWrapper] = weakref.WeakSet()


def release_all() -> None:
    """Releases the graphs of all wrappers that there are, for example before
    `torch.distributed.destroy_process_group()`: a communicator waits for graphs that use it."""
    for wrapper in list(_living):
        wrapper.release()


@atexit.register
def _release_at_exit() -> None:
    for wrapper in list(_living):
        with contextlib.suppress(Exception):
            wrapper.release()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What the collector frees may wait for the device, which ends a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
