"""What the tests of FusedAdam share: where steps run, and Adam in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from stepgraph import FusedAdam


@dataclass
class StepMode:
    """A way to run steps: device and the options for it."""

    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)

    def adam(self, params: Any, **options: Any) -> FusedAdam:
        return FusedAdam(params, **{**self.options, **options})

    def parameter(self, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.as_tensor(values, dtype=torch.float64).to(self.device, dtype)
        return tensor.clone().requires_grad_(True)


def close(p: torch.Tensor, value: Any) -> None:
    """Asserts that the elements of `p` are `value` to a few roundings."""
    assert p.detach().cpu().numpy() == pytest.approx(value, abs=2e-6)


STEP_MODES = ["cpu", "cuda-eager", "cuda-replay"]


def make_step_mode(name: str) -> StepMode:
    if name == "cpu":
        return StepMode(torch.device("cpu"))
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    return StepMode(device, {"capturable": name == "cuda-replay"})


@pytest.fixture(params=["cpu", *(pytest.param(m, marks=pytest.mark.gpu) for m in STEP_MODES[1:])])
def mode(request):
    return make_step_mode(request.param)


@dataclass
class Adam64:
    """One parameter of Adam in float64, as the reference step of docs/numerics.md."""

    value: torch.Tensor
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    bias_correction: bool = True
    amsgrad: bool = False
    maximize: bool = False
    t: int = 0

    def __post_init__(self) -> None:
        self.value = self.value.detach().to("cpu", torch.float64).clone()
        self.m = torch.zeros_like(self.value)
        self.v = torch.zeros_like(self.value)
        self.v_max = torch.zeros_like(self.value)

    def step(self, gradient: torch.Tensor) -> None:
        g = gradient.detach().to("cpu", torch.float64)
        g = -g if self.maximize else g
        self.t += 1
        if not self.decoupled:
            g = g + self.weight_decay * self.value
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        self.v_max = torch.maximum(self.v_max, self.v)
        c1 = 1 - b1**self.t if self.bias_correction else 1.0
        c2 = 1 - b2**self.t if self.bias_correction else 1.0
        v = self.v_max if self.amsgrad else self.v
        change = self.lr * (self.m / c1) / (v.sqrt() / math.sqrt(c2) + self.eps)
        if self.decoupled:
            change = change + self.lr * self.weight_decay * self.value
        self.value = self.value - change


def set_gradient(parameter: torch.Tensor, values: Any, attribute: str = "grad") -> None:
    """A new gradient tensor with these values."""
    dtype = parameter.dtype
    tensor = torch.as_tensor(values, dtype=torch.float64).expand(parameter.shape)
    setattr(parameter, attribute, tensor.to(parameter.device, dtype).clone())


def step_with(optimizer: FusedAdam, parameter: torch.Tensor, gradient: Any, **kwargs: Any) -> None:
    """One step with this gradient, written in place if there is one."""
    if parameter.grad is None:
        set_gradient(parameter, gradient)
    else:
        parameter.grad.copy_(torch.as_tensor(gradient, dtype=torch.float64))
    optimizer.step(**kwargs)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor on the CPU, for comparison."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.detach().contiguous().cpu().view(integers[tensor.element_size()]).clone()


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))
