"""Megatron-Core for tests: process groups, small models and their optimizers, on a GPU or without.

Megatron names the device "cuda" in its sources. `pretended_gpu` answers these requests with the
CPU, so that Megatron's own code, unchanged, runs where there is no GPU. The fixture `device` gives
both in turn.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron.core.optimizer", reason="megatron-core lacks what it imports")

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

import stepgraph.megatron

# A dynamic loss scale that moves within a few steps.
F16_OPTIONS: dict[str, Any] = {
    "initial_loss_scale": 2.0**16,
    "loss_scale_window": 4,
    "hysteresis": 2,
}


class _CpuForCuda(TorchFunctionMode):
    """Requests for the device "cuda" are answered with the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Also on a machine with a GPU, which is hidden meanwhile."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(torch.cuda, "current_stream", lambda: None)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)
    patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    with _CpuForCuda():
        try:
            yield torch.device("cpu")
        finally:
            patch.undo()


@contextlib.contextmanager
def process_groups(rank: int = 0, size: int = 1, directory: str | None = None) -> Iterator[None]:
    """A data-parallel rank of `size`, by NCCL on a GPU and gloo without; ranks share `directory`.
    To be entered inside `pretended_gpu` where that is meant."""
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
    with contextlib.ExitStack() as stack:
        where = directory or stack.enter_context(tempfile.TemporaryDirectory())
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{where}/rendezvous",
            rank=rank,
            world_size=size,
        )
        stack.callback(torch.distributed.destroy_process_group)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        if torch.cuda.is_available():
            model_parallel_cuda_manual_seed(1234)
        # Collectives that were captured hold on to their communicators.
        stack.callback(stepgraph.megatron.release_all)
        yield


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a test runs, with a process group of one rank."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        with process_groups():
            yield torch.device("cuda", torch.cuda.current_device())
    else:
        with pretended_gpu() as found, process_groups():
            yield found


@pytest.fixture
def installed() -> Iterator[None]:
    stepgraph.megatron.install()
    yield
    stepgraph.megatron.uninstall()
    stepgraph.megatron.release_all()


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """An error where the host waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Training(dtype, distributed=distributed).
CASES = pytest.mark.parametrize(
    ("dtype", "distributed"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    ],
    ids=str,
)


class SmallModel(MegatronModule):
    """Two linear layers, a norm and a ReLU: sizes no vector width divides, and zero gradients."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.first = torch.nn.Linear(19, 33).to(dtype)
        self.norm = torch.nn.LayerNorm(33).to(dtype)
        self.last = torch.nn.Linear(33, 7).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Training:
    """A model, Megatron's optimizer and scheduler around it, batches that depend on the step."""

    transformer: ClassVar[dict[str, Any]] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
    }
    first_weight = "first.weight"

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        distributed: bool = False,
        samples: int = 8,
        **options: Any,
    ) -> None:
        torch.manual_seed(1234)
        self.device, self.dtype, self.samples = device, dtype, samples
        self.config = TransformerConfig(
            **self.transformer,
            fp16=dtype == torch.float16,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
        )
        self.model = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
            ),
            self.make_model().to(device),
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **{
                    "optimizer": "adam",
                    "lr": 1e-2,
                    "min_lr": 1e-3,
                    "weight_decay": 0.1,
                    "fp16": dtype == torch.float16,
                    "bf16": dtype == torch.bfloat16,
                    "use_distributed_optimizer": distributed,
                    "optimizer_cuda_graph": True,
                    **options,
                }
            ),
            [self.model],
        )
        self.scheduler = self.make_scheduler()
        #: What each step returned, with numbers for tensors.
        self.results: list[tuple[bool, float | None, float | None]] = []

    def make_model(self) -> torch.nn.Module:
        return SmallModel(self.config, self.dtype)

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(self.samples, 19, generator=generator)
        y = torch.randn(self.samples, 7, generator=generator)
        x, y = x.to(self.device, self.dtype), y.to(self.device)
        return torch.nn.functional.mse_loss(self.model(x).float(), y)

    def make_scheduler(self) -> Any:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=5,
            lr_decay_steps=40,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.2,
            wd_incr_steps=30,
            wd_incr_style="linear",
        )

    def wrap(self, **options: Any) -> stepgraph.megatron.OptimizerCudaGraphWrapper:
        wrapper = stepgraph.megatron.OptimizerCudaGraphWrapper(self.optimizer.step, **options)
        self.optimizer.step = wrapper
        return wrapper

    def backward(self, step: int, overflow: bool = False) -> None:
        """Fills the gradients of `step`, one of them with an infinity if asked to."""
        self.clear_gradients()
        self.optimizer.scale_loss(self.loss(step)).sum().backward()
        if overflow:
            weight = dict(self.model.module.named_parameters())[self.first_weight]
            weight.main_grad.view(-1)[0] = float("inf")
        self.model.finish_grad_sync()

    def clear_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def take_gradients(self, other: Training) -> None:
        """The same bits, whatever a backward of one's own would give."""
        self.clear_gradients()
        for ours, theirs in zip(self.model.buffers, other.model.buffers, strict=True):
            ours.grad_data.copy_(theirs.grad_data)

    def update(self) -> tuple[bool, float | None, float | None]:
        success, norm, zeros = self.optimizer.step()
        if success:
            self.scheduler.step(increment=1)
        result = (
            success,
            None if norm is None else float(norm),
            None if zeros is None else float(zeros),
        )
        self.results.append(result)
        return result

    def step(self, step: int, overflow: bool = False) -> tuple[bool, float | None, float | None]:
        self.backward(step, overflow)
        return self.update()

    def run(self, steps: range, overflows: tuple[int, ...] = ()) -> None:
        for step in steps:
            self.step(step, overflow=step in overflows)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of everything that a step changes, by name."""
        found = {f"model.{n}": p.detach().clone() for n, p in self.model.named_parameters()}
        for place, leaf in enumerate(self.optimizer.chained_optimizers):
            if leaf.optimizer is None:
                continue
            for g, group in enumerate(leaf.optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    where = f"optimizer{place}.group{g}.{i}"
                    found[where] = p.detach().clone()
                    for name, value in leaf.optimizer.state[p].items():
                        if isinstance(value, torch.Tensor):
                            found[f"{where}.{name}"] = value.detach().clone()
            if getattr(leaf, "grad_scaler", None) is not None:
                found[f"optimizer{place}.scale"] = leaf.grad_scaler.scale.detach().clone()
        return found

    def groups(self) -> list[dict[str, Any]]:
        return [
            {k: float(v) for k, v in group.items() if k in ("lr", "weight_decay", "step")}
            for group in self.optimizer.param_groups
        ]


class TinyModel(MegatronModule):
    """So small that the first rank's share of a sharded optimizer is all of it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(19, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class TinyTraining(Training):
    first_weight = "layer.weight"

    def make_model(self) -> torch.nn.Module:
        return TinyModel(self.config).to(self.dtype)

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(self.samples, 19, generator=generator)
        return self.model(x.to(self.device, self.dtype)).float().square().mean()


