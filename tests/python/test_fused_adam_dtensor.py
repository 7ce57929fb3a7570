"""DTensor parameters: states of their placement and local shape, in one process and in two."""

import pytest
import torch

from adam_cases import Adam64

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch has no distributed package", allow_module_level=True)

from ranks import join_group, run_ranks  # noqa: E402


def check_rank(rank, world, device_type, options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from stepgraph import FusedAdam

    mesh = init_device_mesh(device_type, (world,))
    torch.manual_seed(0)
    whole = {"rows": torch.randn(1, 2048), "columns": torch.randn(6, 8), "all": torch.randn(5)}
    placements = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
    params = {
        name: torch.nn.Parameter(distribute_tensor(value.to(device_type), mesh, [placements[name]]))
        for name, value in whole.items()
    }
    optimizer = FusedAdam(params.items(), lr=0.05, weight_decay=0.1, **options)
    references = {name: Adam64(v, lr=0.05, weight_decay=0.1) for name, v in whole.items()}
    for _ in range(4):
        for name, p in params.items():
            g = torch.randn(whole[name].shape)
            p.grad = distribute_tensor(g.to(device_type), mesh, [placements[name]])
            references[name].step(g)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [4]
    saved = optimizer.state_dict()
    for number, (name, p) in enumerate(params.items()):
        for key, state in optimizer.state[p].items():
            assert isinstance(state, DTensor), key
            assert state.placements == p.placements and state.shape == p.shape
            assert state._local_tensor.shape == p._local_tensor.shape
            assert isinstance(optimizer.get_unscaled_state(p, key), DTensor)
            assert isinstance(saved["state"][number][key], DTensor)
        torch.testing.assert_close(
            p.full_tensor().detach().cpu().double(),
            references[name].value,
            rtol=2e-2 if "exp_avg_dtype" in options else 1e-5,
            atol=2e-2 if "exp_avg_dtype" in options else 1e-5,
        )
    addresses = [optimizer.state[p]["exp_avg"]._local_tensor.data_ptr() for p in params.values()]
    optimizer.load_state_dict(saved)
    assert addresses == [
        optimizer.state[p]["exp_avg"]._local_tensor.data_ptr() for p in params.values()
    ]
    optimizer.step()
    if world > 1:
        clipping = FusedAdam(params.items(), max_norm=1.0)
        try:
            clipping.step()
        except ValueError as error:
            assert "rows: is a DTensor over several ranks" in str(error)
        else:
            raise AssertionError("clipping by one shard was not refused")
    optimizer.release()


OPTIONS = {
    "float32": {},
    "master": {"master_weights": True},
    "narrow": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.uint8},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_one_process(device, options, tmp_path):
    if device == "cuda" and not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    join_group(0, 1, device, tmp_path / "rendezvous")
    try:
        check_rank(0, 1, device, OPTIONS[options])
    finally:
        dist.destroy_process_group()


def test_two_processes(device):
    """TransformerEngine#2424: of [1, 2048] over two ranks one shard is empty, and still steps."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(2, device, check_rank, 2, device, OPTIONS["master"])
