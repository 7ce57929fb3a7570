"""Storage formats of parameters, gradients, masters and moments."""

import itertools

import pytest
import torch

from adam_cases import Adam64, equal_bits, make_step_mode, mode, step_with  # noqa: F401
from stepgraph import UsageError
from stepgraph.state_formats import join_remainder, split_master

F32, F16, BF16, U8, E4M3 = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.float8_e4m3fn,
)
PARAMETERS = [F32, F16, BF16]
GRADIENTS = [F32, F16, BF16]
MASTERS = ["none", F32, F16, "remainder"]
MOMENTS = [F32, F16, BF16, U8]


def options_of(master, exp_avg, exp_avg_sq):
    options = {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq}
    if master == "remainder":
        options.update(master_weights=True, store_param_remainders=True)
    elif master != "none":
        options.update(master_weights=True, master_weight_dtype=master)
    return options


def run(mode, parameter, gradient, options, steps=4, numel=300, amsgrad=False):
    torch.manual_seed(11)
    p = mode.parameter(torch.randn(numel), parameter)
    # A learning rate that float32 holds exactly, as a GPU that replays keeps it.
    lr = 2.0**-7
    reference = Adam64(p, lr=lr, weight_decay=0.1, amsgrad=amsgrad)
    optimizer = mode.adam(
        [p], lr=lr, weight_decay=0.1, use_decoupled_grad=True, amsgrad=amsgrad, **options
    )
    for _ in range(steps):
        p.decoupled_grad = torch.randn(numel).to(p.device, gradient)
        optimizer.step()
        reference.step(p.decoupled_grad)
    return p, optimizer, reference


# Relative errors of formats, coarsely.
STEP_ERRORS = {F32: 1e-6, F16: 2e-3, BF16: 1e-2, U8: 0.2, E4M3: 0.2}
PARAMETER_ERRORS = {F32: 1e-6, F16: 1e-3, BF16: 1e-2}


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("master", MASTERS)
def test_every_combination(mode, parameter, master):
    """TransformerEngine#3358, #1656: gradients, masters and moments independent of each other."""
    for gradient, exp_avg, exp_avg_sq in itertools.product(GRADIENTS, MOMENTS, MOMENTS):
        options = options_of(master, exp_avg, exp_avg_sq)
        p, optimizer, reference = run(mode, parameter, gradient, options)
        # Four steps of at most about lr each.
        tolerance = 4 * 0.02 * max(STEP_ERRORS[exp_avg], STEP_ERRORS[exp_avg_sq])
        tolerance += 5 * PARAMETER_ERRORS[parameter] * 4
        error = (p.detach().cpu().double() - reference.value).abs().max().item()
        assert error < tolerance, (gradient, exp_avg, exp_avg_sq, error)
        state = optimizer.state[p]
        assert state["exp_avg"].dtype is exp_avg and state["exp_avg_sq"].dtype is exp_avg_sq
        if master == "none":
            assert "master_param" not in state
        elif parameter is F32:
            assert state["master_param"].data_ptr() == p.data_ptr()
        elif master == "remainder":
            assert state["master_param"].dtype is (torch.int16 if parameter is BF16 else F32)
        else:
            assert state["master_param"].dtype is master


@pytest.mark.parametrize("moment", MOMENTS)
def test_amsgrad_in_every_format(mode, moment):
    options = options_of("none", F32, moment)
    p, optimizer, reference = run(mode, F32, F32, options, amsgrad=True)
    assert optimizer.state[p]["max_exp_avg_sq"].dtype is moment
    error = (p.detach().cpu().double() - reference.value).abs().max().item()
    assert error < 4 * 0.02 * STEP_ERRORS[moment] + 1e-5


def test_float8_states_are_those_of_uint8(mode):
    states = []
    for dtype in (U8, E4M3):
        p, optimizer, _ = run(mode, F32, F32, options_of("none", dtype, dtype))
        assert optimizer.state[p]["exp_avg"].dtype is dtype
        states.append((p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]))
    assert all(equal_bits(a, b) for a, b in zip(*states))


