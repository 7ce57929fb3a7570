"""The captured step beside Megatron's own. On the CPU a replay enqueues the same work again."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

import stepgraph.megatron
from megatron_world import (
    F16_OPTIONS,
    Training,
    assert_same,
    device,
    installed,
    no_waiting,
    pair,
)
from stepgraph._core import CaptureError, UsageError
from stepgraph.megatron import OptimizerCudaGraphWrapper
from stepgraph.megatron.host_reads import NoHostReads

__all__ = ["device", "installed"]
pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_megatron_bit_for_bit(
    device: torch.device, dtype: torch.dtype, distributed: bool, warmup: int
) -> None:
    """With schedules of learning rate and weight decay; in f16 overflows, the first step too."""
    theirs, ours = pair(
        dtype, device, distributed=distributed, clip_grad=0.1, log_num_zeros_in_grad=True
    )
    wrapper = ours.wrap(cuda_graph_warmup_steps=warmup)
    overflows = (0, 7, 8, 9, 15) if dtype is torch.float16 else ()
    for training in (theirs, ours):
        training.run(range(24), overflows)
    assert_same(theirs, ours)
    assert (wrapper.calls, wrapper.captures) == (24, 1)
    assert wrapper.replays == 24 - max(1, warmup)
    assert [success for success, _, _ in ours.results].count(False) == len(overflows)
    assert any(zeros for _, _, zeros in ours.results)
    assert [group["step"] for group in ours.groups()] == [24 - len(overflows)] * 2
    assert ours.groups()[0]["weight_decay"] > 0.1


def test_a_constant_loss_scale_is_checked_and_stays(device: torch.device) -> None:
    theirs, ours = pair(torch.bfloat16, device, loss_scale=64.0, clip_grad=1.0)
    ours.wrap()
    for training in (theirs, ours):
        training.run(range(8), overflows=(3,))
    assert_same(theirs, ours)
    assert ours.results[3] == (False, None, None)
    assert ours.optimizer.get_loss_scale().item() == 64.0


def test_without_clipping_the_norm_is_what_megatron_gives(device: torch.device) -> None:
    theirs, ours = pair(torch.bfloat16, device, clip_grad=0.0)
    ours.wrap()
    for training in (theirs, ours):
        training.run(range(4))
    assert_same(theirs, ours)


def test_a_norm_above_the_threshold_changes_nothing(device: torch.device) -> None:
    probe = Training(torch.float32, device, clip_grad=1.0)
    probe.run(range(12))
    threshold = sorted(norm for _, norm, _ in probe.results)[6]
    theirs, ours = pair(
        torch.float32,
        device,
        clip_grad=1.0,
        grad_norm_skip_threshold=threshold,
        log_num_zeros_in_grad=True,
    )
    wrapper = ours.wrap()
    for step in range(12):
        before = ours.tensors()
        theirs.step(step)
        success, norm, zeros = ours.step(step)
        if not success:
            assert norm > threshold and zeros is not None
            after = ours.tensors()
            assert all(torch.equal(before[name], after[name]) for name in before)
    assert_same(theirs, ours)
    assert 0 < sum(not success for success, _, _ in ours.results) < 12
    assert ours.optimizer.config.grad_norm_skip_threshold == threshold
    assert wrapper.captures == 1


def tag_norm_group(training: Training) -> None:
    """Puts the last layer into Megatron's separate norm group, model and main parameters alike."""
    from megatron.core.optimizer import optimizer as megatron_optimizer

    name = getattr(megatron_optimizer, "MTP_GRAD_NORM_GROUP", None)
    if name is None:
        pytest.skip("this Megatron has no separate gradient norm groups")
    for parameter in training.model.module.last.parameters():
        parameter.grad_norm_group = name
        if hasattr(parameter, "main_param"):
            parameter.main_param.grad_norm_group = name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_separate_norm_groups_clip_by_their_own_norm(
    device: torch.device, dtype: torch.dtype
) -> None:
    theirs, ours = pair(dtype, device, clip_grad=0.1)
    for training in (theirs, ours):
        tag_norm_group(training)
    ours.wrap(cuda_graph_warmup_steps=2)
    for training in (theirs, ours):
        training.run(range(8), overflows=(4,) if dtype is torch.float16 else ())
    assert_same(theirs, ours)
    assert set(ours.optimizer.grad_norms_by_group) == {"mtp"}


