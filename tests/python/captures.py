"""Captures of the caller's for tests: torch.cuda.graph on a GPU, and on the processor a stand-in
that records steps and runs them when replayed. The stand-in has the executor's numbers and the
rules of captures (what is recorded does not run, what is delivered beside runs at once), not
CUDA's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from adam_cases import StepMode
from stepgraph import (
    _core,
    runners,
    scaler_inputs,
    step_building,
    step_changes,
    step_engine,
    step_progress,
    value_sending,
)
from stepgraph._core import UpdateError

CHEAP = ("nothing", "scalar_write", "table_write")


class RecordingExecutor:
    """A graph executor's interface over the host executor. What is set waits for a delivery or for
    a step outside captures; a replay delivers nothing."""

    WAITING = ("set_", "resume_", "rebind", "load_state")

    def __init__(self, plan: Any, capture: HostCapture) -> None:
        self.host = _core.HostExecutor(plan)
        self.capture = capture
        self.waiting: list[Any] = []
        self.calls = {"enqueue": 0, "launch": 0, "deliver": 0, "beside": 0}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.host, name)
        if not name.startswith(self.WAITING):
            return value
        return lambda *arguments: self.waiting.append(lambda: value(*arguments))

    def _deliver_waiting(self) -> None:
        for work in self.waiting:
            work()
        self.waiting.clear()

    def enqueue(self, stream: int) -> None:
        self.calls["enqueue"] += 1
        if self.capture.active is None:
            self._deliver_waiting()
            self.host.launch()
        else:
            self.capture.active.recorded.append(self.host.launch)

    def launch(self, stream: int) -> None:
        assert self.capture.active is None
        self.calls["launch"] += 1
        self._deliver_waiting()
        self.host.launch()

    def deliver(self, stream: int) -> None:
        assert self.capture.active is None
        self.calls["deliver"] += 1
        self._deliver_waiting()

    def deliver_beside_capture(self) -> None:
        assert self.capture.active is not None
        self.calls["beside"] += 1
        self._deliver_waiting()

    def status(self) -> Any:
        assert self.capture.active is None, "waits inside a capture"
        return self.host.status()

    def update(self, plan: Any, stream: int, ceiling: str = "instantiate") -> Any:
        assert self.capture.active is None
        self._deliver_waiting()
        trial = _core.HostExecutor(self.host.plan).update(plan)
        if ceiling == "table_write" and trial.path not in CHEAP:
            raise UpdateError(f"the update needs {trial.path}: {', '.join(trial.reasons)}")
        return self.host.update(plan)


class RecordingRunner(runners.GraphRunner):
    def __init__(self, plan: Any, index: int, warmup: int, capture: HostCapture) -> None:
        self.index = index
        self.captured = False
        self._to_warm_up = warmup
        self.executor = RecordingExecutor(plan, capture)

    def rebind_gradients(self, watch: Any) -> Any:
        return watch.rebind_gradients(self.executor.host)


class HostGraph:
    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def replay(self) -> None:
        for work in self.recorded:
            work()


class HostCapture:
    """Captures on the processor; record other work with `do`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active: HostGraph | None = None
        for module in (
            runners,
            scaler_inputs,
            step_changes,
            step_engine,
            step_progress,
            value_sending,
        ):
            monkeypatch.setattr(module, "is_capturing", lambda index: self.active is not None)
        monkeypatch.setattr(runners, "_current_stream", lambda index: 0)
        monkeypatch.setattr(
            step_building,
            "make_runner",
            lambda plan, index, capturable, warmup: RecordingRunner(plan, index, warmup, self),
        )

    @contextlib.contextmanager
    def __call__(self):
        graph = HostGraph()
        self.active = graph
        try:
            yield graph
        finally:
            self.active = None

    def do(self, work: Any) -> None:
        """Records work that a GPU would record by itself."""
        if self.active is None:
            work()
        else:
            self.active.recorded.append(work)


class CudaCapture:
    """Captures with torch.cuda.graph."""

    @contextlib.contextmanager
    def __call__(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph

    def do(self, work: Any) -> None:
        work()


class CaptureMode(StepMode):
    """Where captured steps run."""

    def __init__(self, device: torch.device, capture: Any) -> None:
        super().__init__(device, {"capturable": True})
        self.capture = capture


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def captures(request, monkeypatch):
    if request.param == "cpu":
        return CaptureMode(torch.device("cpu"), HostCapture(monkeypatch))
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return CaptureMode(torch.device("cuda", torch.cuda.current_device()), CudaCapture())
