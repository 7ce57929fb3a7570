"""Steps inside captures of the caller's, and what reaches their replays."""

import copy
import gc

import pytest
import torch

from adam_cases import Adam64, close, equal_bits, make_step_mode, set_gradient
from captures import captures  # noqa: F401
from stepgraph import FusedAdam, UsageError, _core

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def captured_step(captures, optimizer, parameters=(), warm=True):
    """A graph with one step; the gradients stay where they are."""
    if warm:
        optimizer.step()
    with captures.capture() as graph:
        optimizer.step()
    return graph


def one_parameter(captures, gradient=1.0, **options):
    p = captures.parameter([1.0])
    set_gradient(p, gradient)
    return p, captures.adam([p], **{"lr": 0.1, **options})


@pytest.mark.parametrize("steps,expected", [(2, 0.8), (3, 0.7), (10, 1e-8)])
def test_replays_count(captures, steps, expected):
    """pytorch#76368: a step that is frozen ends elsewhere."""
    p, optimizer = one_parameter(captures)
    graph = captured_step(captures, optimizer)
    close(p, 0.9)  # capturing runs nothing
    for _ in range(steps - 1):
        graph.replay()
    close(p, expected)
    assert optimizer.param_groups[0]["step"] == steps
    graph.replay()
    assert optimizer.param_groups[0]["step"] == steps + 1
    assert optimizer.state_dict()["param_groups"][0]["step"] == steps + 1


@pytest.mark.parametrize(
    "key,later",
    [("lr", 0.03), ("weight_decay", 0.5), ("betas", (0.5, 0.9)), ("eps", 0.2)],
)
def test_values_reach_replays_without_a_step(captures, key, later):
    start = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-3}
    p, optimizer = one_parameter(captures, **start)
    reference = Adam64(p, **start)
    graph = captured_step(captures, optimizer)
    graph.replay()
    optimizer.param_groups[0][key] = later
    graph.replay()
    graph.replay()
    for t in range(4):
        if t == 2:
            setattr(reference, key, later)
        reference.step(p.grad)
    close(p, reference.value.numpy())


def test_rising_weight_decay(captures):
    """dion#108, replayed: frozen gives .931780."""
    p, optimizer = one_parameter(captures, gradient=0.0, weight_decay=0.1)
    graph = captured_step(captures, optimizer)
    for t in range(2, 5):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * t
        graph.replay()
    close(p, 0.903450)


def test_schedulers_reach_replays(captures):
    """burn#5779."""
    p, optimizer = one_parameter(captures)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    graph = captured_step(captures, optimizer)
    for _ in range(4):
        schedule.step()
        graph.replay()
    close(p, 0.806250)


def test_a_learning_rate_tensor_is_read_by_replays(captures):
    lr = torch.tensor(0.1, device=captures.device)
    p, optimizer = one_parameter(captures, lr=lr)
    graph = captured_step(captures, optimizer)
    lr.fill_(0.05)
    graph.replay()
    close(p, 0.85)
    assert optimizer.param_groups[0]["lr"] is lr


def test_options_of_the_step_reach_replays(captures):
    p, optimizer = one_parameter(captures, gradient=3.0, max_norm=10.0, unscale_gradients=True)
    graph = captured_step(captures, optimizer)
    optimizer.clip_grad_norm(1.0)
    p.grad.fill_(3.0)
    graph.replay()
    assert p.grad.item() == pytest.approx(1.0, rel=1e-5)
    optimizer.skip_above_norm(2.0)
    p.grad.fill_(3.0)
    graph.replay()
    assert optimizer.status().skipped == 1


def test_a_loss_scale_reaches_replays(captures):
    p, optimizer = one_parameter(captures, gradient=8.0, loss_scale=8.0)
    graph = captured_step(captures, optimizer)
    optimizer.set_loss_scale(4.0)
    if captures.device.type == "cuda":  # the stand-in delivers with the replay
        assert optimizer.loss_scale_tensor().item() == 4.0
    p.grad.fill_(4.0)
    graph.replay()
    close(p, 0.8)


