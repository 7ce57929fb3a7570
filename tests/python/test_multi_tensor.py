import math

import pytest
import torch

import stepgraph
from stepgraph import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 0, 7, 1000, 4097]


def flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def mixed(device, magnitude=1.0):
    return [
        (torch.randn(size) * magnitude).to(dtype).to(device) for size in SIZES for dtype in DTYPES
    ]


def norm_in_float64(tensors):
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def test_norm_of_mixed_dtypes(device):
    tensors = mixed(device)
    noop = flag(device)
    norm, each = multi_tensor_applier(multi_tensor_l2norm, noop, [tensors], True)
    assert norm.shape == (1,) and norm.dtype == torch.float32 and norm.device.type == device
    assert norm.item() == pytest.approx(norm_in_float64(tensors), rel=1e-6)
    assert each.shape == (len(tensors),)
    for tensor, found in zip(tensors, each.tolist(), strict=True):
        assert found == pytest.approx(norm_in_float64([tensor]), rel=1e-6)
    assert noop.item() == 0


def test_norm_without_the_tensors_own(device):
    norm, each = multi_tensor_l2norm(2048, flag(device), [mixed(device)])
    assert norm.shape == (1,)
    assert each.numel() == 0


def test_norm_whose_squares_overflow(device):
    tensors = [torch.full((1000,), 1e20, device=device), torch.full((1000,), -1e20, device=device)]
    noop = flag(device)
    norm, _ = multi_tensor_l2norm(2048, noop, [tensors])
    assert norm.item() == pytest.approx(1e20 * math.sqrt(2000), rel=1e-6)
    assert noop.item() == 0


