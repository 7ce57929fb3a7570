"""FSDP2: `fully_shard` over two processes, with parameters of which one of them has nothing."""

import tempfile

import pytest
import torch

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch has no distributed package", allow_module_level=True)

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


def run_rank(rank, device_type, capturable, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from stepgraph import FusedAdam

    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=2)
    try:
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
    finally:
        dist.destroy_process_group()


def spawn(device_type, capturable):
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(
            run_rank, (device_type, capturable, f"{directory}/rendezvous"), nprocs=2
        )


def test_shards_on_the_processor():
    spawn("cpu", False)


@pytest.mark.gpu
@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "replayed"])
def test_shards_on_two_gpus(capturable):
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    spawn("cuda", capturable)
