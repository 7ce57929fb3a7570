"""What is refused: the message names the parameter, group or option, and nothing has changed."""

import subprocess
import sys

import pytest
import torch

from adam_cases import mode, set_gradient  # noqa: F401
from stepgraph import FusedAdam, LossScaling, UsageError


@pytest.mark.parametrize(
    "options,message",
    [
        ({"lr": -1}, "lr is -1"),
        ({"betas": (0.9, 1.5)}, "betas holds 1.5"),
        ({"betas": (0.9,)}, "betas is"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"exp_avg_dtype": torch.float64}, "exp_avg_dtype is torch.float64"),
        ({"exp_avg_sq_dtype": torch.int8}, "exp_avg_sq_dtype is torch.int8"),
        ({"master_weight_dtype": torch.bfloat16}, "master_weight_dtype is torch.bfloat16"),
        ({"max_norm": -1.0}, "max_grad_norm is -1"),
        ({"skip_above_norm": float("nan")}, "skip_above_norm is nan"),
        ({"loss_scale": 0.0}, "loss_scale is 0"),
        ({"records": -1}, "records is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"samples_per_step": -2}, "samples_per_step is -2"),
        ({"warmup": -1}, "warmup is -1"),
        ({"zero_gradients": True, "unscale_gradients": True}, "zero_gradients and unscale"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        FusedAdam([torch.ones(1, requires_grad=True)], **options)
    assert isinstance(caught.value, ValueError)


def test_the_deprecated_option():
    p = torch.ones(1, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        optimizer = FusedAdam([p], set_grad_none=False)
    p.grad = torch.ones(1)
    optimizer.zero_grad()
    assert p.grad.item() == 0
    optimizer.zero_grad(set_to_none=True)
    assert p.grad is None


def test_groups_are_checked(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p])
    with pytest.raises(UsageError, match="lr is -1"):
        optimizer.add_param_group({"params": [mode.parameter([1.0])], "lr": -1})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    set_gradient(p, 1.0)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [p, p]
    with pytest.raises(UsageError, match="group 0 parameter 1: .* also group 0 parameter 0"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [p]
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2


def with_gradient(mode, gradient, shape=(4, 6)):
    p = mode.parameter(torch.ones(shape))
    p.decoupled_grad = gradient(p)
    return p


@pytest.mark.parametrize(
    "gradient,message",
    [
        (lambda p: torch.ones(3, device=p.device), r"gradient has sizes \(3,\), expected \(4, 6\)"),
        (lambda p: torch.ones(6, 4, device=p.device).t(), r"gradient has strides \(1, 4\)"),
        (lambda p: torch.ones(4, 12, device=p.device)[:, ::2], "gradient is not contiguous"),
        (lambda p: torch.ones(4, 6, device=p.device).to_sparse(), "gradient is sparse"),
        (lambda p: torch.ones(4, 6, device=p.device).double(), "gradient has type torch.float64"),
        (lambda p: torch.ones(4, 6, device="meta"), "gradient is on meta"),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_gradients_that_do_not_fit(mode, gradient, message, stepped):
    """bitsandbytes#1185: right values or an error that names the tensor."""
    p = with_gradient(mode, lambda p: torch.ones(4, 6, device=p.device))
    optimizer = mode.adam([("weight", p)], lr=0.1, use_decoupled_grad=True)
    if stepped:
        optimizer.step()
    before = p.detach().clone()
    p.decoupled_grad = gradient(p)
    for _ in range(2):
        with pytest.raises(UsageError, match="weight: the " + message):
            optimizer.step()
    assert torch.equal(p, before)
    p.decoupled_grad = torch.ones(4, 6, device=p.device)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == (2 if stepped else 1)


def test_views_offset_by_one_element(mode):
    p = torch.ones(9, device=mode.device)[1:].requires_grad_(True)
    p.grad = torch.ones(9, device=mode.device)[1:]
    optimizer = mode.adam([p], lr=0.1)
    optimizer.step()
    assert p.detach().cpu().numpy() == pytest.approx(0.9, abs=1e-6)


def test_parameters_that_cannot_be_stepped(mode):
    bad = torch.ones(4, 6, device=mode.device, dtype=torch.float64, requires_grad=True)
    optimizer = mode.adam([("weight", bad)])
    with pytest.raises(UsageError, match="weight: the parameter has type torch.float64"):
        optimizer.step()
    strided = torch.ones(4, 6, device=mode.device)[:, ::2].requires_grad_(True)
    with pytest.raises(UsageError, match="group 0 parameter 0: the parameter is not contiguous"):
        mode.adam([strided]).step()
    shared = mode.parameter(torch.ones(8))
    views = [shared.data[:6].requires_grad_(True), shared.data[4:].requires_grad_(True)]
    for view in views:
        set_gradient(view, 1.0)
    with pytest.raises(UsageError, match="shares memory"):
        mode.adam(views).step()


def test_states_that_do_not_fit(mode):
    p = mode.parameter(torch.ones(4))
    optimizer = mode.adam([("weight", p)])
    set_gradient(p, 1.0)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.ones(3, device=p.device)
    with pytest.raises(UsageError, match=r"weight: state exp_avg has sizes \(3,\)"):
        optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.ones(4, device=p.device, dtype=torch.int16)
    with pytest.raises(UsageError, match="weight: state exp_avg has type torch.int16"):
        optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(4, device=p.device)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parameters_on_two_devices():
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, device="cuda", requires_grad=True)
    with pytest.raises(UsageError, match="group 0 parameter 1: .*one optimizer for each device"):
        FusedAdam([a, b]).step()
    optimizer = FusedAdam([a])
    a.grad = torch.ones(1)
    optimizer.step()
    a.data = a.data.cuda()
    a.grad = None
    with pytest.raises(UsageError, match="group 0 parameter 0: the parameter moved to cuda"):
        optimizer.step()


@pytest.mark.parametrize(
    "ending", ["", "raise RuntimeError('as it happens')", "optimizer.release()"]
)
def test_the_process_ends(mode, ending):
    code = (
        "import torch\n"
        "from stepgraph import FusedAdam\n"
        f"p = torch.ones(1, device='{mode.device.type}', requires_grad=True)\n"
        "p.grad = torch.ones_like(p)\n"
        f"optimizer = FusedAdam([p], **{mode.options!r})\n"
        "for _ in range(3): optimizer.step()\n"
        f"assert {mode.device.type == 'cuda'} or not torch.cuda.is_initialized()\n"
        f"{ending}\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True)
    expected = 1 if ending.startswith("raise") else 0
    assert ended.returncode == expected, ended.stderr.decode()
    assert b"Exception ignored" not in ended.stderr


def test_a_moving_scale_with_a_scale(mode):
    p = mode.parameter([1.0])
    with pytest.raises(UsageError, match="growth_interval is 0"):
        mode.adam([p], loss_scale=LossScaling.torch_amp(growth_interval=0))
