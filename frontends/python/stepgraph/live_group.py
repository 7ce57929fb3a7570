"""Parameter groups and states that notice what is assigned to them.

torch's optimizers read `param_groups` and `state` at every step. A step that was built, and perhaps
captured, before cannot: what changed must be sent to it. `LiveGroup`, `StateMap` and
`ParameterState` are the dictionaries that torch expects and report assignments, so that a steady
step compares nothing by value.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Protocol

import torch

VALUES = frozenset({"lr", "weight_decay", "betas", "eps"})
"""Keys whose values a setter of the executor sends."""

STRUCTURE = frozenset(
    {
        "params",
        "param_names",
        "bias_correction",
        "maximize",
        "amsgrad",
        "schedule",
        "weight_decay_schedule",
        "norm_group",
    }
)
"""Keys that decide on the plan."""


class GroupObserver(Protocol):
    """What a group tells about itself."""

    def assigning(self, group: LiveGroup, key: str, value: Any) -> Any:
        """Before an assignment of a value or of "step": checks, and returns what to store."""

    def assigned(self, group: LiveGroup, key: str) -> None:
        """After an assignment or deletion of a key that matters."""

    def refresh_steps(self) -> None:
        """Brings "step" of every group up to date; waits for the device if a step ran since."""


class LiveGroup(dict[str, Any]):
    """A parameter group, as a dictionary like torch's.

    * Assignments of `lr`, `weight_decay`, `betas` and `eps` reach the next step, and once a step
      was captured by the caller also replays enqueued later on the current stream.
    * Where `lr` is a tensor that a captured step reads, assignments fill it; it stays the same
      object. `initial_lr` never shares memory with it.
    * `step` is an int; reading it waits for the steps launched so far, if any was since the last
      reading.

    Copies, also those by `pickle`, are plain dictionaries.
    """

    __slots__ = ("_observer", "index", "lr_input", "lr_source", "name", "weight_decay_input")

    def __init__(
        self, content: Mapping[str, Any], observer: GroupObserver | None = None, name: str = ""
    ) -> None:
        super().__init__(content)
        self.index = -1
        """Of the built step."""
        # The tensors that the step reads by itself, if these values are such tensors.
        self.lr_input: torch.Tensor | None = None
        self.weight_decay_input: torch.Tensor | None = None
        # A CPU tensor whose value was copied into lr_input.
        self.lr_source: torch.Tensor | None = None
        # Weak: an optimizer that is dropped frees its device memory at once, without a cycle.
        self._observer = None if observer is None else weakref.ref(observer)
        self.name = name

    def observer(self) -> GroupObserver | None:
        """Who is told, while it lives."""
        return None if self._observer is None else self._observer()

    # Reading "step".

    def _refresh(self) -> None:
        observer = self.observer()
        if observer is not None:
            observer.refresh_steps()

    def __getitem__(self, key: str) -> Any:
        if key == "step":
            self._refresh()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def __iter__(self) -> Iterator[str]:
        # Defined so that dict(group) and {**group} read through __getitem__.
        return super().__iter__()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._refresh()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._refresh()
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    # Writing.

    def __setitem__(self, key: str, value: Any) -> None:
        if key in ("lr", "initial_lr") and isinstance(value, torch.Tensor):
            # SequentialLR of torch before 2.10 makes them one tensor, and fills lr afterwards.
            if key == "initial_lr" or value is self.stored("initial_lr"):
                value = value.detach().clone()
        observer = self.observer()
        if observer is None:
            super().__setitem__(key, value)
        elif key in VALUES or key == "step":
            super().__setitem__(key, observer.assigning(self, key, value))
            observer.assigned(self, key)
        else:
            super().__setitem__(key, value)
            if key in STRUCTURE:
                observer.assigned(self, key)

    def store(self, key: str, value: Any) -> None:
        """Stores without telling anybody."""
        super().__setitem__(key, value)

    def stored(self, key: str, default: Any = None) -> Any:
        """What is stored, without bringing "step" up to date."""
        return super().get(key, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> LiveGroup:  # type: ignore[override]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        observer = self.observer()
        if observer is not None and (key in VALUES or key in STRUCTURE):
            observer.assigned(self, key)

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        for key in list(self):
            del self[key]


class StateChanges:
    """Whether anything was assigned in `optimizer.state` since it was last looked at."""

    __slots__ = ("__weakref__", "pending")

    def __init__(self) -> None:
        self.pending = True


class _Reporting(dict[Any, Any]):
    """A dictionary that notes in `changes` that something was assigned or deleted."""

    __slots__ = ()

    changes: StateChanges

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.changes.pending = True

    def store(self, key: Any, value: Any) -> None:
        """Stores what the step is bound to already, or about to be."""
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self.changes.pending = True

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.changes.pending = True

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.changes.pending = True
        return super().setdefault(key, default)

    def pop(self, *args: Any) -> Any:
        self.changes.pending = True
        return super().pop(*args)

    def popitem(self) -> tuple[Any, Any]:
        self.changes.pending = True
        return super().popitem()

    def clear(self) -> None:
        self.changes.pending = True
        super().clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


class ParameterState(_Reporting):
    """The state of one parameter, as a dictionary like torch's."""

    __slots__ = ("changes",)

    def __init__(
        self, content: Mapping[str, Any] = {}, changes: StateChanges | None = None
    ) -> None:
        super().__init__(content)
        self.changes = changes or StateChanges()


class StateMap(_Reporting, defaultdict[Any, Any]):
    """`optimizer.state`: from parameters to their states. What is assigned becomes a
    `ParameterState` at the next step, so keep no reference to a dictionary that was put here."""

    def __init__(
        self, content: Mapping[Any, Any] = {}, changes: StateChanges | None = None
    ) -> None:
        self.changes = changes or StateChanges()
        defaultdict.__init__(self, None, content)

    def __missing__(self, key: Any) -> ParameterState:
        state = ParameterState(changes=self.changes)
        self.store(key, state)
        return state

    def copy(self) -> dict[Any, Any]:  # type: ignore[override]
        return dict(self)
