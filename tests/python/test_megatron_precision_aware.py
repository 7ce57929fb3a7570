"""Megatron's precision-aware optimizer: FusedAdam holds masters and narrow moments itself.

Megatron's configuration asks Transformer Engine whether its FusedAdam can do this. The question is
answered here without it.
"""

from __future__ import annotations

import copy
import importlib
import tempfile
from typing import Any

import pytest
import torch

from megatron_world import (
    Training,
    assert_same,
    assert_same_tensors,
    device,
    installed,
    load_sharded,
    pair,
    save_sharded,
)
from stepgraph import UsageError
from stepgraph.fused_adam import FusedAdam
from stepgraph.state_formats import join_remainder

__all__ = ["device", "installed"]
pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(autouse=True)
def no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = importlib.import_module("megatron.core.optimizer")

    def settle(self: Any) -> None:
        self.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = self.use_precision_aware_optimizer

    monkeypatch.setattr(optimizer.OptimizerConfig, "__post_init__", settle)
    monkeypatch.setattr(optimizer, "is_te_min_version", lambda *_: True)


OPTIONS: dict[str, dict[str, Any]] = {
    "remainders": {"store_param_remainders": True},
    "f32 masters": {"store_param_remainders": False},
    "bf16 moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "e4m3 and f16 moments": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
    "f16 masters": {"store_param_remainders": False, "main_params_dtype": torch.float16},
}


def parameter_state(leaf: Any) -> dict[Any, Any]:
    """Megatron's format that keeps the types of states, remainders among them."""
    state: dict[Any, Any] = copy.deepcopy(leaf.get_parameter_state_dp_reshardable())
    for of_buffer in state.values():
        if isinstance(of_buffer, dict):
            for buckets in of_buffer.values():
                for bucket in buckets:
                    for tensors in bucket:
                        tensors["padding"] = False
    return state


@pytest.mark.parametrize("name", OPTIONS)
def test_captured_equals_eager_and_resumes(device: torch.device, name: str) -> None:
    options = {"use_precision_aware_optimizer": True, "clip_grad": 0.2, **OPTIONS[name]}
    theirs, ours = pair(torch.bfloat16, device, distributed=True, **options)
    (leaf,) = ours.optimizer.chained_optimizers
    assert type(leaf.optimizer) is FusedAdam
    assert leaf.optimizer.master_weights and leaf.optimizer.use_decoupled_grad
    wrapper = ours.wrap()
    for training in (theirs, ours):
        training.run(range(8))
    assert_same(theirs, ours)

    model = copy.deepcopy(ours.model.state_dict())
    saved = copy.deepcopy(ours.optimizer.state_dict())
    state = parameter_state(leaf)
    scheduler = copy.deepcopy(ours.scheduler.state_dict())
    before = ours.tensors()
    ours.run(range(8, 12))
    ours.model.load_state_dict(model)
    ours.optimizer.load_state_dict(saved)
    leaf.load_parameter_state_from_dp_reshardable(state)
    ours.scheduler = ours.make_scheduler()
    ours.scheduler.load_state_dict(scheduler)
    assert_same_tensors(before, ours.tensors())
    ours.run(range(8, 12))
    theirs.run(range(8, 12))
    assert ours.results[8:12] == ours.results[12:] == theirs.results[8:]
    assert_same_tensors(theirs.tensors(), ours.tensors())
    assert wrapper.captures == 1, wrapper.recapture_reason


def make(device: torch.device, name: str) -> Training:
    options = {"use_precision_aware_optimizer": True, "clip_grad": 0.2, **OPTIONS[name]}
    return Training(torch.bfloat16, device, distributed=True, **options)


def saved_with_dp_zero(training: Training) -> dict[str, Any]:
    """Megatron's format that holds every state in float32, as its own code makes it."""
    (leaf,) = training.optimizer.chained_optimizers
    saved = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "parameters": leaf.get_parameter_state_dp_zero(),
        "scheduler": training.scheduler.state_dict(),
    }
    (of_buffer,) = saved["parameters"][0].values()
    assert of_buffer["param"].dtype is torch.float32
    return copy.deepcopy(saved)


def load_dp_zero(training: Training, saved: dict[str, Any]) -> None:
    """In Megatron's order: the model, the groups, the states of parameters."""
    saved = copy.deepcopy(saved)
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    (leaf,) = training.optimizer.chained_optimizers
    leaf.load_parameter_state_from_dp_zero(saved["parameters"])
    training.scheduler = training.make_scheduler()
    training.scheduler.load_state_dict(saved["scheduler"])


