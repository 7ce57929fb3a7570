import math
import pickle

import pytest
import torch
from torch.optim import lr_scheduler as lr

import stepgraph
from stepgraph import schedules

STEPS = 300


def optimizer(learning_rate=0.1, groups=2):
    return torch.optim.SGD(
        [
            {"params": [torch.nn.Parameter(torch.ones(1))], "lr": learning_rate * (group + 1)}
            for group in range(groups)
        ]
    )


def rates_of(scheduler, group, steps=STEPS):
    """What torch's scheduler gives, one call after each step."""
    found = []
    for _ in range(steps):
        found.append(float(scheduler.optimizer.param_groups[group]["lr"]))
        scheduler.optimizer.step()
        scheduler.step()
    return found


FACTORIES = {
    "StepLR": lambda o: lr.StepLR(o, 7, 0.9),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [3, 50, 50, 51], 0.5),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.98),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.25, 40),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, 0.8, 90),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 120, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 80, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 20, 2, 0.002),
    "OneCycleLR": lambda o: lr.OneCycleLR(
        o, [0.5, 0.7], total_steps=STEPS + 1, cycle_momentum=False
    ),
    "OneCycleLR of three phases": lambda o: lr.OneCycleLR(
        o,
        0.5,
        total_steps=STEPS + 1,
        pct_start=0.2,
        anneal_strategy="linear",
        div_factor=10,
        final_div_factor=100,
        three_phase=True,
        cycle_momentum=False,
    ),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.01, 1.0, 30), lr.CosineAnnealingLR(o, 200, 0.001)], [30]
    ),
    "LambdaLR": lambda o: lr.LambdaLR(o, [lambda t: 1 / (1 + t), lambda t: 0.5 + 0.5 * (t % 2)]),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("name", FACTORIES)
def test_schedule_from_torch_is_what_torch_does(name, group):
    scheduler = FACTORIES[name](optimizer())
    schedule = schedules.from_torch(scheduler, group, length=STEPS if "Lambda" in name else None)
    assert schedule.clock == "updates"
    for clock, expected in enumerate(rates_of(scheduler, group)):
        # torch multiplies step by step, and its rounding accumulates.
        assert schedule.value_at(clock) == pytest.approx(expected, rel=1e-9, abs=1e-15), clock


def test_from_torch_takes_no_account_of_where_the_scheduler_stands():
    scheduler = lr.StepLR(optimizer(), 7, 0.9)
    before = schedules.from_torch(scheduler)
    rates_of(scheduler, 0, 20)
    assert schedules.from_torch(scheduler) == before


def test_lambda_in_a_sequence_is_tabulated():
    made = optimizer()
    scheduler = lr.SequentialLR(
        made, [lr.LambdaLR(made, lambda t: t / 10), lr.ConstantLR(made, 1.0, 1)], [10]
    )
    schedule = schedules.from_torch(scheduler, length=10)
    assert [schedule.value_at(t) for t in (0, 5, 9, 10)] == pytest.approx([0, 0.05, 0.09, 0.1])


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (lambda o: lr.ReduceLROnPlateau(o), {}, ["ReduceLROnPlateau", "StepLR"]),
        (lambda o: lr.ChainedScheduler([lr.StepLR(o, 3)], o), {}, ["ChainedScheduler"]),
        (lambda o: lr.LambdaLR(o, lambda t: 1.0), {}, ["LambdaLR", "length"]),
        (lambda o: lr.LambdaLR(o, lambda t: 1.0), {"length": 0}, ["length is 0"]),
        (lambda o: lr.StepLR(o, 3), {"group": 2}, ["group is 2", "2 groups"]),
        (lambda o: lr.StepLR(o, 3), {"group": -1}, ["group is -1"]),
        (
            lambda o: lr.OneCycleLR(o, 0.5, total_steps=10, cycle_momentum=True),
            {},
            ["cycle_momentum"],
        ),
    ],
)
def test_from_torch_names_what_it_cannot_take(make, arguments, words):
    made = torch.optim.SGD(optimizer().param_groups, momentum=0.9)
    with pytest.raises(stepgraph.UsageError) as raised:
        schedules.from_torch(make(made), **arguments)
    for word in words:
        assert word in str(raised.value)


