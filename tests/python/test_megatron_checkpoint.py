"""Saving and loading through Megatron, around a captured step."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from megatron_world import (
    CASES,
    F16_OPTIONS,
    Training,
    assert_same_tensors,
    device,
    installed,
    load,
    load_sharded,
    save,
    save_sharded,
)

__all__ = ["device", "installed"]
pytestmark = pytest.mark.usefixtures("installed")


def make(dtype: torch.dtype, device: torch.device, distributed: bool) -> Training:
    options = F16_OPTIONS if dtype is torch.float16 else {}
    return Training(dtype, device, distributed=distributed, clip_grad=0.2, **options)


def state_of(training: Training) -> tuple[Any, ...]:
    scalers = [
        (s.scale.item(), s._growth_tracker, s._hysteresis_tracker)
        for leaf in training.optimizer.chained_optimizers
        if (s := getattr(leaf, "grad_scaler", None)) is not None
    ]
    return training.groups(), scalers


@CASES
def test_a_saved_state_holds_no_device_scalars(
    device: torch.device, dtype: torch.dtype, distributed: bool
) -> None:
    training = make(dtype, device, distributed)
    training.wrap()
    training.run(range(4))
    state = training.optimizer.state_dict()
    groups = state.get("optimizer", state)["param_groups"]
    assert len(groups) == 2
    for group in groups:
        assert type(group["step"]) is int and group["step"] == 4
        assert type(group["lr"]) is float
        assert type(group["weight_decay"]) is float
    # Megatron collects steps in a set and asserts that it holds one.
    assert training.optimizer._synchronize_steps() == 4


@CASES
def test_resumed_in_a_new_process_it_equals_going_on(
    device: torch.device, dtype: torch.dtype, distributed: bool
) -> None:
    overflows = (4, 8, 9) if dtype is torch.float16 else ()
    going_on = make(dtype, device, distributed)
    going_on.wrap()
    going_on.run(range(6), overflows)
    saved = save(going_on)
    going_on.run(range(6, 14), overflows)

    resumed = make(dtype, device, distributed)
    load(resumed, saved)
    resumed.wrap()
    resumed.run(range(6, 14), overflows)
    assert resumed.results == going_on.results[6:]
    assert state_of(resumed) == state_of(going_on)
    assert_same_tensors(resumed.tensors(), going_on.tensors())


@CASES
def test_loaded_into_a_captured_step_the_next_replay_goes_on_from_there(
    device: torch.device, dtype: torch.dtype, distributed: bool
) -> None:
    overflows = (4, 8, 9) if dtype is torch.float16 else ()
    training = make(dtype, device, distributed)
    wrapper = training.wrap()
    training.run(range(6), overflows)
    saved = save(training)
    training.run(range(6, 14), overflows)
    first, first_state = training.tensors(), state_of(training)
    load(training, saved)
    training.run(range(6, 14), overflows)
    assert training.results[6:14] == training.results[14:]
    assert state_of(training) == first_state
    assert_same_tensors(training.tensors(), first)
    assert wrapper.captures == 1, wrapper.recapture_reason


def test_a_state_saved_after_a_skipped_step_counts_updates(device: torch.device) -> None:
    training = make(torch.float16, device, False)
    training.wrap()
    training.run(range(5), overflows=(0, 4))
    assert [success for success, _, _ in training.results] == [False, True, True, True, False]
    state = training.optimizer.state_dict()
    assert [group["step"] for group in state["optimizer"]["param_groups"]] == [3, 3]
    assert state["grad_scaler"]["growth_tracker"] == 0


def test_megatrons_distributed_checkpoint(device: torch.device) -> None:
    going_on = make(torch.bfloat16, device, True)
    going_on.wrap()
    going_on.run(range(5))
    with tempfile.TemporaryDirectory() as directory:
        save_sharded(going_on, directory)
        scheduler = going_on.scheduler.state_dict()
        going_on.run(range(5, 10))
        resumed = make(torch.bfloat16, device, True)
        load_sharded(resumed, directory)
    resumed.scheduler.load_state_dict(scheduler)
    resumed.wrap()
    resumed.run(range(5, 10))
    assert resumed.results == going_on.results[5:]
    assert resumed.groups() == going_on.groups()
    assert_same_tensors(resumed.tensors(), going_on.tensors())
