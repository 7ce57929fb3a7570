"""Groups, parameters, gradients and states that change between steps."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

from adam_cases import Adam64, close, mode, set_gradient, step_with  # noqa: F401
from stepgraph import UsageError
from stepgraph.live_group import LiveGroup, StateMap

# Values.


@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas", "eps"])
@pytest.mark.parametrize("way", ["assign", "update", "tensor", "tensor in place", "list"])
def test_values_reach_the_next_step(mode, key, way):
    start = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-3}
    later = {"lr": 0.03, "weight_decay": 0.5, "betas": (0.5, 0.9), "eps": 0.2}[key]
    if way == "list" and key != "betas" or way == "tensor in place" and key == "betas":
        pytest.skip("not for this value")
    p = mode.parameter([1.0, -2.0])
    options = dict(start)
    if way == "tensor in place":
        options[key] = torch.tensor(start[key])
    if way == "list":
        options[key] = list(start[key])
    optimizer = mode.adam([p], **options)
    group = optimizer.param_groups[0]
    reference = Adam64(p, **start)
    for t in range(4):
        if t == 2:
            if way == "assign":
                group[key] = later
            elif way == "update":
                group.update({key: later})
            elif way == "list":
                group[key][0], group[key][1] = later
            elif way == "tensor":
                value = later
                group[key] = (
                    tuple(torch.tensor(b) for b in value) if key == "betas" else torch.tensor(value)
                )
            elif isinstance(group[key], torch.Tensor) and group[key].is_cuda:
                group[key].fill_(later)
            else:
                options[key].fill_(later)
            setattr(reference, key, later)
        step_with(optimizer, p, 1.0)
        reference.step(p.grad)
    close(p, reference.value.numpy())


def test_a_tensor_of_betas_that_changes_in_place(mode):
    p = mode.parameter([1.0])
    b1, b2 = torch.tensor(0.9), torch.tensor(0.999)
    optimizer = mode.adam([p], lr=0.1, betas=(b1, b2))
    reference = Adam64(p, lr=0.1)
    for t in range(4):
        if t == 2:
            b1.fill_(0.5)
            reference.betas = (0.5, 0.999)
        step_with(optimizer, p, 1.0 if t < 2 else -1.0)
        reference.step(p.grad)
    close(p, reference.value.numpy())


@pytest.mark.parametrize(
    "key,value,message",
    [
        ("lr", -1.0, "lr is -1.0"),
        ("lr", float("nan"), "lr is nan"),
        ("lr", "fast", "lr is 'fast'"),
        ("lr", torch.ones(2), "lr has 2 elements"),
        ("weight_decay", -0.1, "weight_decay is -0.1"),
        ("eps", float("inf"), "eps is inf"),
        ("betas", (0.9, 1.0), "betas holds 1.0"),
        ("betas", 0.9, "betas is 0.9"),
        ("step", -1, "step is -1"),
        ("step", 1.5, "step is 1.5"),
    ],
)
def test_bad_values_are_refused_at_once(mode, key, value, message):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    before = optimizer.param_groups[0][key]
    with pytest.raises(UsageError, match="group 0: " + message):
        optimizer.param_groups[0][key] = value
    assert optimizer.param_groups[0][key] is before or optimizer.param_groups[0][key] == before
    step_with(optimizer, p, 1.0)
    close(p, [0.8])


def test_step_counts_can_be_read_and_assigned(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    group = optimizer.param_groups[0]
    assert "step" not in group
    step_with(optimizer, p, 1.0)
    step_with(optimizer, p, 1.0)
    assert group["step"] == 2 and type(group["step"]) is int
    assert dict(group)["step"] == 2 and {**group}["step"] == 2 and group.copy()["step"] == 2
    group["step"] = 10
    assert group["step"] == 10 and optimizer.status().groups[0].step == 10
    step_with(optimizer, p, 1.0)
    assert group["step"] == 11
    group["step"] = torch.tensor(3)
    step_with(optimizer, p, 1.0)
    assert group["step"] == 4


def test_copies_of_groups_are_plain(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    group = optimizer.param_groups[0]
    assert isinstance(group, LiveGroup) and isinstance(group, dict)
    for made in (group.copy(), copy.copy(group), pickle.loads(pickle.dumps(group)), group | {}):
        assert type(made) is dict and "lr" in made
    assert copy.deepcopy(group)["params"][0] is not p
    assert repr(group) == repr(dict(group))


def test_reading_does_not_touch_the_values(mode):
    group = mode.adam([mode.parameter([1.0])], lr=0.1).param_groups[0]
    assert group.get("nothing") is None and group.get("nothing", 3) == 3
    assert group.setdefault("max_lr", 0.5) == 0.5 and group["max_lr"] == 0.5
    assert group.pop("max_lr") == 0.5 and "max_lr" not in group
    with pytest.raises(KeyError):
        group.pop("max_lr")
    assert len(list(group.items())) == len(group) == len(list(group.values()))


# Lists of parameters.


def test_steps_of_empty_groups_advance(mode):
    """TransformerEngine#1986."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([{"params": [p]}, {"params": []}], lr=0.1)
    for _ in range(3):
        step_with(optimizer, p, 1.0)
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