def test_subclass_may_do_anything_and_is_refused():
    class Mine(lr.StepLR):
        pass

    with pytest.raises(stepgraph.UsageError, match="Mine"):
        schedules.from_torch(Mine(optimizer(), 3))


EVERY_KIND = {
    "constant": schedules.constant(0.5),
    "constant over samples": schedules.constant(0.5, clock="samples"),
    "table": schedules.table([3.0, 2.0, 1.0]),
    "sequence": schedules.sequence([schedules.constant(1.0), schedules.constant(2.0)], [5]),
    "scaled": schedules.scaled(schedules.constant(1.0), 0.25),
    "megatron_learning_rate": schedules.megatron_learning_rate(
        style="wsd", maximum=1e-3, warmup=10, decay=100, wsd_style="minus_sqrt", wsd_decay=20
    ),
    "megatron_weight_decay": schedules.megatron_weight_decay(
        style="cosine", start=0.01, end=0.1, increment=50
    ),
    "step_lr": schedules.step_lr(learning_rate=0.1, step_size=3),
    "multi_step_lr": schedules.multi_step_lr(learning_rate=0.1, milestones=[2, 4]),
    "exponential_lr": schedules.exponential_lr(learning_rate=0.1, gamma=0.9),
    "constant_lr": schedules.constant_lr(learning_rate=0.1),
    "linear_lr": schedules.linear_lr(learning_rate=0.1),
    "polynomial_lr": schedules.polynomial_lr(learning_rate=0.1),
    "cosine_annealing_lr": schedules.cosine_annealing_lr(learning_rate=0.1, t_max=10),
    "cosine_annealing_warm_restarts": schedules.cosine_annealing_warm_restarts(
        learning_rate=0.1, t_0=10
    ),
    "one_cycle_lr": schedules.one_cycle_lr(max_lr=0.1, total_steps=10, strategy="linear"),
}


@pytest.mark.parametrize("name", EVERY_KIND)
def test_schedules_are_values(name):
    schedule = EVERY_KIND[name]
    copy = pickle.loads(pickle.dumps(schedule))
    assert copy == schedule
    assert hash(copy) == hash(schedule)
    assert [copy.value_at(t) for t in range(200)] == [schedule.value_at(t) for t in range(200)]
    assert copy.clock == schedule.clock
    others = [other for other in EVERY_KIND.values() if other is not schedule]
    assert schedule not in others
    assert schedule != name
    assert schedule != None  # noqa: E711


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse_square_root", "wsd"])
def test_megatron_styles_begin_with_their_warm_up(style):
    schedule = schedules.megatron_learning_rate(
        style=style, initial=1e-5, maximum=1e-3, minimum=1e-4, warmup=10, decay=100, wsd_decay=10
    )
    assert schedule.clock == "samples"
    assert schedule.value_at(0) == 1e-5
    assert schedule.value_at(10) == pytest.approx(1e-3)
    assert schedule.value_at(101) == pytest.approx(1e-3 if style == "constant" else 1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: schedules.constant(-1.0), ["-1"]),
        (lambda: schedules.constant(math.nan), ["nan"]),
        (lambda: schedules.constant(1.0, clock="epochs"), ["clock", "epochs", "'updates'"]),
        (lambda: schedules.table([]), ["table"]),
        (lambda: schedules.sequence([schedules.constant(1.0)], [3]), ["milestone"]),
        (lambda: schedules.step_lr(learning_rate=0.1, step_size=0), ["step_size"]),
        (
            lambda: schedules.megatron_learning_rate(style="spiral", maximum=1.0),
            ["style", "spiral", "'wsd'"],
        ),
        (
            lambda: schedules.one_cycle_lr(max_lr=1.0, total_steps=10, strategy="sine"),
            ["strategy", "sine", "'cos'"],
        ),
    ],
)
def test_bad_numbers_and_names_are_refused(call, words):
    with pytest.raises(stepgraph.UsageError) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


def test_broken_pickle_is_refused():
    segments, table, clock = schedules.constant(1.0).__getstate__()
    broken = schedules.Schedule.__new__(schedules.Schedule)
    with pytest.raises(stepgraph.UsageError, match="curve"):
        broken.__setstate__(([(99, *segments[0][1:])], table, clock))
