"""The extension module: what the bindings do beside the core, on every executor."""

import gc
import math
import pickle
import threading
import time
import weakref

import pytest
import torch

import stepgraph
from core_problem import Problem, Reference, Runner, operand, ordinal
from stepgraph import _core


def cuda(kind):
    return pytest.param(kind, marks=pytest.mark.gpu)


@pytest.fixture(params=["HostExecutor", cuda("StreamExecutor"), cuda("GraphExecutor")])
def kind(request):
    if request.param != "HostExecutor" and not (_core.HAS_CUDA and torch.cuda.is_available()):
        pytest.skip("needs a GPU and a build with CUDA")
    return request.param


@pytest.fixture
def problem(kind):
    return Problem("cpu" if kind == "HostExecutor" else "cuda")


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_step_is_the_reference_in_float64(kind, problem, decoupled, max_norm):
    reference = Reference(problem, lr=0.05, weight_decay=0.1)
    plan = problem.plan(
        {"max_grad_norm": max_norm}, learning_rate=0.05, weight_decay=0.1, decoupled=decoupled
    )
    runner = Runner(kind, plan)
    for _ in range(5):
        for tensor in problem.tensors:
            tensor["gradient"].copy_(torch.randn(tensor["gradient"].shape))
        gradients = [tensor["gradient"] for tensor in problem.tensors]
        norm = reference.step(gradients, max_norm, decoupled)
        runner.launch()
    status = runner.core.status()
    assert status.step == 5
    if max_norm:
        assert status.grad_norm == pytest.approx(norm, rel=1e-6)
        assert status.norms == [status.grad_norm]
        assert status.clip_coefficient == pytest.approx(max_norm / (norm + 1e-6), rel=1e-6)
    for tensor, p, m, v in zip(
        problem.tensors,
        reference.parameters,
        reference.exp_avg,
        reference.exp_avg_sq,
        strict=True,
    ):
        torch.testing.assert_close(tensor["parameter"].double().cpu(), p, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tensor["exp_avg"].double().cpu(), m, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(tensor["exp_avg_sq"].double().cpu(), v, rtol=1e-5, atol=1e-8)


def test_setters_reach_the_next_launch(kind, problem):
    options = {"max_grad_norm": 1.0, "loss_scale": 4.0, "samples_per_step": 2}
    core = (runner := Runner(kind, problem.plan(options))).core
    core.set_learning_rate(0, 0.25)
    core.set_weight_decay(0, 0.125)
    core.set_betas(0, 0.5, 0.75)
    core.set_eps(0, 1e-6)
    core.set_group_step(0, 10)
    core.set_step(20)
    core.set_loss_scale(8.0)
    core.set_max_grad_norm(2.0)
    core.set_skip_above_norm(1e9)
    core.set_samples_per_step(3)
    runner.launch()
    status = core.status()
    (group,) = status.groups
    assert (group.step, group.learning_rate, group.weight_decay) == (11, 0.25, 0.125)
    assert (status.step, status.samples) == (21, 3)
    assert (status.loss_scale, status.next_loss_scale) == (8.0, 8.0)
    assert status.clip_coefficient == pytest.approx(2.0 / (status.grad_norm + 1e-6))
    gradient = problem.tensors[0]["gradient"] / 8.0 * status.clip_coefficient
    torch.testing.assert_close(problem.tensors[0]["exp_avg"], gradient * 0.5)
    core.set_skip_above_norm(1e-9)
    runner.launch()
    assert core.status().last_skipped
    assert core.status().skipped == 1


def test_values_by_hand_hold_over_schedules_until_they_are_resumed(kind, problem):
    table = stepgraph.schedules.table([0.1, 0.2, 0.3, 0.4])
    plan = problem.plan(learning_rate_schedule=table, weight_decay_schedule=table)
    core = (runner := Runner(kind, plan)).core
    seen = []
    for change in (
        lambda: None,
        lambda: (core.set_learning_rate(0, 7.0), core.set_weight_decay(0, 8.0)),
        lambda: core.resume_schedule(0),
        lambda: core.resume_weight_decay_schedule(0),
    ):
        change()
        runner.launch()
        (group,) = core.status().groups
        seen.append((group.learning_rate, group.weight_decay))
    assert seen == [(0.1, 0.1), (7.0, 8.0), (0.3, 8.0), (0.4, 0.4)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda core: core.set_learning_rate(0, math.nan), ["learning_rate", "nan", "the group"]),
        (lambda core: core.set_learning_rate(3, 0.1), ["group 3", "1 groups"]),
        (lambda core: core.set_weight_decay(0, -1.0), ["weight_decay", "-1"]),
        (lambda core: core.set_betas(0, 1.0, 0.9), ["beta1"]),
        (lambda core: core.set_eps(0, math.inf), ["eps"]),
        (lambda core: core.set_loss_scale(0.0), ["loss_scale"]),
        (lambda core: core.set_max_grad_norm(1.0), ["max_grad_norm", "measure"]),
        (lambda core: core.set_skip_above_norm(1.0), ["skip_above_norm", "measure"]),
        (lambda core: core.resume_schedule(0), ["schedule", "the group"]),
        (lambda core: core.resume_weight_decay_schedule(0), ["schedule", "the group"]),
        (lambda core: core.load_state(_core.StepStatus()), ["0 groups", "expected 1"]),
        (lambda core: core.rebind([(0, "grad", 8, 0)]), ["operand", "'grad'", "'gradient'"]),
        (lambda core: core.rebind([(9, "gradient", 8, 0)]), ["tensor 9"]),
        (lambda core: core.rebind([(0, "gradient", 0, 0)]), ["tensor 0", "gradient"]),
        (lambda core: core.rebind([(0, "master", 8, 0)]), ["tensor 0", "master"]),
    ],
)
def test_refusals_name_what_is_wrong_and_change_nothing(kind, problem, call, words):
    runner = Runner(kind, problem.plan(name="the group", learning_rate=0.5))
    with pytest.raises(stepgraph.UsageError) as raised:
        call(runner.core)
    for word in words:
        assert word in str(raised.value)
    assert isinstance(raised.value, ValueError)
    runner.launch()
    assert runner.core.status().groups[0].learning_rate == 0.5


