"""The states of parameters: moments and masters in the formats that the user chose.

`optimizer.state[p]` holds plain tensors (DTensors for a DTensor parameter) of the stored dtype;
`optimizer._scales[p][name]` holds the block scales of the narrow ones. Only this module knows how
one becomes the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ._core import UsageError
from .live_group import ParameterState
from .remainder_values import LARGEST_LIKELY_INTEGER, hold_remainders
from .state_formats import (
    decode_block_scaled,
    encode_block_scaled,
    is_block_scaled,
    join_remainder,
    scale_count,
    split_master,
)
from .tensors import (
    ParameterView,
    check_dense,
    dequantized,
    local_of,
    operand,
    same_layout,
    wrap_like,
)

STATE_FORMATS: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.uint8: "e4m3",
    torch.float8_e4m3fn: "e4m3",
    torch.int16: "remainder",
}
"""Storage formats of the core by the dtype of a state."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")


@dataclass
class StateFormats:
    """Which states there are and how they are stored."""

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    master_weights: bool = False
    store_param_remainders: bool = False

    def master_dtype(self, view: ParameterView) -> torch.dtype | None:
        """How the master of this parameter is stored; None without. A float32 parameter is its own
        master, whatever the format of others."""
        if view.quantized:
            return torch.float32
        if not self.master_weights:
            return None
        if view.format == "f32":
            return torch.float32
        if self.store_param_remainders and view.format == "bf16":
            return torch.int16
        return self.master

    def dtypes(self, view: ParameterView, amsgrad: bool) -> dict[str, torch.dtype]:
        """The stored dtype of each state of this parameter."""
        dtypes = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if amsgrad:
            dtypes["max_exp_avg_sq"] = self.exp_avg_sq
        master = self.master_dtype(view)
        if master is not None:
            dtypes["master_param"] = master
        return dtypes


@dataclass
class BoundState:
    """What the executor gets of one parameter's state."""

    operands: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    """By the names of the core's operands."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """Whose memory that is."""


def is_own_master(view: ParameterView) -> bool:
    """`master_param` of such a parameter is its own memory under another name."""
    return view.format == "f32" and not view.quantized


def new_state(
    parameter: torch.Tensor, view: ParameterView, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Zeros for one state, wrapped like the parameter, and the scales it needs."""
    like = view.local
    if view.quantized:
        local = torch.zeros(like.shape, dtype=dtype, device=like.device)
    else:
        local = torch.zeros_like(like, dtype=dtype, requires_grad=False)
    scales = None
    if is_block_scaled(dtype):
        # The scale of a block of zeros, as the core stores it.
        scales = torch.ones(scale_count(local.numel()), dtype=torch.uint8, device=local.device)
    return wrap_like(local, parameter), scales


