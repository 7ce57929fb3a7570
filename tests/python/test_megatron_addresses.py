"""What a captured step was captured with: found to be the same cheaply, and named if it is not."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepgraph.megatron.addresses import Fingerprint, Look


def make_leaf(device: str, main_grad: bool) -> Any:
    """As far as addresses look at an optimizer of Megatron: masters of a model's parameters."""
    model = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    for p in model:
        gradient = torch.ones(5, device=device)
        if main_grad:
            p.main_grad = gradient
        else:
            p.grad = gradient
    masters = [p.detach().clone() for p in model]
    return types.SimpleNamespace(
        config=types.SimpleNamespace(clip_grad=1.0),
        grad_scaler=types.SimpleNamespace(
            growth_interval=4, growth_factor=torch.full((1,), 2.0, device=device)
        ),
        optimizer=types.SimpleNamespace(
            param_groups=[{"params": masters[:1]}, {"params": masters[1:]}]
        ),
        model_float16_groups=[model[:1], model[1:]],
    )


@pytest.fixture(params=[True, False], ids=["main_grad", "grad"])
def leaf(request: pytest.FixtureRequest, device: str) -> Any:
    return make_leaf(device, request.param)


def second(leaf: Any) -> torch.Tensor:
    return leaf.model_float16_groups[1][0]


def move_gradient(leaf: Any) -> None:
    p = second(leaf)
    name = "main_grad" if hasattr(p, "main_grad") else "grad"
    setattr(p, name, getattr(p, name).clone())


def drop_gradient(leaf: Any) -> None:
    p = second(leaf)
    setattr(p, "main_grad" if hasattr(p, "main_grad") else "grad", None)


def move_parameter(leaf: Any) -> None:
    second(leaf).data = second(leaf).data.clone()


def move_master(leaf: Any) -> None:
    group = leaf.optimizer.param_groups[1]
    group["params"] = [group["params"][0], group["params"][1].clone()]


def add_group(leaf: Any) -> None:
    leaf.optimizer.param_groups.append({"params": [torch.ones(1)]})


def set_option(leaf: Any) -> None:
    leaf.config.clip_grad = 2.0


def set_scaler(leaf: Any) -> None:
    leaf.grad_scaler = object()


def set_growth_interval(leaf: Any) -> None:
    leaf.grad_scaler.growth_interval = 5


def move_growth_factor(leaf: Any) -> None:
    leaf.grad_scaler.growth_factor = leaf.grad_scaler.growth_factor.clone()


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (move_gradient, "gradient 1 moved"),
    (drop_gradient, "gradient 1 moved from .* to 0x0"),
    (move_parameter, "model parameter 1 moved"),
    (move_master, "parameter 2 moved"),
    (add_group, "3 parameters became 4"),
    (set_option, "options"),
    (set_scaler, "another grad_scaler"),
    (set_growth_interval, "the rule of the grad_scaler changed"),
    (move_growth_factor, "the rule of the grad_scaler changed"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[c.__name__ for c, _ in CHANGES])
def test_a_change_is_noticed_and_named(leaf: Any, change: Any, reason: str) -> None:
    before, look = Fingerprint.of(leaf), Look(leaf)
    # In use, so that what moves cannot come back to where it was.
    kept = [second(leaf).data, second(leaf).grad, getattr(second(leaf), "main_grad", None)]
    for _ in range(2):
        assert look.still_holds(leaf)
    change(leaf)
    assert not look.still_holds(leaf)
    found = before.difference(Fingerprint.of(leaf))
    assert found is not None and re.match(reason, found), found
    del kept


def test_values_and_lists_of_the_same_content_are_no_change(leaf: Any) -> None:
    look = Look(leaf)
    with torch.no_grad():
        second(leaf).fill_(3.0)
    leaf.optimizer.param_groups = [
        {"params": list(g["params"])} for g in leaf.optimizer.param_groups
    ]
    leaf.model_float16_groups = [list(group) for group in leaf.model_float16_groups]
    assert look.still_holds(leaf)


def test_a_main_grad_that_comes_later(device: str) -> None:
    leaf = make_leaf(device, False)
    look = Look(leaf)
    second(leaf).main_grad = torch.ones(5, device=device)
    assert not look.still_holds(leaf)


def test_memory_that_cannot_be_read_is_compared_in_full() -> None:
    leaf = make_leaf("cpu", True)
    leaf.model_float16_groups[1][0] = torch.nn.Parameter(torch.ones(5).to_sparse())
    look = Look(leaf)
    assert not look.readable and not look.still_holds(leaf)
