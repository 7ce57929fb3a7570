"""The hand-written types of the extension module against the module itself."""

import ast
import pathlib
import subprocess
import sys

import pytest

import stepgraph
from stepgraph import _core

STUB = pathlib.Path(stepgraph.__file__).resolve().parent / "_core.pyi"
UNTYPED = {"__repr__", "__getstate__", "__setstate__"}


def is_overloaded_property(function, kind):
    return any(
        isinstance(decorator, ast.Attribute) and decorator.attr == kind
        for decorator in function.decorator_list
    )


def arguments_of(function):
    """Names, kinds and defaults, for comparison."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    described = [
        ("positional", each.arg, default and ast.unparse(default))
        for each, default in zip(positional, defaults, strict=True)
    ]
    described += [
        ("keyword", each.arg, default and ast.unparse(default))
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return described


def functions_of(body):
    return {
        each.name: arguments_of(each)
        for each in body
        if isinstance(each, ast.FunctionDef)
        and each.name not in UNTYPED
        and not any(
            isinstance(decorator, ast.Name) and decorator.id == "property"
            for decorator in each.decorator_list
        )
        and not is_overloaded_property(each, "setter")
    }


def attributes_of(body):
    """Names of properties and whether they can be assigned."""
    found = {}
    for each in body:
        if isinstance(each, ast.AnnAssign):
            found[each.target.id] = True
        elif isinstance(each, ast.FunctionDef):
            if is_overloaded_property(each, "setter"):
                found[each.name] = True
            elif any(isinstance(d, ast.Name) and d.id == "property" for d in each.decorator_list):
                found[each.name] = False
    return found


def classes_of(tree):
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    pytest.importorskip("nanobind")
    folder = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-r", "-m", "stepgraph._core"]
    subprocess.run([*command, "-O", str(folder)], check=True)
    (main,) = folder.rglob("__init__.pyi")
    (factories,) = folder.rglob("schedules.pyi")
    return ast.parse(main.read_text()), ast.parse(factories.read_text())


@pytest.fixture(scope="module")
def written():
    return ast.parse(STUB.read_text())


@pytest.mark.skipif(not _core.HAS_CUDA, reason="without CUDA the executors have no methods")
def test_classes_have_the_methods_and_attributes_that_the_stub_says(generated, written):
    ours, theirs = classes_of(written), classes_of(generated[0])
    errors = {name for name in ours if name.endswith("Error")}
    assert set(ours) - errors - {"schedules"} == set(theirs)
    for name, found in theirs.items():
        assert functions_of(ours[name].body) == functions_of(found.body), name
        assert attributes_of(ours[name].body) == attributes_of(found.body), name
        assert [b.id for b in ours[name].bases] == [ast.unparse(b) for b in found.bases], name


def test_functions_are_those_of_the_stub(generated, written):
    assert functions_of(written.body) == functions_of(generated[0].body)
    stub = functions_of(classes_of(written)["schedules"].body)
    assert stub == functions_of(generated[1].body)


def test_every_schedule_is_exported():
    factories = {name for name in dir(_core.schedules) if not name.startswith("_")}
    assert factories <= set(stepgraph.schedules.__all__)


def test_errors_are_those_of_the_stub(written):
    for name, described in classes_of(written).items():
        if not name.endswith("Error"):
            continue
        bases = tuple(base.id for base in described.bases)
        assert tuple(base.__name__ for base in getattr(_core, name).__bases__) == bases
        assert getattr(_core, name) is getattr(stepgraph, name)
    assert stepgraph.CudaError("text").status == 0