def test_wrong_types_are_type_errors(kind, problem):
    runner = Runner(kind, problem.plan())
    with pytest.raises(TypeError):
        runner.core.set_learning_rate(0, "much")
    with pytest.raises(TypeError):
        runner.core.set_learning_rate(-1, 0.1)
    with pytest.raises(TypeError):
        problem.builder().add_tensor(0, name="x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_grad_norm": -1.0}, ["max_grad_norm"]),
        ({"loss_scale": 0.0}, ["loss_scale"]),
        ({"norm": "l3"}, ["norm", "'l3'", "'infinity'"]),
        ({"scaling": _core.LossScaling.torch_amp(), "loss_scale": 2.0}, ["loss_scale", "scaling"]),
        ({"scaling": _core.LossScaling("torch_amp", growth_factor=0.5)}, ["growth_factor"]),
        ({"scaling": _core.LossScaling.torch_amp(-1.0)}, ["loss_scale", "-1"]),
    ],
)
def test_builder_refuses_options(options, words):
    with pytest.raises(stepgraph.UsageError) as raised:
        _core.StepBuilder().set_options(**options)
    for word in words:
        assert word in str(raised.value)


def test_builder_refuses_tensors_by_name():
    memory = torch.zeros(8)
    good = {"numel": 4, "device": -1, "parameter": operand(memory), "gradient": None}
    state = torch.zeros(2, 8)
    good |= {"exp_avg": operand(state[0]), "exp_avg_sq": operand(state[1])}
    builder = _core.StepBuilder()
    group = builder.add_group()
    with pytest.raises(stepgraph.UsageError, match=r"'lonely'.*gradient"):
        builder.add_tensor(group, name="lonely", **good)
    good["gradient"] = (memory.data_ptr(), "f64", 0)
    with pytest.raises(stepgraph.UsageError, match="format is 'f64'"):
        builder.add_tensor(group, name="odd", **good)
    good["gradient"] = operand(memory)
    builder.add_tensor(group, name="shared", **good)
    with pytest.raises(stepgraph.UsageError, match="shared"):
        builder.build()
    with pytest.raises(stepgraph.UsageError, match="group 7"):
        builder.add_tensor(7, name="stray", **good)
    with pytest.raises(stepgraph.UsageError, match="'shared'"):
        builder.add_gradient(group, name="shared", numel=4, device=-1, gradient=operand(state[0]))
    with pytest.raises(stepgraph.UsageError, match="beta2"):
        builder.add_group(beta2=2.0)
    with pytest.raises(stepgraph.UsageError, match="when is 'soon'"):
        builder.add_foreign_work("hook", "grad_stats", when="soon")