def test_the_first_step_may_not_be_captured(captures):
    p, optimizer = one_parameter(captures)
    with pytest.raises(UsageError, match=r"call prepare\(\) or step once before the capture"):
        with captures.capture():
            optimizer.step()
    graph = captured_step(captures, optimizer)
    graph.replay()
    close(p, 0.8)


def test_prepare_makes_it_possible(captures):
    p, optimizer = one_parameter(captures)
    optimizer.prepare()
    graph = captured_step(captures, optimizer, warm=False)
    close(p, 1.0)
    graph.replay()
    close(p, 0.9)
    assert optimizer.param_groups[0]["step"] == 1


def test_prepare_without_gradients(captures):
    p, q = captures.parameter([1.0]), captures.parameter([1.0])
    optimizer = captures.adam([p, q], lr=0.1)
    optimizer.prepare()
    assert not optimizer.state[p]["exp_avg"].any()
    kept = torch.ones(1, device=captures.device), torch.ones(1, device=captures.device)
    p.grad, q.grad = kept
    graph = captured_step(captures, optimizer, warm=False)
    graph.replay()
    close(p, 0.9)
    close(q, 0.9)


def test_prepared_gradients_that_do_not_come(captures):
    p, q = captures.parameter([1.0]), captures.parameter([1.0])
    optimizer = captures.adam([("first", p), ("second", q)], lr=0.1)
    optimizer.prepare()
    set_gradient(p, 1.0)
    with pytest.raises(UsageError, match="second: a gradient"), captures.capture():
        optimizer.step()
    optimizer.step()
    close(p, 0.9)
    close(q, 1.0)


@pytest.mark.filterwarnings("ignore:FusedAdam. the step was built anew")
def test_gradients_dropped_before_prepare(captures):
    """They are expected to come, but a step without them must not read their old memory."""
    p, optimizer = one_parameter(captures)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.prepare()
    optimizer.prepare()
    optimizer.step()
    close(p, 0.9)
    set_gradient(p, 1.0)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 3
    assert p.item() < 0.9


def test_a_gradient_that_is_missing_in_the_capture(captures):
    """dion#108: the error names it."""
    p, q = captures.parameter([1.0]), captures.parameter([1.0])
    optimizer = captures.adam([("first", p), ("second", q)], lr=0.1)
    set_gradient(p, 1.0)
    set_gradient(q, 1.0)
    optimizer.step()
    q.grad = None
    with pytest.raises(UsageError, match="second: a gradient"), captures.capture():
        optimizer.step()


def test_gradients_of_the_capture_are_bound_beside_it(captures):
    """The usual order: warm up, drop the gradients, capture with those of the graph's pool."""
    p, optimizer = one_parameter(captures)
    optimizer.step()
    old = p.grad
    optimizer.zero_grad()
    optimizer.param_groups[0]["weight_decay"] = 0.5
    p.grad = torch.full((1,), -1.0, device=captures.device)
    with captures.capture() as graph:
        optimizer.step()
    reference = Adam64(torch.ones(1), lr=0.1)
    reference.step(old)
    reference.weight_decay = 0.5
    for _ in range(3):
        graph.replay()
        reference.step(p.grad)
    close(p, reference.value.numpy())
    assert optimizer.rebinds == 1
    if captures.device.type == "cpu":
        assert optimizer.engine.runner.executor.calls["beside"] == 1


@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_memory_that_moves_after_the_capture_is_refused(captures, what):
    """pytorch#181723: re-bound, re-captured or refused, never the old buffer."""
    p = captures.parameter([1.0])
    optimizer = captures.adam([("weight", p)], lr=0.1)
    set_gradient(p, 1.0)
    graph = captured_step(captures, optimizer)
    kept = (p.grad, p.data)
    if what == "gradient":
        p.grad = p.grad.clone()
    else:
        p.data = p.data.clone()
    assert "weight" in optimizer.recapture_required()
    for _ in range(2):
        with pytest.raises(UsageError, match=f"weight: the {what} moved .*abandon_captured_steps"):
            optimizer.step()
    p.grad, p.data = kept
    assert optimizer.recapture_required() is None
    optimizer.step()
    graph.replay()
    close(p, 0.7)
    del graph
    optimizer.abandon_captured_steps()
    p.grad = p.grad.clone()
    optimizer.step()
    close(p, 0.6)