class GptTraining(Training):
    """A GPT of two layers, by Megatron's local layers: no Transformer Engine."""

    vocabulary, length = 128, 32
    transformer: ClassVar[dict[str, Any]] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    first_weight = "embedding.word_embeddings.weight"

    def make_model(self) -> torch.nn.Module:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(),
            vocab_size=self.vocabulary,
            max_sequence_length=self.length,
        )
        return model.to(self.dtype)

    def loss(self, step: int) -> torch.Tensor:
        """Of a sequence that counts up by a stride: something to be learnt."""
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(self.vocabulary, (self.samples, 1), generator=generator)
        stride = torch.randint(1, 4, (self.samples, 1), generator=generator)
        tokens = (start + stride * torch.arange(self.length + 1)) % self.vocabulary
        tokens = tokens.to(self.device)
        positions = torch.arange(self.length, device=self.device).expand(self.samples, -1)
        future = torch.ones(self.length, self.length, dtype=torch.bool, device=self.device)
        losses = self.model(
            tokens[:, :-1].contiguous(),
            positions.contiguous(),
            future.triu(1)[None, None],
            labels=tokens[:, 1:].contiguous(),
        )
        return losses.float().mean()


def save(training: Training) -> dict[str, Any]:
    """What Megatron's non-sharded checkpoint holds."""
    saved: dict[str, Any] = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
    }
    (leaf,) = training.optimizer.chained_optimizers
    if hasattr(leaf, "get_parameter_state_dp_zero"):
        saved["parameter_state"] = leaf.get_parameter_state_dp_zero()
    return copy.deepcopy(saved)


def load(training: Training, saved: dict[str, Any]) -> None:
    saved = copy.deepcopy(saved)
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    if "parameter_state" in saved:
        (leaf,) = training.optimizer.chained_optimizers
        leaf.load_parameter_state_from_dp_zero(saved["parameter_state"])
    training.scheduler = training.make_scheduler()
    training.scheduler.load_state_dict(saved["scheduler"])


def _sharded(training: Training, is_loading: bool) -> dict[str, Any]:
    model = training.model.module.sharded_state_dict()
    return {
        "model": model,
        "optimizer": training.optimizer.sharded_state_dict(
            model, is_loading, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
        ),
    }


def _dist_checkpointing() -> Any:
    pytest.importorskip("psutil", reason="dist_checkpointing wants psutil")
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def save_sharded(training: Training, directory: str) -> None:
    """Model and optimizer as Megatron's distributed checkpoint."""
    _dist_checkpointing().save(_sharded(training, False), directory)


def load_sharded(training: Training, directory: str) -> None:
    """What save_sharded wrote, into another training."""
    loaded = _dist_checkpointing().load(_sharded(training, True), directory)
    training.model.module.load_state_dict(loaded["model"])
    training.optimizer.load_state_dict(loaded["optimizer"])


def pair(
    dtype: torch.dtype, device: torch.device, kind: type[Training] = Training, **options: Any
) -> tuple[Training, Training]:
    """Two trainings that start alike."""
    if dtype is torch.float16:
        options = {**F16_OPTIONS, **options}
    return kind(dtype, device, **options), kind(dtype, device, **options)


def lockstep(steps: range, overflows: tuple[int, ...], theirs: Training, *others: Training) -> None:
    """Steps of all with the gradients of the one."""
    for step in steps:
        theirs.backward(step, overflow=step in overflows)
        for other in others:
            other.take_gradients(theirs)
        for training in (theirs, *others):
            training.update()


def assert_same_tensors(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], but: str = "-"
) -> None:
    """Equal bits, except of names that start with `but`."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert [name for name in different if not name.startswith(but)] == []


def assert_same(left: Training, right: Training) -> None:
    """Equal results, groups and bits."""
    assert left.results == right.results
    assert left.groups() == right.groups()
    assert_same_tensors(left.tensors(), right.tensors())