def test_every_operand_reaches_the_plan():
    numel = 300
    scales = _core.scale_count(numel)
    assert scales == 3
    half = torch.zeros(4, numel, dtype=torch.float16)
    bytes_ = torch.zeros(8, numel, dtype=torch.uint8)
    scalars = torch.ones(3)
    builder = _core.StepBuilder()
    group = builder.add_group(name="narrow")
    builder.add_tensor(
        group,
        name="narrow",
        numel=numel,
        device=-1,
        parameter=(bytes_[0].data_ptr(), "e4m3", 0),
        gradient=(half[0].data_ptr(), "bf16", 0),
        master=(half[1].data_ptr(), "f16", bytes_[1].data_ptr()),
        exp_avg=(bytes_[2].data_ptr(), "e4m3", bytes_[3].data_ptr()),
        exp_avg_sq=(half[2].data_ptr(), "f16", bytes_[4].data_ptr()),
        max_exp_avg_sq=(half[3].data_ptr(), "f16", bytes_[5].data_ptr()),
        parameter_scaling=tuple(scalars[i].data_ptr() for i in range(3)),
    )
    plan = builder.build()
    names = [node["name"] for node in plan.nodes()]
    assert names == ["advance_step", "update/e4m3/bf16/f16/e4m3/f16/amsgrad"]
    assert plan.nodes()[1]["kind"] == "update"
    assert plan.nodes()[1]["tensors"] == [0]
    assert plan.nodes()[1]["bytes_written"] > 0
    assert (plan.tensors, plan.groups, plan.norm_groups) == (["narrow"], ["narrow"], [""])
    assert "digraph" in plan.to_dot()
    assert "update/e4m3" in plan.to_dot()


def test_gradients_without_parameters_are_unscaled(kind, problem):
    gradient = torch.full((500,), 8.0, device=problem.device)
    builder = _core.StepBuilder()
    group = builder.add_group(norm_group="alone")
    builder.add_gradient(
        group,
        name="gradient",
        numel=500,
        device=ordinal(problem.device),
        gradient=operand(gradient),
    )
    builder.set_options(unscale_gradients=True, loss_scale=4.0, measure_norm=True, count_zeros=True)
    plan = builder.build()
    assert plan.norm_groups == ["alone"]
    runner = Runner(kind, plan)
    runner.launch()
    status = runner.core.status()
    assert status.grad_norm == pytest.approx(2.0 * math.sqrt(500))
    assert gradient.tolist() == [2.0] * 500


