"""Numbers of FusedAdam: against float64, against torch's own Adam, and bit for bit between ways to
step."""

import pytest
import torch

from adam_cases import Adam64, equal_bits, mode, set_gradient, step_with  # noqa: F401
from stepgraph import FusedAdam, _core


def run_beside_float64(mode, options, reference, steps=30, sizes=((33, 7), (5,), ())):
    torch.manual_seed(1)
    params = [mode.parameter(torch.randn(size)) for size in sizes]
    exact = [Adam64(p, **reference) for p in params]
    optimizer = mode.adam(params, **options)
    for _ in range(steps):
        for p, ref in zip(params, exact):
            g = torch.randn(p.shape)
            set_gradient(p, g)
            ref.step(p.grad)
        optimizer.step()
    return params, exact


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_follows_float64(mode, decoupled, amsgrad, maximize, bias_correction):
    shared = dict(
        lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, amsgrad=amsgrad, maximize=maximize
    )
    shared["bias_correction"] = bias_correction
    params, exact = run_beside_float64(
        mode, {**shared, "adam_w_mode": decoupled}, {**shared, "decoupled": decoupled}
    )
    for p, ref in zip(params, exact):
        torch.testing.assert_close(p.detach().cpu().double(), ref.value, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_follows_torch(mode, decoupled, amsgrad):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torch.manual_seed(2)
    start = [torch.randn(17, 3), torch.randn(9)]
    ours = [mode.parameter(p) for p in start]
    theirs = [mode.parameter(p) for p in start]
    options = dict(lr=3e-3, betas=(0.9, 0.99), weight_decay=0.05, amsgrad=amsgrad)
    optimizer = mode.adam(ours, adam_w_mode=decoupled, **options)
    expected = kind(theirs, **options)
    for _ in range(50):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape, device=a.device)
            b.grad = a.grad.clone()
        optimizer.step()
        expected.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_equals_the_host_executor_bit_for_bit(mode):
    torch.manual_seed(3)
    sizes = [(4096 + 5,), (3, 11), (1,)]
    params = [mode.parameter(torch.randn(size)) for size in sizes]
    optimizer = mode.adam(params, lr=0.02, weight_decay=0.1, max_norm=0.5)
    copies = [p.detach().cpu().clone() for p in params]
    gradients = [torch.empty_like(c) for c in copies]
    moments = [(torch.zeros_like(c), torch.zeros_like(c)) for c in copies]
    builder = _core.StepBuilder()
    builder.set_options(max_grad_norm=0.5)
    builder.add_group(learning_rate=0.02, weight_decay=0.1)
    for i, (c, g, (m, v)) in enumerate(zip(copies, gradients, moments)):
        builder.add_tensor(
            0,
            name=str(i),
            numel=c.numel(),
            device=-1,
            parameter=(c.data_ptr(), "f32", 0),
            gradient=(g.data_ptr(), "f32", 0),
            exp_avg=(m.data_ptr(), "f32", 0),
            exp_avg_sq=(v.data_ptr(), "f32", 0),
        )
    executor = _core.HostExecutor(builder.build())
    # As the step does: the learning rate that a GPU reads from a tensor is rounded to float32.
    if optimizer.capturable:
        executor.set_learning_rate(0, float(torch.tensor(0.02)))
    for _ in range(5):
        for p, g in zip(params, gradients):
            g.copy_(torch.randn(g.shape))
            set_gradient(p, g)
        optimizer.step()
        executor.launch()
    for p, c, (m, v) in zip(params, copies, moments):
        assert equal_bits(p, c)
        assert equal_bits(optimizer.state[p]["exp_avg"], m)
        assert equal_bits(optimizer.state[p]["exp_avg_sq"], v)


# Cases from the field, by hand. g is the gradient of every element.


