"""What measurements must keep: the promises of the README, as limits.

    limits.py                      # of the committed results
    limits.py DIRECTORY...         # of what run_all.sh has just written

Prints every measurement that breaks a limit, and fails if one does. Programs that did not run are passed
over; a limit that meets no measurement of a program that did is broken, so that no renamed benchmark
escapes. Limits are a little wider than what was measured, for hosts differ.
"""

import argparse
import dataclasses
import fnmatch
import pathlib
import sys

import report


@dataclasses.dataclass(frozen=True)
class Limit:
    """Of one counter of the benchmarks whose names match."""

    names: str
    counter: str
    least: float = float("-inf")
    most: float = float("inf")

    def broken_by(self, value):
        return not self.least <= value <= self.most

    def __str__(self):
        sides = []
        if self.least > float("-inf"):
            sides.append(f"at least {self.least:g}")
        if self.most < float("inf"):
            sides.append(f"at most {self.most:g}")
        return " and ".join(sides)


# Iterations and options that Google Benchmark appends to a name are matched by the last asterisk.
LIMITS = (
    # Captured, the update is as fast as launched with its scalars as arguments, which Transformer
    # Engine's is not (1.49 on an H200); and as fast as a copy of its bytes.
    Limit("adam/*/1x1073741824*", "regular_ratio", most=1.02),
    Limit("adam/*/1x1073741824*", "stream_ratio", least=0.83),
    Limit("adam/f32/f32/none/f32/f32/1x1073741824*", "stream_ratio", least=0.98),
    Limit("adam/bf16/*/f32/f32/f32/1x1073741824*", "stream_ratio", least=0.98),
    Limit("adam/bf16/*/remainder/[fb]*/1x1073741824*", "stream_ratio", least=0.97),
    Limit("adam/bf16/bf16/none/bf16/bf16/1x1073741824*", "stream_ratio", least=0.97),
    Limit("adam/bf16/bf16/remainder/e4m3/e4m3/1x1073741824*", "stream_ratio", least=0.88),
    Limit("adam/f32/f32/none/f32/f32/64x65536*", "stream_ratio", least=0.85),
    # The whole step beside the fastest kernel for each of its parts.
    Limit("step/gpt2-124m/*", "floor_ratio", most=1.06),
    Limit("step/gpt2-124m/*", "kernel_nodes", most=2),
    Limit("step/64x65536/clip*", "floor_ratio", most=1.0),
    Limit("step/148x4096/*", "replay_gpu_us", most=8.2),
    # One launch, whatever the number of tensors and groups.
    Limit("replay/*", "replay_cpu_us", most=5),
    Limit("update/schedule/*", "added_cpu_us", most=0.5),
    Limit("update/setter/1groups*", "change_cpu_us", most=1),
    # Beside PyTorch, in one run: times over stepgraph's.
    Limit("peers/adam/f32/201x20971520/pytorch_fused_graph/*", "ratio", least=1.15),
    Limit("peers/full/f32/gpt2-124m/pytorch_fused_graph/*", "ratio", least=1.4),
    Limit("peers/full/f32/148x4096/pytorch_fused_graph/*", "ratio", least=4),
)


def broken_limits(results, limits=LIMITS):
    """A line for each measurement that breaks a limit."""
    lines = []
    for limit in limits:
        measured = [b for _, b in results.of(limit.names.split("/")[0])]
        if not measured:
            continue
        found = [b for b in measured if fnmatch.fnmatchcase(b["name"], limit.names) and limit.counter in b]
        if not found:
            lines.append(f"{limit.names}: no measurement has {limit.counter}, expected {limit}")
        lines += [
            f"{b['name']}: {limit.counter} is {b[limit.counter]:.4g}, expected {limit}"
            for b in found
            if limit.broken_by(b[limit.counter])
        ]
    return lines


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Fails if a measurement breaks a limit.")
    parser.add_argument("results", nargs="*", type=pathlib.Path, help="default: perf/results/*")
    options = parser.parse_args(arguments)
    directories = options.results or sorted((report.ROOT / "perf" / "results").glob("*/"))
    checked = 0
    lines = []
    for directory in directories:
        results = report.Results(directory)
        checked += len(results.benchmarks)
        lines += broken_limits(results)
    for line in lines:
        print(line, file=sys.stderr)
    print(f"{checked} measurements, {len(lines) or 'no'} limit{'s' if len(lines) != 1 else ''} broken")
    return 1 if lines or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