def test_inputs_are_read_by_the_step(kind, problem):
    inputs = {
        name: torch.zeros(1, device=problem.device)
        for name in ("learning_rate", "weight_decay", "found_inf", "loss_scale")
    }
    inputs["learning_rate"].fill_(0.5)
    inputs["loss_scale"].fill_(2.0)
    plan = problem.plan(
        {f"{name}_input": inputs[name].data_ptr() for name in ("found_inf", "loss_scale")},
        **{f"{name}_input": inputs[name].data_ptr() for name in ("learning_rate", "weight_decay")},
    )
    runner = Runner(kind, plan)
    runner.launch()
    assert runner.core.status().groups[0].learning_rate == 0.5
    assert runner.core.status().loss_scale == 2.0
    inputs["weight_decay"].fill_(0.25)
    inputs["found_inf"].fill_(1.0)
    runner.launch()
    assert runner.core.status().found_inf
    inputs["found_inf"].zero_()
    runner.launch()
    assert runner.core.status().groups[0].weight_decay == 0.25
    assert (runner.core.status().step, runner.core.status().skipped) == (2, 1)


def test_records_arrive_in_order_and_count_what_was_lost(kind, problem):
    plan = problem.plan(
        {"record_capacity": 4, "measure_norm": True, "skip_non_finite": True, "count_zeros": True},
        learning_rate=0.5,
    )
    runner = Runner(kind, plan)
    assert runner.core.read_records().records == []
    problem.tensors[0]["gradient"][3] = 0.0
    runner.launch()
    problem.tensors[0]["gradient"][0] = math.inf
    runner.launch()
    runner.core.status()
    batch = runner.core.read_records()
    first, second = batch.records
    assert batch.overwritten == 0
    assert (first.launch, first.step, first.skipped, first.was_skipped) == (1, 1, 0, False)
    assert (first.zeros, first.clip_coefficient, first.loss_scale) == (1, 1.0, 1.0)
    assert first.groups[0].learning_rate == 0.5
    assert (second.launch, second.step, second.skipped, second.was_skipped) == (2, 1, 1, True)
    assert second.found_inf and math.isinf(second.grad_norm)
    for _ in range(10):
        runner.launch()
    runner.core.status()
    batch = runner.core.read_records()
    assert batch.overwritten + len(batch.records) == 10
    assert len(batch.records) <= 4
    assert batch.records[-1].launch == 12
    assert "launch 12" in repr(batch.records[-1])


def test_state_is_restored(kind, problem):
    scaling = _core.LossScaling.megatron(2.0**10, growth_interval=3, hysteresis=2)
    options = {"scaling": scaling, "samples_per_step": 4}
    first = Runner(kind, problem.plan(options))
    for step in range(5):
        problem.tensors[0]["gradient"][0] = math.inf if step == 3 else 1.0
        first.launch()
    state = first.core.status()
    assert (state.step, state.skipped, state.samples) == (4, 1, 16)
    assert (state.next_loss_scale, state.growth_tracker, state.hysteresis_left) == (2048.0, 1, 1)

    copy = _core.StepStatus()
    for name in ("step", "skipped", "samples", "next_loss_scale"):
        setattr(copy, name, getattr(state, name))
    copy.growth_tracker, copy.hysteresis_left = state.growth_tracker, state.hysteresis_left
    copy.groups = [_core.GroupStatus()]
    copy.groups[0].step = state.groups[0].step
    second = Runner(kind, problem.plan(options))
    second.core.load_state(copy)
    second.launch()
    first.launch()
    for name in ("step", "skipped", "samples", "loss_scale", "next_loss_scale", "growth_tracker"):
        assert getattr(second.core.status(), name) == getattr(first.core.status(), name)
    assert second.core.status().groups[0].step == 5

    copy.groups = ["no group"]
    with pytest.raises((TypeError, RuntimeError)):
        second.core.load_state(copy)


