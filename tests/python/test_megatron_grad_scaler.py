"""Megatron's loss scale with its state on the device follows Megatron's own rule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_world import pretended_gpu
from stepgraph._core import UsageError
from stepgraph.megatron.grad_scaler import is_on_device, move_to_device

grad_scaler = pytest.importorskip("megatron.core.optimizer.grad_scaler")


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    with pretended_gpu() as found:
        yield found


def dynamic(**options: Any) -> Any:
    return grad_scaler.DynamicGradScaler(
        **{
            "initial_scale": 2.0**16,
            "min_scale": 1.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 5,
            "hysteresis": 2,
            **options,
        }
    )


def state(scaler: Any) -> tuple[float, int, int]:
    return scaler.scale.item(), scaler._growth_tracker, scaler._hysteresis_tracker


@pytest.mark.parametrize("as_tensor", [False, True], ids=["bool", "tensor"])
@pytest.mark.parametrize("chance", [0.02, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2, 7])
def test_follows_megatron_over_random_overflows(
    interval: int, hysteresis: int, chance: float, as_tensor: bool
) -> None:
    options = {
        "growth_interval": interval,
        "hysteresis": hysteresis,
        "growth_factor": 3.0,
        "backoff_factor": 0.3,
        "min_scale": 0.7,
    }
    theirs, ours = dynamic(**options), dynamic(**options)
    move_to_device(ours)
    scale = ours.scale
    draw = random.Random(interval * 100 + hysteresis * 10 + int(chance * 7))
    for _ in range(80):
        overflow = draw.random() < chance
        theirs.update(overflow)
        ours.update(torch.tensor(overflow) if as_tensor else overflow)
        assert state(ours) == state(theirs)
        assert torch.equal(ours.inv_scale, theirs.inv_scale)
    assert ours.scale is scale


def test_takes_over_where_the_scaler_is() -> None:
    theirs, ours = dynamic(), dynamic()
    for overflow in (True, False, False, True, True, False):
        theirs.update(overflow)
        ours.update(overflow)
    move_to_device(ours)
    move_to_device(ours)
    assert is_on_device(ours) and not is_on_device(theirs)
    assert isinstance(ours, grad_scaler.DynamicGradScaler)
    assert state(ours) == state(theirs)
    for overflow in (False, False, False, False, True, True):
        theirs.update(overflow)
        ours.update(overflow)
        assert state(ours) == state(theirs)


def test_a_saved_state_does_not_change_and_loads_in_place() -> None:
    ours = dynamic()
    move_to_device(ours)
    scale = ours.scale
    for _ in range(3):
        ours.update(True)
    saved = ours.state_dict()
    assert saved["scale"].item() == 2.0**14
    assert (saved["growth_tracker"], saved["hysteresis_tracker"]) == (0, -1)
    assert all(type(saved[name]) is int for name in ("growth_tracker", "hysteresis_tracker"))
    for _ in range(4):
        ours.update(True)
    assert saved["scale"].item() == 2.0**14

    theirs = dynamic()
    theirs.load_state_dict(saved)
    ours.load_state_dict(theirs.state_dict())
    assert state(ours) == state(theirs) == (2.0**14, 0, -1)
    assert ours.scale is scale


def test_assignments_reach_the_device_state() -> None:
    ours = dynamic(growth_interval=3)
    move_to_device(ours)
    scale = ours.scale
    ours._scale = torch.tensor([8.0])
    ours._growth_tracker = 2
    assert ours.scale is scale
    ours.update(torch.tensor([0.0]))
    assert state(ours) == (16.0, 0, 2)


def test_anything_but_zero_is_an_overflow() -> None:
    for value in (1.0, 2.0, 8.0, 0.5, -1.0, float("nan"), float("inf")):
        ours = dynamic(hysteresis=1)
        move_to_device(ours)
        ours.update(torch.tensor([value]))
        assert state(ours) == (2.0**15, 0, 0), value


def test_a_constant_scaler_stays_as_it_is() -> None:
    scaler = grad_scaler.ConstantGradScaler(128.0)
    move_to_device(scaler)
    assert type(scaler) is grad_scaler.ConstantGradScaler
    scaler.update(torch.tensor([1.0]))
    assert scaler.scale.item() == 128.0
    move_to_device(None)


def test_a_scaler_of_another_rule_is_refused() -> None:
    class Other(grad_scaler.DynamicGradScaler):
        def update(self, found_inf: bool) -> None:
            self._scale += 1

    scaler = Other(2.0, 1.0, 2.0, 0.5, 5, 1)
    with pytest.raises(UsageError, match="Other; a captured step knows the rules of"):
        move_to_device(scaler)
    assert type(scaler) is Other