def test_bfloat16_moments_round_only_what_is_kept(mode):
    """TransformerEngine#1656: this step's update uses the unrounded moments."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16)
    g = 1.2345678
    step_with(optimizer, p, g)
    assert p.item() == pytest.approx(0.9, abs=1e-7)  # m / sqrt(v) of the same unrounded g
    kept = torch.tensor(0.1 * g).to(BF16)
    assert optimizer.state[p]["exp_avg"].item() == kept.item()
    squares = torch.tensor(0.001 * g * g).to(BF16)
    assert optimizer.state[p]["exp_avg_sq"].item() == squares.item()


def test_remainders_make_a_bfloat16_parameter_exact(mode):
    """Masters of float32 and remainders hold the same number after any number of steps."""
    torch.manual_seed(5)
    start = torch.randn(500)
    runs = []
    for remainders in (False, True):
        torch.manual_seed(6)
        p = mode.parameter(start, BF16)
        optimizer = mode.adam([p], lr=1e-3, master_weights=True, store_param_remainders=remainders)
        for _ in range(20):
            step_with(optimizer, p, torch.randn(500).to(BF16))
        runs.append((p, optimizer))
    (p, optimizer), (q, with_remainders) = runs
    assert equal_bits(joined(with_remainders, q), optimizer.state[p]["master_param"])
    assert with_remainders.get_unscaled_state(q, "master_param").dtype is torch.int16


def test_the_master_of_a_float32_parameter_is_the_parameter(mode):
    """TE's goes stale."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, master_weights=True, master_weight_dtype=F16)
    step_with(optimizer, p, 1.0)
    assert optimizer.get_unscaled_state(p, "master_param").item() == p.item()
    assert p.item() == pytest.approx(0.9, abs=1e-6)
    with torch.no_grad():
        p.fill_(2.0)
    step_with(optimizer, p, 1.0)
    assert p.item() == pytest.approx(1.9, abs=1e-6)
    p.data = p.data.clone()
    step_with(optimizer, p, 1.0)
    assert optimizer.state[p]["master_param"].item() == p.item()


def test_float16_and_bfloat16_parameters_in_one_group(mode):
    """TE refuses that when capturable."""
    params = [mode.parameter([1.0, 2.0], dtype) for dtype in (F32, F16, BF16)]
    optimizer = mode.adam(params, lr=2.0**-4, master_weights=True)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    for p in params:
        assert p.tolist() == pytest.approx([1 - 2.0**-3, 2 - 2.0**-3], abs=2e-3)


