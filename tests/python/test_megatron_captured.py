"""The captured step and FusedAdam's idea of being captured, without a GPU.

A stand-in records what FusedAdam would enqueue; the rest of Megatron's step runs again at every
"replay". FusedAdam's Python step is called at the capture only, as on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stepgraph.megatron
from captures import HostCapture
from megatron_world import (
    CASES,
    Training,
    assert_same,
    assert_same_tensors,
    pair,
    pretended_gpu,
    process_groups,
)
from stepgraph.megatron import OptimizerCudaGraphWrapper
from stepgraph.megatron.addresses import Fingerprint
from stepgraph.megatron.grad_scaler import is_on_device
from stepgraph.megatron.parts import gradients


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    stepgraph.megatron.install()
    monkeypatch.setattr(Recorded, "capture", HostCapture(monkeypatch), raising=False)
    with pretended_gpu() as found, process_groups():
        yield found
    stepgraph.megatron.uninstall()


class Recorded(OptimizerCudaGraphWrapper):
    """Replays what FusedAdam enqueued at the capture."""

    capture: Any
    graph: Any = None

    def _capture(self, now: Any) -> None:
        kept = self._changed_by_running()
        values = [tensor.clone() for tensor in kept]
        with self.capture() as self.graph:
            self._step.enqueue()
        for tensor, value in zip(kept, values, strict=True):
            tensor.copy_(value)
        self._gradients = gradients(self._step.adams)
        self._fingerprint = now
        self.captures += 1

    def _changed_by_running(self) -> list[torch.Tensor]:
        """A capture runs nothing, so this is put back after it."""
        kept = [
            buffer.grad_data for chunk in self.__self__.model_chunks for buffer in chunk.buffers
        ]
        for leaf in self.__self__.chained_optimizers:
            scaler = getattr(leaf, "grad_scaler", None)
            if is_on_device(scaler):
                kept += [scaler._device_scale, scaler._device_growth, scaler._device_hysteresis]
        return kept

    def _replay(self) -> None:
        (adam,) = self._step.adams
        assert adam.captured
        self._before_replay()
        adam.step = self._replayed_step
        try:
            self._step.enqueue()
        finally:
            del adam.step
        self.replays += 1

    def _replayed_step(self) -> None:
        (adam,) = self._step.adams
        # What the recorded kernels find in the inputs that were copied to before them.
        found_inf = adam.__dict__.get("found_inf")
        adam.engine.found_inf.fill_(0.0 if found_inf is None else found_inf)
        self.graph.replay()


def record(training: Training) -> Recorded:
    training.optimizer.step = wrapper = Recorded(training.optimizer.step)
    return wrapper


def make(device: torch.device, dtype: torch.dtype, distributed: bool) -> tuple[Training, Training]:
    training, other = pair(dtype, device, distributed=distributed, clip_grad=0.2)
    # Megatron's non-distributed optimizers keep no list of the model chunks.
    training.optimizer.model_chunks = [training.model]
    return training, other


@CASES
def test_replays_follow_schedules_and_skip(
    device: torch.device, dtype: torch.dtype, distributed: bool
) -> None:
    ours, theirs = make(device, dtype, distributed)
    wrapper = record(ours)
    overflows = (0, 4, 8, 9) if dtype is torch.float16 else ()
    for training in (ours, theirs):
        training.run(range(14), overflows)
    assert_same(theirs, ours)
    assert (wrapper.captures, wrapper.replays) == (1, 13)


@CASES
def test_a_state_loaded_after_the_capture(
    device: torch.device, dtype: torch.dtype, distributed: bool
) -> None:
    ours, theirs = make(device, dtype, distributed)
    wrapper = record(ours)
    for training in (ours, theirs):
        training.run(range(5))
    model, saved, state, scheduler = (
        copy.deepcopy(value)
        for value in (
            ours.model.state_dict(),
            ours.optimizer.state_dict(),
            ours.optimizer.chained_optimizers[0].get_parameter_state_dp_zero()
            if distributed
            else None,
            ours.scheduler.state_dict(),
        )
    )
    before = ours.tensors()
    ours.run(range(5, 8))
    ours.clear_gradients()
    ours.model.load_state_dict(model)
    ours.optimizer.load_state_dict(saved)
    if distributed:
        ours.optimizer.chained_optimizers[0].load_parameter_state_from_dp_zero(state)
    ours.scheduler = ours.make_scheduler()
    ours.scheduler.load_state_dict(scheduler)
    assert_same_tensors(before, ours.tensors())
    for training in (ours, theirs):
        training.run(range(5, 10))
    assert_same_tensors(theirs.tensors(), ours.tensors())
    assert theirs.groups() == ours.groups()
    assert wrapper.captures == 1, wrapper.recapture_reason


@CASES
def test_groups_replaced_after_the_capture(
    device: torch.device, dtype: torch.dtype, distributed: bool
) -> None:
    ours, theirs = make(device, dtype, distributed)
    wrapper = record(ours)
    for training in (ours, theirs):
        training.run(range(4))
        inner = training.optimizer.chained_optimizers[0].optimizer
        inner.param_groups = [
            {**group, "params": list(group["params"])} for group in inner.param_groups
        ]
        training.run(range(4, 7))
        inner.param_groups[0]["weight_decay"] = 0.7
        inner.param_groups[0]["betas"] = (0.8, 0.99)
        inner.param_groups[0]["eps"] = 1e-6
        training.run(range(7, 8))
    assert_same(theirs, ours)
    assert wrapper.captures == 1, wrapper.recapture_reason


def test_steady_calls_do_not_read_addresses_in_python(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make(device, torch.bfloat16, False)
    wrapper = record(ours)
    for training in (ours, theirs):
        training.run(range(4))
    with monkeypatch.context() as patch:
        patch.setattr(Fingerprint, "of", lambda _: pytest.fail("compared in full"))
        ours.run(range(4, 7))
    theirs.run(range(4, 7))
    assert_same(theirs, ours)
    weight = next(ours.model.parameters())
    weight.main_grad = weight.main_grad.clone()
    ours.update()
    assert wrapper.recapture_reason is not None
    assert wrapper.recapture_reason.startswith("gradient ")


def test_after_the_graph_eager_steps_go_on(device: torch.device) -> None:
    ours, theirs = make(device, torch.float16, False)
    record(ours)
    ours.run(range(5), overflows=(3,))
    del ours.optimizer.step
    ours.run(range(5, 9), overflows=(6,))
    record(ours)
    ours.run(range(9, 13))
    theirs.run(range(13), overflows=(3, 6))
    assert_same(theirs, ours)


def test_a_released_step_is_noticed(device: torch.device) -> None:
    ours, theirs = make(device, torch.bfloat16, False)
    wrapper = record(ours)
    ours.run(range(4))
    (leaf,) = ours.optimizer.chained_optimizers
    leaf.optimizer.release()
    wrapper._graph = wrapper.graph  # as on a GPU, where a wrapper with a graph asks
    wrapper._graph.reset = lambda: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        ours.run(range(4, 8))
    theirs.run(range(8))
    assert_same(theirs, ours)
    assert wrapper.recapture_reason == "the step of optimizer 0 was released or built anew"
    assert wrapper.captures == 2
