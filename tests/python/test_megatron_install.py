"""install() and uninstall() on the modules of the Megatron-Core that is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import stepgraph.megatron
from megatron_world import Training, pretended_gpu, process_groups
from stepgraph._core import UsageError
from stepgraph.fused_adam import FusedAdam

MODULES = (
    "megatron.core.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.optimizer_cuda_graph",
    "megatron.core.utils",
)


def attributes() -> dict[tuple[str, str], Any]:
    modules = [importlib.import_module(name) for name in MODULES]
    return {
        (module.__name__, attribute): value
        for module in modules
        for attribute, value in vars(module).items()
        if not attribute.startswith("__")
    }


@pytest.fixture(autouse=True)
def not_installed() -> Iterator[None]:
    was = stepgraph.megatron.installed()
    stepgraph.megatron.uninstall()
    yield
    stepgraph.megatron.uninstall()
    if was:
        stepgraph.megatron.install()


def in_new_process(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sets_the_attributes_and_nothing_else() -> None:
    before = attributes()
    stepgraph.megatron.install()
    changed = {key for key, value in attributes().items() if before.get(key) is not value}
    optimizer = "megatron.core.optimizer"
    wanted = {
        (optimizer, "Adam"),
        (f"{optimizer}.distrib_optimizer", "Adam"),
        (f"{optimizer}.distrib_optimizer", "USING_TE_OPTIMIZER"),
        (f"{optimizer}.clip_grads", "multi_tensor_applier"),
        (f"{optimizer}.clip_grads", "l2_norm_impl"),
        (f"{optimizer}.clip_grads", "multi_tensor_scale_impl"),
        (f"{optimizer}.clip_grads", "multi_tensor_scale_tensor_impl"),
        (f"{optimizer}.optimizer", "multi_tensor_applier"),
        (f"{optimizer}.optimizer", "multi_tensor_scale_impl"),
        (f"{optimizer}.optimizer_cuda_graph", "OptimizerCudaGraphWrapper"),
        ("megatron.core.utils", "local_multi_tensor_applier"),
        ("megatron.core.utils", "local_multi_tensor_l2_norm"),
        ("megatron.core.utils", "local_multi_tensor_scale"),
    }
    # Already right where Transformer Engine or apex is installed.
    depending = {
        (optimizer, "USING_PYTORCH_OPTIMIZER"),
        (f"{optimizer}.distrib_optimizer", "HAVE_APEX_OR_TE"),
        (f"{optimizer}.distrib_optimizer", "USING_APEX_OPTIMIZER"),
    }
    assert wanted - {(f"{optimizer}.distrib_optimizer", "USING_TE_OPTIMIZER")} <= changed
    assert changed <= wanted | depending
    after = attributes()
    assert after[optimizer, "Adam"] is FusedAdam
    assert after[optimizer, "USING_PYTORCH_OPTIMIZER"] is False
    assert after[f"{optimizer}.distrib_optimizer", "HAVE_APEX_OR_TE"] is True
    assert after[f"{optimizer}.distrib_optimizer", "USING_TE_OPTIMIZER"] is True
    assert after[f"{optimizer}.distrib_optimizer", "USING_APEX_OPTIMIZER"] is False


def test_uninstall_puts_everything_back_however_often_it_was_installed() -> None:
    before = attributes()
    for _ in range(3):
        stepgraph.megatron.install()
        assert stepgraph.megatron.installed()
    stepgraph.megatron.uninstall()
    assert not stepgraph.megatron.installed()
    after = attributes()
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []
    stepgraph.megatron.uninstall()
    assert attributes() == before


def test_uninstall_keeps_what_somebody_set_later(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("TheirAdam", (), {})
    module = sys.modules["megatron.core.optimizer"]
    monkeypatch.setattr(module, "Adam", module.Adam)  # what is put back after the test
    stepgraph.megatron.install()
    module.Adam = theirs
    stepgraph.megatron.uninstall()
    assert module.Adam is theirs


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("megatron.core.optimizer.clip_grads", "l2_norm_impl"),
        ("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER"),
        ("megatron.core.optimizer.optimizer_cuda_graph", "OptimizerCudaGraphWrapper"),
    ],
)
def test_a_megatron_without_an_attribute_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, module: str, attribute: str
) -> None:
    monkeypatch.delattr(sys.modules[module], attribute)
    before = attributes()
    with pytest.raises(UsageError, match=rf"{module}\.{attribute}: not in megatron-core \d"):
        stepgraph.megatron.install()
    assert attributes() == before
    assert not stepgraph.megatron.installed()


def test_a_megatron_without_a_module_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron.core.optimizer.optimizer_cuda_graph"

    class Hidden:
        @staticmethod
        def find_spec(found: str, path: Any = None, target: Any = None) -> None:
            if found == name:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    with pytest.raises(UsageError, match=f"{name}: no such module in megatron-core"):
        stepgraph.megatron.install()
    assert not stepgraph.megatron.installed()


def test_megatron_builds_fused_adam() -> None:
    stepgraph.megatron.install()
    with pretended_gpu() as device, process_groups():
        (leaf,) = Training(torch.bfloat16, device).optimizer.chained_optimizers
        assert type(leaf.optimizer) is FusedAdam
        assert leaf.optimizer.capturable
        assert leaf.optimizer.adam_w_mode
        (leaf,) = Training(
            torch.bfloat16, device, distributed=True, decoupled_weight_decay=False
        ).optimizer.chained_optimizers
        assert type(leaf.optimizer) is FusedAdam
        assert not leaf.optimizer.adam_w_mode


def test_importing_imports_nothing_of_megatron() -> None:
    loaded = in_new_process(
        """
        import sys
        import stepgraph, stepgraph.megatron
        print([name for name in sys.modules if name.split(".")[0] == "megatron"])
        """
    )
    assert loaded == "[]"


def test_before_megatron_is_imported() -> None:
    found = in_new_process(
        """
        import sys
        import stepgraph.megatron
        stepgraph.megatron.install()
        from megatron.core.optimizer import Adam
        from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper as graph
        print(Adam.__module__, Adam.__name__, graph is stepgraph.megatron.OptimizerCudaGraphWrapper)
        import torch
        print(torch.cuda.is_initialized())
        """
    ).splitlines()
    assert found == ["stepgraph.fused_adam FusedAdam True", "False"]


@pytest.mark.parametrize("first", [True, False], ids=["install first", "import first"])
def test_the_training_loop_takes_the_wrapper(first: bool) -> None:
    """`megatron.training` is in the wheel, but imports more than megatron-core requires."""
    found = in_new_process(
        f"""
        import stepgraph.megatron
        if {first}:
            stepgraph.megatron.install()
        try:
            import megatron.training.training as training
            import megatron.training.utils.common_utils as utils
        except ImportError as error:
            print("skip", error)
            raise SystemExit
        before = training.OptimizerCudaGraphWrapper, utils.multi_tensor_l2norm
        stepgraph.megatron.install()
        print(training.OptimizerCudaGraphWrapper is stepgraph.megatron.OptimizerCudaGraphWrapper)
        print(utils.multi_tensor_l2norm.__module__)
        stepgraph.megatron.uninstall()
        print(training.OptimizerCudaGraphWrapper.__module__)
        print(utils.multi_tensor_l2norm.__module__)
        """
    ).splitlines()
    if found[0].startswith("skip"):
        pytest.skip(found[0])
    assert found[0] == "True"
    assert found[1] == "stepgraph.multi_tensor"
    assert found[2] == "megatron.core.optimizer.optimizer_cuda_graph"
    assert not found[3].startswith("stepgraph")
