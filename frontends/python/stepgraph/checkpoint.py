"""State dictionaries: ours, those of torch.optim.Adam and AdamW, and those of Transformer Engine.

Loading writes into the tensors that exist. So a captured step stays good, and a replay after it
continues from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ._core import StepStatus, UsageError
from .engine_state import first_status
from .group_values import check_step, check_value
from .live_group import STRUCTURE, VALUES, LiveGroup
from .parameter_states import is_own_master
from .step_progress import PROGRESS, Held
from .tensors import local_of

if TYPE_CHECKING:
    from .fused_adam import FusedAdam

KEY = "stepgraph"
"""Where the checkpoint holds what belongs to the step instead of groups and parameters."""

_NOT_SAVED = frozenset({"params", "schedule", "weight_decay_schedule"})
_NOT_LOADED = _NOT_SAVED | {
    "step",
    "param_names",
    # How torch's optimizers run; and whether it is Adam or AdamW, which adam_w_mode says here.
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _plain(value: Any) -> Any:
    """Numbers instead of tensors of one element, so that a checkpoint depends on no device."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(each) for each in value)
    return value


def save_progress(optimizer: FusedAdam, groups: list[LiveGroup]) -> dict[str, Any]:
    """Where the step stands but for the steps of groups, in plain numbers. Brings those of `groups`
    up to date; waits for the steps made."""
    engine = optimizer.engine
    engine.check_readable("state_dict")
    status = engine.status(groups)
    progress: dict[str, Any] = {key: getattr(status, key) for key in PROGRESS}
    progress["loss_scale_rule"] = engine.options.loss_scale_rule
    held = [engine.held(group) for group in groups]
    progress["held"] = [[each.learning_rate, each.weight_decay] for each in held]
    return progress


def load_progress(
    optimizer: FusedAdam, groups: list[LiveGroup], progress: Mapping[str, Any]
) -> None:
    """What save_progress gave, into a new optimizer whose groups hold their steps."""
    status = StepStatus()
    for key in PROGRESS:
        setattr(status, key, progress[key])
    steps = [group.stored("step") for group in groups]
    held = [Held(*each) for each in progress["held"]]
    optimizer.engine.restore(groups, status, held, steps)


def save(optimizer: FusedAdam) -> dict[str, Any]:
    """FusedAdam.state_dict without hooks."""
    engine = optimizer.engine
    groups = engine.adopt_groups(optimizer)
    progress = save_progress(optimizer, groups)
    flat = [parameter for group in groups for parameter in group.stored("params")]
    number = {id(parameter): i for i, parameter in enumerate(flat)}
    saved_groups = []
    for group in groups:
        saved = {key: _plain(group[key]) for key in group if key not in _NOT_SAVED}
        saved["params"] = [number[id(parameter)] for parameter in group.stored("params")]
        saved_groups.append(saved)
    state: dict[Any, Any] = {}
    with torch.no_grad():
        for label, _, parameter in _labelled(optimizer, groups):
            of_parameter = optimizer.state.get(parameter)
            if of_parameter is None:
                continue
            state[number[id(parameter)]] = {
                name: engine.states.unscaled(parameter, of_parameter, name, label)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in of_parameter.items()
            }
    return {"state": state, "param_groups": saved_groups, KEY: progress}


def save_for_torch(optimizer: FusedAdam) -> dict[str, Any]:
    """FusedAdam.torch_state_dict."""
    ours = save(optimizer)
    state: dict[Any, Any] = {}
    groups = []
    for group in ours["param_groups"]:
        step = float(group.pop("step", 0))
        for number in group["params"]:
            known = ours["state"].get(number)
            if not known:
                continue
            names = (*_MOMENTS, "max_exp_avg_sq")
            state[number] = {name: known[name] for name in names if name in known}
            state[number]["step"] = torch.tensor(step, dtype=torch.float32)
        group.pop("bias_correction", None)
        group.pop("norm_group", None)
        group.setdefault("amsgrad", optimizer.amsgrad)
        group.setdefault("maximize", optimizer.maximize)
        group.update(
            foreach=None,
            fused=None,
            capturable=False,
            differentiable=False,
            decoupled_weight_decay=optimizer.adam_w_mode,
        )
        groups.append(group)
    return {"state": state, "param_groups": groups}


