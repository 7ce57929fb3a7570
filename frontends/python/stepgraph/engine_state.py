"""What the parts of the step engine share."""

from __future__ import annotations

from typing import Any

import torch

from ._core import StepStatus
from .bound_step import BoundGroup, BoundParameter
from .live_group import LiveGroup, StateChanges, StateMap
from .parameter_states import ParameterStates
from .runners import Runner
from .step_options import StepOptions
from .tensors import Fp8Scaling


def first_status(options: StepOptions) -> Any:
    """Where a step stands before the first."""
    status = StepStatus()
    status.next_loss_scale = options.first_loss_scale
    status.hysteresis_left = int(getattr(options.scaling, "hysteresis", 1))
    return status


class EngineState:
    """Holds what the executor was told, so that only differences are sent."""

    def __init__(
        self,
        options: StepOptions,
        states: ParameterStates,
        *,
        capturable: bool,
        warmup: int,
        decoupled: bool,
        amsgrad: bool,
        maximize: bool,
    ) -> None:
        self.options = options
        self.states = states
        self.capturable = capturable
        self.warmup = warmup
        self.decoupled = decoupled
        self.amsgrad = amsgrad
        self.maximize = maximize
        self.use_decoupled_grad = False
        self.fp8_scaling: dict[Any, Fp8Scaling] = {}

        self.runner: Runner | None = None
        self.index = -1
        """Where the step runs: CUDA ordinal, -1 is the host."""
        self.groups: list[BoundGroup] = []
        self.parameters: list[BoundParameter] = []
        self.changes = StateChanges()
        self.state_map: StateMap | None = None

        self.structure_changed = True
        self.changed_groups: set[int] = set()
        """Groups some of whose values have been assigned."""
        self.watched_groups: list[int] = []
        """Groups with values that may change without an assignment."""
        self.pending = False
        """Something was sent since the last delivery."""

        self.progress = first_status(options)
        """Where the step stands without an executor, or once `undelivered` has been delivered."""
        self.undelivered = False
        """`progress` was loaded into the executor, whose status does not show it yet."""
        self.undelivered_loss_scale: float | None = None
        self.load_pending = False
        """`progress` is still to be loaded into the executor."""
        self.held_to_load: list[tuple[bool, bool]] | None = None
        """With it: whether lr and weight decay of each group hold over their schedules."""
        self.steps_stale = False
        """A step may have run since "step" of the groups was read back."""
        self.stepped = False
        self.kept_records: list[Any] = []
        """Batches of executors that are gone."""

        self.captures = 0
        self.rebinds = 0
        self.last_update: Any = None

        self.found_inf: torch.Tensor | None = None
        self.grad_scale: torch.Tensor | None = None
        self.inputs_neutral = True
        """found_inf is 0 and grad_scale 1."""

    @property
    def captured(self) -> bool:
        """A step was recorded into a capture of the caller's."""
        return self.runner is not None and self.runner.captured

    def uses_amsgrad(self, group: LiveGroup) -> bool:
        """What the group says, or else the optimizer."""
        return bool(group.stored("amsgrad", self.amsgrad))

    def index_of(self, group: LiveGroup) -> int | None:
        """The number of a group of the built step."""
        index = group.index
        known = 0 <= index < len(self.groups) and self.groups[index].group is group
        return index if known else None

    def device(self) -> torch.device:
        """Where the step runs."""
        return torch.device("cpu") if self.index < 0 else torch.device("cuda", self.index)
