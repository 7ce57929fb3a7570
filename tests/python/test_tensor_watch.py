import gc
import weakref

import pytest
import torch

import stepgraph
from core_problem import Problem
from stepgraph._core import HostExecutor, TensorWatch


def parameters(device, count=4):
    made = [torch.nn.Parameter(torch.ones(4, 6, device=device)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def watch_of(tensors, attribute="grad", wrapped=False):
    return TensorWatch(tensors, [attribute] * len(tensors), [wrapped] * len(tensors))


def accepted(tensors, **arguments):
    watch = watch_of(tensors, **arguments)
    assert watch.changed() == list(range(len(tensors)))
    watch.accept()
    assert watch.changed() == []
    return watch


def test_steady_state_is_silent(device):
    made = parameters(device)
    watch = accepted(made)
    for parameter in made:
        with torch.no_grad():
            parameter.add_(1.0)
            parameter.grad.mul_(2.0)
    assert watch.changed() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda p: setattr(p, "grad", None),
        lambda p: setattr(p, "grad", torch.ones_like(p)),
        lambda p: setattr(p, "data", torch.ones_like(p)),
        lambda p: setattr(p, "data", p.data[:2]),
        lambda p: setattr(p.grad, "data", torch.ones_like(p)),
        lambda p: p.grad.resize_(2, 3),
        lambda p: setattr(p, "data", p.data.view(torch.int32).view(torch.float32).t()),
    ],
)
def test_change_is_found(device, change):
    made = parameters(device)
    watch = accepted(made)
    kept = (made[2].data, made[2].grad.data)  # so that addresses are not reused
    change(made[2])
    assert watch.changed() == [2]
    assert watch.changed() == [2]  # until it is accepted
    watch.accept()
    assert watch.changed() == []
    del kept


def test_element_type_of_the_same_memory(device):
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.float16, device=device))
    watch = accepted([parameter])
    parameter.data = parameter.data.view(torch.bfloat16)
    assert watch.changed() == [0]


def test_gradient_that_comes_and_goes(device):
    made = parameters(device)
    made[1].grad = None
    watch = accepted(made)
    made[1].grad = torch.ones_like(made[1])
    assert watch.changed() == [1]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (), (1,)])
def test_empty_and_single_elements(device, shape):
    parameter = torch.nn.Parameter(torch.ones(shape, device=device))
    parameter.grad = torch.ones_like(parameter)
    accepted([parameter])


def test_contiguity_is_noticed(device):
    parameter = torch.nn.Parameter(torch.ones(4, 6, device=device))
    memory = torch.ones(4, 12, device=device)
    parameter.grad = memory.view(-1)[:24].view(4, 6)
    watch = accepted([parameter])
    parameter.grad = memory[:, ::2]
    assert memory.data_ptr() == parameter.grad.data_ptr()
    assert watch.changed() == [0]


def test_other_attribute(device):
    made = parameters(device, 2)
    watch = accepted(made, attribute="decoupled_grad")
    made[0].grad = None
    assert watch.changed() == []
    made[0].decoupled_grad = torch.ones_like(made[0])
    assert watch.changed() == [0]
    watch.accept()
    made[0].decoupled_grad = None
    assert watch.changed() == [0]


def test_without_gradients(device):
    made = parameters(device, 2)
    watch = accepted(made, attribute="")
    made[0].grad = None
    assert watch.changed() == []
    made[0].data = torch.ones_like(made[0])
    assert watch.changed() == [0]


def test_gradients_that_only_moved_are_rebound():
    problem = Problem("cpu", sizes=(6, 6, 6, 6))
    made = [tensor["parameter"] for tensor in problem.tensors]
    for tensor in problem.tensors:
        tensor["parameter"].grad = tensor["gradient"]
    executor = HostExecutor(problem.plan())
    watch = watch_of(made)
    watch.accept([0, 1, 2, -1])
    kept = [parameter.grad.data for parameter in made]
    made[0].grad = torch.zeros(6)
    made[2].grad.data = torch.zeros(2, 3)
    made[3].grad = torch.zeros(6)
    assert watch.rebind_gradients(executor) == (1, [2, 3])
    assert watch.rebind_gradients(executor) == (0, [2, 3])
    before = [parameter.clone() for parameter in made]
    executor.launch()
    assert [torch.equal(a, b) for a, b in zip(made, before)] == [True, False, False, False]
    del kept


def test_subclasses_are_read_by_their_methods(device):
    class Plain(torch.Tensor):
        pass

    class Elsewhere(torch.Tensor):
        """What its own storage says is not what it is about."""

        def data_ptr(self):
            return self.place

    plain = torch.ones(3, device=device).as_subclass(Plain)
    odd = torch.ones(3, device=device).as_subclass(Elsewhere)
    odd.place = 4096
    watch = accepted([plain, odd])
    odd.place = 8192
    assert watch.changed() == [1]


def test_wrapped_tensors_are_unwrapped(device):
    class Wrapper:
        def __init__(self, inner, grad=None):
            self._local_tensor = inner
            self.grad = grad

    wrapper = Wrapper(torch.ones(3, device=device), Wrapper(torch.ones(3, device=device)))
    watch = accepted([wrapper], wrapped=True)
    wrapper.grad._local_tensor = torch.zeros(3, device=device)
    assert watch.changed() == [0]
    watch.accept()
    wrapper._local_tensor = torch.zeros(3, device=device)
    assert watch.changed() == [0]
    watch.accept()
    wrapper.grad = None
    assert watch.changed() == [0]
    del wrapper._local_tensor
    with pytest.raises(AttributeError, match="_local_tensor"):
        watch.changed()


def test_tensors_without_memory_count_as_changed():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.eye(3)[0].to_sparse()
    watch = watch_of([parameter])
    watch.accept()
    assert watch.changed() == [0]
    parameter.grad = torch.ones(3)
    watch.accept()
    assert watch.changed() == []


def test_parameters_are_held_and_gradients_are_not():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    gradient = weakref.ref(parameter.grad)
    held = weakref.ref(parameter)
    watch = accepted([parameter])
    parameter.grad = None
    assert gradient() is None
    del parameter
    assert held() is not None
    del watch
    assert held() is None


def test_cycle_through_a_parameter_is_collected():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.watch = accepted([parameter])
    gone = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert gone() is None


def test_lengths_must_agree():
    with pytest.raises(stepgraph.UsageError, match="1 parameters, 2 gradient attributes"):
        TensorWatch([torch.ones(1)], ["grad", "grad"], [False])