class _Checkpoint:
    """A checkpoint, read and checked against the optimizer; nothing has been written."""

    def __init__(self, optimizer: FusedAdam, saved: Mapping[str, Any]) -> None:
        for key in ("state", "param_groups"):
            if key not in saved:
                raise UsageError(f"load_state_dict: has no {key!r}, expected a state_dict()")
        self.groups: list[dict[str, Any]] = list(saved["param_groups"])
        self.live = optimizer.engine.adopt_groups(optimizer)
        if len(self.groups) != len(self.live):
            raise UsageError(
                f"load_state_dict: the checkpoint has {len(self.groups)} parameter groups, "
                f"expected {len(self.live)}"
            )
        self.states: dict[int, Mapping[str, Any]] = {}
        self.steps: list[int | None] = []
        for group, content in zip(self.live, self.groups):
            parameters = group.stored("params")
            if len(content["params"]) != len(parameters):
                raise UsageError(
                    f"{group.name}: the checkpoint has {len(content['params'])} parameters, "
                    f"expected {len(parameters)}"
                )
            for key in VALUES & content.keys():
                check_value(group.name, key, _plain(content[key]))
            step = content.get("step")
            common = None if step is None else check_step(group.name, step)
            for i, (number, parameter) in enumerate(zip(content["params"], parameters)):
                label = optimizer.engine.label_of(group, i)
                state = saved["state"].get(number, {})
                self._check_state(optimizer, label, parameter, state)
                self.states[id(parameter)] = state
                if step is None and "step" in state:
                    common = self._common_step(label, common, state["step"])
            self.steps.append(common)
        self.own: Mapping[str, Any] = saved.get(KEY, {})

    @staticmethod
    def _check_state(
        optimizer: FusedAdam, label: str, parameter: torch.Tensor, state: Mapping[str, Any]
    ) -> None:
        if not state:
            return
        shape = optimizer.engine.view_of(label, parameter).local.shape
        for name in _MOMENTS:
            if name not in state:
                raise UsageError(
                    f"{label}: the checkpoint has {', '.join(state)} but no {name}, expected the "
                    "state of Adam"
                )
        for name in (*_MOMENTS, "max_exp_avg_sq", "master_param"):
            if name not in state:
                continue
            value = state[name]
            if not isinstance(value, torch.Tensor) or local_of(value).shape != shape:
                found = tuple(local_of(value).shape) if isinstance(value, torch.Tensor) else value
                raise UsageError(
                    f"{label}: the checkpoint's {name} has sizes {found}, expected {tuple(shape)} "
                    "as the parameter"
                )

    @staticmethod
    def _common_step(label: str, common: int | None, found: Any) -> int:
        step = check_step(label, found)
        if common is not None and step != common:
            raise UsageError(
                f"{label}: the checkpoint has it at step {step}, expected {common} as the others "
                "of its group; a group has one step count"
            )
        return step


def load(optimizer: FusedAdam, saved: Mapping[str, Any]) -> None:
    """FusedAdam.load_state_dict without hooks."""
    engine = optimizer.engine
    engine.check_loadable()
    checkpoint = _Checkpoint(optimizer, saved)
    status = engine.status(checkpoint.live)

    with torch.no_grad():
        for group, content in zip(checkpoint.live, checkpoint.groups):
            _load_values(group, content)
        for label, group, parameter in _labelled(optimizer, checkpoint.live):
            _load_state(optimizer, label, group, parameter, checkpoint.states[id(parameter)])
    progress = _progress(optimizer, checkpoint, status)
    held = [Held(*each) for each in checkpoint.own.get("held", ())]
    held += [Held()] * (len(checkpoint.live) - len(held))
    engine.restore(checkpoint.live, progress, held, checkpoint.steps)


def _labelled(
    optimizer: FusedAdam, groups: list[LiveGroup]
) -> Iterator[tuple[str, LiveGroup, torch.Tensor]]:
    for group in groups:
        for i, parameter in enumerate(group.stored("params")):
            yield optimizer.engine.label_of(group, i), group, parameter


def _load_values(group: LiveGroup, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if key in _NOT_LOADED:
            continue
        if key in STRUCTURE and group.stored(key, value) == value and key in group:
            continue
        live = group.stored(key)
        if key in ("lr", "weight_decay") and isinstance(live, torch.Tensor):
            live.fill_(_plain(value))
            continue
        if key in VALUES:
            # Not the checkpoint's tensors, which whoever saved it goes on changing.
            value = _plain(value)
        group[key] = tuple(value) if key == "betas" else value


def _load_state(
    optimizer: FusedAdam,
    label: str,
    group: LiveGroup,
    parameter: torch.Tensor,
    saved: Mapping[str, Any],
) -> None:
    engine = optimizer.engine
    view = engine.view_of(label, parameter)
    if not saved and not optimizer.state.get(parameter):
        return
    live = optimizer.state[parameter]
    amsgrad = engine.uses_amsgrad(group)
    for name in engine.states.formats.dtypes(view, amsgrad):
        if name == "master_param" and is_own_master(view):
            continue  # The parameter is the master.
        value = saved.get(name)
        if value is None and name == "max_exp_avg_sq":
            value = saved.get("exp_avg_sq")
        if value is None:
            engine.states.reset(parameter, view, live, name, amsgrad, label)
        else:
            engine.states.store(parameter, view, live, name, value, amsgrad, label)


def _progress(optimizer: FusedAdam, checkpoint: _Checkpoint, status: Any) -> Any:
    """Where the step stands after loading; `status` is where it stood."""
    own = checkpoint.own
    progress = StepStatus()
    options = optimizer.engine.options
    for key in ("next_loss_scale", "growth_tracker", "hysteresis_left"):
        setattr(progress, key, getattr(status, key))
    steps = [step or 0 for step in checkpoint.steps]
    progress.step = int(own.get("step", max(steps, default=0)))
    progress.skipped = int(own.get("skipped", 0))
    progress.samples = int(own.get("samples", 0))
    if own and options.owns_loss_scale:
        progress.next_loss_scale = float(own["next_loss_scale"])
        first = first_status(options)
        goes_on = own.get("loss_scale_rule") == options.loss_scale_rule
        for key in ("growth_tracker", "hysteresis_left"):
            setattr(progress, key, int(own[key]) if goes_on else getattr(first, key))
    return progress