class TwoGroups:
    """A chain of two optimizers whose gradient statistics belong to different process groups."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        from megatron.core.optimizer import ChainedOptimizer

        self.parts = [Training(torch.float32, device, **options) for _ in range(2)]
        leaves = [part.optimizer.chained_optimizers[0] for part in self.parts]
        leaves[1].grad_stats_parallel_group = torch.distributed.new_group([0])
        leaves[1].config = leaves[0].config
        self.optimizer = ChainedOptimizer(leaves)
        assert not self.optimizer.grads_states_parallel_group_is_shared()

    def set_gradients(self, *values: float) -> None:
        """One element of each part's gradient; the others are zero."""
        for part, value in zip(self.parts, values, strict=True):
            for parameter in part.model.parameters():
                parameter.main_grad.zero_()
            part.model.module.first.weight.main_grad[1, 2] = value

    def weights(self) -> torch.Tensor:
        return torch.cat(
            [p.detach().flatten() for part in self.parts for p in part.model.parameters()]
        )


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [((3.0, 4.0), 5.0), ((3.0, 0.0), 3.0), ((0.0, 4.0), 4.0), ((0.0, 0.0), 0.0)],
)
def test_statistics_groups_are_combined_without_the_host(
    device: torch.device, gradients: tuple[float, float], norm: float
) -> None:
    two = TwoGroups(device, clip_grad=1.0, log_num_zeros_in_grad=True)
    two.optimizer.step = wrapper = OptimizerCudaGraphWrapper(two.optimizer.step)
    numel = two.weights().numel()
    for _ in range(3):
        two.set_gradients(*gradients)
        success, found, zeros = two.optimizer.step()
        assert success and float(found) == norm
        assert int(zeros) == numel - sum(value != 0.0 for value in gradients)
        assert two.weights().isfinite().all()
        coefficient = min(1.0, 1.0 / (norm + 1e-6))
        for part, value in zip(two.parts, gradients, strict=True):
            clipped = part.model.module.first.weight.main_grad[1, 2].item()
            assert clipped == pytest.approx(value * coefficient, rel=1e-6)
    assert wrapper.replays == 2


def test_the_threshold_means_the_combined_norm(device: torch.device) -> None:
    two = TwoGroups(device, clip_grad=1.0, grad_norm_skip_threshold=4.5)
    two.optimizer.step = OptimizerCudaGraphWrapper(two.optimizer.step)
    for group in two.optimizer.param_groups:
        group["lr"] = 1e-2
    for gradients, applied in [((3.0, 1.0), True), ((3.0, 4.0), False), ((1.0, 4.0), True)]:
        before = two.weights()
        two.set_gradients(*gradients)
        success, norm, _ = two.optimizer.step()
        assert success is applied
        assert norm == pytest.approx(math.hypot(*gradients))
        assert torch.equal(before, two.weights()) is not applied
    assert [group["step"] for group in two.optimizer.param_groups] == [2] * 4


def test_what_a_step_returned_stays_what_it_was(device: torch.device) -> None:
    training = Training(torch.bfloat16, device, clip_grad=1.0, log_num_zeros_in_grad=True)
    training.wrap()
    kept, seen = [], []
    for step in range(5):
        training.backward(step)
        success, norm, zeros = training.optimizer.step()
        assert success is True
        kept.append((norm, zeros))
        seen.append((float(norm), float(zeros)))
    assert [(float(norm), float(zeros)) for norm, zeros in kept] == seen
    assert len({norm for norm, _ in seen}) == 5


def test_only_a_step_that_can_be_skipped_is_waited_for(device: torch.device) -> None:
    free = Training(torch.bfloat16, device, clip_grad=1.0, log_num_zeros_in_grad=True)
    scaled = Training(torch.float16, device, clip_grad=1.0, log_num_zeros_in_grad=True)
    for training, kinds in ((free, (torch.Tensor, torch.Tensor)), (scaled, (float, int))):
        training.wrap()
        for step in range(3):
            training.backward(step)
            success, norm, zeros = training.optimizer.step()
            if success:
                assert (type(norm), type(zeros)) == kinds
    free.backward(3)
    with no_waiting(device):
        free.optimizer.step()


def test_megatrons_timers_are_not_started_inside_the_step(device: torch.device) -> None:
    training = Training(torch.bfloat16, device, clip_grad=1.0)

    def timers(name: str, log_level: int | None = None) -> Any:
        raise AssertionError(f"timer {name} waits for the device")

    training.optimizer.config.timers = timers
    training.wrap()
    training.run(range(3))
    assert training.optimizer.config.timers is timers


