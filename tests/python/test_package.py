import pathlib
import pickle
import subprocess
import sys

import pytest

import stepgraph


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_import_needs_no_torch_and_no_gpu():
    assert run("import stepgraph, sys; print('torch' in sys.modules)") == "False"


def test_import_does_not_initialise_cuda():
    code = (
        "import stepgraph, torch; stepgraph.multi_tensor_l2norm; print(torch.cuda.is_initialized())"
    )
    assert run(code) == "False"


def test_nothing_is_reported_at_exit():
    """nanobind names what it finds alive when the interpreter goes."""
    code = """
import stepgraph, torch
from stepgraph import _core
p = [torch.ones(8) for _ in range(4)]
builder = _core.StepBuilder()
builder.add_tensor(builder.add_group(), name="p", numel=8, device=-1,
                   **dict(zip(("parameter", "gradient", "exp_avg", "exp_avg_sq"),
                              [(t.data_ptr(), "f32", 0) for t in p])))
builder.add_foreign_work("hook", "advance_step")
executor = _core.HostExecutor(builder.build(), {"hook": lambda: executor})
executor.launch()
watch = _core.TensorWatch(p, ["grad"] * 4, [False] * 4)
p[0].watch = watch
try:
    executor.set_eps(9, 1.0)
except stepgraph.UsageError as error:
    kept = error
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_package_is_typed_and_versioned():
    folder = pathlib.Path(stepgraph.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "_core.pyi").exists()
    assert stepgraph.__version__.count(".") == 2


@pytest.mark.parametrize("name", stepgraph.__all__)
def test_every_public_name_is_there(name):
    assert getattr(stepgraph, name) is not None
    assert name in dir(stepgraph)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="'Adam'"):
        stepgraph.Adam  # noqa: B018


@pytest.mark.parametrize(
    "name", ["Error", "UsageError", "CudaError", "CaptureError", "UpdateError"]
)
def test_errors_are_pickled_by_their_public_names(name):
    error = getattr(stepgraph, name)
    assert error.__module__ == "stepgraph"
    copy = pickle.loads(pickle.dumps(error("text")))
    assert type(copy) is error and str(copy) == "text"
    assert issubclass(error, stepgraph.Error) and issubclass(error, RuntimeError)
