"""Learning rates and weight decays that the step evaluates by itself, on the device.

Each function returns a `Schedule`, a value. The clock of a schedule counts the updates applied to
its group, or the samples consumed, before the step in question; a skipped step advances neither.
`from_torch` takes one over from a scheduler of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._core import Schedule, UsageError
from ._core import schedules as _core_schedules

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

constant = _core_schedules.constant
table = _core_schedules.table
sequence = _core_schedules.sequence
scaled = _core_schedules.scaled
megatron_learning_rate = _core_schedules.megatron_learning_rate
megatron_weight_decay = _core_schedules.megatron_weight_decay
step_lr = _core_schedules.step_lr
multi_step_lr = _core_schedules.multi_step_lr
exponential_lr = _core_schedules.exponential_lr
constant_lr = _core_schedules.constant_lr
linear_lr = _core_schedules.linear_lr
polynomial_lr = _core_schedules.polynomial_lr
cosine_annealing_lr = _core_schedules.cosine_annealing_lr
cosine_annealing_warm_restarts = _core_schedules.cosine_annealing_warm_restarts
one_cycle_lr = _core_schedules.one_cycle_lr

__all__ = [
    "Schedule",
    "constant",
    "constant_lr",
    "cosine_annealing_lr",
    "cosine_annealing_warm_restarts",
    "exponential_lr",
    "from_torch",
    "linear_lr",
    "megatron_learning_rate",
    "megatron_weight_decay",
    "multi_step_lr",
    "one_cycle_lr",
    "polynomial_lr",
    "scaled",
    "sequence",
    "step_lr",
    "table",
]


def from_torch(scheduler: LRScheduler, group: int = 0, *, length: int | None = None) -> Schedule:
    """The learning rate that a scheduler of torch gives to one group of its optimizer.

    Taken from the scheduler's settings, not from where it stands: the schedule's clock, the updates
    applied to the group, stands for the number of calls of `scheduler.step()`. Do not step the
    scheduler any more: a learning rate set by hand holds over the schedule.

    `length`: steps to tabulate of a LambdaLR, whose last factor then holds.

    Raises UsageError for schedulers that depend on more than the number of steps, for one that
    changes momentum or betas too, for a group that does not exist, and for a LambdaLR without
    `length`.
    """
    return _from_torch(scheduler, group, length)


def _from_torch(scheduler: Any, group: int, length: int | None) -> Schedule:
    name = type(scheduler).__name__
    convert = _converters().get(type(scheduler))
    if convert is None:
        known = ", ".join(sorted(each.__name__ for each in _converters()))
        raise UsageError(f"scheduler is a {name}, expected one of {known}")
    groups = len(scheduler.optimizer.param_groups)
    if not 0 <= group < groups:
        raise UsageError(f"{name}: group is {group}, the optimizer has {groups} groups")
    if convert is _lambda_lr:
        if length is None or length < 1:
            raise UsageError(
                f"{name}: length is {length}, expected the number of steps to tabulate"
            )
        return _lambda_lr(scheduler, group, length)
    if convert is _sequential_lr:
        return _sequential_lr(scheduler, group, length)
    return convert(scheduler, group)


def _base(scheduler: Any, group: int) -> float:
    return float(scheduler.base_lrs[group])


def _step_lr(scheduler: Any, group: int) -> Schedule:
    return step_lr(
        learning_rate=_base(scheduler, group),
        step_size=scheduler.step_size,
        gamma=scheduler.gamma,
    )


def _multi_step_lr(scheduler: Any, group: int) -> Schedule:
    return multi_step_lr(
        learning_rate=_base(scheduler, group),
        milestones=sorted(scheduler.milestones.elements()),  # a Counter: some may come twice
        gamma=scheduler.gamma,
    )


def _exponential_lr(scheduler: Any, group: int) -> Schedule:
    return exponential_lr(learning_rate=_base(scheduler, group), gamma=scheduler.gamma)


def _constant_lr(scheduler: Any, group: int) -> Schedule:
    return constant_lr(
        learning_rate=_base(scheduler, group),
        factor=scheduler.factor,
        total_iters=scheduler.total_iters,
    )


def _linear_lr(scheduler: Any, group: int) -> Schedule:
    return linear_lr(
        learning_rate=_base(scheduler, group),
        start_factor=scheduler.start_factor,
        end_factor=scheduler.end_factor,
        total_iters=scheduler.total_iters,
    )


def _polynomial_lr(scheduler: Any, group: int) -> Schedule:
    return polynomial_lr(
        learning_rate=_base(scheduler, group),
        total_iters=scheduler.total_iters,
        power=scheduler.power,
    )


def _cosine_annealing_lr(scheduler: Any, group: int) -> Schedule:
    return cosine_annealing_lr(
        learning_rate=_base(scheduler, group), t_max=scheduler.T_max, eta_min=scheduler.eta_min
    )


def _cosine_annealing_warm_restarts(scheduler: Any, group: int) -> Schedule:
    return cosine_annealing_warm_restarts(
        learning_rate=_base(scheduler, group),
        t_0=scheduler.T_0,
        t_mult=scheduler.T_mult,
        eta_min=scheduler.eta_min,
    )


def _one_cycle_lr(scheduler: Any, group: int) -> Schedule:
    if scheduler.cycle_momentum:
        raise UsageError(
            "OneCycleLR: cycle_momentum is True, expected False: a schedule moves the learning "
            "rate alone"
        )
    settings = scheduler.optimizer.param_groups[group]
    # The scheduler keeps what it made of its arguments; the first phase ends at
    # pct_start * total_steps - 1.
    phases = scheduler._schedule_phases
    return one_cycle_lr(
        max_lr=float(settings["max_lr"]),
        total_steps=scheduler.total_steps,
        pct_start=(float(phases[0]["end_step"]) + 1.0) / scheduler.total_steps,
        strategy=scheduler._anneal_func_type,
        div_factor=float(settings["max_lr"]) / float(settings["initial_lr"]),
        final_div_factor=float(settings["initial_lr"]) / float(settings["min_lr"]),
        three_phase=len(phases) == 3,
    )


def _lambda_lr(scheduler: Any, group: int, length: int) -> Schedule:
    factor = scheduler.lr_lambdas[group]
    return scaled(table([float(factor(step)) for step in range(length)]), _base(scheduler, group))


def _sequential_lr(scheduler: Any, group: int, length: int | None) -> Schedule:
    parts = [_from_torch(part, group, length) for part in scheduler._schedulers]
    return sequence(parts, scheduler._milestones)


def _converters() -> dict[type, Callable[..., Schedule]]:
    """By exact type: a subclass may do anything."""
    from torch.optim import lr_scheduler

    return {
        lr_scheduler.StepLR: _step_lr,
        lr_scheduler.MultiStepLR: _multi_step_lr,
        lr_scheduler.ExponentialLR: _exponential_lr,
        lr_scheduler.ConstantLR: _constant_lr,
        lr_scheduler.LinearLR: _linear_lr,
        lr_scheduler.PolynomialLR: _polynomial_lr,
        lr_scheduler.CosineAnnealingLR: _cosine_annealing_lr,
        lr_scheduler.CosineAnnealingWarmRestarts: _cosine_annealing_warm_restarts,
        lr_scheduler.OneCycleLR: _one_cycle_lr,
        lr_scheduler.LambdaLR: _lambda_lr,
        lr_scheduler.SequentialLR: _sequential_lr,
    }
