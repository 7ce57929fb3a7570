"""Parameter groups as Megatron makes, replaces and drives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepgraph.megatron
from megatron_world import Training, assert_same_tensors, device, installed
from stepgraph.fused_adam import FusedAdam

__all__ = ["device", "installed"]
pytestmark = pytest.mark.usefixtures("installed")


def megatron_group(parameters: list[torch.Tensor], **values: Any) -> dict[str, Any]:
    return {
        "params": parameters,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "max_lr": 1e-2,
        "min_lr": 1e-3,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        **values,
    }


def scheduler(optimizer: Any, **options: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        **{
            "init_lr": 1e-4,
            "max_lr": 1e-2,
            "min_lr": 1e-3,
            "lr_warmup_steps": 4,
            "lr_decay_steps": 20,
            "lr_decay_style": "linear",
            "start_wd": 0.0,
            "end_wd": 0.4,
            "wd_incr_steps": 16,
            "wd_incr_style": "cosine",
            **options,
        },
    )


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "constant", "WSD"])
def test_megatrons_scheduler_drives_the_groups(style: str) -> None:
    """Beside float64 AdamW that is given the scheduler's values by hand."""
    torch.manual_seed(3)
    parameters = [torch.randn(n, requires_grad=True) for n in (5, 17, 3)]
    reference = [p.detach().double().requires_grad_() for p in parameters]
    optimizer = FusedAdam(
        [
            megatron_group(parameters[:2]),
            megatron_group([]),
            megatron_group(parameters[2:], wd_mult=0.0, max_lr=3e-2, eps=1e-6),
            megatron_group([], start_wd=0.2, end_wd=0.3),
        ],
        lr=1e-2,
        weight_decay=0.1,
    )
    other = torch.optim.AdamW(
        [{"params": reference[:2]}, {"params": reference[2:], "eps": 1e-6}], lr=1e-2
    )
    options: dict[str, Any] = {"lr_decay_style": style}
    if style == "WSD":
        options |= {"wsd_decay_steps": 6, "lr_wsd_decay_style": "minus_sqrt"}
    schedule = scheduler(optimizer, **options)
    for _ in range(25):
        for ours, theirs in zip(parameters, reference, strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.double()
        for ours_group, theirs_group in zip(
            (optimizer.param_groups[0], optimizer.param_groups[2]), other.param_groups, strict=True
        ):
            theirs_group["lr"] = float(ours_group["lr"])
            theirs_group["weight_decay"] = float(ours_group["weight_decay"])
        optimizer.step()
        other.step()
        schedule.step(increment=1)
    for ours, theirs in zip(parameters, reference, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-6)
    assert [group["step"] for group in optimizer.param_groups] == [25] * 4
    assert optimizer.param_groups[2]["weight_decay"] == 0.0
    assert optimizer.param_groups[3]["weight_decay"] == 0.3


def test_equals_torch_inside_megatron_to_rounding(device: torch.device) -> None:
    ours = Training(torch.float32, device, clip_grad=0.5)
    ours.wrap()
    ours.run(range(20))
    stepgraph.megatron.uninstall()
    theirs = Training(torch.float32, device, clip_grad=0.5, optimizer_cuda_graph=False)
    if type(theirs.optimizer.chained_optimizers[0].optimizer) is not torch.optim.AdamW:
        pytest.skip("Transformer Engine or apex is installed; their FusedAdam needs a GPU")
    theirs.run(range(20))
    for (name, left), right in zip(
        ours.model.named_parameters(), theirs.model.parameters(), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5, msg=name)
    for left, right in zip(ours.results, theirs.results, strict=True):
        assert left[1] == pytest.approx(right[1], rel=1e-3)


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
def test_plain_dictionaries_put_in_place_of_the_groups_go_on(
    device: torch.device, distributed: bool
) -> None:
    """As Megatron does: the lists and dictionaries are new, the parameters are the same."""
    trainings = [Training(torch.bfloat16, device, distributed=distributed) for _ in range(2)]
    trainings[1].wrap()
    for training in trainings:
        training.run(range(3))
        inner = training.optimizer.chained_optimizers[0].optimizer
        inner.param_groups = [
            {**group, "params": list(group["params"])} for group in inner.param_groups
        ]
        training.run(range(3, 8))
        # A dictionary that somebody still holds is written to without anything being told.
        inner.param_groups = [dict(group) for group in inner.param_groups]
        inner.param_groups[0]["weight_decay"] = 0.9
        training.run(range(8, 9))
    assert_same_tensors(trainings[0].tensors(), trainings[1].tensors())
    assert [group["step"] for group in trainings[1].groups()] == [9, 9]


def test_states_that_megatron_initialises_are_used(device: torch.device) -> None:
    """`init_state_fn` puts zero tensors into the state before the first step, for loading."""
    early, late = (Training(torch.bfloat16, device) for _ in range(2))
    (leaf,) = early.optimizer.chained_optimizers
    leaf.init_state_fn(leaf.optimizer, leaf.config)
    addresses = [
        leaf.optimizer.state[p][name].data_ptr()
        for group in leaf.optimizer.param_groups
        for p in group["params"]
        for name in ("exp_avg", "exp_avg_sq")
    ]
    for training in (early, late):
        training.wrap()
        training.run(range(5))
    assert_same_tensors(early.tensors(), late.tensors())
    assert addresses == [
        leaf.optimizer.state[p][name].data_ptr()
        for group in leaf.optimizer.param_groups
        for p in group["params"]
        for name in ("exp_avg", "exp_avg_sq")
    ]
