"""The stepgraph executors for Python benchmarks: a ctypes layer over libstepgraph_peer.so.

Knows addresses and sizes only; torch is not needed.
"""

import ctypes
import os
import pathlib


class StepgraphError(RuntimeError):
    """What the library reported."""


class _Tensors(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_uint64),
        ("numels", ctypes.POINTER(ctypes.c_uint64)),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("gradients", ctypes.POINTER(ctypes.c_void_p)),
        ("masters", ctypes.POINTER(ctypes.c_void_p)),
        ("exp_avgs", ctypes.POINTER(ctypes.c_void_p)),
        ("exp_avg_sqs", ctypes.POINTER(ctypes.c_void_p)),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        ("learning_rate", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("max_grad_norm", ctypes.c_double),
        ("zero_gradients", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("use_graph", ctypes.c_int32),
    ]


class Library:
    """libstepgraph_peer.so. Load torch first: both then share torch's CUDA runtime."""

    def __init__(self, path=None):
        path = path or os.environ.get("STEPGRAPH_PEER_LIBRARY") or self._built_here()
        self._library = ctypes.CDLL(str(path))
        handle = ctypes.c_void_p
        for name, result, *arguments in (
            ("error", ctypes.c_char_p),
            ("commit", ctypes.c_char_p),
            ("create", handle, ctypes.c_char_p, ctypes.POINTER(_Tensors), ctypes.POINTER(_Options), handle),
            ("launch", ctypes.c_int, handle, handle),
            ("set_learning_rate", ctypes.c_int, handle, ctypes.c_double),
            ("grad_norm", ctypes.c_double, handle),
            ("destroy", None, handle),
            ("parameter_list", ctypes.c_uint64, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64),
        ):
            function = getattr(self._library, "stepgraph_peer_" + name)
            function.restype = result
            function.argtypes = arguments
            setattr(self, "_" + name, function)

    @staticmethod
    def _built_here():
        root = pathlib.Path(__file__).resolve().parent.parent
        found = sorted(root.glob("build*/**/libstepgraph_peer.so"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise StepgraphError(f"no libstepgraph_peer.so under {root}/build*; name it with --library")
        return found[-1]

    def commit(self):
        return self._commit().decode()

    def check(self, result, failed):
        if result in failed:
            raise StepgraphError(self._error().decode())
        return result

    def parameter_list(self, model):
        """Element counts of a model's parameters."""
        name = model.encode()
        count = self.check(self._parameter_list(name, None, 0), (0,))
        numels = (ctypes.c_uint64 * count)()
        self._parameter_list(name, numels, count)
        return list(numels)


class Executor:
    """One AdamW group over tensors that the caller keeps alive.

    `operands` maps "parameter", "gradient", "exp_avg", "exp_avg_sq" and, with a master, "master" to
    lists of addresses; `device` is a CUDA ordinal, or -1 for host memory.
    """

    def __init__(
        self,
        library,
        signature,
        numels,
        operands,
        *,
        learning_rate,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=0.0,
        zero_gradients=False,
        device=-1,
        use_graph=True,
        stream=None,
    ):
        self._handle = None
        self._library = library
        count = len(numels)

        def addresses(kind):
            listed = operands.get(kind)
            return (ctypes.c_void_p * count)(*(listed if listed else [None] * count))

        tensors = _Tensors(
            count,
            (ctypes.c_uint64 * count)(*numels),
            *(addresses(kind) for kind in ("parameter", "gradient", "master", "exp_avg", "exp_avg_sq")),
        )
        options = _Options(
            learning_rate, *betas, eps, weight_decay, max_grad_norm, zero_gradients, device, use_graph
        )
        handle = library._create(signature.encode(), ctypes.byref(tensors), ctypes.byref(options), stream)
        self._handle = library.check(handle, (None,))

    def launch(self, stream=None):
        if not self._library._launch(self._handle, stream):
            self._library.check(0, (0,))

    def set_learning_rate(self, value):
        self._library.check(self._library._set_learning_rate(self._handle, value), (0,))

    def grad_norm(self):
        norm = self._library._grad_norm(self._handle)
        if norm < 0:
            self._library.check(0, (0,))
        return norm

    def close(self):
        if self._handle:
            self._library._destroy(self._handle)
            self._handle = None

    def __del__(self):
        self.close()