def test_loss_scaling_has_the_numbers_of_torch_and_megatron():
    torch_amp = _core.LossScaling()
    assert torch_amp == _core.LossScaling.torch_amp() == _core.LossScaling("torch_amp")
    assert (torch_amp.initial, torch_amp.growth_interval) == (65536.0, 2000)
    megatron = _core.LossScaling.megatron()
    assert (megatron.initial, megatron.growth_interval, megatron.hysteresis) == (2.0**32, 1000, 2)
    assert (megatron.growth_factor, megatron.backoff_factor, megatron.minimum) == (2.0, 0.5, 1.0)
    assert megatron != torch_amp
    assert _core.LossScaling("fixed").initial == 1.0
    copy = pickle.loads(pickle.dumps(megatron))
    assert copy == megatron and hash(copy) == hash(megatron)
    with pytest.raises(stepgraph.UsageError, match="rule is 'apex'"):
        _core.LossScaling("apex")


def test_rebound_operands_are_used_from_the_next_launch_on(kind, problem):
    runner = Runner(kind, problem.plan(learning_rate=0.5))
    runner.launch()
    first = problem.tensors[0]
    old = first["parameter"].clone()
    other = {name: torch.zeros_like(value) for name, value in first.items()}
    other["gradient"].fill_(1.0)
    runner.core.rebind([(0, name, value.data_ptr(), 0) for name, value in other.items()])
    runner.launch()
    runner.core.status()
    assert torch.equal(first["parameter"], old)
    assert other["exp_avg"][0].item() == pytest.approx(0.1)
    with pytest.raises(stepgraph.UsageError):  # the second is refused, so the first is not taken
        runner.core.rebind([(0, "parameter", old.data_ptr(), 0), (1, "gradient", 0, 0)])
    before = other["parameter"].clone()
    runner.launch()
    runner.core.status()
    assert not torch.equal(other["parameter"], before)


def test_update_goes_on_with_another_plan(kind, problem):
    runner = Runner(kind, problem.plan(name="g", learning_rate=0.5))
    runner.launch()
    report = runner.update(problem.plan(name="g", learning_rate=0.25))
    assert report.path == "scalar_write"
    assert not report.rebuilt
    assert any("learning_rate" in reason for reason in report.reasons)
    assert report.counts["instantiations"] == 0
    assert report.seconds >= 0.0
    runner.launch()
    assert runner.core.status().groups[0].learning_rate == 0.25
    problem.tensors.append({k: torch.ones(9, device=problem.device) for k in problem.tensors[0]})
    plan = problem.plan(name="g", learning_rate=0.25)
    report = runner.update(plan)
    assert any("tensor 4" in reason for reason in report.reasons)
    runner.launch()
    assert runner.core.plan.tensors == plan.tensors
    assert runner.core.status().step == 3
    assert runner.core.recapture_required() is None


def test_released_executor_refuses(kind, problem):
    runner = Runner(kind, problem.plan())
    runner.launch()
    runner.core.release()
    runner.core.release()
    for call in (
        runner.launch,
        runner.core.status,
        lambda: runner.core.set_learning_rate(0, 0.1),
        runner.core.loss_scale_address,
        runner.core.totals_address,
        lambda: runner.update(problem.plan()),
    ):
        with pytest.raises(stepgraph.UsageError, match="released"):
            call()


def test_addresses_are_of_the_loss_scale_and_the_totals(kind, problem):
    import ctypes

    options = {"loss_scale": 16.0, "exchange_totals": True, "measure_norm": True}
    core = Runner(kind, problem.plan(options)).core
    assert core.loss_scale_address() and core.totals_address()
    if kind == "HostExecutor":
        assert ctypes.c_float.from_address(core.loss_scale_address()).value == 16.0


def hooked(problem, **work):
    builder = problem.builder()
    builder.add_foreign_work("hook", "advance_step", **work)
    return builder.build()


def test_foreign_work_is_called_with_what_it_needs(kind, problem):
    calls = []
    runner = Runner(kind, hooked(problem), {"hook": lambda *arguments: calls.append(arguments)})
    for _ in range(3):
        runner.launch()
    assert len(calls) == (1 if kind == "GraphExecutor" else 3)
    if kind == "HostExecutor":
        assert calls[0] == ()
    else:
        _, totals, loss_scale = calls[0]
        assert totals == runner.core.totals_address()
        assert loss_scale == runner.core.loss_scale_address()


