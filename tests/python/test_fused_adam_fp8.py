"""FP8 primary weights: raw bytes with scaling, and tensors of Transformer Engine by their shape."""

import enum
import types

import pytest
import torch

from adam_cases import Adam64, equal_bits, mode  # noqa: F401
from captures import captures  # noqa: F401
from stepgraph import UsageError

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def scalar(value, device):
    return torch.full((1,), float(value), device=device)


def cast(values, scale, format):
    return (values * scale).clamp(-LARGEST[format], LARGEST[format]).to(DTYPES[format])


def make_raw(mode, values, format, scale, raw):
    stored = cast(values, scale, format).to(mode.device)
    parameter = stored.view(torch.uint8) if raw else stored
    scaling = [scalar(x, mode.device) for x in (scale, 0.0, 1 / scale)]
    return parameter.clone(), scaling


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("raw", [True, False])
def test_weights_follow_their_masters(mode, format, raw):
    torch.manual_seed(0)
    start = torch.randn(300)
    p, (scale, amax, scale_inv) = make_raw(mode, start, format, 16.0, raw)
    optimizer = mode.adam([p], lr=0.25, master_weights=True, use_decoupled_grad=True)
    optimizer.set_fp8_scaling(p, scale, amax, scale_inv, format=format)
    first = cast(start, 16.0, format).float() / 16.0
    reference = Adam64(first, lr=0.25)
    for t in range(4):
        if t == 2:
            # TransformerEngine#2753: the next step, or replay, quantizes with the new scale.
            scale.fill_(8.0)
            amax.zero_()
        p.decoupled_grad = torch.randn(300).to(p.device)
        optimizer.step()
        reference.step(p.decoupled_grad)
        master = optimizer.state[p]["master_param"]
        torch.testing.assert_close(master.cpu().double(), reference.value, rtol=1e-5, atol=1e-5)
        expected = cast(master.cpu(), float(scale), format)
        assert equal_bits(p.view(torch.uint8), expected.view(torch.uint8))
        largest = master.abs().max().item()
        if t in (0, 2):
            assert amax.item() == pytest.approx(largest)
        else:
            assert amax.item() >= largest * (1 - 1e-6)
        assert scale_inv.item() == 1 / float(scale)


def test_weights_without_master_are_updated(mode):
    """TE leaves them as they were, silently."""
    p, scaling = make_raw(mode, torch.ones(64), "e4m3", 16.0, True)
    optimizer = mode.adam([p], lr=0.25, use_decoupled_grad=True)
    optimizer.set_fp8_scaling(p, *scaling)
    p.decoupled_grad = torch.ones(64, device=p.device)
    optimizer.step()
    values = p.view(torch.float8_e4m3fn).float() / 16.0
    assert values.cpu().numpy() == pytest.approx(0.75)
    assert "master_param" not in optimizer.state[p]


def test_scaling_that_moves_is_followed(mode):
    p, scaling = make_raw(mode, torch.ones(8), "e4m3", 16.0, True)
    optimizer = mode.adam([p], lr=0.25, master_weights=True, use_decoupled_grad=True)
    optimizer.set_fp8_scaling(p, *scaling)
    p.decoupled_grad = torch.ones(8, device=p.device)
    optimizer.step()
    scale, amax, scale_inv = (scalar(x, p.device) for x in (32.0, 0.0, 1 / 32.0))
    optimizer.set_fp8_scaling(p, scale, amax, scale_inv)
    optimizer.step()
    assert (p.view(torch.float8_e4m3fn).float() / 32.0).cpu().numpy() == pytest.approx(0.5)
    assert amax.item() == pytest.approx(0.5)


def test_bad_scaling_is_refused(mode):
    p, scaling = make_raw(mode, torch.ones(8), "e4m3", 16.0, True)
    q = mode.parameter([1.0])
    optimizer = mode.adam([p, q], use_decoupled_grad=True)
    p.decoupled_grad = torch.ones(8, device=p.device)
    with pytest.raises(UsageError, match="group 0 parameter 0: .*uint8 without scaling"):
        optimizer.step()
    for bad, message in (
        ({"format": "e3m4"}, "the FP8 format is 'e3m4'"),
        ({"scale": 1.0}, "scale is a float"),
        ({"amax": torch.ones(2, device=p.device)}, "amax has type torch.float32 and 2 elements"),
        ({"scale_inv": torch.ones(1, device=p.device).half()}, "scale_inv has type torch.float16"),
    ):
        given = dict(zip(("scale", "amax", "scale_inv"), scaling)) | bad
        with pytest.raises(UsageError, match="group 0 parameter 0: " + message):
            optimizer.set_fp8_scaling(p, **given)
    with pytest.raises(UsageError, match="group 0 parameter 1: .*float32, expected uint8"):
        optimizer.set_fp8_scaling(q, *scaling)
    optimizer.set_fp8_scaling(p, *scaling)
    optimizer.step()