def write_state(
    name: str, stored: torch.Tensor, scales: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Stores values into a state in place, in its own format; `name` as in the state."""
    target, source = local_of(stored), local_of(values)
    if not is_block_scaled(target.dtype):
        target.copy_(source)
        return
    assert scales is not None
    converted = torch.empty_like(target, dtype=torch.float32).copy_(source)
    encode_block_scaled(converted, target, scales, name in SECOND_MOMENTS)


def read_state(name: str, stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The values of a state as a local float32 tensor: the live one if that is float32; int16
    remainders as they are."""
    local = local_of(stored)
    if local.dtype in (torch.float32, torch.int16):
        return local
    if not is_block_scaled(local.dtype):
        return local.to(torch.float32)
    assert scales is not None
    return decode_block_scaled(local, scales, name in SECOND_MOMENTS)


class ParameterStates:
    """Creates, converts, reads and writes the states of an optimizer's parameters."""

    def __init__(self, formats: StateFormats) -> None:
        self.formats = formats
        self.scales: dict[Any, dict[str, torch.Tensor]] = {}

    def initialize(
        self,
        parameter: torch.Tensor,
        view: ParameterView,
        state: dict[str, Any],
        name: str,
        dtype: torch.dtype,
    ) -> None:
        """Makes one state as it is before the first step."""
        if name == "master_param" and is_own_master(view):
            self._keep(parameter, state, name, parameter.detach(), None)
            return
        stored, scales = new_state(parameter, view, dtype)
        if name == "master_param" and dtype is not torch.int16:
            write_state(name, stored, scales, dequantized(view))
        self._keep(parameter, state, name, stored, scales)

    def _keep(
        self,
        parameter: torch.Tensor,
        state: dict[str, Any],
        name: str,
        stored: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        if isinstance(state, ParameterState):
            state.store(name, stored)
        else:
            state[name] = stored
        known = self.scales.setdefault(parameter, {})
        if scales is not None:
            known[name] = scales
        else:
            known.pop(name, None)

    def conform(
        self,
        parameter: torch.Tensor,
        view: ParameterView,
        state: dict[str, Any],
        amsgrad: bool,
        label: str,
        before_change: Callable[[str], None],
    ) -> BoundState:
        """Makes `state` what the step needs of it, out of what it holds: missing states are
        created, others converted. `before_change` is called with the state's name before memory is
        written. Refuses states of other sizes, naming `label`."""
        bound = BoundState()
        dtypes = self.formats.dtypes(view, amsgrad)
        for name in dtypes:
            if name in state:
                self._check(label, name, view, state[name])
        for name, dtype in dtypes.items():
            scales = self.scales.get(parameter, {}).get(name)
            if name not in state:
                before_change(name)
                self.initialize(parameter, view, state, name, dtype)
            elif not self._fits(name, state[name], scales, view, dtype):
                before_change(name)
                self._convert(parameter, view, state, name, dtype, label)
            self._bind(bound, name, view, state[name], self.scales.get(parameter, {}).get(name))
        return bound

    @staticmethod
    def _check(label: str, name: str, view: ParameterView, stored: Any) -> None:
        if not isinstance(stored, torch.Tensor):
            raise UsageError(
                f"{label}: state {name} is a {type(stored).__name__}, expected a tensor"
            )
        local = local_of(stored)
        if local.dtype not in STATE_FORMATS or (
            local.dtype is torch.int16 and name != "master_param"
        ):
            raise UsageError(
                f"{label}: state {name} has type {local.dtype}, expected float32, float16, "
                "bfloat16, uint8 or float8_e4m3fn"
            )
        if local.shape != view.local.shape:
            raise UsageError(
                f"{label}: state {name} has sizes {tuple(local.shape)}, expected "
                f"{tuple(view.local.shape)} as the parameter"
            )

    @staticmethod
    def _fits(
        name: str,
        stored: torch.Tensor,
        scales: torch.Tensor | None,
        view: ParameterView,
        dtype: torch.dtype,
    ) -> bool:
        local = local_of(stored)
        if local.dtype is not dtype or local.device != view.local.device:
            return False
        if name == "master_param" and is_own_master(view):
            return local.data_ptr() == view.local.data_ptr()
        if view.distributed and local is stored:
            return False
        like_parameter = local.is_contiguous() if view.quantized else same_layout(local, view.local)
        return like_parameter and (scales is not None) == is_block_scaled(dtype)

    def _convert(
        self,
        parameter: torch.Tensor,
        view: ParameterView,
        state: dict[str, Any],
        name: str,
        dtype: torch.dtype,
        label: str,
    ) -> None:
        if name == "master_param" and is_own_master(view):
            # The parameter is the truth; an older master of it is not.
            self.initialize(parameter, view, state, name, dtype)
            return
        found = state[name]
        scales = self.scales.get(parameter, {}).get(name)
        if is_block_scaled(local_of(found).dtype) and scales is None:
            raise UsageError(
                f"{label}: state {name} has type {local_of(found).dtype} and no scales, expected "
                "set_scaled_state to store it"
            )
        if dtype is torch.int16 or local_of(found).dtype is torch.int16:
            values = found if local_of(found).dtype is dtype else None
        else:
            values = read_state(name, found, scales)
        stored, new_scales = new_state(parameter, view, dtype)
        if values is not None:
            write_state(name, stored, new_scales, values)
        elif dtype is torch.int16:
            split_master(
                read_state(name, found, scales).to(view.local.device),
                view.local,
                local_of(stored),
            )
        else:
            joined = join_remainder(view.local, local_of(found).to(view.local.device))
            write_state(name, stored, new_scales, joined)
        self._keep(parameter, state, name, stored, new_scales)

    @staticmethod
    def _bind(
        bound: BoundState,
        name: str,
        view: ParameterView,
        stored: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> None:
        if name == "master_param" and is_own_master(view):
            return
        local = local_of(stored)
        check_dense("state", name, local)
        core_name = {"master_param": "parameter" if view.quantized else "master"}.get(name, name)
        bound.operands[core_name] = operand(local, STATE_FORMATS[local.dtype], scales)
        bound.tensors.append(local)
        if scales is not None:
            bound.tensors.append(scales)

    def unscaled(
        self, parameter: torch.Tensor, state: Mapping[str, Any], name: str, label: str
    ) -> torch.Tensor:
        """A state in float32: see FusedAdam.get_unscaled_state."""
        if name not in state:
            raise UsageError(
                f"{label}: has no state {name}, expected one of {', '.join(state) or 'none yet'}"
            )
        stored = state[name]
        scales = self.scales.get(parameter, {}).get(name)
        if is_block_scaled(local_of(stored).dtype) and scales is None:
            raise UsageError(f"{label}: state {name} has no scales, it was put there from outside")
        local = read_state(name, stored, scales)
        return stored if local is local_of(stored) else wrap_like(local, parameter)

    def tell_remainders(
        self, view: ParameterView, name: str, values: torch.Tensor, label: str
    ) -> torch.Tensor:
        """Float32 values for a state, or what they mean if they are remainders: see
        FusedAdam.set_scaled_state."""
        source = local_of(values)
        master = self.formats.master_dtype(view) if name == "master_param" else None
        if (
            master is None
            or view.format != "bf16"
            or source.dtype is not torch.float32
            or source.shape != view.local.shape
        ):
            return values
        source = source.to(view.local.device)
        if not hold_remainders(source, view.local):
            return values
        if master is torch.int16:
            return source.to(torch.int16)
        if source.abs().max() >= LARGEST_LIKELY_INTEGER:
            raise UsageError(
                f"{label}: the values for state {name} are integers of 16 bits that have nothing "
                "to do with the parameter, as remainders are; expected a master. Load them with "
                "store_param_remainders=True, or set the parameter to these values first"
            )
        return values

    def store(
        self,
        parameter: torch.Tensor,
        view: ParameterView,
        state: dict[str, Any],
        name: str,
        values: torch.Tensor,
        amsgrad: bool,
        label: str,
    ) -> None:
        """Writes float32 values into a state in place, making it first if it is missing: see
        FusedAdam.set_scaled_state."""
        dtypes = self.formats.dtypes(view, amsgrad)
        if name not in dtypes:
            raise UsageError(f"{label}: has no state {name}, expected one of {', '.join(dtypes)}")
        dtype = dtypes[name]
        source = local_of(values)
        if source.shape != view.local.shape:
            raise UsageError(
                f"{label}: the values for state {name} have sizes {tuple(source.shape)}, expected "
                f"{tuple(view.local.shape)} as the parameter"
            )
        known = self.scales.get(parameter, {}).get(name)
        if name not in state or not self._fits(name, state[name], known, view, dtype):
            self.initialize(parameter, view, state, name, dtype)
        scales = self.scales.get(parameter, {}).get(name)
        stored = local_of(state[name])
        if source.dtype is torch.int16 and dtype is not torch.int16:
            source = join_remainder(view.local, source.to(view.local.device))
        if dtype is torch.int16 and source.dtype is not torch.int16:
            master = torch.empty_like(view.local, dtype=torch.float32).copy_(source)
            split_master(master, view.local, stored)
            return
        write_state(name, stored, scales, source)

    def reset(
        self,
        parameter: torch.Tensor,
        view: ParameterView,
        state: dict[str, Any],
        name: str,
        amsgrad: bool,
        label: str,
    ) -> None:
        """Makes a state what it is before the first step, in place where it exists."""
        if name != "master_param":
            values = torch.zeros(view.local.shape, device=view.local.device)
        elif self.formats.master_dtype(view) is torch.int16:
            values = torch.zeros(view.local.shape, dtype=torch.int16, device=view.local.device)
        else:
            values = dequantized(view)
        self.store(parameter, view, state, name, values, amsgrad, label)

    def forget_others(self, parameters: set[int]) -> None:
        """Drops the scales of parameters that the optimizer holds no more."""
        for parameter in [p for p in self.scales if id(p) not in parameters]:
            del self.scales[parameter]
