"""Learning-rate schedulers of torch on FusedAdam, and schedules that the step evaluates itself."""

import pytest
import torch
from torch.optim import lr_scheduler as s

from adam_cases import mode, set_gradient, step_with  # noqa: F401
from stepgraph import UsageError, _core

FAMILIES = {
    "LambdaLR": lambda o: s.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda t: 0.95),
    "StepLR": lambda o: s.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [1, 4], 0.1),
    "ConstantLR": lambda o: s.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: s.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: s.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": lambda o: s.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=True),
    "SequentialLR": lambda o: s.SequentialLR(
        o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.5, 2), s.StepLR(o, 3)]),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=1, factor=0.3),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_of_torch(mode, family, as_tensor):
    torch.manual_seed(0)
    start = torch.randn(20)
    ours, theirs = mode.parameter(start), mode.parameter(start)
    groups = [{"lr": 0.05}, {"lr": 0.02}]
    other = mode.parameter(start), mode.parameter(start)

    def lrs(group):
        return {"lr": torch.tensor(group["lr"])} if as_tensor else group

    optimizer = mode.adam(
        [{"params": [ours], **lrs(groups[0])}, {"params": [other[0]], **lrs(groups[1])}]
    )
    expected = torch.optim.AdamW(
        [{"params": [theirs], **groups[0]}, {"params": [other[1]], **groups[1]}], weight_decay=0.0
    )
    live = [group["lr"] for group in optimizer.param_groups]
    first, second = FAMILIES[family](optimizer), FAMILIES[family](expected)
    for _ in range(10):
        for a, b in ((ours, theirs), (other[0], other[1])):
            g = torch.randn(20)
            set_gradient(a, g)
            set_gradient(b, g)
        for o, schedule in ((optimizer, first), (expected, second)):
            o.step()
            schedule.step(1.0) if family == "ReduceLROnPlateau" else schedule.step()
        for a, b in zip(optimizer.param_groups, expected.param_groups):
            assert float(a["lr"]) == pytest.approx(float(b["lr"]), rel=1e-5, abs=1e-9)
            assert a["betas"] == pytest.approx(b["betas"])
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(other[0], other[1], rtol=2e-5, atol=2e-6)
    for group, before in zip(optimizer.param_groups, live):
        if optimizer.capturable:
            assert group["lr"] is before
        initial = group.get("initial_lr")
        if isinstance(initial, torch.Tensor):
            assert initial.data_ptr() != group["lr"].data_ptr()


def test_the_base_does_not_compound(mode):
    """pytorch#126854: three times half of the base."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=torch.tensor(0.1))
    schedule = s.LambdaLR(optimizer, lambda t: 0.5)
    seen = []
    for _ in range(3):
        step_with(optimizer, p, 1.0)
        schedule.step()
        seen.append(float(optimizer.param_groups[0]["lr"]))
    assert seen == pytest.approx([0.05] * 3)
    assert float(optimizer.param_groups[0]["initial_lr"]) == pytest.approx(0.1)


def test_halved_at_every_step(mode):
    """burn#5779."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    schedule = s.ExponentialLR(optimizer, 0.5)
    step_with(optimizer, p, 1.0)
    addresses = [t.data_ptr() for t in optimizer.state[p].values()]
    for _ in range(4):
        schedule.step()
        step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(0.806250, abs=1e-6)
    assert [t.data_ptr() for t in optimizer.state[p].values()] == addresses


def test_a_schedule_on_the_device(mode):
    schedule = _core.schedules.exponential_lr(learning_rate=0.1, gamma=0.5)
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], schedule=schedule)
    for _ in range(5):
        step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(0.806250, abs=1e-6)
    assert optimizer.status().groups[0].learning_rate == pytest.approx(0.1 * 0.5**4)
    assert optimizer.captures == 1


def test_values_by_hand_hold_over_a_schedule(mode):
    schedule = _core.schedules.exponential_lr(learning_rate=0.1, gamma=0.5)
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], schedule=schedule)
    group = optimizer.param_groups[0]
    step_with(optimizer, p, 1.0)
    group["lr"] = 0.2
    step_with(optimizer, p, 1.0)
    optimizer.add_param_group({"params": [mode.parameter([0.0])], "schedule": None})
    step_with(optimizer, p, 1.0)  # held through another plan
    assert p.item() == pytest.approx(1 - 0.1 - 0.2 - 0.2, abs=1e-6)
    saved = optimizer.state_dict()
    assert saved["stepgraph"]["held"][0] == [True, False]
    optimizer.resume_schedule(0)
    step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(0.5 - 0.1 * 0.5**3, abs=1e-6)
    optimizer.load_state_dict(saved)
    step_with(optimizer, p, 1.0)
    assert optimizer.status().groups[0].learning_rate == pytest.approx(0.2)
    with pytest.raises(UsageError, match="group 1: has no schedule"):
        optimizer.resume_schedule(1)
    with pytest.raises(UsageError, match="group 7 does not exist"):
        optimizer.resume_schedule(7)


def test_a_held_value_survives_a_schedule_of_the_other(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], schedule=_core.schedules.constant(0.1))
    step_with(optimizer, p, 1.0)
    optimizer.param_groups[0]["lr"] = 0.2
    step_with(optimizer, p, 1.0)
    optimizer.param_groups[0]["weight_decay_schedule"] = _core.schedules.constant(0.0)
    step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(1 - 0.1 - 0.2 - 0.2, abs=1e-6)


def test_a_schedule_that_is_assigned_later(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    optimizer.param_groups[0]["schedule"] = _core.schedules.constant(0.3)
    step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(0.6, abs=1e-6)
    optimizer.param_groups[0]["schedule"] = None
    step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(0.5, abs=1e-6)


def test_a_weight_decay_schedule(mode):
    schedule = _core.schedules.linear_lr(
        learning_rate=0.4, start_factor=0.25, end_factor=1.0, total_iters=3
    )
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, weight_decay_schedule=schedule)
    for _ in range(4):
        step_with(optimizer, p, 0.0)
    assert p.item() == pytest.approx(0.903450, abs=1e-6)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    step_with(optimizer, p, 0.0)
    assert p.item() == pytest.approx(0.903450, abs=1e-6)
    optimizer.resume_weight_decay_schedule(0)
    step_with(optimizer, p, 0.0)
    assert p.item() == pytest.approx(0.903450 * 0.96, abs=1e-6)


def test_schedules_count_samples(mode):
    schedule = _core.schedules.megatron_learning_rate(
        style="linear", maximum=0.1, minimum=0.0, warmup=0, decay=100
    )
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], schedule=schedule, samples_per_step=25)
    seen = []
    for _ in range(4):
        step_with(optimizer, p, 1.0)
        seen.append(optimizer.status().groups[0].learning_rate)
    assert seen == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert optimizer.status().samples == 100


def test_not_a_schedule(mode):
    p = mode.parameter([1.0])
    with pytest.raises(UsageError, match="schedule is a float, expected a Schedule"):
        mode.adam([p], schedule=0.1)