def values(training: Training) -> dict[str, torch.Tensor]:
    """What is stored, whichever of the codes that a narrow format may have for it."""
    (leaf,) = training.optimizer.chained_optimizers
    found = {f"model.{n}": p.detach().clone() for n, p in training.model.named_parameters()}
    parameters = [p for group in leaf.optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        for name in leaf.optimizer.state[p]:
            found[f"{i}.{name}"] = leaf.optimizer.get_unscaled_state(p, name).clone()
    return found


def masters(training: Training) -> list[torch.Tensor]:
    """Whole masters, also where remainders are kept."""
    (leaf,) = training.optimizer.chained_optimizers
    found = []
    for group in leaf.optimizer.param_groups:
        for p in group["params"]:
            master = leaf.optimizer.state[p]["master_param"]
            found.append(join_remainder(p, master) if master.dtype is torch.int16 else master)
    assert found
    return [master.clone() for master in found]


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_file_of_float32_resumes(device: torch.device, name: str, steps: int) -> None:
    going_on = make(device, name)
    going_on.wrap()
    if steps == 0:  # as Megatron saves before the first step
        going_on.optimizer.chained_optimizers[0]._init_optimizer_states_with_dummy_values()
    going_on.run(range(steps))
    saved, before = saved_with_dp_zero(going_on), values(going_on)

    resumed = make(device, name)
    resumed.run(range(20, 22))
    wrapper = resumed.wrap()
    resumed.run(range(22, 24))
    for training in (resumed, going_on):
        # Another model, then a step that has been captured and went on.
        load_dp_zero(training, saved)
        assert_same_tensors(before, values(training))
        training.run(range(steps, steps + 4))
    assert resumed.results[-4:] == going_on.results[-4:]
    assert_same_tensors(resumed.tensors(), going_on.tensors())
    assert wrapper.captures == 1, wrapper.recapture_reason


@pytest.mark.parametrize("saved_as", ["remainders", "f32 masters"])
def test_a_distributed_checkpoint_of_float32(device: torch.device, saved_as: str) -> None:
    saved, resumed = make(device, saved_as), make(device, "remainders")
    saved.run(range(5))
    with tempfile.TemporaryDirectory() as directory:
        save_sharded(saved, directory)
        load_sharded(resumed, directory)
    for one, other in zip(masters(saved), masters(resumed), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_file_of_whole_masters_loads_into_remainders(device: torch.device, steps: int) -> None:
    whole, remainders = make(device, "f32 masters"), make(device, "remainders")
    if steps == 0:
        whole.optimizer.chained_optimizers[0]._init_optimizer_states_with_dummy_values()
    whole.run(range(steps))
    remainders.run(range(20, 23))
    load_dp_zero(remainders, saved_with_dp_zero(whole))
    for _ in range(2):
        for one, other in zip(masters(whole), masters(remainders), strict=True):
            assert torch.equal(one, other)
        remainders.take_gradients(whole)
        for training in (whole, remainders):
            training.update()


@pytest.mark.parametrize("name", ["f32 masters", "f16 masters"])
def test_a_file_of_remainders_is_refused_by_whole_masters(device: torch.device, name: str) -> None:
    remainders, whole = make(device, "remainders"), make(device, name)
    remainders.run(range(4))
    with pytest.raises(UsageError, match="state master_param are integers of 16 bits"):
        load_dp_zero(whole, saved_with_dp_zero(remainders))


def test_a_loss_scale_skips_there_too(device: torch.device) -> None:
    options = {"use_precision_aware_optimizer": True, "loss_scale": 128.0, "clip_grad": 0.2}
    theirs, ours = pair(torch.bfloat16, device, distributed=True, **options)
    ours.wrap()
    for training in (theirs, ours):
        training.run(range(6), overflows=(0, 3))
    assert_same(theirs, ours)
    assert [success for success, _, _ in ours.results] == [False, True, True, False, True, True]


def test_f32_is_close_to_megatrons_f32_masters(device: torch.device) -> None:
    """The same training with the masters in Megatron and in FusedAdam."""
    aware = Training(
        torch.bfloat16,
        device,
        distributed=True,
        use_precision_aware_optimizer=True,
        store_param_remainders=True,
    )
    other = Training(torch.bfloat16, device, distributed=True)
    aware.wrap()
    other.wrap()
    for training in (aware, other):
        training.run(range(6))
    for (name, left), right in zip(
        aware.model.named_parameters(), other.model.parameters(), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=1e-3, msg=name)
