"""`FusedAdam`: Adam and AdamW as one step, eager, replayed or inside a capture of the caller's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _torch_optimizer

from . import checkpoint
from ._core import LossScaling, Schedule, UsageError
from .grad_scaler import inputs_of
from .group_values import check_value
from .live_group import VALUES, StateMap
from .parameter_states import ParameterStates, StateFormats
from .state_access import StateAccess
from .step_controls import StepControls
from .step_engine import StepEngine
from .step_options import StepOptions
from .tensors import Fp8Scaling

_MASTER_DTYPES = (torch.float32, torch.float16)
_MOMENT_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.float8_e4m3fn,
)

# Hooks for the steps of all optimizers, and whether a profiler looks on.
_global_pre_hooks = getattr(_torch_optimizer, "_global_optimizer_pre_hooks", {})
_global_post_hooks = getattr(_torch_optimizer, "_global_optimizer_post_hooks", {})
_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class FusedAdam(StepControls, StateAccess, Optimizer):
    """Adam with the contract of Transformer Engine's `FusedAdam`, and of `torch.optim.AdamW`.

    The whole step is two kernels, whatever the number of parameters and groups, and one more for
    each further combination of formats. Parameters on the CPU step there. Parameters on a GPU
    step by kernels on the current stream, or with `capturable=True` by one launch of a graph of
    their own; the same step can then be recorded into a capture of the caller's
    (`torch.cuda.graph`). In all of these, learning rates and other values of groups may change
    at any time: nothing is captured again.

    A parameter without gradient takes no part in a step. Parameters and states are updated in
    place; gradients are read only, unless asked otherwise or scaled by a GradScaler. Nothing waits
    for the GPU but reading back: `group["step"]`, `status()`, `state_dict()`, `release()`.

    Args:
        params: parameters, named parameters or groups, as for torch's optimizers.
        lr: learning rate, a number or a float32 tensor. With `capturable=True` `group["lr"]` is a
            tensor on the GPU, which replays read; assignments fill it.
        betas, eps, weight_decay: as in torch; numbers, or tensors of one element.
        amsgrad: use the largest second moment so far.
        bias_correction: correct the moments for their start at zero.
        adam_w_mode: decoupled weight decay (AdamW); else it joins the gradient (L2).
        capturable: replay a graph, and allow steps inside captures.
        master_weights: keep a master of every 16-bit or FP8 parameter.
        master_weight_dtype: float32, or float16 in blocks that share a scale.
        exp_avg_dtype, exp_avg_sq_dtype: float32, bfloat16, float16 or 8 bits (uint8 or
            float8_e4m3fn, both FP8 e4m3), the last two in blocks that share a scale.
        use_decoupled_grad: read `parameter.decoupled_grad` instead of `parameter.grad`.
        store_param_remainders: store the master of a bfloat16 parameter as the 16 bits that the
            parameter lacks. Needs master_weights and a float32 master_weight_dtype; without
            effect otherwise.
        set_grad_none: deprecated, see zero_grad.
        maximize: step along the gradient instead of against it.
        max_norm: clip the global norm of the gradient to this; 0: no clipping.
        skip_above_norm: skip a step whose gradient has a larger norm; 0: never.
        skip_non_finite: skip a step with a gradient that is not finite. Clipping and a moving loss
            scale imply it.
        loss_scale: a number, or a `LossScaling` rule by which the scale moves on the device; None:
            the scale of a GradScaler, if there is one. See loss_scale_tensor.
        schedule, weight_decay_schedule: schedules that the step evaluates on the device; of a group
            by the keys of the same names. Values that are assigned hold over them.
        zero_gradients: the step leaves zeros in the gradients that it has read.
        unscale_gradients: the step leaves unscaled and clipped gradients; None: where a
            GradScaler's scale was in them, as torch's and Transformer Engine's optimizers do. That
            takes a write of every gradient, which False saves.
        records: number of step records that are kept for records().
        stochastic_rounding, seed: round bfloat16 parameters without master at random.
        samples_per_step: what an applied step adds to the samples consumed, by which schedules may
            count.
        count_zeros: count the gradient elements that are zero.
        warmup: steps that enqueue kernels before the first replay.

    Raises UsageError (a ValueError), naming the parameter, group or option; then nothing changed.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[Any, Any] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | torch.Tensor = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        maximize: bool = False,
        max_norm: float = 0.0,
        skip_above_norm: float = 0.0,
        skip_non_finite: bool = False,
        loss_scale: float | LossScaling | None = None,
        schedule: Schedule | None = None,
        weight_decay_schedule: Schedule | None = None,
        zero_gradients: bool = False,
        unscale_gradients: bool | None = None,
        records: int = 0,
        stochastic_rounding: bool = False,
        seed: int = 0,
        samples_per_step: int = 0,
        count_zeros: bool = False,
        warmup: int = 1,
    ) -> None:
        _check_dtype("master_weight_dtype", master_weight_dtype, _MASTER_DTYPES)
        _check_dtype("exp_avg_dtype", exp_avg_dtype, _MOMENT_DTYPES)
        _check_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype, _MOMENT_DTYPES)
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        for key, value in values.items():
            check_value("FusedAdam", key, value)
        if not isinstance(warmup, int) or warmup < 0:
            raise UsageError(f"warmup is {warmup!r}, expected an int of at least 0")
        options = StepOptions(
            max_norm=max_norm,
            skip_above_norm=skip_above_norm,
            skip_non_finite=skip_non_finite,
            loss_scale=loss_scale,
            zero_gradients=zero_gradients,
            unscale_gradients=unscale_gradients,
            records=records,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            samples_per_step=samples_per_step,
            count_zeros=count_zeros,
        )
        options.check()
        formats = StateFormats(
            exp_avg=exp_avg_dtype,
            exp_avg_sq=exp_avg_sq_dtype,
            master=master_weight_dtype,
            master_weights=master_weights,
            store_param_remainders=(
                store_param_remainders and master_weights and master_weight_dtype is torch.float32
            ),
        )
        if set_grad_none is not None:
            warnings.warn(
                "FusedAdam(set_grad_none=...) is deprecated, use zero_grad(set_to_none=...)",
                DeprecationWarning,
                stacklevel=2,
            )
        self.set_grad_none = set_grad_none
        self.adam_w_mode = adam_w_mode
        self.amsgrad = amsgrad
        self.maximize = maximize
        self._formats = formats
        self._options = options
        self.engine = self._make_engine(capturable, warmup)
        self.engine.use_decoupled_grad = use_decoupled_grad

        defaults: dict[str, Any] = {**values, "bias_correction": bias_correction}
        for key, given in (
            ("schedule", schedule),
            ("weight_decay_schedule", weight_decay_schedule),
        ):
            if given is not None:
                _check_schedule(key, given)
                defaults[key] = given
        super().__init__(params, defaults)
        self.state = StateMap(self.state, self.engine.changes)

    def _make_engine(self, capturable: bool, warmup: int) -> StepEngine:
        return StepEngine(
            self._options,
            ParameterStates(self._formats),
            capturable=capturable,
            warmup=warmup,
            decoupled=self.adam_w_mode,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
        )

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; its step count starts at 0. The dictionary is taken over: read
        it back as `param_groups[-1]`."""
        if isinstance(param_group, dict):
            for key in VALUES & param_group.keys():
                check_value("add_param_group", key, param_group[key])
            for key in ("schedule", "weight_decay_schedule"):
                if param_group.get(key) is not None:
                    _check_schedule(key, param_group[key])
        super().add_param_group(param_group)
        self.engine.structure_changed = True
        groups = self.engine.adopt_groups(self)
        index = self.engine.device_index_of([groups[-1]])
        if index >= 0:
            self.engine.bind_inputs(groups[-1], torch.device("cuda", index))

    @property
    def capturable(self) -> bool:
        """Whether steps replay a graph and may be captured."""
        return self.engine.capturable

    @capturable.setter
    def capturable(self, value: bool) -> None:
        if bool(value) != self.engine.capturable:
            self.engine.release()
            self.engine.capturable = bool(value)

    @property
    def master_weights(self) -> bool:
        """Whether 16-bit and FP8 parameters have masters; may be set until the step is captured."""
        return self._formats.master_weights

    @master_weights.setter
    def master_weights(self, value: bool) -> None:
        if bool(value) != self._formats.master_weights:
            self._formats.master_weights = bool(value)
            self.engine.force_build = self.engine.structure_changed = True

    @property
    def use_decoupled_grad(self) -> bool:
        """Whether gradients are read from `parameter.decoupled_grad`; may be set likewise."""
        return self.engine.use_decoupled_grad

    @use_decoupled_grad.setter
    def use_decoupled_grad(self, value: bool) -> None:
        if bool(value) != self.engine.use_decoupled_grad:
            self.engine.use_decoupled_grad = bool(value)
            self.engine.force_build = self.engine.structure_changed = True

    @property
    def store_param_remainders(self) -> bool:
        """Whether masters of bfloat16 parameters are stored as remainders."""
        return self._formats.store_param_remainders

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One step on the current stream. Returns what `closure` returns, which is called first,
        with gradients enabled.

        `grad_scaler`: a GradScaler whose scale and overflow check the step takes over. It may have
        unscaled the gradients before (`unscale_()`) or not. `GradScaler.step(optimizer)` calls it
        so; a scaler that sets `grad_scale` and `found_inf` on the optimizer works too. A step with
        an overflow is skipped whole: anything in found_inf but exactly 0 is one.

        A step that cannot run raises before anything changed. Legal inside a capture with
        `capturable=True` once a step was made or prepare() was called. Once a step was captured,
        one outside a capture is refused if a gradient of it moved or was dropped.
        """
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_pre_hooks
            or _global_post_hooks
            or _profiling()
        ):
            args = () if closure is None else (closure,)
            kwargs = {} if grad_scaler is None else {"grad_scaler": grad_scaler}
            return _hooked_step(self, *args, **kwargs)
        return self._step(closure, grad_scaler)

    # torch wraps the step of every optimizer in a profiler range, which costs more than this step.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inputs = None
        if grad_scaler is not None:
            inputs = inputs_of(grad_scaler, self, self._gradients)
        elif "found_inf" in self.__dict__ or "grad_scale" in self.__dict__:
            found_inf = self.__dict__.get("found_inf")
            grad_scale = self.__dict__.get("grad_scale")
            if found_inf is not None or grad_scale is not None:
                inputs = (0.0 if found_inf is None else found_inf, grad_scale)
        self.engine.step(self, inputs)
        return loss

    def _gradients(self) -> list[torch.Tensor]:
        attribute = "decoupled_grad" if self.use_decoupled_grad else "grad"
        found = [
            getattr(parameter, attribute, None)
            for group in self.param_groups
            for parameter in group["params"]
        ]
        return [gradient for gradient in found if gradient is not None]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops or zeroes the gradients, decoupled ones too. `set_to_none` None: as the deprecated
        set_grad_none said, else True."""
        if set_to_none is None:
            set_to_none = True if self.set_grad_none is None else self.set_grad_none
        kept: list[torch.Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                for attribute in ("grad", "decoupled_grad"):
                    gradient = getattr(parameter, attribute, None)
                    if gradient is None:
                        continue
                    if set_to_none:
                        setattr(parameter, attribute, None)
                    else:
                        if attribute == "grad":
                            _detach_in_place(gradient)
                        kept.append(gradient)
        if kept:
            with torch.no_grad():
                torch._foreach_zero_(kept)

    def prepare(self) -> None:
        """Builds the step without making one, so that the first may be captured. Gradients that do
        not exist yet are expected in the type of their parameters (float32 for FP8); those that
        have not come at the first step take no part in it. Once a step was captured, gradients of
        None are expected back where they were: replays go on reading them there, while a step
        outside the capture is refused, because it cannot leave them out."""
        self.engine.prepare(self)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The state as torch lays it out, in float32 (remainders in int16), with `step` an int and
        `lr` a float in every group, and what belongs to the whole step under "stepgraph". Live
        float32 tensors are not copied. Schedules are not part of it. Waits for the steps made."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        result = checkpoint.save(self)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, result)
            if replaced is not None:
                result = replaced
        return result

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as `torch.optim.AdamW.load_state_dict` takes it (`torch.optim.Adam` without
        adam_w_mode). Masters have no place there."""
        return checkpoint.save_for_torch(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what state_dict of this class, of torch.optim.Adam or AdamW, or of Transformer
        Engine's FusedAdam gave. Tensors that exist are written in place, so a captured step goes on
        from there. States that the checkpoint lacks start afresh. `amsgrad` and `maximize` of
        groups follow the checkpoint, as in torch; options of the whole step, adam_w_mode and
        schedules stay those of this optimizer."""
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        checkpoint.load(self, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        groups = self.engine.adopt_groups(self)
        progress = checkpoint.save_progress(self, groups)
        kept = {
            key: value
            for key, value in self.__dict__.items()
            if key
            in ("set_grad_none", "adam_w_mode", "amsgrad", "maximize", "_formats", "_options")
        }
        return {
            "defaults": self.defaults,
            "state": {parameter: dict(each) for parameter, each in self.state.items()},
            "param_groups": [dict(group) for group in groups],
            "_stepgraph": {
                "attributes": kept,
                "capturable": self.capturable,
                "warmup": self.engine.warmup,
                "use_decoupled_grad": self.use_decoupled_grad,
                "scales": {parameter: dict(each) for parameter, each in self._scales.items()},
                "fp8": [
                    (parameter, s.scale, s.amax, s.scale_inv, s.format)
                    for parameter, s in self.engine.fp8_scaling.items()
                ],
                "progress": progress,
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        ours = state.get("_stepgraph")
        if ours is None:
            super().__setstate__(state)
            return
        self.__dict__.update(ours["attributes"])
        self.engine = self._make_engine(ours["capturable"], ours["warmup"])
        self.engine.use_decoupled_grad = ours["use_decoupled_grad"]
        super().__setstate__({key: state[key] for key in ("defaults", "state", "param_groups")})
        self.defaults.pop("differentiable", None)
        self.state = StateMap(self.state, self.engine.changes)
        self.engine.states.scales.update(ours["scales"])
        for parameter, scale, amax, scale_inv, format in ours["fp8"]:
            self.engine.fp8_scaling[parameter] = Fp8Scaling(scale, amax, scale_inv, format)
        groups = self.engine.adopt_groups(self)
        checkpoint.load_progress(self, groups, ours["progress"])


def _run_step(self: FusedAdam, closure: Any = None, grad_scaler: Any = None) -> Any:
    return self._step(closure, grad_scaler)


_hooked_step = Optimizer.profile_hook_step(_run_step)


def _check_dtype(option: str, found: Any, allowed: Iterable[torch.dtype]) -> None:
    allowed = tuple(allowed)
    if found not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise UsageError(f"{option} is {found}, expected one of {names}")


def _check_schedule(key: str, value: Any) -> None:
    if not isinstance(value, Schedule):
        raise UsageError(f"{key} is a {type(value).__name__}, expected a Schedule")


def _detach_in_place(gradient: torch.Tensor) -> None:
    if gradient.grad_fn is not None:
        gradient.detach_()
    else:
        gradient.requires_grad_(False)
