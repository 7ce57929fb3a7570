"""`pip install .` on a tree of its own settings, and an import from a fresh environment."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = os.environ.get("STEPGRAPH_BUILD_DIR")


def settings_of(build):
    """What that build compiled, so that ccache has it all."""
    text = (pathlib.Path(build) / "CMakeCache.txt").read_text()
    found = dict(re.findall(r"^(\w+):\w+=(.*)$", text, re.MULTILINE))
    settings = {
        name: found[name]
        for name in ("CMAKE_CUDA_ARCHITECTURES", "CMAKE_CXX_COMPILER", "STEPGRAPH_CUDA")
        if name in found
    }
    return settings | {"STEPGRAPH_WERROR": "ON"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for package in ("scikit_build_core", "nanobind"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    if shutil.which("cmake") is None or BUILD is None:
        pytest.skip("needs cmake and STEPGRAPH_BUILD_DIR")
    folder = tmp_path_factory.mktemp("wheel")
    # A neighbour of the build: ccache tells paths relative to the working directory.
    build = pathlib.Path(BUILD).with_name(pathlib.Path(BUILD).name + "-wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "-w", str(folder), "-C", f"build-dir={build}"]
    for name, value in settings_of(BUILD).items():
        command += ["-C", f"cmake.define.{name}={value}"]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


def test_wheel_holds_the_package_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    top = {name.split("/")[0] for name in names}
    assert len(top) == 2 and "stepgraph" in top
    files = {name for name in names if name.startswith("stepgraph/")}
    assert {"stepgraph/__init__.py", "stepgraph/_core.pyi", "stepgraph/py.typed"} <= files
    assert {pathlib.Path(name).suffix for name in files} <= {".py", ".pyi", ".so", ".typed"}
    assert sum(name.endswith(".so") for name in files) == 1
    assert "Requires-Dist: torch>=2.6" in metadata
    if sys.version_info >= (3, 12):
        assert "-cp312-abi3-" in wheel.name


def test_wheel_is_imported_from_a_fresh_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*command, "--no-index", "-q", str(wheel)], check=True)
    code = """
import pathlib, stepgraph
from stepgraph import schedules
assert schedules.step_lr(learning_rate=1.0, step_size=2).value_at(2) == 0.1
print(stepgraph.__version__, pathlib.Path(stepgraph.__file__).parent)
"""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")
    }
    done = subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    version, folder = done.stdout.split()
    assert version in wheel.name
    assert folder.startswith(str(tmp_path))