def test_exception_of_foreign_work_arrives_as_it_was_raised(kind, problem):
    class MyError(Exception):
        pass

    def hook(*_):
        raise MyError("from the hook")

    with pytest.raises(MyError, match="from the hook"):
        Runner(kind, hooked(problem), {"hook": hook}).launch()
    runner = Runner(kind, problem.plan())
    runner.launch()
    assert runner.core.status().step == 1


def test_foreign_work_that_does_not_fit_the_plan_is_named(kind, problem):
    with pytest.raises(stepgraph.UsageError, match="'hook'"):
        Runner(kind, hooked(problem))
    with pytest.raises(stepgraph.UsageError, match="'other'"):
        Runner(kind, hooked(problem), {"hook": print, "other": print})
    with pytest.raises(TypeError, match="'hook'"):
        Runner(kind, hooked(problem), {"hook": 3})


def test_executor_and_its_hook_are_collected_together(kind, problem):
    class Owner:
        def __init__(self):
            self.runner = Runner(kind, hooked(problem), {"hook": self.hook})

        def hook(self, *_):
            pass

    owner = Owner()
    owner.runner.launch()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_failed_construction_leaves_no_hook_behind(kind, problem):
    class Hook:
        def __call__(self, *_):
            raise RuntimeError("no")

    hook = Hook()
    gone = weakref.ref(hook)
    with pytest.raises((RuntimeError, stepgraph.UsageError)):
        Runner(kind, hooked(problem), {"hook": hook, "other": hook}).launch()
    del hook
    gc.collect()
    assert gone() is None


def test_executor_called_from_its_own_foreign_work_is_refused(problem):
    if problem.device != "cpu":
        pytest.skip("the GPU's executors share the code")
    runners = []
    runner = Runner("HostExecutor", hooked(problem), {"hook": lambda: runners[0].core.status()})
    runners.append(runner)
    with pytest.raises(stepgraph.UsageError, match="foreign work"):
        runner.launch()


def test_other_threads_run_during_a_launch(problem):
    if problem.device != "cpu":
        pytest.skip("launches do not last there")
    inside, go_on = threading.Event(), threading.Event()

    def hook():
        inside.set()
        assert go_on.wait(10)

    runner = Runner("HostExecutor", hooked(problem), {"hook": hook})
    thread = threading.Thread(target=runner.launch)
    thread.start()
    assert inside.wait(10)
    runner.core.set_learning_rate(0, 0.5)  # neither waits nor disturbs
    waiting = threading.Thread(target=lambda: results.append(runner.core.status()))
    results = []
    waiting.start()
    time.sleep(0.05)
    assert results == []  # one at a time
    go_on.set()
    thread.join()
    waiting.join()
    assert results[0].step == 1


@pytest.mark.skipif(_core.HAS_CUDA, reason="this build has CUDA executors")
def test_host_build_says_what_it_lacks():
    plan = Problem("cpu").plan()
    for kind in (_core.StreamExecutor, _core.GraphExecutor):
        with pytest.raises(stepgraph.UsageError, match="no CUDA executors"):
            kind(plan, 0)


@pytest.mark.skipif(not _core.HAS_CUDA, reason="needs a build with CUDA")
@pytest.mark.parametrize("kind", ["StreamExecutor", "GraphExecutor"])
def test_cuda_executors_refuse_host_tensors(kind):
    with pytest.raises(stepgraph.UsageError, match=r"host.*CUDA"):
        getattr(_core, kind)(Problem("cpu").plan(), 0)