def test_two_optimizers_have_a_graph_each(device: torch.device) -> None:
    trainings = [Training(torch.bfloat16, device, clip_grad=c) for c in (0.1, 1.0)]
    alone = [Training(torch.bfloat16, device, clip_grad=c) for c in (0.1, 1.0)]
    wrappers = [training.wrap() for training in trainings]
    for step in range(6):
        for training in trainings:
            training.step(step)
    for training, other in zip(trainings, alone, strict=True):
        other.run(range(6))
        assert_same(training, other)
    assert [wrapper.captures for wrapper in wrappers] == [1, 1]


def test_train_called_again_captures_again(device: torch.device) -> None:
    theirs, ours = pair(torch.float16, device, clip_grad=0.5)
    theirs.run(range(12), overflows=(2, 6))
    for part in (range(4), range(4, 8), range(8, 12)):
        wrapper = ours.wrap()
        ours.run(part, overflows=(2, 6))
        assert (wrapper.captures, wrapper.replays) == (1, 3)
        del ours.optimizer.step
        assert "step" not in vars(ours.optimizer)
        del wrapper
    assert_same(theirs, ours)


def test_wrapped_again_it_goes_on_with_megatrons_step(device: torch.device) -> None:
    theirs, ours = pair(torch.bfloat16, device)
    first = ours.wrap()
    ours.run(range(3))
    second = ours.wrap()
    ours.run(range(3, 6))
    theirs.run(range(6))
    assert_same(theirs, ours)
    assert not first.captured and second.captured
    assert second.__self__ is ours.optimizer


def test_eager_steps_of_megatron_go_on_from_a_captured_one(device: torch.device) -> None:
    theirs, ours = pair(torch.float16, device, clip_grad=0.5)
    ours.wrap()
    ours.run(range(6), overflows=(3,))
    del ours.optimizer.step
    ours.run(range(6, 12), overflows=(7, 8))
    theirs.run(range(12), overflows=(3, 7, 8))
    assert_same(theirs, ours)


def test_changed_options_and_moved_memory_capture_again(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = pair(torch.bfloat16, device, clip_grad=0.1)
    wrapper = ours.wrap()

    def change_clip(training: Training) -> None:
        training.optimizer.config.clip_grad = 0.7

    def count_zeros(training: Training) -> None:
        training.optimizer.config.log_num_zeros_in_grad = True

    def move_main_parameter(training: Training) -> None:
        main = training.model.module.first.weight.main_param
        main.data = main.data.clone()

    def move_gradient(training: Training) -> None:
        parameter = training.model.module.first.weight
        parameter.main_grad = parameter.main_grad.clone()

    step = 0
    for change, reason in (
        (None, None),
        (change_clip, "clip_grad"),
        (count_zeros, "log_num_zeros_in_grad"),
        (move_main_parameter, "parameter 0 moved"),
    ):
        for training in (theirs, ours):
            if change is not None:
                change(training)
            training.run(range(step, step + 4))
        step += 4
        if reason is not None:
            assert reason in wrapper.recapture_reason
            assert reason in caplog.records[-1].getMessage()
            assert caplog.records[-1].levelno == logging.WARNING
    assert_same(theirs, ours)
    assert wrapper.captures == 4
    ours.backward(step)
    move_gradient(ours)
    ours.optimizer.step()
    assert "gradient 0 moved" in wrapper.recapture_reason


def test_gradients_that_move_at_every_step_are_refused(device: torch.device) -> None:
    training = Training(torch.float32, device)
    training.wrap()
    with pytest.raises(UsageError, match=r"gradient 0 moved from .*main_grad"):
        for step in range(8):
            training.backward(step)
            parameter = training.model.module.first.weight
            kept = parameter.main_grad
            parameter.main_grad = kept.clone()
            training.optimizer.step()
            del kept


def test_a_replaced_scaler_is_noticed(device: torch.device) -> None:
    training = Training(torch.float16, device, **F16_OPTIONS)
    wrapper = training.wrap()
    training.run(range(3))
    (leaf,) = training.optimizer.chained_optimizers
    other = Training(torch.float16, device, **F16_OPTIONS)
    leaf.grad_scaler = other.optimizer.chained_optimizers[0].grad_scaler
    training.run(range(3, 6), overflows=(3, 4))
    assert wrapper.recapture_reason == "another grad_scaler was put in place"
    assert wrapper.captures == 2
    assert leaf.grad_scaler.scale.item() == 2.0**15


def test_a_rank_without_parameters_takes_part(device: torch.device) -> None:
    from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    leaf = FP32Optimizer(
        None, OptimizerConfig(clip_grad=1.0, log_num_zeros_in_grad=True), lambda x: x
    )
    optimizer = ChainedOptimizer([leaf])
    optimizer.step = wrapper = OptimizerCudaGraphWrapper(optimizer.step)
    for _ in range(3):
        success, norm, zeros = optimizer.step()
        assert (success, float(norm), float(zeros)) == (True, 0.0, 0.0)
    assert wrapper.replays == 2


# What is refused.


def test_without_install_it_says_so(device: torch.device) -> None:
    training = Training(torch.float32, device)
    stepgraph.megatron.uninstall()
    with pytest.raises(UsageError, match=r"Call stepgraph\.megatron\.install\(\)"):
        training.wrap()


def test_another_optimizer_inside_is_refused(device: torch.device) -> None:
    stepgraph.megatron.uninstall()
    training = Training(torch.float32, device)
    stepgraph.megatron.install()
    with pytest.raises(
        UsageError, match=r"optimizer 0 \(FP32Optimizer\).*torch\.optim\.adamw\.AdamW"
    ):
        training.wrap()
    assert "step" not in vars(training.optimizer)


def test_a_function_without_an_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="bound method `step` of a MegatronOptimizer"):
        OptimizerCudaGraphWrapper(lambda: (True, None, None))
    with pytest.raises(UsageError, match="has no attribute prepare_grads"):
        OptimizerCudaGraphWrapper(torch.optim.SGD([torch.zeros(1)], lr=0.1).step)