@pytest.mark.parametrize("dtype", MOMENTS + [E4M3])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_states_can_be_read_and_written(mode, dtype, name):
    torch.manual_seed(8)
    p = mode.parameter(torch.randn(200))
    optimizer = mode.adam([p], exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    values = torch.rand(200, device=p.device) + 0.01
    optimizer.set_scaled_state(p, name, values)
    address = optimizer.state[p][name].data_ptr()
    read = optimizer.get_unscaled_state(p, name)
    torch.testing.assert_close(read, values, rtol=0.15, atol=2e-3)
    if dtype is F32:
        assert read is optimizer.state[p][name]
    optimizer.set_scaled_state(p, name, read)
    assert equal_bits(optimizer.get_unscaled_state(p, name), read)
    assert optimizer.state[p][name].data_ptr() == address
    # The step works on what was written.
    step_with(optimizer, p, 0.0)
    assert optimizer.state[p][name].data_ptr() == address
    beta = 0.9 if name == "exp_avg" else 0.999
    torch.testing.assert_close(
        optimizer.get_unscaled_state(p, name), beta * read, rtol=0.15, atol=2e-3
    )


@pytest.mark.parametrize("master", [F32, F16, "remainder"])
def test_masters_can_be_read_and_written(mode, master):
    p = mode.parameter(torch.ones(200), BF16)
    optimizer = mode.adam([p], lr=0.0, **options_of(master, F32, F32))
    optimizer.initialize_state(p, master == "remainder")
    values = torch.linspace(1, 2, 200, device=p.device)
    optimizer.set_scaled_state(p, "master_param", values)
    step_with(optimizer, p, 0.0)
    if master is F32:
        assert equal_bits(p, values.to(BF16))
    torch.testing.assert_close(p.detach().float(), values, rtol=2**-8, atol=0)
    read = optimizer.get_unscaled_state(p, "master_param")
    if master == "remainder":
        optimizer.set_scaled_state(p, "master_param", torch.zeros_like(read))
        assert not optimizer.state[p]["master_param"].any()
    else:
        torch.testing.assert_close(read, values, rtol=1e-3, atol=0)


def adam_with_master(mode, values, master):
    p = mode.parameter(values, BF16)
    optimizer = mode.adam([("weight", p)], **options_of(master, F32, F32))
    optimizer.initialize_state(p)
    return p, optimizer


def joined(optimizer, p):
    return join_remainder(p, optimizer.state[p]["master_param"])


@pytest.mark.parametrize(
    "remainders",
    [
        torch.tensor([-32768.0, 32767.0, 0.0, 1.0, -1.0, 12345.0]),
        torch.zeros(6),
        torch.ones(6),
        torch.full((6,), -7.0),
    ],
    ids=["any", "zeros", "ones", "small"],
)
def test_remainders_in_float32(mode, remainders):
    """As Megatron's files hold them, wherever these are; int16 gives the same."""
    values = torch.tensor([1.5, 2.5, -0.75, 0.0, 3.0, 1e-3])
    for given in (remainders, remainders.to(mode.device), remainders.to(torch.int16)):
        p, optimizer = adam_with_master(mode, values, "remainder")
        before, stored = p.detach().clone(), optimizer.state[p]["master_param"]
        optimizer.set_scaled_state(p, "master_param", given)
        assert optimizer.state[p]["master_param"] is stored
        assert torch.equal(stored.cpu(), remainders.to(torch.int16))
        assert equal_bits(p, before)


@pytest.mark.parametrize(
    "master",
    [
        torch.linspace(-1, 1, 50),
        torch.ones(50),
        torch.arange(50).float(),
        # 257 and 259 lie between two numbers of bfloat16, whose nearest even ones differ in side.
        torch.tensor([257.0, 259.0, -257.0, -259.0, 1.0] * 10),
        torch.full((50,), 40000.0),
        torch.tensor([0.0, float("inf"), float("nan"), 1.0, -0.0] * 10),
    ],
    ids=["fractions", "ones", "integers", "halfway", "large", "special"],
)
@pytest.mark.parametrize("rounding", ["even", "up"])
def test_masters_in_float32_beside_remainders(mode, master, rounding):
    """The parameter was loaded before, from whichever kind of run."""
    p, optimizer = adam_with_master(mode, master.double(), "remainder")
    if rounding == "up":
        with torch.no_grad():
            split_master(master.to(p.device), p, torch.empty_like(p, dtype=torch.int16))
    optimizer.set_scaled_state(p, "master_param", master)
    assert equal_bits(joined(optimizer, p), master)


def test_masters_in_float32_set_the_parameter(mode):
    """Unless they might be remainders; in a checkpoint of ours they never are."""
    p, optimizer = adam_with_master(mode, torch.ones(3), "remainder")
    for master in ([0.5, 2.0, 3.0], [1.0, 40000.0, 2.0]):
        optimizer.set_scaled_state(p, "master_param", torch.tensor(master))
        assert joined(optimizer, p).tolist() == master
    q, whole = adam_with_master(mode, torch.full((3,), 2.0), F32)
    step_with(whole, q, 0.0)
    step_with(optimizer, p, 0.0)
    optimizer.load_state_dict(whole.state_dict())
    assert joined(optimizer, p).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("master", [F32, F16])
def test_remainders_where_whole_masters_are_kept_are_refused(mode, master):
    p, optimizer = adam_with_master(mode, torch.ones(3), master)
    kept = optimizer.get_unscaled_state(p, "master_param").clone()
    with pytest.raises(UsageError, match="weight: .* store_param_remainders=True"):
        optimizer.set_scaled_state(p, "master_param", torch.tensor([1.0, -300.0, 0.0]))
    assert equal_bits(optimizer.get_unscaled_state(p, "master_param"), kept)
    # Likely weights, and integers that the parameter has too, are masters.
    for values in ([2.0, 4.0, 0.0], [1024.0, 4.0, 0.0]):
        if values[0] == 1024.0:
            with torch.no_grad():
                p.copy_(torch.tensor(values))
        optimizer.set_scaled_state(p, "master_param", torch.tensor(values))
        assert optimizer.get_unscaled_state(p, "master_param").tolist() == values


def test_unknown_states_are_refused(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p])
    with pytest.raises(UsageError, match="group 0 parameter 0: has no state exp_avg"):
        optimizer.get_unscaled_state(p, "exp_avg")
    with pytest.raises(UsageError, match="group 0 parameter 0: has no state momentum"):
        optimizer.set_scaled_state(p, "momentum", torch.ones(1))
    with pytest.raises(UsageError, match=r"have sizes \(2,\), expected \(1,\)"):
        optimizer.set_scaled_state(p, "exp_avg", torch.ones(2))
    with pytest.raises(UsageError, match="no parameter of this optimizer"):
        optimizer.get_unscaled_state(torch.ones(1), "exp_avg")


