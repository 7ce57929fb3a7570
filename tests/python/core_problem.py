"""A small step for tests of the bindings: tensors of torch, and the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from stepgraph import _core

FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def operand(tensor):
    return (tensor.data_ptr(), FORMATS[tensor.dtype], 0)


def ordinal(device):
    return -1 if device == "cpu" else torch.device(device).index or 0


@dataclass
class Problem:
    """One group of f32 tensors without masters, with state from zero."""

    device: str
    sizes: tuple[int, ...] = (1000, 1, 0, 37)
    tensors: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self):
        for size in self.sizes:
            self.tensors.append(
                {
                    "parameter": torch.randn(size).to(self.device),
                    "gradient": torch.randn(size).to(self.device),
                    "exp_avg": torch.zeros(size, device=self.device),
                    "exp_avg_sq": torch.zeros(size, device=self.device),
                }
            )

    def builder(self, options=None, **group):
        builder = _core.StepBuilder()
        index = builder.add_group(**group)
        for i, tensor in enumerate(self.tensors):
            builder.add_tensor(
                index,
                name=f"tensor {i}",
                numel=tensor["parameter"].numel(),
                device=ordinal(self.device),
                **{name: operand(value) for name, value in tensor.items()},
            )
        builder.set_options(**(options or {}))
        return builder

    def plan(self, options=None, **group):
        return self.builder(options, **group).build()


def stream():
    return torch.cuda.current_stream().cuda_stream


class Runner:
    """One face for the executors: `launch()` and `update(plan)` on the current stream."""

    def __init__(self, kind, plan, foreign=None):
        self.on_device = kind != "HostExecutor"
        where = (stream(),) if self.on_device else ()
        self.core = getattr(_core, kind)(plan, *where, foreign)

    def launch(self):
        self.core.launch(*((stream(),) if self.on_device else ()))

    def update(self, plan):
        return self.core.update(plan, *((stream(),) if self.on_device else ()))


class Reference:
    """The step in float64, on the CPU."""

    def __init__(self, problem, *, lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
        self.numbers = (lr, beta1, beta2, eps, weight_decay)
        self.parameters = [t["parameter"].double().cpu().clone() for t in problem.tensors]
        self.exp_avg = [torch.zeros_like(p) for p in self.parameters]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.parameters]
        self.step_count = 0

    def step(self, gradients, max_norm=0.0, decoupled=True):
        lr, beta1, beta2, eps, weight_decay = self.numbers
        gradients = [g.double().cpu() for g in gradients]
        norm = sum(g.square().sum() for g in gradients) ** 0.5
        clip = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
        self.step_count += 1
        for p, g, m, v in zip(
            self.parameters, gradients, self.exp_avg, self.exp_avg_sq, strict=True
        ):
            g = g * clip + (0.0 if decoupled else weight_decay * p)
            m.mul_(beta1).add_((1 - beta1) * g)
            v.mul_(beta2).add_((1 - beta2) * g * g)
            if decoupled:
                p.mul_(1 - lr * weight_decay)
            step_size = lr / (1 - beta1**self.step_count)
            p.sub_(step_size * m / ((v / (1 - beta2**self.step_count)).sqrt() + eps))
        return float(norm)
