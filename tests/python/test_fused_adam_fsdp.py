"""FSDP2: `fully_shard` over two processes, with parameters of which one of them has nothing."""

import pytest
import torch

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch has no distributed package", allow_module_level=True)

from ranks import run_ranks  # noqa: E402

STEPS = 5
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def make_model():
    torch.manual_seed(0)
    # One row: its weight and its bias are whole on the first rank and empty on the second.
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(model, optimizer, device):
    torch.manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(16, 6).to(device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def check_rank(rank, device_type, capturable):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from stepgraph import FusedAdam

    mesh = init_device_mesh(device_type, (2,))
    model = make_model().to(device_type)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    empty = [p._local_tensor.numel() == 0 for p in model.parameters()]
    assert any(empty) == (rank == 1)
    optimizer = FusedAdam(model.parameters(), capturable=capturable, **OPTIONS)
    # Both ranks see the same data, so the mean of their gradients is the gradient.
    train(model, optimizer, device_type)
    whole = make_model()
    train(whole, torch.optim.AdamW(whole.parameters(), **OPTIONS), "cpu")
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().cpu(), theirs, rtol=1e-4, atol=1e-5)
        state = optimizer.state[ours]["exp_avg"]
        assert state.placements == ours.placements
        assert state._local_tensor.shape == ours._local_tensor.shape
    assert optimizer.param_groups[0]["step"] == STEPS
    optimizer.release()


def test_shards_on_the_processor():
    run_ranks(2, "cpu", check_rank, "cpu", False)


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "replayed"])
def test_shards_on_two_gpus(capturable):
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    run_ranks(2, "cuda", check_rank, "cuda", capturable)