def test_norm_whose_squares_vanish(device):
    norm, _ = multi_tensor_l2norm(2048, flag(device), [[torch.full((4,), 1e-30, device=device)]])
    assert norm.item() == pytest.approx(2e-30, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_values_that_are_not_finite_raises_the_flag(device, bad, dtype):
    tensor = torch.ones(5000, dtype=dtype, device=device)
    tensor[4321] = bad
    noop = flag(device)
    norm, _ = multi_tensor_l2norm(2048, noop, [[torch.ones(3, device=device), tensor]])
    assert not math.isfinite(norm.item())
    assert noop.item() == 1


@pytest.mark.parametrize("tensors", [[], [0], [0, 0]])
def test_norm_of_nothing(device, tensors):
    lists = [[torch.empty(size, device=device) for size in tensors]]
    norm, each = multi_tensor_l2norm(2048, flag(device), lists, True)
    assert norm.tolist() == [0.0]
    assert each.tolist() == [0.0] * len(tensors)


def test_unscaled_norm_leaves_the_tensors(device):
    tensors = mixed(device, 100.0)
    before = [tensor.clone() for tensor in tensors]
    factor = torch.full((1,), 1 / 512, device=device)
    noop = flag(device)
    norm, each = multi_tensor_applier(multi_tensor_unscale_l2norm, noop, [tensors], factor, True)
    assert norm.item() == pytest.approx(norm_in_float64(tensors) / 512, rel=1e-6)
    assert each[-1].item() == pytest.approx(norm_in_float64(tensors[-1:]) / 512, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert noop.item() == 0


@pytest.mark.parametrize("by_tensor", [False, True])
@pytest.mark.parametrize("from_dtype", DTYPES)
@pytest.mark.parametrize("to_dtype", DTYPES)
def test_scale_rounds_once(device, from_dtype, to_dtype, by_tensor):
    scale = 0.3
    source = [(torch.randn(size) * 8).to(from_dtype).to(device) for size in SIZES]
    before = [tensor.clone() for tensor in source]
    target = [torch.full_like(tensor, 5, dtype=to_dtype) for tensor in source]
    noop = flag(device)
    if by_tensor:
        factor = torch.full((), scale, device=device)
        multi_tensor_applier(multi_tensor_scale_tensor, noop, [source, target], factor)
    else:
        multi_tensor_applier(multi_tensor_scale, noop, [source, target], scale)
    factor = torch.tensor(scale, dtype=torch.float32, device=device)
    for a, b, kept in zip(source, target, before, strict=True):
        assert torch.equal(b, (a.float() * factor).to(to_dtype))
        assert torch.equal(a, kept)
    assert noop.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_in_place(device, dtype):
    tensors = [(torch.randn(size) * 8).to(dtype).to(device) for size in SIZES]
    expected = [(tensor.float() * 0.3).to(dtype) for tensor in tensors]
    multi_tensor_scale(2048, flag(device), [tensors, tensors], 0.3)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_scale_of_large_values_into_a_narrow_dtype(device):
    source = [torch.full((10,), 1e6, device=device)]
    target = [torch.empty(10, dtype=torch.float16, device=device)]
    noop = flag(device)
    multi_tensor_scale(2048, noop, [source, target], 1e-3)
    assert target[0].tolist() == [1000.0] * 10
    assert noop.item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("from_dtype", DTYPES)
@pytest.mark.parametrize("to_dtype", DTYPES)
def test_scale_of_values_that_are_not_finite_raises_the_flag(device, bad, from_dtype, to_dtype):
    source = [torch.ones(5000, dtype=from_dtype, device=device) for _ in range(2)]
    source[1][4321] = bad
    target = [torch.empty_like(tensor, dtype=to_dtype) for tensor in source]
    noop = flag(device)
    multi_tensor_scale(2048, noop, [source, target], 2.0)
    assert noop.item() == 1
    assert target[0].tolist() == [2.0] * 5000


@pytest.mark.parametrize("from_dtype", DTYPES)
@pytest.mark.parametrize("to_dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_scale_of_one_copies_and_looks(device, from_dtype, to_dtype, bad):
    sources = [torch.randn(size).to(device, from_dtype) for size in SIZES]
    if bad is not None:
        sources[3][500] = bad
    targets = [torch.empty_like(source, dtype=to_dtype) for source in sources]
    noop = flag(device)
    multi_tensor_scale(2048, noop, [sources, targets], 1.0)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target.nan_to_num(7.0), source.to(to_dtype).nan_to_num(7.0))
    assert noop.item() == (0 if bad is None else 1)


def test_large_lists_are_scaled_piece_by_piece(device, monkeypatch):
    sources = [torch.randn(size).to(device) for size in (10, 2500, 999, 1, 1001, 0, 3000)]
    sources.append(torch.randn(60, 40).to(device).t())  # not to be cut
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    largest = []
    empty_like = torch.empty_like

    def counted(*args, **kwargs):
        largest.append(args[0].numel())
        return empty_like(*args, **kwargs)

    monkeypatch.setattr(stepgraph.multi_tensor, "_LARGEST_TEMPORARY", 1000)
    monkeypatch.setattr(torch, "empty_like", counted)
    noop = flag(device)
    multi_tensor_scale(2048, noop, [sources, targets], 0.3)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, (source * torch.tensor(0.3, device=device)).bfloat16())
    assert sorted(largest)[-1] == 2400 and sorted(largest)[-2] <= 1000
    assert sum(largest) == sum(source.numel() for source in sources)
    sources[4][1000] = math.inf
    multi_tensor_scale(2048, noop, [sources, targets], 0.3)
    assert noop.item() == 1


def test_flag_that_is_up_stays_up(device):
    noop = torch.ones(1, dtype=torch.int32, device=device)
    multi_tensor_scale(2048, noop, [[torch.ones(3, device=device)]] * 2, 2.0)
    multi_tensor_l2norm(2048, noop, [[torch.ones(3, device=device)]])
    assert noop.item() == 1


def test_scale_of_nothing(device):
    noop = flag(device)
    multi_tensor_scale(2048, noop, [[], []], 2.0)
    assert noop.item() == 0


def test_tensors_that_require_gradients(device):
    tensor = torch.nn.Parameter(torch.full((4,), 3.0, device=device))
    norm, _ = multi_tensor_l2norm(2048, flag(device), [[tensor]])
    assert norm.tolist() == [6.0] and not norm.requires_grad
    multi_tensor_scale(2048, flag(device), [[tensor], [tensor]], 2.0)
    assert tensor.tolist() == [6.0] * 4


def test_applier_hands_its_chunk_size_on():
    seen = []
    applier = MultiTensorApply(77)
    assert applier.available
    noop = flag("cpu")
    result = applier(lambda *args: seen.append(args) or "result", noop, [[]], 1, 2)
    assert result == "result"
    assert seen == [(77, noop, [[]], 1, 2)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: multi_tensor_l2norm(1, flag("cpu"), []), ["l2norm", "0 lists", "expected 1"]),
        (
            lambda: multi_tensor_l2norm(1, flag("cpu"), [[torch.ones(1).double()]]),
            ["tensor 0", "float64"],
        ),
        (
            lambda: multi_tensor_l2norm(1, flag("cpu"), [[torch.ones(1, device="meta")]]),
            ["tensor 0", "meta", "cpu"],
        ),
        (lambda: multi_tensor_l2norm(1, torch.zeros(1), [[]]), ["noop_flag", "float32", "int32"]),
        (
            lambda: multi_tensor_scale(1, flag("cpu"), [[torch.ones(2)], [torch.ones(3)]], 1.0),
            ["input 0", "(2,)", "(3,)"],
        ),
        (
            lambda: multi_tensor_scale(1, flag("cpu"), [[torch.ones(2)], []], 1.0),
            ["1 inputs", "0 outputs"],
        ),
        (
            lambda: multi_tensor_scale_tensor(1, flag("cpu"), [[], []], torch.ones(2)),
            ["scale", "2 elements"],
        ),
        (
            lambda: multi_tensor_unscale_l2norm(1, flag("cpu"), [[]], torch.ones(1).double()),
            ["inv_scale", "float64"],
        ),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(stepgraph.UsageError) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_can_be_captured():
    tensors = mixed("cuda")
    outputs = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    noop = flag("cuda")
    factor = torch.full((1,), 0.5, device="cuda")

    def work():
        norms = multi_tensor_l2norm(2048, noop, [tensors], True)
        unscaled = multi_tensor_unscale_l2norm(2048, noop, [tensors], factor)
        multi_tensor_scale(2048, noop, [tensors, outputs], 2.0)
        multi_tensor_scale_tensor(2048, noop, [tensors, tensors], factor)
        return *norms, unscaled[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm, each, unscaled = work()
    for tensor in tensors:
        tensor.fill_(3.0)
    factor.fill_(0.25)
    graph.replay()
    count = sum(tensor.numel() for tensor in tensors)
    assert norm.item() == pytest.approx(3.0 * math.sqrt(count), rel=1e-6)
    assert each[-1].item() == pytest.approx(3.0 * math.sqrt(tensors[-1].numel()), rel=1e-6)
    assert unscaled.item() == pytest.approx(0.75 * math.sqrt(count), rel=1e-6)
    assert all((tensor == 0.75).all() for tensor in tensors)
    assert all((tensor == 6.0).all() for tensor in outputs)
    tensors[-1].fill_(math.inf)
    graph.replay()
    assert noop.item() == 1
