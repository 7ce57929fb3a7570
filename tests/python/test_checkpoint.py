"""Checkpoints of FusedAdam: its own, torch's and Transformer Engine's; copies of optimizers."""

import copy
import io
import pickle

import pytest
import torch

from adam_cases import equal_bits, mode, set_gradient, step_with  # noqa: F401
from stepgraph import FusedAdam, UsageError, _core

BF16, F16, U8 = torch.bfloat16, torch.float16, torch.uint8

FORMATS = {
    "float32": {},
    "bfloat16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "float16 and 8 bits": {"exp_avg_dtype": F16, "exp_avg_sq_dtype": U8},
    "master": {"master_weights": True},
    "float16 master": {"master_weights": True, "master_weight_dtype": F16},
    "remainders": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": U8,
        "exp_avg_sq_dtype": U8,
    },
    "amsgrad": {"amsgrad": True, "exp_avg_sq_dtype": F16},
}


def trained(mode, start, options, steps, seed=0, dtype=BF16):
    params = [mode.parameter(each, dtype) for each in start]
    optimizer = mode.adam(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}],
        lr=2.0**-6,
        weight_decay=0.1,
        **options,
    )
    train(params, optimizer, steps, seed)
    return params, optimizer


def train(params, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            set_gradient(p, torch.randn(p.shape, generator=generator))
        optimizer.step()


def through_a_file(saved):
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, map_location="cpu")


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("into", ["new", "stepped"])
def test_resuming_gives_the_same_bits(mode, formats, into):
    """torchtitan#4615: 2 steps, save, load, 2 steps equal 4 steps."""
    torch.manual_seed(1)
    start = [torch.randn(300), torch.randn(7, 5), torch.randn(0)]
    options = FORMATS[formats]
    params, optimizer = trained(mode, start, options, 2)
    saved = through_a_file(optimizer.state_dict())
    values = [p.detach().cpu().clone() for p in params]
    train(params, optimizer, 2, seed=9)

    others, resumed = trained(mode, start, options, 0 if into == "new" else 3, seed=5)
    addresses = [t.data_ptr() for p in others for t in resumed.state[p].values()]
    with torch.no_grad():
        for p, value in zip(others, values):
            p.copy_(value)
    resumed.load_state_dict(saved)
    if into == "stepped":
        assert [t.data_ptr() for p in others for t in resumed.state[p].values()] == addresses
    train(others, resumed, 2, seed=9)
    for p, q in zip(params, others):
        assert equal_bits(p, q)
        for name, state in optimizer.state[p].items():
            assert resumed.state[q][name].dtype is state.dtype
            assert equal_bits(resumed.state[q][name], state)
    assert [group["step"] for group in resumed.param_groups] == [4, 4]
    assert resumed.status().step == 4


def test_what_a_checkpoint_holds(mode):
    params, optimizer = trained(mode, [torch.ones(3), torch.ones(2)], FORMATS["remainders"], 3)
    saved = optimizer.state_dict()
    assert set(saved["state"]) == {0, 1}
    for state in saved["state"].values():
        assert state["exp_avg"].dtype is torch.float32
        assert state["exp_avg_sq"].dtype is torch.float32
        assert state["master_param"].dtype is torch.int16
    for group, lr in zip(saved["param_groups"], (2.0**-6, 0.02)):
        assert type(group["step"]) is int and group["step"] == 3
        assert type(group["lr"]) is float and group["lr"] == pytest.approx(lr)
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1]]