def test_states_of_other_formats_are_converted(mode):
    torch.manual_seed(9)
    p = mode.parameter(torch.randn(300))
    optimizer = mode.adam([p], exp_avg_dtype=BF16, exp_avg_sq_dtype=U8)
    first, second = torch.randn(300), torch.rand(300) + 0.1
    optimizer.state[p] = {"exp_avg": first, "exp_avg_sq": second}
    step_with(optimizer, p, 0.0)
    assert optimizer.state[p]["exp_avg"].dtype is BF16
    assert optimizer.state[p]["exp_avg_sq"].dtype is U8
    torch.testing.assert_close(
        optimizer.get_unscaled_state(p, "exp_avg").cpu(), 0.9 * first, rtol=0.02, atol=0.02
    )
    torch.testing.assert_close(
        optimizer.get_unscaled_state(p, "exp_avg_sq").cpu(), second, rtol=0.15, atol=0.01
    )


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda-eager", "cuda-replay"])
@pytest.mark.parametrize("master", MASTERS)
def test_the_bits_of_the_cpu(where, master):
    """Every format gives the same bits eager, replayed and on the processor."""
    on_gpu, on_cpu = make_step_mode(where), make_step_mode("cpu")
    for parameter, gradient, exp_avg, exp_avg_sq in itertools.product(
        PARAMETERS, GRADIENTS, MOMENTS, MOMENTS
    ):
        options = options_of(master, exp_avg, exp_avg_sq)
        a, first, _ = run(on_gpu, parameter, gradient, options)
        b, second, _ = run(on_cpu, parameter, gradient, options)
        assert equal_bits(a, b), (parameter, gradient, exp_avg, exp_avg_sq)
        for name, of_gpu in first.state[a].items():
            assert equal_bits(of_gpu, second.state[b][name]), (name, exp_avg, exp_avg_sq)
        for name, scales in first._scales[a].items():
            assert equal_bits(scales, second._scales[b][name]), (name, exp_avg, exp_avg_sq)


@pytest.mark.parametrize("remainders", [False, True], ids=["f32", "remainders"])
def test_masters_are_a_float32_training_bit_for_bit(mode, remainders):
    """As Megatron-LM asks of a precision-aware optimizer: for 1,000 steps the master of a bfloat16
    parameter has the bits of a float32 parameter, and the parameter those of its rounding. With
    remainders, which round ties up, parameter and remainder together have them."""
    torch.manual_seed(6)
    numel = 278011 if mode.device.type == "cuda" else 1013
    start = torch.rand(numel, device=mode.device).bfloat16()
    reference = start.float().requires_grad_()
    parameter = start.clone().requires_grad_()
    options = {"lr": 1.0, "betas": (0.1, 0.25), "eps": 1e-8}
    whole = mode.adam([reference], **options)
    aware = mode.adam(
        [parameter],
        **options,
        master_weights=True,
        store_param_remainders=remainders,
        use_decoupled_grad=True,
    )
    reference.grad = torch.empty_like(reference)
    parameter.decoupled_grad = torch.empty_like(reference)
    for step in range(1000):
        reference.grad.uniform_()
        parameter.decoupled_grad.copy_(reference.grad)
        whole.step()
        aware.step()
        if step % 50 > 3 and step != 999:
            continue
        master = aware.get_unscaled_state(parameter, "master_param")
        if remainders:
            upper = parameter.detach().view(torch.int16).int() << 16
            assert torch.equal(upper + master.int(), reference.detach().view(torch.int32)), step
        else:
            assert equal_bits(parameter, reference.bfloat16()), step
            assert equal_bits(master, reference), step
