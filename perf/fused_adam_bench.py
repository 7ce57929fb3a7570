"""What a step costs the processor in Python: stepgraph.FusedAdam beside torch.optim.AdamW.

    fused_adam_bench.py                                # 148 and 5,000 tensors on cuda
    fused_adam_bench.py --json fused_adam_bench.json
    fused_adam_bench.py --device cpu --numel 8

Each case runs with gradients that stay where they are and, where nothing was captured by hand, with
fresh ones before every step, as zero_grad(set_to_none=True) leaves it to autograd. Only `step()` is
timed: seconds until it returns, on an idle device, and the device's own time by events around many
steps. The rounds of all implementations are interleaved; figures are medians.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import time

import torch

import peers

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARMUP_STEPS = 5
STEPS_A_ROUND = 20
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Case:
    """An optimizer on parameters of its own, and how often its gradients are renewed."""

    def __init__(self, name, label, parameters, make, fresh):
        self.name = name
        self.label = label
        self.parameters = parameters
        self.fresh = fresh
        self.cpu_seconds = []
        self.gpu_seconds = []
        # Two sets in turn, so that every step of a fresh case finds other addresses than the last.
        self._sets = [[torch.randn_like(p) * 0.01 for p in parameters] for _ in range(1 + fresh)]
        self._turn = 0
        self.renew()
        self.step = make(parameters)

    def renew(self):
        if self.fresh or self.parameters[0].grad is None:
            for parameter, gradient in zip(self.parameters, self._sets[self._turn]):
                parameter.grad = gradient
            self._turn = (self._turn + 1) % len(self._sets)

    def measure_cpu(self, synchronize):
        for _ in range(STEPS_A_ROUND):
            self.renew()
            synchronize()
            begin = time.perf_counter()
            self.step()
            self.cpu_seconds.append(time.perf_counter() - begin)

    def measure_gpu(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS_A_ROUND):
            self.step()
        end.record()
        end.synchronize()
        self.gpu_seconds.append(begin.elapsed_time(end) * 1e-3 / STEPS_A_ROUND)


def implementations(device):
    """(name, label, how to make the step of parameters, may its gradients move)."""
    import stepgraph

    def torch_adamw(**arguments):
        return lambda parameters: torch.optim.AdamW(parameters, **OPTIONS, **arguments).step

    def by_hand(make):
        return lambda parameters: peers.captured(make(parameters))

    def fused_adam(**arguments):
        return lambda parameters: stepgraph.FusedAdam(parameters, **OPTIONS, **arguments).step

    listed = [
        ("stepgraph_eager", "stepgraph FusedAdam", fused_adam(), True),
        ("pytorch_fused", "PyTorch fused", torch_adamw(fused=True), True),
    ]
    if device.type == "cuda":
        ours, theirs = fused_adam(capturable=True), torch_adamw(fused=True, capturable=True)
        listed[1:1] = [
            ("stepgraph_replayed", "stepgraph FusedAdam, replayed", ours, True),
            ("stepgraph_graph", "stepgraph graph, captured by hand", by_hand(ours), False),
        ]
        listed += [
            ("pytorch_capturable", "PyTorch fused capturable", theirs, True),
            ("pytorch_graph", "PyTorch graph, captured by hand", by_hand(theirs), False),
        ]
    return listed


def make_cases(device, n_tensors, numel):
    cases = []
    for name, label, make, may_move in implementations(device):
        for fresh in (False, True) if may_move else (False,):
            parameters = [
                torch.nn.Parameter(torch.rand(numel, device=device)) for _ in range(n_tensors)
            ]
            kind = "fresh" if fresh else "kept"
            cases.append(Case(f"{name}/{kind}", label, parameters, make, fresh))
    return cases


def measure(device, n_tensors, numel, rounds):
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    cases = make_cases(device, n_tensors, numel)
    for case in cases:
        for _ in range(WARMUP_STEPS):
            case.renew()
            case.step()
    synchronize()
    for _ in range(rounds):
        for case in cases:
            case.measure_cpu(synchronize)
            if device.type == "cuda" and not case.fresh:
                case.measure_gpu()
            synchronize()
    return cases


def as_benchmarks(cases, n_tensors, numel):
    listed = []
    for case in cases:
        name = f"python/{n_tensors}x{numel}/{case.name}"
        entry = {"name": name, "run_name": name, "run_type": "iteration", "label": case.label}
        entry |= {
            "iterations": len(case.cpu_seconds),
            "time_unit": "us",
            "fresh_gradients": case.fresh,
        }
        entry["cpu_time"] = statistics.median(case.cpu_seconds) * 1e6
        if case.gpu_seconds:
            entry["real_time"] = statistics.median(case.gpu_seconds) * 1e6
        listed.append(entry)
    return listed


def print_table(benchmarks):
    for b in benchmarks:
        gpu = f"{b['real_time']:10.1f} us GPU" if "real_time" in b else ""
        gradients = "fresh" if b["fresh_gradients"] else "kept"
        size = b["name"].split("/")[1]
        print(f"{size:>12}  {b['label']:34} {gradients:6} {b['cpu_time']:10.1f} us CPU {gpu}")


def this_commit():
    """As write_commit.cmake says it: changed results, which are no sources, do not make it -dirty."""

    def git(*arguments):
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)

    commit = git("rev-parse", "--short=12", "HEAD").stdout.strip()
    changed = git("diff", "--quiet", "HEAD", "--", ".", ":!README.md", ":!perf/results").returncode
    return commit + ("-dirty" if changed else "") if commit else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--n-tensors", type=int, nargs="+", default=[148, 5000])
    parser.add_argument("--numel", type=int, default=4096, help="elements of a tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--commit", default=None, help="of what is measured; asked of git if not given"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the results in the form of Google Benchmark's"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    benchmarks = []
    for n_tensors in options.n_tensors:
        cases = measure(device, n_tensors, options.numel, options.rounds)
        benchmarks += as_benchmarks(cases, n_tensors, options.numel)
    print_table(benchmarks)
    if options.json:
        described = peers.context(
            device, pathlib.Path(__file__).name, options.commit or this_commit()
        )
        result = {"context": described, "benchmarks": benchmarks}
        pathlib.Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
