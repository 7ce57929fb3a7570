"""A small GPT trained by Megatron-Core with the captured step: one GPU, two GPUs, and the CPU."""

from __future__ import annotations

import copy
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph.megatron
from megatron_world import (
    GptTraining,
    TinyTraining,
    Training,
    assert_same,
    assert_same_tensors,
    device,
    installed,
    load,
    lockstep,
    no_waiting,
    pair,
    process_groups,
    save,
)
from stepgraph._core import UsageError

__all__ = ["device", "installed"]
pytestmark = pytest.mark.usefixtures("installed")

STEPS = 24
OVERFLOWS = (0, 7, 8, 9, 15)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
DISTRIBUTED = pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])


def only_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("no GPU")


def overflows_of(dtype: torch.dtype) -> tuple[int, ...]:
    return OVERFLOWS if dtype is torch.float16 else ()


@DISTRIBUTED
@DTYPES
def test_captured_equals_eager_bit_for_bit(
    device: torch.device, dtype: torch.dtype, distributed: bool
) -> None:
    """Learning rate and weight decay follow their schedules; f16 scales, overflows and goes on."""
    options = {"clip_grad": 0.5, "log_num_zeros_in_grad": True}
    theirs, ours = pair(dtype, device, GptTraining, distributed=distributed, **options)
    wrapper = ours.wrap()
    lockstep(range(STEPS), overflows_of(dtype), theirs, ours)
    assert_same(theirs, ours)
    assert (wrapper.captures, wrapper.replays) == (1, STEPS - 1)
    skipped = len(overflows_of(dtype))
    assert [success for success, _, _ in ours.results].count(False) == skipped
    assert {group["step"] for group in ours.groups()} == {STEPS - skipped}
    assert ours.groups()[0]["weight_decay"] > 0.1
    del ours.optimizer.step


@DTYPES
def test_it_learns(device: torch.device, dtype: torch.dtype) -> None:
    options = {"initial_loss_scale": 2.0**16} if dtype is torch.float16 else {}
    training = GptTraining(dtype, device, clip_grad=1.0, **options)
    training.wrap()
    first = training.loss(0).item()
    training.run(range(40))
    assert training.loss(0).item() < 0.8 * first
    del training.optimizer.step


@DISTRIBUTED
def test_saved_and_resumed_equals_going_on(device: torch.device, distributed: bool) -> None:
    """f16: the loss scale goes on from where it was, too."""
    going_on, resumed = pair(
        torch.float16, device, GptTraining, distributed=distributed, clip_grad=0.5
    )
    wrapper = going_on.wrap()
    going_on.run(range(12), OVERFLOWS)
    load(resumed, save(going_on))
    resumed.wrap()
    going_on.results.clear()
    lockstep(range(12, STEPS), (*OVERFLOWS, 16, 17), going_on, resumed)
    assert_same(going_on, resumed)
    # The same state into a step that is captured and has gone on: nothing is captured again.
    saved = save(going_on)
    before = going_on.tensors()
    going_on.run(range(STEPS, STEPS + 3))
    load(going_on, saved)
    assert_same_tensors(before, going_on.tensors())
    lockstep(range(STEPS, STEPS + 3), (), resumed, going_on)
    assert_same_tensors(resumed.tensors(), going_on.tensors())
    assert wrapper.captures == 1
    del going_on.optimizer.step, resumed.optimizer.step


def test_replays_wait_for_nothing(device: torch.device) -> None:
    """With the weight decay assigned and the learning rate filled between them."""
    only_cuda(device)
    training = GptTraining(torch.bfloat16, device, clip_grad=1.0, log_num_zeros_in_grad=True)
    training.wrap()
    training.run(range(3))
    results = []
    for step in range(3, 8):
        training.backward(step)
        with no_waiting(device):
            results.append(training.optimizer.step())
            training.scheduler.step(increment=1)
    norms = [float(norm) for _, norm, _ in results]
    assert len(set(norms)) == len(norms)
    assert training.groups()[0]["step"] == 8
    del training.optimizer.step


def test_other_threads_may_use_the_gpu_while_it_captures(device: torch.device) -> None:
    only_cuda(device)
    stop = threading.Event()
    errors: list[BaseException] = []

    def meddle() -> None:
        try:
            stream = torch.cuda.Stream()
            kept = []
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    # Allocations that no cache can serve, and queries of events.
                    kept.append(torch.empty(1 << 21, dtype=torch.uint8, pin_memory=True))
                    event = torch.cuda.Event()
                    torch.empty(1 << 21, device=device).zero_()
                    event.record(stream)
                    event.query()
                    if len(kept) > 8:
                        kept.clear()
                        torch._C._host_emptyCache()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        training = GptTraining(torch.bfloat16, device, clip_grad=1.0)
        for part in range(6):
            wrapper = training.wrap()
            training.run(range(3 * part, 3 * part + 3))
            assert wrapper.captures == 1
            del training.optimizer.step
            del wrapper
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert all(success for success, _, _ in training.results)


