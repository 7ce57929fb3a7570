"""Options of the step as a whole, and what they become in the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._core import LossScaling, StepBuilder, UsageError


@dataclass
class StepOptions:
    """Keyword arguments of `FusedAdam` that do not belong to a group; described there."""

    max_norm: float = 0.0
    skip_above_norm: float = 0.0
    skip_non_finite: bool = False
    loss_scale: float | LossScaling | None = None
    zero_gradients: bool = False
    unscale_gradients: bool | None = None
    """None: only for a GradScaler, which then counts on it."""
    records: int = 0
    stochastic_rounding: bool = False
    seed: int = 0
    samples_per_step: int = 0
    count_zeros: bool = False
    scaled_from_outside: bool = False
    """A GradScaler has left its scale in gradients."""

    @property
    def owns_loss_scale(self) -> bool:
        """The step has a scale of its own, instead of a GradScaler's."""
        return self.loss_scale is not None

    @property
    def scaling(self) -> LossScaling | None:
        """The rule by which the scale moves; None: it stays."""
        return self.loss_scale if isinstance(self.loss_scale, LossScaling) else None

    @property
    def loss_scale_rule(self) -> str:
        """The name of that rule; "fixed" without."""
        return "fixed" if self.scaling is None else str(self.scaling.rule)

    @property
    def first_loss_scale(self) -> float:
        """The scale of the first step."""
        if isinstance(self.loss_scale, LossScaling):
            return float(self.loss_scale.initial)
        return 1.0 if self.loss_scale is None else float(self.loss_scale)

    @property
    def writes_gradients(self) -> bool:
        """The step leaves other values in the gradients than it found there."""
        return self.zero_gradients or self.leaves_unscaled

    @property
    def leaves_unscaled(self) -> bool:
        """The step leaves unscaled and clipped gradients."""
        if self.unscale_gradients is not None:
            return self.unscale_gradients
        return self.scaled_from_outside and not self.zero_gradients

    @property
    def measures(self) -> bool:
        """The step reads the gradients before it updates."""
        return (
            self.max_norm > 0
            or self.skip_above_norm > 0
            or self.skip_non_finite
            or self.count_zeros
            or self.scaling is not None
        )

    def core(self, found_inf_input: int = 0, loss_scale_input: int = 0) -> dict[str, Any]:
        """Arguments of StepBuilder.set_options. The inputs are addresses of a GradScaler's values,
        ignored by a step that has a scale of its own."""
        options: dict[str, Any] = {
            "skip_non_finite": self.skip_non_finite,
            "max_grad_norm": self.max_norm,
            "skip_above_norm": self.skip_above_norm,
            "count_zeros": self.count_zeros,
            "zero_gradients": self.zero_gradients,
            "unscale_gradients": self.leaves_unscaled,
            "samples_per_step": self.samples_per_step,
            "record_capacity": self.records,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": self.seed,
        }
        if self.scaling is not None:
            options["scaling"] = self.scaling
        elif self.owns_loss_scale:
            options["loss_scale"] = self.first_loss_scale
        else:
            options["found_inf_input"] = found_inf_input
            options["loss_scale_input"] = loss_scale_input
        return options

    def check(self) -> None:
        """Refuses values that the core would refuse later."""
        for key in ("records", "seed", "samples_per_step"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UsageError(f"{key} is {value!r}, expected an int of at least 0")
        StepBuilder().set_options(**self.core())