def test_a_gradient_that_goes_after_the_capture_is_refused(captures):
    p = captures.parameter([1.0])
    optimizer = captures.adam([("weight", p)], lr=0.1)
    set_gradient(p, 1.0)
    captured_step(captures, optimizer)
    p.grad = None
    with pytest.raises(UsageError, match="weight: a gradient .* abandon_captured_steps"):
        optimizer.step()


def two_parameters(captures, **options):
    """Two parameters and their gradients, warmed up and captured."""
    params = [captures.parameter([1.0]), captures.parameter([1.0])]
    optimizer = captures.adam(list(zip(("first", "second"), params)), lr=0.1, **options)
    for p in params:
        set_gradient(p, 1.0)
    return params, [p.grad for p in params], optimizer, captured_step(captures, optimizer)


def replace_groups(optimizer):
    """New dictionaries and lists of the same content, as Megatron puts into place."""
    optimizer.param_groups = [
        {**group, "params": list(group["params"])} for group in optimizer.param_groups
    ]


def replace_states(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


@pytest.mark.parametrize("change", [replace_groups, replace_states])
@pytest.mark.parametrize("way", ["deliver", "prepare"])
@pytest.mark.parametrize("dropped", [(0, 1), (1,)], ids=["all", "one"])
def test_dropped_gradients_stay_in_a_captured_step(captures, change, way, dropped):
    """zero_grad() between replays: what is planned anew keeps the memory that replays read."""
    params, kept, optimizer, graph = two_parameters(captures)
    for i in dropped:
        params[i].grad = None
    change(optimizer)
    getattr(optimizer, way)()
    assert optimizer.captured and optimizer.recapture_required() is None
    for gradient in kept:
        gradient.fill_(-1.0)
    reference = Adam64(torch.ones(1), lr=0.1)
    for g in (1.0, -1.0, -1.0):
        reference.step(torch.tensor([g]))
    graph.replay()
    graph.replay()
    for p in params:
        close(p, reference.value.numpy())
    assert optimizer.param_groups[0]["step"] == 3
    # A step outside the capture would have to leave them out.
    with pytest.raises(UsageError, match=f"{('first', 'second')[dropped[0]]}.*: a gradient"):
        optimizer.step()
    for p, gradient in zip(params, kept):
        p.grad = gradient
    optimizer.step()
    reference.step(torch.tensor([-1.0]))
    for p in params:
        close(p, reference.value.numpy())
    del graph
    optimizer.abandon_captured_steps()
    params[1].grad = None
    with pytest.warns(UserWarning, match="built anew because gradients came or went"):
        optimizer.step()
    close(params[1], reference.value.numpy())


def test_dropped_gradients_and_values_that_change(captures):
    params, kept, optimizer, graph = two_parameters(captures)
    optimizer.zero_grad()
    replace_groups(optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.deliver()
    graph.replay()
    reference = Adam64(torch.ones(1), lr=0.1)
    reference.step(kept[0])
    reference.weight_decay = 0.5
    reference.step(kept[0])
    for p in params:
        close(p, reference.value.numpy())


def test_a_gradient_that_comes_elsewhere_is_refused(captures):
    """Also if it was None when the step was planned anew."""
    params, kept, optimizer, graph = two_parameters(captures)
    optimizer.zero_grad()
    replace_groups(optimizer)
    optimizer.deliver()
    params[0].grad = kept[0]
    set_gradient(params[1], 1.0)
    assert optimizer.recapture_required() == "second: the gradient moved to other memory"
    with pytest.raises(UsageError, match="second: the gradient moved"):
        optimizer.step()
    replace_groups(optimizer)
    with pytest.raises(UsageError, match="second: the gradient moved"):
        optimizer.deliver()
    params[1].grad = kept[1]
    optimizer.step()
    graph.replay()
    for p in params:
        close(p, 0.7)


def test_a_gradient_of_another_type_in_the_same_place_is_refused(captures):
    p = captures.parameter([1.0])
    optimizer = captures.adam([("weight", p)], lr=0.1, use_decoupled_grad=True)
    set_gradient(p, 1.0, "decoupled_grad")
    p.decoupled_grad = p.decoupled_grad.to(torch.bfloat16)
    captured_step(captures, optimizer)
    p.decoupled_grad = p.decoupled_grad.view(torch.float16)
    assert optimizer.recapture_required() == "weight: the gradient changed its type"
    replace_groups(optimizer)
    with pytest.raises(UsageError, match="weight: the gradient has type torch.float16, expected"):
        optimizer.deliver()


def test_a_gradient_that_was_not_captured_takes_no_part(captures):
    """Not even as one that is expected to come."""
    p, q = captures.parameter([1.0]), captures.parameter([1.0])
    optimizer = captures.adam([("first", p), ("second", q)], lr=0.1)
    set_gradient(p, 1.0)
    graph = captured_step(captures, optimizer)
    replace_groups(optimizer)
    optimizer.prepare()
    optimizer.step()
    graph.replay()
    close(p, 0.7)
    close(q, 1.0)
    set_gradient(q, 1.0)
    assert optimizer.recapture_required().startswith("second: a gradient came")
    with pytest.raises(UsageError, match="second: a gradient"):
        optimizer.step()


def test_a_dropped_gradient_needs_no_recapture(captures):
    params, kept, optimizer, graph = two_parameters(captures)
    optimizer.zero_grad()
    assert optimizer.recapture_required() is None
    optimizer.prepare()
    assert optimizer.recapture_required() is None
    with pytest.raises(UsageError, match="first, second: a gradient"):
        optimizer.step()
    graph.replay()
    for p in params:
        close(p, 0.8)


def test_whether_a_step_was_captured(captures):
    p, optimizer = one_parameter(captures)
    assert not optimizer.captured
    optimizer.step()
    assert not optimizer.captured
    for end in (optimizer.abandon_captured_steps, optimizer.release):
        graph = captured_step(captures, optimizer)
        assert optimizer.captured
        graph.replay()
        assert optimizer.captured
        del graph
        end()
        assert not optimizer.captured


def test_another_plan_after_the_capture_is_refused(captures):
    p, optimizer = one_parameter(captures)
    graph = captured_step(captures, optimizer)
    q = captures.parameter([1.0])
    set_gradient(q, 1.0)
    optimizer.add_param_group({"params": [q]})
    for _ in range(2):
        with pytest.raises(UsageError, match="abandon_captured_steps"):
            optimizer.step()
    graph.replay()
    close(p, 0.8)
    del graph
    optimizer.abandon_captured_steps()
    optimizer.step()
    close(p, 0.7)
    close(q, 0.9)
    assert [group["step"] for group in optimizer.param_groups] == [3, 1]


def test_clipping_that_needs_another_plan_is_refused(captures):
    p, optimizer = one_parameter(captures)
    captured_step(captures, optimizer)
    with pytest.raises(UsageError, match="max_norm: the captured step does not measure"):
        optimizer.clip_grad_norm(1.0)
    optimizer.step()
    close(p, 0.8)


@pytest.mark.parametrize("way", ["deliver", "prepare"])
def test_states_that_are_replaced_after_the_capture(captures, way):
    p, optimizer = one_parameter(captures)
    graph = captured_step(captures, optimizer)
    fresh = torch.full((1,), 0.5, device=captures.device)
    optimizer.state[p]["exp_avg"] = fresh
    getattr(optimizer, way)()
    graph.replay()
    assert fresh.item() == pytest.approx(0.55)


def test_memory_that_moves_with_a_state_is_refused_too(captures):
    p, optimizer = one_parameter(captures)
    captured_step(captures, optimizer)
    optimizer.state[p]["exp_avg"] = torch.full((1,), 0.5, device=captures.device)
    p.grad = p.grad.clone()
    with pytest.raises(UsageError, match="group 0 parameter 0: the gradient moved"):
        optimizer.step()


def test_eager_steps_and_replays_share_counters(captures):
    p, optimizer = one_parameter(captures)
    graph = captured_step(captures, optimizer)
    for _ in range(2):
        graph.replay()
        optimizer.step()
    close(p, 0.5)
    assert optimizer.param_groups[0]["step"] == 5
    optimizer.param_groups[0]["step"] = 1000
    graph.replay()
    assert optimizer.param_groups[0]["step"] == 1001


def test_loading_after_the_capture(captures):
    """pytorch#103256: the next replay equals the eager resume."""
    torch.manual_seed(0)
    start, gradients = torch.randn(300), torch.randn(6, 300)
    options = dict(lr=2.0**-6, exp_avg_dtype=torch.bfloat16, weight_decay=0.1)
    p = captures.parameter(start)
    optimizer = captures.adam([p], **options)
    set_gradient(p, gradients[0])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    values = p.detach().clone()
    with captures.capture() as graph:
        optimizer.step()
    for g in gradients[:3]:
        p.grad.copy_(g)
        graph.replay()
    optimizer.param_groups[0]["lr"] = 0.5

    optimizer.load_state_dict(saved)
    with torch.no_grad():
        p.copy_(values)
    q = captures.parameter(values.cpu())
    eager = captures.adam([q], **options)
    eager.load_state_dict(saved)
    for g in gradients:
        p.grad.copy_(g)
        set_gradient(q, g)
        graph.replay()
        eager.step()
    assert equal_bits(p, q)
    assert optimizer.param_groups[0]["step"] == 7
    assert float(optimizer.param_groups[0]["lr"]) == 2.0**-6


def test_reading_inside_a_capture_is_refused(captures):
    p, optimizer = one_parameter(captures)
    optimizer.step()
    for read in (
        lambda: optimizer.param_groups[0]["step"],
        optimizer.status,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    ):
        with pytest.raises(UsageError, match="captur"), captures.capture():
            read()
    graph = captured_step(captures, optimizer)
    graph.replay()
    close(p, 0.7)


def test_a_scale_and_an_overflow_in_a_capture(captures):
    """The tensors of a scaler are read by every replay."""
    p, optimizer = one_parameter(captures, gradient=4.0)
    found_inf = torch.zeros((), device=captures.device)
    scale = torch.full((), 4.0, device=captures.device)
    optimizer.step()
    if captures.device.type == "cpu":
        # The stand-in records steps, not the copies before them.
        def copy_inputs():
            optimizer.engine.found_inf.copy_(found_inf)
            optimizer.engine.grad_scale.copy_(scale)

        with captures.capture() as graph:
            captures.capture.do(copy_inputs)
            optimizer.found_inf, optimizer.grad_scale = found_inf, scale
            optimizer.step()
    else:
        with captures.capture() as graph:
            optimizer.found_inf, optimizer.grad_scale = found_inf, scale
            optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    found_inf.fill_(2.0)
    graph.replay()
    assert optimizer.status().skipped == 1
    found_inf.zero_()
    scale.fill_(2.0)
    before = optimizer.state[p]["exp_avg"].item()
    graph.replay()
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.9 * before + 0.1 * 2.0)


def test_inputs_of_an_eager_step_do_not_stay_for_replays(captures):
    p, optimizer = one_parameter(captures)
    graph = captured_step(captures, optimizer)
    optimizer.found_inf = torch.ones((), device=captures.device)
    optimizer.grad_scale = None
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    close(p, 0.9)
    graph.replay()
    close(p, 0.8)


def test_twenty_captures(captures):
    p, optimizer = one_parameter(captures)
    optimizer.step()
    for _ in range(20):
        p.grad = torch.ones(1, device=captures.device)
        with captures.capture() as graph:
            optimizer.step()
        graph.replay()
        del graph
        optimizer.abandon_captured_steps()
    assert p.item() == pytest.approx(1 - 2.1, abs=1e-5)
    assert optimizer.param_groups[0]["step"] == 21
    assert optimizer.captures == 1


def test_release_and_capture_again(captures):
    p, optimizer = one_parameter(captures)
    graph = captured_step(captures, optimizer)
    graph.replay()
    del graph
    optimizer.release()
    assert optimizer.param_groups[0]["step"] == 2
    with pytest.raises(UsageError, match="before the capture"), captures.capture():
        optimizer.step()
    graph = captured_step(captures, optimizer)
    graph.replay()
    close(p, 0.6)
    assert optimizer.param_groups[0]["step"] == 4


def test_new_quantization_scales_reach_replays(captures):
    """TransformerEngine#2753: the second replay quantizes with the new scale and amax."""
    scale, amax, scale_inv = (
        torch.full((1,), x, device=captures.device) for x in (16.0, 0.0, 1 / 16)
    )
    p = (torch.ones(64, device=captures.device) * 16).to(torch.float8_e4m3fn).view(torch.uint8)
    optimizer = captures.adam([p], lr=0.25, master_weights=True, use_decoupled_grad=True)
    optimizer.set_fp8_scaling(p, scale, amax, scale_inv)
    p.decoupled_grad = torch.ones(64, device=captures.device, dtype=torch.bfloat16)
    graph = captured_step(captures, optimizer)
    graph.replay()
    scale.fill_(32.0)
    amax.zero_()
    graph.replay()
    values = p.view(torch.float8_e4m3fn).float().cpu() / 32.0
    assert values.numpy() == pytest.approx(0.25, abs=1e-6)
    assert amax.item() == pytest.approx(0.25) and scale_inv.item() == 1 / 32.0


def test_a_schedule_on_the_device_runs_in_replays(captures):
    schedule = _core.schedules.exponential_lr(learning_rate=0.1, gamma=0.5)
    p, optimizer = one_parameter(captures, schedule=schedule)
    graph = captured_step(captures, optimizer)
    for _ in range(4):
        graph.replay()
    close(p, 0.806250)
    optimizer.param_groups[0]["lr"] = 0.2
    graph.replay()
    close(p, 0.606250)
    optimizer.resume_schedule(0)
    graph.replay()
    close(p, 0.606250 - 0.1 * 0.5**6)


# What only a GPU shows.


@pytest.mark.gpu
@needs_gpu
def test_a_step_that_is_not_capturable_names_the_option():
    p = torch.ones(4, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], lr=0.1)
    optimizer.step()
    with pytest.raises(UsageError, match="capturable=True"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    optimizer.step()
    close(p, 0.8)


@pytest.mark.gpu
@needs_gpu
def test_its_own_replays():
    p = torch.ones(4, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], lr=0.1, capturable=True)
    for t in range(5):
        optimizer.param_groups[0]["weight_decay"] = 0.0 if t % 2 else 1e-9
        if t == 3:
            p.grad = torch.ones_like(p)
        optimizer.step()
    close(p, 0.5)
    assert optimizer.engine.runner.executor.instantiations == 1
    assert optimizer.captures == 1


