"""Groups of the optimizer as the step knows them: live, named, and known again when replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._core import UsageError
from .group_values import check_step, check_value
from .live_group import VALUES, LiveGroup
from .step_progress import StepProgress
from .tensors import ParameterView, device_index, local_of, view_parameter


class GroupAdoption(StepProgress):
    """Takes over what the user puts into `param_groups`."""

    def adopt_groups(self, optimizer: Any) -> list[LiveGroup]:
        """The groups as LiveGroups of this engine; plain dictionaries are replaced by such in the
        optimizer's list. A dictionary that takes the place of a known group goes on as it."""
        groups = optimizer.param_groups
        mine = [isinstance(g, LiveGroup) and g.observer() is self for g in groups]
        if all(mine):
            for group in groups:
                self._name(group, groups)
            return list(groups)
        if self.runner is not None and self.steps_stale:
            self.refresh_steps()
        present = {id(group) for group, is_mine in zip(groups, mine) if is_mine}
        gone = [bound.group for bound in self.groups if id(bound.group) not in present]
        for i, group in enumerate(groups):
            if mine[i]:
                continue
            before = self._predecessor(group, i, gone)
            if before is not None:
                gone.remove(before)
            groups[i] = self._live_group(group, before)
        for group in groups:
            self._name(group, groups)
        return list(groups)

    def _predecessor(self, group: Any, i: int, gone: list[LiveGroup]) -> LiveGroup | None:
        params = group["params"]
        for before in gone:
            known = before.stored("params")
            if known is params or (known and params and known[0] is params[0]):
                return before
        if i < len(self.groups) and len(gone) == len(self.groups):
            return next((before for before in gone if before is self.groups[i].group), None)
        return None

    def _live_group(self, content: Any, before: LiveGroup | None) -> LiveGroup:
        if not isinstance(content, dict):
            raise UsageError(
                f"param_groups holds a {type(content).__name__}, expected dictionaries"
            )
        group = LiveGroup(dict(content), self)
        for key in VALUES & group.keys():
            check_value("a parameter group", key, group.stored(key))
        if "step" in group:
            group.store("step", check_step("a parameter group", group.stored("step")))
        if before is not None:
            group.name = before.name
            if "step" in before:
                group.setdefault("step", before.stored("step"))
            lr = group.stored("lr")
            if before.lr_input is not None and self._keeps_tensor(before.lr_input):
                # Captured steps read that tensor.
                group.lr_input = before.lr_input
                group.store("lr", before.lr_input)
                if lr is not before.lr_input:
                    group["lr"] = lr
        return group

    def _name(self, group: LiveGroup, groups: Sequence[LiveGroup]) -> None:
        if group.name:
            return
        taken = {other.name for other in groups} | {bound.group.name for bound in self.groups}
        number = next(i for i, other in enumerate(groups) if other is group)
        while f"group {number}" in taken:
            number += 1
        group.name = f"group {number}"

    def device_index_of(self, groups: Sequence[LiveGroup]) -> int:
        """Where the first parameter is; the host without any."""
        for group in groups:
            for parameter in group.stored("params"):
                return device_index(local_of(parameter).device)
        return -1

    def view_of(self, label: str, parameter: torch.Tensor) -> ParameterView:
        """How the step sees a parameter."""
        return view_parameter(label, parameter, self.fp8_scaling.get(parameter))

    def label_of(self, group: LiveGroup, i: int) -> str:
        """The user's name for a parameter, or where it is."""
        names = group.stored("param_names")
        return names[i] if names and i < len(names) else f"{group.name} parameter {i}"
