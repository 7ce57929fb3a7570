"""Methods of FusedAdam that read and write the states of parameters."""

from __future__ import annotations

from typing import Any

import torch

from ._core import UsageError
from .live_group import LiveGroup
from .parameter_states import StateFormats
from .step_engine import StepEngine
from .tensors import Fp8Scaling


class StateAccess:
    """States in float32, whatever their format, and the scaling of FP8 weights."""

    engine: StepEngine
    state: Any
    _formats: StateFormats

    @property
    def _scales(self) -> dict[Any, dict[str, torch.Tensor]]:
        """Block scales of narrow states, by parameter and name: one byte for 128 elements."""
        return self.engine.states.scales

    def set_fp8_scaling(
        self,
        parameter: torch.Tensor,
        scale: torch.Tensor,
        amax: torch.Tensor,
        scale_inv: torch.Tensor,
        format: str = "e4m3",
    ) -> None:
        """Makes a uint8 or torch.float8 parameter an FP8 weight with delayed scaling.

        `scale`, `amax` and `scale_inv` are float32 tensors of one element on its device. A step
        stores value * `scale` in the parameter, raises `amax` to the largest magnitude and sets
        `scale_inv` to 1 / `scale`; whoever owns the recipe changes `scale` and resets `amax`, in
        place. `format`: e4m3 or e5m2. Gradients of such parameters come from `decoupled_grad`
        where autograd cannot hold them. Float8Tensors of Transformer Engine need no call.
        """
        scaling = Fp8Scaling(scale, amax, scale_inv, format)
        _, label = self._find(parameter)
        before = self.engine.fp8_scaling.get(parameter)
        self.engine.fp8_scaling[parameter] = scaling
        try:
            self.engine.view_of(label, parameter)
        except UsageError:
            if before is None:
                del self.engine.fp8_scaling[parameter]
            else:
                self.engine.fp8_scaling[parameter] = before
            raise
        self.engine.force_build = self.engine.structure_changed = True

    def _find(self, parameter: torch.Tensor) -> tuple[LiveGroup, str]:
        """The group of a parameter, and its label."""
        for group in self.engine.adopt_groups(self):
            for i, known in enumerate(group.stored("params")):
                if known is parameter:
                    return group, self.engine.label_of(group, i)
        raise UsageError("the tensor is no parameter of this optimizer")

    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Creates the states of a parameter as they are before the first step, replacing those
        that exist. The formats are the constructor's: `store_param_remainders` is accepted because
        Transformer Engine's callers pass it, and not looked at."""
        group, label = self._find(param)
        view = self.engine.view_of(label, param)
        state = self.state[param]
        amsgrad = self.engine.uses_amsgrad(group)
        with torch.no_grad():
            for name, dtype in self._formats.dtypes(view, amsgrad).items():
                self.engine.states.initialize(param, view, state, name, dtype)
        self.engine.changes.pending = True

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A state in float32: the live tensor if it is stored so, else a new one. Remainders stay
        int16. Does not wait."""
        _, label = self._find(param)
        with torch.no_grad():
            return self.engine.states.unscaled(param, self.state[param], state_name, label)

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Writes float32 values into a state in place, whatever its format, and creates it if it
        does not exist.

        `master_param` of a parameter with remainders takes the int16 remainder, the same in
        float32, as Megatron's files hold it, or a float32 master, which sets parameter and
        remainder. Float32 values are remainders if all are integers of 16 bits and do not round to
        the parameter as it is, which therefore is to be loaded first. Where whole masters are kept,
        remainders in float32 are refused (UsageError) as soon as one is too large to pass for a
        weight.

        Waits only to look at a float32 master of a bfloat16 parameter."""
        group, label = self._find(param)
        view = self.engine.view_of(label, param)
        states = self.engine.states
        amsgrad = self.engine.uses_amsgrad(group)
        with torch.no_grad():
            values = states.tell_remainders(view, state_name, unscaled_state, label)
            states.store(param, view, self.state[param], state_name, values, amsgrad, label)
