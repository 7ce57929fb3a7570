"""FusedAdam with torch.amp.GradScaler, and with a loss scale of its own."""

import math

import pytest
import torch

from adam_cases import equal_bits, mode, set_gradient, step_with  # noqa: F401
from stepgraph import UsageError, _core

pytestmark = pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")


def scaler_on(mode, scale=65536.0, **options):
    return torch.amp.GradScaler(mode.device.type, init_scale=scale, **options)


def start(scaler, mode):
    """A scaler makes its tensors when it scales the first loss."""
    scaler.scale(torch.zeros((), device=mode.device))


class AttributeScaler:
    """The other protocol: a step without a grad_scaler argument, as torch's own optimizers."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, found_inf, scale):
        self.optimizer.found_inf = found_inf
        self.optimizer.grad_scale = scale
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf
            del self.optimizer.grad_scale


@pytest.mark.parametrize("unscale_before", [False, True])
@pytest.mark.parametrize("protocol", ["scaler.step", "optimizer.step"])
def test_unscaled_once(mode, unscale_before, protocol):
    """pytorch#95781: twice unscaled gives .939590."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    scaler = scaler_on(mode)
    start(scaler, mode)
    set_gradient(p, 65536 * 1e-3)
    if unscale_before:
        scaler.unscale_(optimizer)
        assert p.grad.item() == pytest.approx(1e-3)
    if protocol == "scaler.step":
        scaler.step(optimizer)
    else:
        optimizer.step(grad_scaler=scaler)
    scaler.update()
    assert p.item() == pytest.approx(0.900001, abs=1e-6)
    assert scaler.get_scale() == 65536.0
    # As torch's optimizers, whatever was asked of the scaler before.
    assert p.grad.item() == pytest.approx(1e-3)


def test_gradients_stay_scaled_when_asked(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, unscale_gradients=False)
    scaler = scaler_on(mode)
    start(scaler, mode)
    set_gradient(p, 65536 * 1e-3)
    scaler.step(optimizer)
    assert p.item() == pytest.approx(0.900001, abs=1e-6)
    assert p.grad.item() == pytest.approx(65.536)