def test_a_shared_memory_pool(device: torch.device) -> None:
    theirs, ours = pair(torch.bfloat16, device, GptTraining, clip_grad=0.5)
    others = GptTraining(torch.bfloat16, device, clip_grad=0.5)
    ours.wrap(use_single_mempool=True)
    others.wrap(use_single_mempool=True)
    lockstep(range(8), (), theirs, ours, others)
    assert_same(theirs, ours)
    assert_same(theirs, others)
    del ours.optimizer.step, others.optimizer.step


def test_megatrons_own_timers(device: torch.device) -> None:
    only_cuda(device)
    from megatron.core.timers import Timers

    theirs, ours = pair(torch.float16, device, GptTraining, clip_grad=0.5)
    theirs.optimizer.config.timers = Timers(2, "minmax")
    ours.optimizer.config.timers = Timers(2, "minmax")
    ours.wrap()
    lockstep(range(8), OVERFLOWS, theirs, ours)
    assert_same(theirs, ours)
    del ours.optimizer.step


def test_an_optimizer_that_keeps_its_values_on_the_host_is_refused(device: torch.device) -> None:
    only_cuda(device)
    training = Training(torch.float32, device, optimizer_cuda_graph=False)
    with pytest.raises(UsageError, match=r"OptimizerConfig\.optimizer_cuda_graph"):
        training.wrap()


def test_memory_is_freed_with_the_graph(device: torch.device) -> None:
    only_cuda(device)
    training = GptTraining(torch.float16, device, initial_loss_scale=2.0**10)
    sizes = []
    for part in range(4):
        training.wrap()
        training.run(range(2 * part, 2 * part + 2))
        del training.optimizer.step
        training.clear_gradients()
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] <= sizes[1], sizes


# Two GPUs.


def _rank_of_two(rank: int, directory: str, path: list[str]) -> None:
    sys.path[:0] = path
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    stepgraph.megatron.install()
    with process_groups(rank, 2, directory):
        for dtype, distributed in (
            (torch.bfloat16, False),
            (torch.bfloat16, True),
            (torch.float16, True),
        ):
            options: dict[str, Any] = {"clip_grad": 0.5, "log_num_zeros_in_grad": True}
            theirs, ours = pair(dtype, device, GptTraining, distributed=distributed, **options)
            wrapper = ours.wrap()
            for step in range(STEPS):
                # The infinity is in the gradient of one rank; both have to skip.
                overflow = step in overflows_of(dtype) and rank == step % 2
                theirs.backward(step, overflow)
                ours.take_gradients(theirs)
                theirs.update()
                ours.update()
            assert_same(theirs, ours)
            assert (wrapper.captures, wrapper.replays) == (1, STEPS - 1)
            applied = [success for success, _, _ in ours.results]
            assert applied == [step not in overflows_of(dtype) for step in range(STEPS)]
            everywhere: list[Any] = [None, None]
            torch.distributed.all_gather_object(everywhere, ours.results)
            assert everywhere[0] == everywhere[1]
            for name, parameter in ours.model.named_parameters():
                both = [torch.empty_like(parameter) for _ in range(2)]
                torch.distributed.all_gather(both, parameter.detach())
                assert torch.equal(*both), name

            (leaf,) = ours.optimizer.chained_optimizers
            saved = copy.deepcopy(ours.optimizer.state_dict())
            assert all(type(g["step"]) is int for g in saved["optimizer"]["param_groups"])
            if distributed:
                state = copy.deepcopy(leaf.get_parameter_state_dp_zero())
                before = ours.tensors()
                for step in range(3):
                    ours.step(STEPS + step)
                ours.optimizer.load_state_dict(saved)
                leaf.load_parameter_state_from_dp_zero(state)
                # Of the model this loads the main parameters only.
                assert_same_tensors(before, ours.tensors(), but="model.")
                ours.step(STEPS)
                assert wrapper.captures == 1
            del ours.optimizer.step, wrapper

        theirs, ours = pair(torch.bfloat16, device, TinyTraining, distributed=True, clip_grad=0.1)
        wrapper = ours.wrap()
        lockstep(range(8), (), theirs, ours)
        assert_same(theirs, ours)
        (leaf,) = ours.optimizer.chained_optimizers
        assert any(group["params"] for group in leaf.optimizer.param_groups) is (rank == 0)
        assert {group["step"] for group in leaf.optimizer.param_groups} == {8}
        assert wrapper.captures == 1
        del ours.optimizer.step, wrapper
    Path(directory, f"done{rank}").touch()


@pytest.mark.gpu
def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_rank_of_two, (directory, sys.path), nprocs=2)
        assert len(list(Path(directory).glob("done*"))) == 2