@pytest.mark.skipif(
    not _core.HAS_CUDA or torch.cuda.is_available(), reason="needs a CUDA build without a GPU"
)
def test_failing_cuda_call_is_a_cuda_error():
    with pytest.raises(stepgraph.CudaError) as raised:
        _core.GraphExecutor(_core.StepBuilder().build(), 0)
    assert raised.value.status != 0
    assert "cudaGetDeviceCount" in str(raised.value)


@pytest.mark.parametrize("format_", ["f16", "e4m3"])
@pytest.mark.parametrize("second_moment", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 128, 1000])
def test_block_scaled_states_round_trip(format_, second_moment, numel):
    values = torch.randn(numel) * 1e-3
    if second_moment:
        values = values.square()
    stored = torch.zeros(numel, dtype=torch.float16 if format_ == "f16" else torch.uint8)
    scales = torch.zeros(_core.scale_count(numel), dtype=torch.uint8)
    pointers = (stored.data_ptr(), scales.data_ptr())
    _core.encode_block_scaled(values.data_ptr(), numel, format_, second_moment, *pointers)
    decoded = torch.full((numel,), -1.0)
    _core.decode_block_scaled(*pointers, numel, format_, second_moment, decoded.data_ptr())
    # Half a unit in the last place of the largest of 128 neighbours, at least.
    places = 2.0 ** (-11 if format_ == "f16" else -4)
    for first in range(0, numel, 128):
        block, back = (
            t[first : first + 128].sqrt() if second_moment else t[first : first + 128]
            for t in (values, decoded)
        )
        assert (block - back).abs().max() <= places * block.abs().max() * (1 + 1e-5)
    again = torch.zeros_like(stored)
    _core.encode_block_scaled(
        decoded.data_ptr(), numel, format_, second_moment, again.data_ptr(), scales.data_ptr()
    )
    assert torch.equal(again.view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_block_scaled_states_have_the_bits_of_the_step(dtype):
    """A step whose moments are stored narrow stores what the conversion stores."""
    numel = 500
    gradient = torch.randn(numel) * 1e-2
    wide, narrow = {}, {}
    for states in (wide, narrow):
        states["parameter"] = torch.ones(numel)
        states["gradient"] = gradient.clone()
    format_ = "f16" if dtype == torch.float16 else "e4m3"
    scales = torch.zeros(2, _core.scale_count(numel), dtype=torch.uint8)
    builder = _core.StepBuilder()
    group = builder.add_group()
    for name, states in (("wide", wide), ("narrow", narrow)):
        moments = [
            torch.zeros(numel, dtype=torch.float32 if name == "wide" else dtype) for _ in range(2)
        ]
        states["exp_avg"], states["exp_avg_sq"] = moments
        described = [
            operand(moment) if name == "wide" else (moment.data_ptr(), format_, scale.data_ptr())
            for moment, scale in zip(moments, scales, strict=True)
        ]
        builder.add_tensor(
            group,
            name=name,
            numel=numel,
            device=-1,
            parameter=operand(states["parameter"]),
            gradient=operand(states["gradient"]),
            exp_avg=described[0],
            exp_avg_sq=described[1],
        )
    _core.HostExecutor(builder.build()).launch()
    for name, row in (("exp_avg", 0), ("exp_avg_sq", 1)):
        stored = torch.zeros(numel, dtype=dtype)
        found = torch.zeros_like(scales[row])
        _core.encode_block_scaled(
            wide[name].data_ptr(), numel, format_, row == 1, stored.data_ptr(), found.data_ptr()
        )
        assert torch.equal(stored.view(torch.uint8), narrow[name].view(torch.uint8))
        assert torch.equal(found, scales[row])


def test_conversions_refuse_other_formats():
    with pytest.raises(stepgraph.UsageError, match=r"'bf16'.*'e4m3'"):
        _core.encode_block_scaled(8, 1, "bf16", False, 8, 8)
    with pytest.raises(stepgraph.UsageError, match="host memory"):
        _core.decode_block_scaled(0, 0, 1, "f16", False, 0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (_core.HAS_CUDA and torch.cuda.is_available()), reason="needs a GPU and a CUDA build"
)
class TestGraphExecutor:
    def test_steps_are_launched_enqueued_and_captured(self):
        problem = Problem("cuda")
        reference = Reference(problem, lr=0.05)
        runner = Runner("GraphExecutor", problem.plan(learning_rate=0.05))
        gradients = [tensor["gradient"] for tensor in problem.tensors]
        runner.core.enqueue(torch.cuda.current_stream().cuda_stream)
        runner.launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(stepgraph.CaptureError):
                runner.launch()
            runner.core.enqueue(torch.cuda.current_stream().cuda_stream)
        graph.replay()
        runner.core.set_learning_rate(0, 0.0)
        runner.core.deliver(torch.cuda.current_stream().cuda_stream)
        graph.replay()
        for _ in range(3):
            reference.step(gradients)
        assert runner.core.status().step == 4
        torch.testing.assert_close(
            problem.tensors[0]["parameter"].double().cpu(),
            reference.parameters[0],
            rtol=1e-5,
            atol=1e-6,
        )
        assert runner.core.instantiations == 1
        nodes = runner.core.nodes()
        assert nodes[-1]["kind"] == "update"
        assert "update_kernel" in nodes[-1]["function"]

    @pytest.mark.parametrize("kind", ["StreamExecutor", "GraphExecutor"])
    def test_changes_are_delivered_beside_a_capture(self, kind):
        problem = Problem("cuda")
        runner = Runner(kind, problem.plan(learning_rate=0.5))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        other = torch.ones_like(problem.tensors[0]["gradient"])
        with torch.cuda.stream(side):
            runner.launch()
            # On the stream of the launch, which nothing has waited for.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            runner.core.rebind([(0, "gradient", other.data_ptr(), 0)])
            runner.core.set_learning_rate(0, 0.25)
            runner.core.deliver_beside_capture()
            stream = torch.cuda.current_stream().cuda_stream
            runner.core.enqueue(stream) if kind == "GraphExecutor" else runner.core.launch(stream)
            graph.capture_end()
        torch.cuda.synchronize()
        before = problem.tensors[0]["exp_avg"].clone()
        graph.replay()
        status = runner.core.status()
        assert (status.step, status.groups[0].learning_rate) == (2, 0.25)
        torch.testing.assert_close(problem.tensors[0]["exp_avg"], 0.9 * before + 0.1 * other)

    def test_ceiling_is_kept(self):
        problem = Problem("cuda")
        runner = Runner("GraphExecutor", problem.plan())
        plan = problem.plan({"max_grad_norm": 1.0})
        stream = torch.cuda.current_stream().cuda_stream
        with pytest.raises(stepgraph.UpdateError, match="scalar_write"):
            runner.core.update(plan, stream, "scalar_write")
        assert runner.core.recapture_required() is not None
        with pytest.raises(stepgraph.UsageError, match="ceiling is 'cheap'"):
            runner.core.update(plan, stream, "cheap")
        assert runner.core.update(plan, stream).rebuilt
        runner.launch()
        assert runner.core.status().step == 1

    def test_several_steps_a_launch(self):
        problem = Problem("cuda")
        stream = torch.cuda.current_stream().cuda_stream
        executor = _core.GraphExecutor(problem.plan(), stream, steps_per_launch=3)
        executor.launch(stream)
        assert executor.status().step == 3
        with pytest.raises(stepgraph.UsageError, match="steps_per_launch"):
            executor.enqueue(stream)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_executor_of_another_device_leaves_the_current_device_alone(self):
        problem = Problem("cuda:1")
        stream = torch.cuda.current_stream(1).cuda_stream
        executor = _core.GraphExecutor(problem.plan(), stream)
        for _ in range(3):
            executor.launch(stream)
            assert torch.cuda.current_device() == 0
            assert torch.ones(1, device="cuda").device.index == 0
        assert executor.status().step == 3