def test_a_checkpoint_after_a_skipped_step(mode):
    """TE's holds step + 1."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, skip_non_finite=True)
    step_with(optimizer, p, 1.0)
    step_with(optimizer, p, float("inf"))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["step"] == 1
    assert (saved["stepgraph"]["step"], saved["stepgraph"]["skipped"]) == (1, 1)
    q = mode.parameter(p.detach().cpu())
    other = mode.adam([q], lr=0.1)
    other.load_state_dict(saved)
    step_with(other, q, 1.0)
    assert q.item() == pytest.approx(0.8, abs=1e-6)
    assert other.param_groups[0]["step"] == 2


def test_loading_restores_counters_and_scale(mode):
    scaling = _core.LossScaling.torch_amp(initial=8.0, growth_interval=3)
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1, loss_scale=scaling, samples_per_step=4)
    for g in (8.0, float("inf"), 4.0, 4.0):
        step_with(optimizer, p, g)
    saved = through_a_file(optimizer.state_dict())
    for later in (False, True):
        q = mode.parameter(p.detach().cpu())
        other = mode.adam([q], lr=0.1, loss_scale=scaling, samples_per_step=4)
        if later:
            step_with(other, q, 0.0)
            with torch.no_grad():
                q.copy_(p)
        other.load_state_dict(saved)
        status = other.status()
        assert (status.step, status.skipped, status.samples) == (3, 1, 12)
        assert (status.next_loss_scale, status.growth_tracker) == (4.0, 2)
        assert other.loss_scale_tensor().item() == 4.0
        step_with(other, q, 4.0)
        assert other.loss_scale_tensor().item() == 8.0
        assert other.status().samples == 16
        assert q.item() == pytest.approx(1 - 0.4, abs=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_from_torch_and_back(mode, decoupled, amsgrad):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torch.manual_seed(3)
    start = [torch.randn(40), torch.randn(3, 5)]
    options = dict(lr=0.01, betas=(0.8, 0.97), weight_decay=0.1, amsgrad=amsgrad)
    theirs = [mode.parameter(each) for each in start]
    expected = kind(theirs, **options)
    train(theirs, expected, 5, seed=0)

    ours = [mode.parameter(p.detach().cpu()) for p in theirs]
    optimizer = mode.adam(ours, lr=0.5, adam_w_mode=decoupled, amsgrad=amsgrad)
    optimizer.load_state_dict(expected.state_dict())
    assert optimizer.param_groups[0]["step"] == 5
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)
    train(theirs, expected, 5, seed=1)
    train(ours, optimizer, 5, seed=1)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    again = [mode.parameter(p.detach().cpu()) for p in ours]
    back = kind(again, lr=0.5)
    back.load_state_dict(optimizer.torch_state_dict())
    assert all(float(back.state[p]["step"]) == 10 for p in again)
    train(theirs, expected, 5, seed=2)
    train(again, back, 5, seed=2)
    for a, b in zip(again, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_torch_counts_by_parameter_and_a_group_does_not(mode):
    theirs = [mode.parameter([1.0]), mode.parameter([1.0])]
    expected = torch.optim.AdamW(theirs)
    set_gradient(theirs[0], 1.0)
    expected.step()
    set_gradient(theirs[1], 1.0)
    expected.step()
    optimizer = mode.adam([mode.parameter([1.0]), mode.parameter([1.0])])
    with pytest.raises(UsageError, match="group 0 parameter 1: .* at step 1, expected 2"):
        optimizer.load_state_dict(expected.state_dict())


def test_from_transformer_engine(mode):
    """Its layout: step in the group, a tensor if capturable, states in float32, int16 remainders;
    and a master of a float32 parameter that may be out of date."""
    start = torch.tensor([1.5, -2.25])
    moments = {"exp_avg": torch.tensor([0.1, 0.2]), "exp_avg_sq": torch.tensor([0.01, 0.04])}
    group = {
        "lr": torch.tensor(0.05),
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "step": torch.tensor([7], dtype=torch.int),
        "params": [0, 1],
    }
    saved = {
        "state": {
            0: {**moments, "master_param": torch.tensor([9.0, 9.0])},
            1: {**moments, "master_param": torch.tensor([3, -5], dtype=torch.int16)},
        },
        "param_groups": [group],
    }
    a, b = mode.parameter(start), mode.parameter(start, BF16)
    optimizer = mode.adam([a, b], master_weights=True, store_param_remainders=True)
    optimizer.load_state_dict(saved)
    assert a.tolist() == start.tolist()
    assert optimizer.state[b]["master_param"].tolist() == [3, -5]
    assert optimizer.param_groups[0]["step"] == 7
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)

    c = mode.parameter(start, BF16)
    other = mode.adam([mode.parameter(start), c], master_weights=True)
    other.load_state_dict(saved)
    expected = start.view(torch.int32) + torch.tensor([3, -5], dtype=torch.int32)
    assert equal_bits(other.state[c]["master_param"], expected.view(torch.float32))


def test_loaded_values_are_not_the_checkpoints_tensors(mode):
    p = mode.parameter([1.0, 2.0])
    saved = torch.optim.AdamW([p], lr=torch.tensor(0.25), betas=(0.5, 0.75)).state_dict()
    optimizer = mode.adam([p], lr=0.1)
    optimizer.load_state_dict(saved)
    saved["param_groups"][0]["lr"].fill_(8.0)
    (group,) = optimizer.param_groups
    assert float(group["lr"]) == 0.25
    assert group["betas"] == (0.5, 0.75)


def test_options_of_groups_follow_the_checkpoint_as_in_torch(mode):
    p, q = mode.parameter([1.0]), mode.parameter([1.0])
    torchs = torch.optim.AdamW([q], lr=0.25, weight_decay=0.0)
    ours = mode.adam([p], lr=0.25, maximize=True)
    ours.load_state_dict(torchs.state_dict())
    for parameter, optimizer in ((p, ours), (q, torchs)):
        set_gradient(parameter, torch.ones(1))
        optimizer.step()
    assert p.item() == pytest.approx(q.item(), abs=1e-6) == pytest.approx(0.75)


def test_a_group_may_use_amsgrad_alone(mode):
    p, q = mode.parameter([1.0, 2.0]), mode.parameter([3.0])
    optimizer = mode.adam([{"params": [p], "amsgrad": True}, {"params": [q]}])
    values = torch.full((2,), 0.5, device=mode.device)
    optimizer.set_scaled_state(p, "max_exp_avg_sq", values)
    assert torch.equal(optimizer.get_unscaled_state(p, "max_exp_avg_sq"), values)
    with pytest.raises(UsageError, match="max_exp_avg_sq"):
        optimizer.set_scaled_state(q, "max_exp_avg_sq", values[:1])
    optimizer.initialize_state(p)
    assert set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_states_that_a_checkpoint_lacks_start_afresh(mode):
    params, optimizer = trained(mode, [torch.ones(3), torch.ones(2)], {"master_weights": True}, 3)
    saved = optimizer.state_dict()
    saved["state"] = {0: saved["state"][0]}
    del saved["state"][0]["master_param"]
    addresses = [t.data_ptr() for p in params for t in optimizer.state[p].values()]
    optimizer.load_state_dict(saved)
    assert not optimizer.state[params[1]]["exp_avg"].any()
    assert equal_bits(optimizer.state[params[0]]["master_param"], params[0].detach().float())
    assert [t.data_ptr() for p in params for t in optimizer.state[p].values()] == addresses


def test_amsgrad_from_a_checkpoint_without(mode):
    """The largest second moment known is the second moment."""
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 10.0)
    q = mode.parameter([1.0])
    other = mode.adam([q], lr=0.1, amsgrad=True)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[q]["max_exp_avg_sq"].item() == pytest.approx(0.1)
    step_with(other, q, 0.0)
    assert other.state[q]["max_exp_avg_sq"].item() == pytest.approx(0.1)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda s: s["param_groups"].pop(), "has 1 parameter groups, expected 2"),
        (lambda s: s["param_groups"][1].update(params=[]), "group 1: the checkpoint has 0"),
        (
            lambda s: s["state"][1].update(exp_avg=torch.ones(5)),
            r"group 1 parameter 0: the checkpoint's exp_avg has sizes \(5,\)",
        ),
        (lambda s: s["state"][0].pop("exp_avg_sq"), "group 0 parameter 0: .* no exp_avg_sq"),
        (lambda s: s["param_groups"][0].update(step=-1), "group 0: step is -1"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "group 0: lr is -1.0"),
        (lambda s: s.pop("state"), "has no 'state'"),
    ],
)
def test_a_refused_checkpoint_changes_nothing(mode, change, message):
    params, optimizer = trained(mode, [torch.ones(3), torch.ones(2)], {}, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(equal_bits(state[name], after["state"][number][name]) for name in state)


def test_loading_on_the_cpu_and_stepping(device):
    """pytorch#103256: every scalar where it belongs."""
    p = torch.ones(4, device=device, requires_grad=True)
    options = [{}] if device == "cpu" else [{}, {"capturable": True}]
    for each in options:
        optimizer = FusedAdam([p], lr=torch.tensor(0.1, device=device), **each)
        step_with(optimizer, p, 1.0)
        live = optimizer.param_groups[0]["lr"]
        saved = through_a_file(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.05
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] is live and live.device == p.device
        before = p.detach().clone()
        step_with(optimizer, p, 1.0)
        torch.testing.assert_close(before - p.detach(), torch.full_like(before, 0.05))