def test_learning_rate_written_in_place(mode):
    """pytorch#106802: .1 then .05."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    optimizer.param_groups[0]["lr"] = 0.05
    step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(0.85, abs=1e-6)


@pytest.mark.parametrize("steps,expected", [(2, 0.8), (3, 0.7), (10, 1e-8)])
def test_constant_gradient(mode, steps, expected):
    """pytorch#76368."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    for _ in range(steps):
        step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(expected, abs=1e-6)


def test_rising_weight_decay(mode):
    """dion#108: only the weight decay moves the parameter."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    for t in range(1, 5):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * t
        step_with(optimizer, p, 0.0)
    assert p.item() == pytest.approx(0.903450, abs=1e-6)


def test_bfloat16_gradient_on_a_float32_parameter(mode):
    """TransformerEngine#3358, with the gradient where autograd does not restrict its type."""
    p = mode.parameter(torch.ones(16))
    optimizer = mode.adam([p], lr=1e-3, use_decoupled_grad=True)
    p.decoupled_grad = torch.ones(16, dtype=torch.bfloat16, device=p.device)
    optimizer.step()
    assert p.detach().cpu().numpy() == pytest.approx(0.999, abs=1e-6)


def test_amsgrad_keeps_the_largest(mode):
    """pytorch#78807: gradients 10 then nine of .1."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, betas=(0.9, 0.9), amsgrad=True)
    for t in range(10):
        step_with(optimizer, p, 10.0 if t == 0 else 0.1)
    assert p.item() == pytest.approx(0.594738, abs=2e-6)
    assert optimizer.state[p]["max_exp_avg_sq"].item() == pytest.approx(10.0, rel=1e-6)


@pytest.mark.parametrize(
    "start,gradient,decoupled,expected,m,v",
    [
        (10.0, -0.5, False, 9.9, None, None),
        (10.0, -0.5, True, 10.0, None, None),
        (1.0, 0.5, False, 0.9, 0.06, 3.6e-4),
        (1.0, 0.5, True, 0.89, 0.05, 2.5e-4),
    ],
)
def test_l2_and_decoupled(mode, start, gradient, decoupled, expected, m, v):
    """FlagGems#4988."""
    p = mode.parameter([start])
    optimizer = mode.adam([p], lr=0.1, weight_decay=0.1, adam_w_mode=decoupled)
    step_with(optimizer, p, gradient)
    assert p.item() == pytest.approx(expected, abs=2e-6)
    if m is not None:
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(m, rel=1e-5)
        assert optimizer.state[p]["exp_avg_sq"].item() == pytest.approx(v, rel=1e-5)


def test_empty_parameter_among_others(mode):
    """TransformerEngine#3207."""
    a, b = mode.parameter(torch.ones(16)), mode.parameter(torch.ones(0))
    optimizer = mode.adam([a, b], lr=0.1)
    set_gradient(a, 1.0)
    set_gradient(b, 1.0)
    optimizer.step()
    assert a.detach().cpu().numpy() == pytest.approx(0.9, abs=1e-6)
    assert optimizer.state[b]["exp_avg"].numel() == 0


def test_clipping_uses_the_global_norm(mode):
    a, b = mode.parameter([0.0]), mode.parameter([0.0])
    optimizer = mode.adam([{"params": [a]}, {"params": [b]}], max_norm=1.0, unscale_gradients=True)
    set_gradient(a, 3.0)
    set_gradient(b, 4.0)
    optimizer.step()
    assert optimizer.status().grad_norm == pytest.approx(5.0)
    assert a.grad.item() == pytest.approx(0.6, rel=1e-5)
    assert b.grad.item() == pytest.approx(0.8, rel=1e-5)
    optimizer.clip_grad_norm(0.5)
    set_gradient(a, 3.0)
    set_gradient(b, 4.0)
    optimizer.step()
    assert a.grad.item() == pytest.approx(0.3, rel=1e-5)