def test_an_all_gather_that_outlives_the_step_is_refused(device: torch.device) -> None:
    training = Training(torch.float32, device)
    training.optimizer.config.overlap_param_gather_with_optimizer_step = True
    with pytest.raises(UsageError, match="overlap_param_gather_with_optimizer_step"):
        training.wrap()


# Reads on the host.


def in_megatron(source: str, device: torch.device) -> Any:
    """Runs code as if it stood in Megatron, where `value` makes tensors on the device."""

    def value(of: Any) -> torch.Tensor:
        return torch.tensor(of, device=device)

    scope: dict[str, Any] = {"__name__": "megatron.core.something", "value": value, "inf": math.inf}
    exec(compile(source, "something.py", "exec"), scope)
    return scope


def test_megatrons_item_stays_on_the_device(device: torch.device) -> None:
    with NoHostReads(device):
        source = "x = value([4.0])\ny = x.item() ** 0.5 > 1.0\nx.fill_(0)"
        found = in_megatron(source, device)["y"]
    assert isinstance(found, torch.Tensor) and found.shape == () and bool(found)


def test_megatrons_decisions_on_the_host_are_refused_with_the_place(device: torch.device) -> None:
    for source in ("if x > 1.0: pass", "float(x)", "int(x)", "x.tolist()", "[0, 1][x.int()]"):
        with (
            NoHostReads(device),
            pytest.raises(CaptureError, match=r"something\.py:2: .* decides on the host"),
        ):
            in_megatron("x = value(0.0)\n" + source, device)


def test_a_threshold_that_is_off_needs_no_value(device: torch.device) -> None:
    with NoHostReads(device):
        assert in_megatron("x = value([3.0])\nfound = x > inf", device)["found"] is False


def test_reads_of_others_are_theirs(device: torch.device) -> None:
    with NoHostReads(device):
        assert torch.tensor([4.0]).item() == 4.0
        assert bool(torch.tensor([4.0]) > 1.0)


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["eager", "captured", "replayed"])
def test_an_error_inside_the_step_leaves_the_optimizer_usable(
    device: torch.device, steps: int
) -> None:
    if steps == 2 and device.type == "cuda":
        pytest.skip("a replay calls nothing of Megatron's")
    theirs, ours = pair(torch.float16, device)
    replaced = ("prepare_grads", "step_with_ready_grads", "get_grad_norm")
    timers = ours.optimizer.config.timers = lambda *_: None
    ours.wrap()
    ours.run(range(steps))

    def failing() -> None:
        raise KeyError("in the middle")

    (leaf,) = ours.optimizer.chained_optimizers
    leaf._copy_model_grads_to_main_grads = failing
    ours.backward(steps)
    with pytest.raises(KeyError, match="in the middle"):
        ours.optimizer.step()
    del leaf._copy_model_grads_to_main_grads
    assert [name for name in replaced if name in vars(ours.optimizer)] == []
    assert ours.optimizer.config.timers is timers
    assert getattr(leaf.optimizer, "found_inf", None) is None

    ours.run(range(steps, steps + 4))
    theirs.run(range(steps + 4))
    assert_same(theirs, ours)
