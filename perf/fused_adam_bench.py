"""What a step of FusedAdam costs the processor, beside torch's fused AdamW.

    PYTHONPATH=... python perf/fused_adam_bench.py [--device cpu|cuda] [--json FILE]

On a GPU the time of the calls is measured while the device is busy, so that nothing waits. "around"
is what is left of a step when the executor's launch is left out: finding out that nothing changed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from stepgraph import FusedAdam


def microseconds(call: Callable[[], Any], device: str, calls: int = 50, rounds: int = 7) -> float:
    """The fastest of some rounds, for one call."""
    best = float("inf")
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(int(1e8))
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best * 1e6


def around(optimizer: FusedAdam, device: str) -> float:
    """A step without its launch."""
    runner: Any = optimizer.engine.runner
    launch = runner.launch
    runner.launch = lambda pending: True
    try:
        return microseconds(optimizer.step, device)
    finally:
        runner.launch = launch


def measure(tensors: int, groups: int, device: str) -> list[dict[str, Any]]:
    params = [torch.zeros(64, device=device, requires_grad=True) for _ in range(tensors)]
    for p in params:
        p.grad = torch.ones_like(p)
    per_group = tensors // groups
    split = [{"params": params[g * per_group : (g + 1) * per_group]} for g in range(groups)]

    def copies() -> list[dict[str, Any]]:
        return [dict(group) for group in split]

    rows = []
    ways = [("stepgraph", {"capturable": False})]
    if device == "cuda":
        ways.append(("stepgraph, replayed", {"capturable": True}))
    for name, options in ways:
        optimizer = FusedAdam(copies(), lr=1e-3, **options)
        for _ in range(3):
            optimizer.step()
        rows.append(
            {
                "tensors": tensors,
                "groups": groups,
                "step": name,
                "us": microseconds(optimizer.step, device),
                "around us": around(optimizer, device),
            }
        )
        optimizer.release()
    expected = torch.optim.AdamW(copies(), lr=1e-3, fused=True)
    for _ in range(3):
        expected.step()
    us = microseconds(expected.step, device, calls=5)
    rows.append({"tensors": tensors, "groups": groups, "step": "torch fused", "us": us})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="also write the rows there")
    arguments = parser.parse_args()
    rows = []
    print(f"{'tensors':>8} {'groups':>7} {'step':<20} {'us':>9} {'around us':>10}")
    for tensors, groups in ((148, 1), (5000, 1), (465, 465)):
        for row in measure(tensors, groups, arguments.device):
            rows.append(row)
            rest = f"{row['around us']:>10.1f}" if "around us" in row else ""
            print(f"{tensors:>8} {groups:>7} {row['step']:<20} {row['us']:>9.1f} {rest}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