def test_clipping_that_is_switched_on_later(mode):
    p = mode.parameter([0.0])
    optimizer = mode.adam([p], lr=0.1, unscale_gradients=True)
    step_with(optimizer, p, 3.0)
    optimizer.clip_grad_norm(1.0)
    step_with(optimizer, p, 3.0)
    assert p.grad.item() == pytest.approx(1.0, rel=1e-5)
    assert optimizer.param_groups[0]["step"] == 2


def test_gradients_stay_as_they_were(mode):
    """TE writes unscaled gradients back, even with a scale of 1."""
    p = mode.parameter([1.0, 2.0])
    optimizer = mode.adam([p], max_norm=0.1)
    set_gradient(p, torch.tensor([3.0, 4.0]))
    optimizer.step()
    assert p.grad.tolist() == [3.0, 4.0]


def test_zeroed_gradients(mode):
    p = mode.parameter([1.0, 2.0])
    optimizer = mode.adam([p], zero_gradients=True)
    set_gradient(p, torch.tensor([3.0, 4.0]))
    version = p.grad._version
    optimizer.step()
    assert p.grad.tolist() == [0.0, 0.0]
    assert p.grad._version > version


def test_autograd_notices_the_step(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p])
    set_gradient(p, 1.0)
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_above_a_norm_is_left_out(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, skip_above_norm=2.0)
    step_with(optimizer, p, 1.0)
    step_with(optimizer, p, 3.0)
    assert p.item() == pytest.approx(0.9, abs=1e-6)
    assert (optimizer.status().step, optimizer.status().skipped) == (1, 1)


def test_records_tell_of_each_step(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, records=8, max_norm=10.0)
    for gradient in (1.0, float("inf"), 2.0):
        step_with(optimizer, p, gradient)
    optimizer.status()
    records = optimizer.records().records
    assert [r.was_skipped for r in records] == [False, True, False]
    assert [r.grad_norm for r in records] == [1.0, float("inf"), 2.0]
    assert optimizer.records().records == []


def test_stochastic_rounding_is_right_on_average(mode):
    """torchao#1124, shorter: each step moves by 2^-12, a 32nd of the last place."""
    p = mode.parameter(torch.ones(20000), torch.bfloat16)
    optimizer = mode.adam([p], lr=2.0**-12, eps=0.0, stochastic_rounding=True, seed=5)
    for _ in range(16):
        step_with(optimizer, p, 1.0)
    # Below 1 the last place is 2^-8.
    deviation = 4 * (2.0**-8 * 16**0.5 / 2) / 20000**0.5
    assert p.detach().float().mean().item() == pytest.approx(1 - 16 * 2.0**-12, abs=deviation)


def test_count_zeros(mode):
    p = mode.parameter(torch.ones(6))
    optimizer = mode.adam([p], count_zeros=True)
    set_gradient(p, torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 3.0]))
    optimizer.step()
    assert optimizer.status().zeros == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_current_device_does_not_matter():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for capturable in (False, True):
        p = torch.ones(8, device="cuda:1", requires_grad=True)
        optimizer = FusedAdam([p], lr=0.1, capturable=capturable)
        with torch.cuda.device(0):
            for _ in range(3):
                p.grad = torch.ones_like(p)
                optimizer.step()
        assert p.detach().cpu().numpy() == pytest.approx(0.7, abs=1e-6)


def test_channels_last_parameters(mode):
    torch.manual_seed(4)
    start = torch.randn(2, 3, 4, 5)
    p = start.to(mode.device).to(memory_format=torch.channels_last).requires_grad_(True)
    optimizer = mode.adam([p], lr=0.01)
    reference = Adam64(p, lr=0.01)
    for _ in range(3):
        g = torch.randn(2, 3, 4, 5, device=mode.device)
        p.grad = g.to(memory_format=torch.channels_last)
        optimizer.step()
        reference.step(g)
    torch.testing.assert_close(p.detach().cpu().double(), reference.value, rtol=1e-6, atol=1e-6)
