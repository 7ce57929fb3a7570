"""Megatron's precision-aware optimizer: FusedAdam holds masters and narrow moments itself.

Megatron's configuration asks Transformer Engine whether its FusedAdam can do this. The question is
answered here without it.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

from megatron_world import Training, assert_same, assert_same_tensors, device, installed, pair
from stepgraph.fused_adam import FusedAdam

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
