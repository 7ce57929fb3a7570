"""What the executor was told of groups and parameters, and the plan that says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._core import StepBuilder
from .group_values import GroupValues
from .live_group import LiveGroup, ParameterState
from .tensors import FORMATS, ParameterView, device_index, scaling_addresses

Shape = tuple[Any, ...]


@dataclass
class BoundGroup:
    """A group of the built step."""

    group: LiveGroup
    shape: Shape
    """What decides on the plan beside values: see `shape_of`."""
    sent: GroupValues
    plan_step: int
    """The step count in the plan: what it was when the group joined, so that a later plan does not
    set it back."""
    lr_held: bool = False
    """A value set by hand holds over the schedule."""
    weight_decay_held: bool = False
    watched: list[Any] = field(default_factory=list)
    fingerprint: Any = None


@dataclass
class BoundParameter:
    """A parameter of the built step."""

    label: str
    parameter: torch.Tensor
    group: int
    view: ParameterView
    attribute: str
    """Where its gradient is: grad or decoupled_grad."""
    state: ParameterState
    operands: dict[str, Any]
    """Arguments of StepBuilder.add_tensor that do not change from step to step."""
    tensors: list[torch.Tensor]
    """The memory of its state."""
    layout: tuple[torch.Size, tuple[int, ...]]
    """Sizes and strides of the parameter when the step was built."""
    gradient_dtype: torch.dtype | None = None
    """None: it takes no part in the step."""
    gradient_address: int = 0
    """For the plan that is being built; the executor knows it afterwards."""
    parameter_address: int = 0
    tensor_id: int = -1

    def current_gradient(self) -> torch.Tensor | None:
        """The gradient that the user has stored, wrapped as it is."""
        return getattr(self.parameter, self.attribute, None)


def shape_of(group: LiveGroup, amsgrad: bool, maximize: bool) -> Shape:
    """What of a group decides on the plan beside its values and parameters. Schedules count by
    their values, inputs by their addresses."""
    lr_input, weight_decay_input = group.lr_input, group.weight_decay_input
    return (
        bool(group.stored("bias_correction", True)),
        bool(group.stored("maximize", maximize)),
        bool(group.stored("amsgrad", amsgrad)),
        group.stored("schedule"),
        group.stored("weight_decay_schedule"),
        str(group.stored("norm_group", "")),
        0 if lr_input is None else lr_input.data_ptr(),
        0 if weight_decay_input is None else weight_decay_input.data_ptr(),
    )


def operands_of(view: ParameterView, state: Mapping[str, Any]) -> dict[str, Any]:
    """The operands of one tensor but its gradient, as StepBuilder.add_tensor takes them. `state` as
    BoundState.operands."""
    operands: dict[str, Any] = {
        "numel": view.local.numel(),
        "device": device_index(view.local.device),
        **state,
    }
    if not view.quantized:
        operands["parameter"] = (view.local.data_ptr(), view.format, 0)
    if view.scaling is not None:
        operands["parameter_scaling"] = scaling_addresses(view)
    return operands


def build_plan(
    groups: Sequence[BoundGroup],
    parameters: Sequence[BoundParameter],
    decoupled: bool,
    options: dict[str, Any],
    device: int,
) -> Any:
    """The plan of one step; numbers the parameters that take part in it. Those without gradient
    take none."""
    builder = StepBuilder()
    builder.set_options(**options)
    for bound in groups:
        bias_correction, maximize, _, schedule, decay_schedule, norm_group, lr, decay = bound.shape
        builder.add_group(
            name=bound.group.name,
            learning_rate=bound.sent.learning_rate,
            beta1=bound.sent.beta1,
            beta2=bound.sent.beta2,
            eps=bound.sent.eps,
            weight_decay=bound.sent.weight_decay,
            decoupled=decoupled,
            bias_correction=bias_correction,
            maximize=maximize,
            learning_rate_schedule=schedule,
            weight_decay_schedule=decay_schedule,
            step=bound.plan_step,
            norm_group=norm_group,
            learning_rate_input=lr,
            weight_decay_input=decay,
        )
    taking_part = 0
    for each in parameters:
        if each.gradient_dtype is None:
            each.tensor_id = -1
            continue
        operand = (each.gradient_address, FORMATS[each.gradient_dtype], 0)
        each.tensor_id = builder.add_tensor(
            each.group, name=each.label, gradient=operand, **each.operands
        )
        taking_part += 1
    if taking_part == 0 and device >= 0 and groups:
        # A plan without tensors is one of the host; its groups step all the same, on their device.
        nothing = (0, "f32", 0)
        builder.add_tensor(
            0,
            name="nothing",
            numel=0,
            device=device,
            parameter=nothing,
            gradient=nothing,
            exp_avg=nothing,
            exp_avg_sq=nothing,
        )
    return builder.build()
