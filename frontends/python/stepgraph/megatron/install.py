"""Makes Megatron build its optimizers with stepgraph.FusedAdam.

Megatron chooses Adam and the multi-tensor functions when its modules are imported, from Transformer
Engine, apex or torch, and keeps the choice in attributes of these modules. `install` sets the
attributes, whatever the choice was, and `uninstall` puts back what was there. Nothing else is
touched: no module is faked, none is imported but those of `megatron.core` below.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from stepgraph import multi_tensor
from stepgraph._core import UsageError
from stepgraph.fused_adam import FusedAdam
from stepgraph.megatron.cuda_graph import OptimizerCudaGraphWrapper

_Attributes = dict[str, dict[str, Any]]
_Source = tuple[str, str]


def _norm_copies() -> dict[str, _Source]:
    return {
        "multi_tensor_applier": ("megatron.core.utils", "local_multi_tensor_applier"),
        "multi_tensor_l2norm": ("megatron.core.utils", "local_multi_tensor_l2_norm"),
    }


def _core_attributes() -> _Attributes:
    """Imported by `install`; each attribute has to exist."""
    return {
        "megatron.core.optimizer": {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False},
        "megatron.core.optimizer.distrib_optimizer": {
            "Adam": FusedAdam,
            # As Transformer Engine's class, FusedAdam keeps `step` in its groups.
            "HAVE_APEX_OR_TE": True,
            "USING_TE_OPTIMIZER": True,
            "USING_APEX_OPTIMIZER": False,
        },
        "megatron.core.optimizer.clip_grads": {
            "multi_tensor_applier": multi_tensor.multi_tensor_applier,
            "l2_norm_impl": multi_tensor.multi_tensor_l2norm,
            "multi_tensor_scale_impl": multi_tensor.multi_tensor_scale,
            # With it the norm stays on the device, with or without a graph.
            "multi_tensor_scale_tensor_impl": multi_tensor.multi_tensor_scale_tensor,
        },
        "megatron.core.optimizer.optimizer": {
            "multi_tensor_applier": multi_tensor.multi_tensor_applier,
            "multi_tensor_scale_impl": multi_tensor.multi_tensor_scale,
        },
        "megatron.core.optimizer.optimizer_cuda_graph": {
            "OptimizerCudaGraphWrapper": OptimizerCudaGraphWrapper
        },
        # What modules imported later take where neither Transformer Engine nor apex is installed.
        "megatron.core.utils": {
            "local_multi_tensor_applier": multi_tensor.multi_tensor_applier,
            "local_multi_tensor_l2_norm": multi_tensor.multi_tensor_l2norm,
            "local_multi_tensor_scale": multi_tensor.multi_tensor_scale,
        },
    }


# Modules that have copied some of the above when they were imported, and from where.
_COPIES = {
    "megatron.training.training": {
        "OptimizerCudaGraphWrapper": (
            "megatron.core.optimizer.optimizer_cuda_graph",
            "OptimizerCudaGraphWrapper",
        )
    },
    "megatron.training.utils.common_utils": _norm_copies(),
    "megatron.training.utils": _norm_copies(),  # before it became a package
}

# What was there before: (module, attribute) -> value.
_replaced: dict[tuple[str, str], Any] = {}


def install() -> None:
    """Makes Megatron use stepgraph: FusedAdam, the multi-tensor functions, the graph of the step.

    To be called before Megatron builds an optimizer, before or after its modules are imported, with
    or without Transformer Engine and apex. Calling it again also reaches modules imported since.
    Raises UsageError naming the attribute if this Megatron lacks one, and ImportError without
    megatron.core; nothing is changed then. Touches no GPU.
    """
    ours = _core_attributes()
    wanted: list[tuple[ModuleType, str, Any]] = []
    for name, attributes in ours.items():
        module = _import_core(name)
        for attribute, value in attributes.items():
            if attribute not in vars(module):
                raise UsageError(
                    f"{name}.{attribute}: not in megatron-core {_version()}; expected "
                    "Megatron-Core 0.18 or newer"
                )
            wanted.append((module, attribute, value))
    for module, attribute, (source, name) in _loaded_copies():
        wanted.append((module, attribute, ours[source][name]))
    for module, attribute, value in wanted:
        if vars(module)[attribute] is not value:
            _replaced.setdefault((module.__name__, attribute), vars(module)[attribute])
            setattr(module, attribute, value)


def uninstall() -> None:
    """Puts back what `install` replaced, in modules imported since too, except where somebody else
    has set another value after it. Optimizers that exist stay what they are."""
    if not _replaced:
        return
    ours = _core_attributes()
    for module, attribute, source in _loaded_copies():
        before = _replaced.pop((module.__name__, attribute), _replaced.get(source))
        if vars(module)[attribute] is ours[source[0]][source[1]]:
            setattr(module, attribute, before)
    for (name, attribute), before in _replaced.items():
        module = sys.modules[name]
        if vars(module).get(attribute) is ours[name][attribute]:
            setattr(module, attribute, before)
    _replaced.clear()


def installed() -> bool:
    """Whether Megatron builds stepgraph.FusedAdam now."""
    module = sys.modules.get("megatron.core.optimizer")
    return module is not None and getattr(module, "Adam", None) is FusedAdam


def _loaded_copies() -> Iterator[tuple[ModuleType, str, _Source]]:
    for name, copies in _COPIES.items():
        module = sys.modules.get(name)
        if module is not None:
            for attribute, source in copies.items():
                if attribute in vars(module):
                    yield module, attribute, source


def _import_core(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name and "megatron.core" in sys.modules:
            raise UsageError(
                f"{name}: no such module in megatron-core {_version()}; expected "
                "Megatron-Core 0.18 or newer"
            ) from error
        raise


def _version() -> str:
    return str(getattr(sys.modules.get("megatron.core"), "__version__", "of unknown version"))