def test_hooks_of_state_dicts(mode):
    p = mode.parameter([1.0])
    optimizer = mode.adam([p], lr=0.1)
    step_with(optimizer, p, 1.0)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append(s.pop("mine")))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert calls == ["save", 1, "loaded"] and saved["mine"] == 1


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("formats", FORMATS)
def test_copies_go_on_alike(mode, way, formats):
    torch.manual_seed(2)
    params, optimizer = trained(mode, [torch.randn(200), torch.randn(3)], FORMATS[formats], 3)
    if way == "deepcopy":
        others, other = copy.deepcopy((params, optimizer))
    else:
        others, other = pickle.loads(pickle.dumps((params, optimizer)))
    assert other.param_groups[0]["params"][0] is others[0]
    train(params, optimizer, 2, seed=4)
    train(others, other, 2, seed=4)
    for p, q in zip(params, others):
        assert equal_bits(p, q) and p.data_ptr() != q.data_ptr()
    assert [group["step"] for group in other.param_groups] == [5, 5]
    assert other.status().step == 5


def test_the_helpers_of_distributed_checkpoints(mode):
    """torch.distributed.checkpoint.state_dict makes states with a step of zero learning rate."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(mode.device)
    optimizer = mode.adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4, device=mode.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer)
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    fresh = mode.adam(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, fresh, saved)
    for p, weight, moment in zip(model.parameters(), weights, moments):
        assert equal_bits(p, weight)
        assert equal_bits(fresh.state[p]["exp_avg"], moment)
    assert fresh.param_groups[0]["step"] == 2
