"""The optimizer step as one CUDA graph.

Importing the package initialises no CUDA and does not import torch: what needs torch is loaded when
it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import schedules
from ._core import (
    HAS_CUDA,
    CaptureError,
    CudaError,
    Error,
    GroupStatus,
    LossScaling,
    RecordBatch,
    Schedule,
    StepRecord,
    StepStatus,
    UpdateError,
    UpdateReport,
    UsageError,
    __version__,
)

if TYPE_CHECKING:
    from .fused_adam import FusedAdam
    from .multi_tensor import (
        MultiTensorApply,
        multi_tensor_applier,
        multi_tensor_l2norm,
        multi_tensor_scale,
        multi_tensor_scale_tensor,
        multi_tensor_unscale_l2norm,
    )

# Where the names live that are loaded when they are asked for.
_LAZY = {
    "FusedAdam": "fused_adam",
    "MultiTensorApply": "multi_tensor",
    "multi_tensor_applier": "multi_tensor",
    "multi_tensor_l2norm": "multi_tensor",
    "multi_tensor_scale": "multi_tensor",
    "multi_tensor_scale_tensor": "multi_tensor",
    "multi_tensor_unscale_l2norm": "multi_tensor",
}

__all__ = [
    "HAS_CUDA",
    "CaptureError",
    "CudaError",
    "Error",
    "FusedAdam",
    "GroupStatus",
    "LossScaling",
    "MultiTensorApply",
    "RecordBatch",
    "Schedule",
    "StepRecord",
    "StepStatus",
    "UpdateError",
    "UpdateReport",
    "UsageError",
    "__version__",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
    "schedules",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