def test_the_first_scaler_after_steps_without(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    set_gradient(p, 2.0)
    optimizer.step()
    assert p.grad.item() == 2.0
    scaler = scaler_on(mode, 4.0)
    start(scaler, mode)
    set_gradient(p, 8.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.grad.item() == 2.0
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.38)
    assert optimizer.param_groups[0]["step"] == 2


@pytest.mark.parametrize("unscale_before", [False, True])
def test_an_overflow_leaves_all_bits(mode, unscale_before):
    torch.manual_seed(0)
    p, q = mode.parameter(torch.randn(100)), mode.parameter(torch.randn(7))
    optimizer = mode.adam([{"params": [p]}, {"params": [q]}], lr=0.1)
    scaler = scaler_on(mode)
    start(scaler, mode)
    for each in (p, q):
        set_gradient(each, torch.randn(each.shape) * 65536)
    scaler.step(optimizer)
    scaler.update()
    before = [
        t.detach().clone() for each in (p, q) for t in (each, *optimizer.state[each].values())
    ]
    p.grad[3] = float("inf")
    q.grad.normal_()
    if unscale_before:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = [t for each in (p, q) for t in (each, *optimizer.state[each].values())]
    assert all(equal_bits(a, b) for a, b in zip(before, after))
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
    assert scaler.get_scale() == 32768.0
    assert optimizer.status().skipped == 1


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0, 8.0, 0.5, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_anything_but_zero_skips(mode, found_inf, scale):
    """FlagGems#5878; TE skips for exactly 1 alone."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    set_gradient(p, 1.0 if scale is None else scale)
    tensor = torch.tensor(found_inf, device=mode.device)
    AttributeScaler(optimizer).step(
        tensor, None if scale is None else torch.tensor(scale, device=mode.device)
    )
    skipped = found_inf != 0.0 or math.isnan(found_inf)
    assert p.item() == pytest.approx(1.0 if skipped else 0.9, abs=1e-6)
    assert optimizer.param_groups[0]["step"] == (0 if skipped else 1)
    # The values of one step are not those of the next.
    step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(0.9 if skipped else 0.8, abs=1e-6)


def test_a_scale_is_that_of_one_step(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    none = torch.zeros((), device=mode.device)
    set_gradient(p, 4.0)
    AttributeScaler(optimizer).step(none, torch.tensor(4.0, device=mode.device))
    set_gradient(p, 1.0)
    AttributeScaler(optimizer).step(none, None)
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.19)
    step_with(optimizer, p, 1.0)
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.271)


def test_an_overflow_in_the_middle(mode):
    """libreyolo#771: gradients 1, inf, 1."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    scaler = scaler_on(mode, 1.0)
    start(scaler, mode)
    for g in (1.0, float("inf"), 1.0):
        set_gradient(p, g * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == pytest.approx(0.8, abs=1e-6)
    assert optimizer.param_groups[0]["step"] == 2


def test_an_overflow_in_the_very_first_step(mode):
    """TE leaves every group but the first one step ahead."""
    a, b = mode.parameter([1.0]), mode.parameter([1.0])
    optimizer = mode.adam([{"params": [a]}, {"params": [b]}], lr=0.1)
    scaler = scaler_on(mode, 1.0)
    start(scaler, mode)
    set_gradient(a, float("inf"))
    set_gradient(b, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert [group["step"] for group in optimizer.param_groups] == [0, 0]
    for p in (a, b):
        set_gradient(p, scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    assert a.item() == pytest.approx(0.9, abs=1e-6)
    assert b.item() == pytest.approx(0.9, abs=1e-6)
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_a_scaler_that_is_off(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    scaler = torch.amp.GradScaler(mode.device.type, enabled=False)
    set_gradient(p, 1.0)
    scaler.step(optimizer)
    optimizer.step(grad_scaler=scaler)
    assert p.item() == pytest.approx(0.8, abs=1e-6)


def test_float16_gradients_need_no_unscaling_before(mode):
    p = mode.parameter([1.0], torch.float16)
    optimizer = mode.adam([p], lr=2.0**-4, master_weights=True)
    scaler = scaler_on(mode, 1024.0)
    start(scaler, mode)
    set_gradient(p, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == pytest.approx(1 - 2.0**-4, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoupled_gradients_are_checked(mode, dtype):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, use_decoupled_grad=True)
    scaler = scaler_on(mode, 2.0)
    start(scaler, mode)
    for g in (2.0, float("nan"), 1.0):
        p.decoupled_grad = torch.tensor([g], device=p.device, dtype=dtype)
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == pytest.approx(0.8, abs=1e-3)
    assert scaler.get_scale() == 1.0


def test_two_scales_are_refused(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, loss_scale=2.0)
    set_gradient(p, 1.0)
    with pytest.raises(UsageError, match="GradScaler and FusedAdam.*loss_scale"):
        AttributeScaler(optimizer).step(torch.zeros((), device=mode.device), None)
    assert p.item() == 1.0


def test_a_found_inf_of_several_elements(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    set_gradient(p, 1.0)
    with pytest.raises(UsageError, match="found_inf has 2 elements"):
        AttributeScaler(optimizer).step(torch.zeros(2, device=mode.device), None)
    AttributeScaler(optimizer).step(torch.zeros(1, device=mode.device), None)
    assert p.item() == pytest.approx(0.9, abs=1e-6)


# A loss scale of the step's own.


def test_a_fixed_scale(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, loss_scale=8.0, skip_non_finite=True)
    assert optimizer.loss_scale_tensor().item() == 8.0
    step_with(optimizer, p, 8.0)
    optimizer.set_loss_scale(4.0)
    assert optimizer.loss_scale_tensor().item() == 4.0
    assert optimizer.status().next_loss_scale == 4.0
    step_with(optimizer, p, 4.0)
    assert p.item() == pytest.approx(0.8, abs=1e-6)
    with pytest.raises(UsageError, match="loss_scale is -1"):
        optimizer.set_loss_scale(-1.0)


@pytest.mark.parametrize("rule", ["torch_amp", "megatron"])
def test_a_moving_scale_follows_the_original(mode, rule):
    p = mode.parameter([1.0])
    if rule == "torch_amp":
        scaling = _core.LossScaling.torch_amp(initial=16.0, growth_interval=3)
    else:
        scaling = _core.LossScaling.megatron(initial=16.0, growth_interval=3, hysteresis=2)
    optimizer = mode.adam([p], lr=0.1, loss_scale=scaling)
    gradients = [1, 1, 1, math.inf, math.inf, 1, 1, 1, math.nan, 1]
    scale, tracker, left = 16.0, 0, 2
    for g in gradients:
        assert optimizer.loss_scale_tensor().item() == scale
        step_with(optimizer, p, g * scale)
        if math.isfinite(g):
            tracker += 1
            if tracker == 3:
                scale, tracker, left = scale * 2, 0, 2
        else:
            tracker = 0
            left -= 1
            if rule == "torch_amp" or left <= 0:
                scale /= 2
    status = optimizer.status()
    assert (status.step, status.skipped) == (7, 3)
    assert status.next_loss_scale == scale
    assert p.item() == pytest.approx(1 - 0.7, abs=1e-5)


def test_no_scale_of_its_own(mode):
    optimizer = mode.adam([mode.parameter([1.0])])
    with pytest.raises(UsageError, match="no scale of its own"):
        optimizer.loss_scale_tensor()
    with pytest.raises(UsageError, match="no scale of its own"):
        optimizer.set_loss_scale(2.0)