@pytest.mark.gpu
@needs_gpu
def test_the_learning_rate_is_a_tensor_that_stays():
    p, q = (torch.ones(4, device="cuda", requires_grad=True) for _ in range(2))
    optimizer = FusedAdam([{"params": [p], "lr": 0.2}], capturable=True)
    optimizer.add_param_group({"params": [q], "lr": 0.3})
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(lr, torch.Tensor) and lr.is_cuda and lr.dim() == 0 for lr in lrs)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    assert [float(lr) for lr in lrs] == [0.5, 0.25]
    assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, lrs))
    optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.1
    assert float(optimizer.param_groups[0]["initial_lr"]) == 0.5
    with pytest.raises(UsageError, match="group 0: lr is assigned while"):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
        optimizer.step()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.param_groups[0]["lr"] = 1.0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("master", ["none", torch.float32, torch.float16, "remainder"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_eager_replayed_and_captured_give_the_same_bits(master, moments, gradient):
    torch.manual_seed(0)
    start, gradients = torch.randn(5000), torch.randn(6, 5000)
    runs = []
    for way in ("cpu", "eager", "replay", "captured"):
        where = make_step_mode("cpu" if way == "cpu" else "cuda-eager")
        p = where.parameter(start, torch.bfloat16)
        options = dict(exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
        if master == "remainder":
            options.update(master_weights=True, store_param_remainders=True)
        elif master != "none":
            options.update(master_weights=True, master_weight_dtype=master)
        optimizer = FusedAdam(
            [p],
            lr=2.0**-6,
            weight_decay=0.1,
            max_norm=1.0,
            use_decoupled_grad=True,
            capturable=way in ("replay", "captured"),
            **options,
        )
        p.decoupled_grad = gradients[0].to(p.device, gradient, copy=True)
        optimizer.step()
        graph = None
        for g in gradients[1:]:
            p.decoupled_grad.copy_(g)
            if way != "captured":
                optimizer.step()
                continue
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        runs.append([p, *optimizer.state[p].values(), *optimizer._scales[p].values()])
    for other in runs[1:]:
        assert all(equal_bits(a, b) for a, b in zip(runs[0], other))


@pytest.mark.gpu
@needs_gpu
def test_a_whole_iteration_in_a_capture():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.cuda()
    other = copy.deepcopy(model)
    x = torch.randn(64, 8, device="cuda")
    optimizer = FusedAdam(model.named_parameters(), lr=0.01, capturable=True, loss_scale=128.0)
    expected = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.0)

    def iterate():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        (loss * optimizer.loss_scale_tensor()).backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iterate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate()
    for t in range(20):
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**t
        graph.replay()
    for t in range(23):
        expected.zero_grad()
        torch.nn.functional.mse_loss(other(x), x.sum(1, keepdim=True)).backward()
        expected.param_groups[0]["lr"] = 0.01 if t < 3 else 0.01 * 0.9 ** (t - 3)
        expected.step()
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert optimizer.param_groups[0]["step"] == 23


@pytest.mark.gpu
@needs_gpu
def test_device_memory_stays_flat():
    """warp#1429: build, capture, replay, drop."""
    p = torch.ones(1 << 20, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    free = []
    for _ in range(20):
        optimizer = FusedAdam([p], lr=0.1, capturable=True)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        del graph
        optimizer.release()
        del optimizer
        gc.collect()
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[4]


@pytest.mark.gpu
@needs_gpu
def test_streams_are_ordered():
    """Steps on different streams, each after the one before."""
    p = torch.ones(1 << 22, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    for capturable in (False, True):
        with torch.no_grad():
            p.fill_(1.0)
        optimizer = FusedAdam([p], lr=0.1, capturable=capturable)
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for t in range(9):
            with torch.cuda.stream(streams[t % 3]):
                optimizer.step()
        torch.cuda.synchronize()
        assert p.detach().cpu().numpy() == pytest.approx(0.1, abs=1e-5)


@pytest.mark.gpu
@needs_gpu
def test_a_steady_step_does_not_wait():
    p = torch.ones(64, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    for capturable in (False, True):
        optimizer = FusedAdam([p], lr=0.1, capturable=capturable)
        optimizer.step()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(int(2e9))
            done = torch.cuda.Event()
            for t in range(3):
                optimizer.param_groups[0]["lr"] = 0.1 / (t + 1)
                optimizer.step()
            done.record()
            assert not done.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