def test_steps_advance_without_any_gradient(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert optimizer.state[p]["exp_avg"].tolist() == [0.0]
    close(p, [1.0])


def test_a_missing_gradient_leaves_the_parameter_out(mode):
    a, b = mode.parameter([1.0]), mode.parameter([1.0])
    optimizer = mode.adam([a, b], lr=0.1, weight_decay=0.5)
    set_gradient(a, 1.0)
    set_gradient(b, 1.0)
    optimizer.step()
    state = optimizer.state[b]["exp_avg"].clone()
    before = b.detach().clone()
    b.grad = None
    with pytest.warns(UserWarning, match="group 0 parameter 1"):
        optimizer.step()
    assert torch.equal(b, before) and torch.equal(optimizer.state[b]["exp_avg"], state)
    set_gradient(b, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert b.item() < before.item()
    assert optimizer.param_groups[0]["step"] == 3


def test_gradients_at_new_addresses_are_followed(mode):
    """pytorch#181723."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    held = []
    for _ in range(5):
        set_gradient(p, 1.0)
        held.append(p.grad)  # so that each has its own memory
        optimizer.step()
        optimizer.zero_grad()
        assert p.grad is None
    close(p, [0.5])
    assert optimizer.rebinds == 4 and optimizer.captures == 1


def test_gradient_types_may_change(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, use_decoupled_grad=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        p.decoupled_grad = torch.ones(1, dtype=dtype, device=p.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    close(p, [0.6])


def test_groups_added_later_count_from_zero(mode):
    a, b = mode.parameter([1.0]), mode.parameter([1.0])
    optimizer = mode.adam([a], lr=0.1)
    for _ in range(3):
        step_with(optimizer, a, 1.0)
    optimizer.add_param_group({"params": [b], "lr": 0.01})
    if optimizer.capturable:
        # TE keeps the lr of such a group on the CPU.
        assert optimizer.param_groups[1]["lr"].device == b.device
    set_gradient(b, 1.0)
    step_with(optimizer, a, 1.0)
    close(a, [0.6])
    close(b, [0.99])
    assert [group["step"] for group in optimizer.param_groups] == [4, 1]


def test_replaced_lists_are_followed(mode):
    a, b, c = (mode.parameter([1.0]) for _ in range(3))
    optimizer = mode.adam([a, b], lr=0.1)
    for p in (a, b, c):
        set_gradient(p, 1.0)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [b, c]
    optimizer.step()
    close(a, [0.9])
    close(b, [0.8])
    # c starts at the step of its group, with moments of zero.
    assert c.item() == pytest.approx(1 - 0.1 * (0.1 / 0.19) / (0.001 / 0.001999) ** 0.5, abs=1e-6)
    optimizer.param_groups[0]["params"].append(a)
    optimizer.step()
    assert a.item() < 0.9
    assert optimizer.param_groups[0]["step"] == 3


def test_replaced_groups_go_on(mode):
    """What Megatron-LM does after construction: plain dictionaries in place of groups."""
    a, b = mode.parameter([1.0]), mode.parameter([1.0])
    optimizer = mode.adam([{"params": [a]}, {"params": [b], "lr": 0.01}], lr=0.1)
    for p in (a, b):
        set_gradient(p, 1.0)
    optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.step()
    assert all(isinstance(group, LiveGroup) for group in optimizer.param_groups)
    if optimizer.capturable:
        assert optimizer.param_groups[0]["lr"] is lr
    assert [group["step"] for group in optimizer.param_groups] == [2, 2]
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.2, "step": 2}
    optimizer.step()
    close(a, [0.6])
    close(b, [0.97])
    optimizer.param_groups.reverse()
    optimizer.step()
    close(a, [0.4])
    close(b, [0.96])
    del optimizer.param_groups[0]
    optimizer.step()
    close(a, [0.2])
    close(b, [0.96])


def test_a_replaced_group_may_bring_its_step(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    for _ in range(3):
        step_with(optimizer, p, 1.0)
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "step": 0}
    optimizer.state[p]["exp_avg"].zero_()
    optimizer.state[p]["exp_avg_sq"].zero_()
    step_with(optimizer, p, 1.0)
    close(p, [0.6])
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "step": 41}
    step_with(optimizer, p, 1.0)
    assert optimizer.param_groups[0]["step"] == 42


def test_initial_lr_does_not_alias(mode):
    lr = torch.tensor(0.1, device=mode.device)
    group = mode.adam([mode.parameter([1.0])], lr=lr).param_groups[0]
    assert group["lr"] is lr
    group["initial_lr"] = group["lr"]
    lr.fill_(0.5)
    assert float(group["initial_lr"]) == pytest.approx(0.1)
    group["lr"] = group["initial_lr"]
    assert float(group["lr"]) == pytest.approx(0.1)
    group["lr"].fill_(0.5)
    assert float(group["initial_lr"]) == pytest.approx(0.1)


def test_replaced_states_are_followed(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    fresh = torch.full((1,), 0.5, device=p.device)
    optimizer.state[p]["exp_avg"] = fresh
    step_with(optimizer, p, 1.0)
    assert optimizer.state[p]["exp_avg"] is fresh
    assert fresh.item() == pytest.approx(0.55)
    optimizer.state = {p: {"exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}}
    step_with(optimizer, p, 1.0)
    assert isinstance(optimizer.state, StateMap)
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.1)
    optimizer.state.clear()
    step_with(optimizer, p, 1.0)
    assert optimizer.state[p]["exp_avg"].item() == pytest.approx(0.1)


def test_state_memory_that_moves_is_followed(mode):
    p = mode.parameter(torch.ones(64))
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    moment = optimizer.state[p]["exp_avg"]
    moment.data = moment.data.clone()
    step_with(optimizer, p, 1.0)
    assert moment.cpu().numpy() == pytest.approx(0.19, abs=1e-6)


def test_parameter_memory_that_moves_is_followed(mode):
    p = mode.parameter(torch.ones(64))
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    old = p.data
    p.data = p.data.clone()
    step_with(optimizer, p, 1.0)
    close(p, 0.8)
    close(old, 0.9)


def test_a_resized_parameter_is_refused(mode):
    p = mode.parameter(torch.ones(64))
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    p.data = torch.ones(32, device=p.device)
    p.grad = torch.ones(32, device=p.device)
    with pytest.raises(UsageError, match="group 0 parameter 0: the parameter has sizes"):
        optimizer.step()


def test_many_groups_of_one_tensor(mode):
    """rf-detr#1409: 465 groups with lr and weight decay of their own."""
    torch.manual_seed(7)
    starts = torch.randn(465, 3)
    params = [mode.parameter(row) for row in starts]
    theirs = [mode.parameter(row) for row in starts]

    def groups(of):
        return [
            {"params": [p], "lr": 1e-3 * (1 + i), "weight_decay": 1e-2 * (i % 7)}
            for i, p in enumerate(of)
        ]

    optimizer = mode.adam(groups(params))
    expected = torch.optim.AdamW(groups(theirs))
    for _ in range(3):
        for a, b in zip(params, theirs):
            g = torch.randn(3).to(a.device)
            a.grad, b.grad = g, g.clone()
        for o in (optimizer, expected):
            for group in o.param_groups:
                group["lr"] = float(group["lr"]) * 0.9
            o.step()
    for a, b in zip(params, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    plan = optimizer.engine.runner.executor.plan
    assert sum(node["kind"] == "update" for node in plan.nodes()) == 1


def test_zero_grad_reaches_decoupled_gradients(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], use_decoupled_grad=True)
    p.decoupled_grad = torch.ones(1, device=p.device)
    p.grad = torch.ones(1, device=p.device)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad.item() == 0 and p.decoupled_grad.item() == 0
    optimizer.zero_grad()
    assert p.grad is None and p.decoupled_grad is None


def test_master_weights_may_be_switched_on_later(mode):
    """Megatron-LM sets it after construction."""
    p = mode.parameter([1.0], torch.bfloat16)
    optimizer = mode.adam([p], lr=1e-4)
    step_with(optimizer, p, 1.0)
    optimizer.master_weights = True
    for _ in range(4):
        step_with(optimizer, p, 1.0)
    master = optimizer.state[p]["master_param"]
    assert master.dtype is torch.float32 and master.item() == pytest.approx(1 - 4e-4, abs=1e-6)


def test_hooks_and_closures_work(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = (p * 1.0).sum()
        loss.backward()
        calls.append("closure")
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert calls == ["pre", "closure", "post"]
    close(p, [0.9])
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert any(e.key == "Optimizer.step#FusedAdam.step" for e in profile.key_averages())


def test_a_dropped_optimizer_is_gone_at_once(mode):
    """Its device memory does not wait for the garbage collector."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    engine = weakref.ref(optimizer.engine)
    group = optimizer.param_groups[0]
    gc.disable()
    try:
        del optimizer
        assert engine() is None
    finally:
        gc.enable()
    group["lr"] = 0.5  # what is left is a dictionary
    assert float(group["lr"]) == 0.5


def test_release_and_go_on(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, records=8, loss_scale=2.0)
    for _ in range(2):
        step_with(optimizer, p, 2.0)
    optimizer.set_loss_scale(4.0)
    optimizer.release()
    optimizer.release()
    assert optimizer.param_groups[0]["step"] == 2
    assert optimizer.status().next_loss_scale == 4.0
    step_with(optimizer, p, 4.0)
    close(p, [0.7])
    assert optimizer.param_groups[0]["step"] == 3
    assert len(optimizer.records().records) == 3