class DType(enum.Enum):
    """As transformer_engine_torch.DType."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Float8Tensor(torch.Tensor):
    """What the step needs of Transformer Engine's class, and its nominal type in front."""

    @staticmethod
    def __new__(cls, values, scale, format, delayed=True):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=torch.bfloat16, device=values.device, requires_grad=True
        )

    def __init__(self, values, scale, format, delayed=True):
        device = values.device
        self._data = cast(values, scale, format).view(torch.uint8)
        self._scale_inv = scalar(1 / scale, device)
        self._fp8_dtype = DType.kFloat8E4M3 if format == "e4m3" else DType.kFloat8E5M2
        self._format = format
        self._transpose_invalid = False
        self._quantizer = types.SimpleNamespace()
        if delayed:
            self._quantizer.scale = scalar(scale, device)
            self._quantizer.amax = scalar(0, device)

    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)

    def dequantize(self):
        return self._data.view(DTYPES[self._format]).float() * self._scale_inv

    def quantize_(self, values):
        scale = LARGEST[self._format] / values.abs().max()
        self._scale_inv.copy_(1 / scale)
        self._data.copy_(cast(values, scale, self._format).view(torch.uint8))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_tensors_of_transformer_engine(mode, format, decoupled):
    torch.manual_seed(1)
    start = torch.randn(40, 5, device=mode.device)
    p = Float8Tensor(start, 16.0, format)
    q = mode.parameter(torch.ones(3))
    optimizer = mode.adam([p, q], lr=0.25, master_weights=True, use_decoupled_grad=decoupled)
    reference = Adam64(cast(start.cpu(), 16.0, format).float() / 16.0, lr=0.25)
    for t in range(3):
        g = torch.randn(40, 5, device=p.device, dtype=torch.bfloat16)
        if decoupled:
            p.decoupled_grad, q.decoupled_grad = g.float(), torch.ones(3, device=p.device)
        else:
            p.grad, q.grad = g, torch.ones(3, device=p.device)
        if t == 1:
            p._data = p._data.clone()
        if t == 2:
            p._quantizer.scale = scalar(8.0, p.device)
        optimizer.step()
        reference.step(g)
        assert p._transpose_invalid
        p._transpose_invalid = False
        master = optimizer.state[p]["master_param"]
        assert master.shape == p.shape
        torch.testing.assert_close(master.cpu().double(), reference.value, rtol=1e-5, atol=1e-5)
        expected = cast(master.cpu(), p._quantizer.scale.item(), format)
        assert equal_bits(p._data, expected.view(torch.uint8))
        assert p._scale_inv.item() == 1 / p._quantizer.scale.item()
        assert p._quantizer.amax.item() >= master.abs().max().item() * (1 - 1e-6)
    assert q.detach().cpu().numpy() == pytest.approx(0.25, abs=1e-5)


def test_tensors_that_quantize_themselves(mode):
    """Block-scaled and current scaling: the master is stepped, the class quantizes it."""
    torch.manual_seed(2)
    start = torch.randn(64, device=mode.device)
    p = Float8Tensor(start, 16.0, "e4m3", delayed=False)
    optimizer = mode.adam([p], lr=0.25)
    reference = Adam64(p.dequantize(), lr=0.25)
    for _ in range(3):
        p.grad = torch.randn(64, device=p.device, dtype=torch.bfloat16)
        optimizer.step()
        reference.step(p.grad)
        master = optimizer.state[p]["master_param"]
        torch.testing.assert_close(master.cpu().double(), reference.value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(p.dequantize(), master, rtol=0.07, atol=0.01)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["step"] == 3


@pytest.mark.parametrize("delayed", [True, False])
def test_what_moves_after_a_capture(captures, delayed):
    p = Float8Tensor(torch.ones(64, device=captures.device), 16.0, "e4m3", delayed)
    optimizer = captures.adam([("weight", p)], lr=0.25, master_weights=True)
    p.grad = torch.ones(64, device=p.device, dtype=torch.bfloat16)
    optimizer.step()
    with captures.capture():
        optimizer.step()
    kept = p.grad
    assert optimizer.recapture_required() is None
    p.grad = None
    assert optimizer.recapture_required() is None
    p.grad = kept.clone()
    assert optimizer.recapture_required() == "weight: the gradient moved to other memory"
    p.grad = kept
    if delayed:
        p._data = p._data.clone()
        assert optimizer.recapture_required() == "weight: the parameter moved to other memory"


def test_checkpoints_of_fp8_weights(mode):
    p, scaling = make_raw(mode, torch.linspace(-2, 2, 50), "e4m3", 16.0, True)
    runs = []
    for resume in (False, True):
        q = p.clone()
        copies = [s.clone() for s in scaling]
        optimizer = mode.adam([q], lr=0.25, master_weights=True, use_decoupled_grad=True)
        optimizer.set_fp8_scaling(q, *copies)
        torch.manual_seed(3)
        for t in range(4):
            q.decoupled_grad = torch.randn(50).to(q.device)
            optimizer.step()
            if resume and t == 1:
                saved = optimizer.state_dict()
                saved = {
                    **saved,
                    "state": {0: {k: v.clone() for k, v in saved["state"][0].items()}},
                }
                optimizer = mode.adam([q], lr=0.25, master_weights=True, use_decoupled_grad=True)
                optimizer.set_fp8_scaling(q, *copies)
                optimizer.load_state_dict(saved)
        runs.append((q, optimizer.state[q]["master_param"]))
    assert equal_bits(runs[0][0], runs[1][0]) and equal_bits(runs[0][1], runs[1][1])
