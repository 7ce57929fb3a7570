"""AdamW implementations side by side: the same tensors, one process, interleaved measurements.

    peers.py                                       # 201 x 20,971,520 f32, as in the original report
    peers.py --dtype bf16 --json peers_bf16.json
    peers.py --parameters gpt2-124m --step full    # clip + AdamW + zero gradients
    peers.py --device cpu

PyTorch's fused AdamW, Transformer Engine's and apex's FusedAdam where they are installed, and
stepgraph through libstepgraph_peer.so. Before anything is timed, every implementation takes a few
steps on small tensors and is compared with the same steps in double precision.

The times are medians of `--steps` rounds, each of which runs every implementation once (many times
back to back where a step is short), by events on a device and by the clock on the processor. A step
that zeroes its gradients gets them back before each measurement. GB/s counts the bytes that the step
must move, whatever an implementation does move.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import statistics
import time

# Two OpenMP runtimes share the processors in a CPU comparison: waiting threads of the one must not
# spin while the other computes. Read when the runtimes are loaded, so before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

import stepgraph_peer  # noqa: E402

BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01
MAX_NORM = 1.0
WARMUP_STEPS = 3
SHORTEST_MEASUREMENT_SECONDS = 2e-3
MOST_STEPS_A_MEASUREMENT = 200

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class NotAvailable(Exception):
    """Why an implementation cannot run here."""


class Tensors:
    """Parameters, gradients and moments, each operand in one allocation.

    Moments of either precision are made when first asked for and shared by everybody who asks: the
    implementations work on the same memory, one after the other.
    """

    def __init__(self, numels, dtype, device, seed=0):
        self.numels = list(numels)
        self.dtype = dtype
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self.parameters = [torch.nn.Parameter(p) for p in self._make(dtype, lambda t: self._uniform(t, -1, 1))]
        self.gradients = self._make(dtype, lambda t: self._normal(t, 0.01))
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient
        self._kept_gradients = None
        self._moments = {}

    def keep_gradients(self):
        """For `restore_gradients`."""
        self._kept_gradients = self.gradients[0]._base.clone()

    def restore_gradients(self):
        """Enqueues a copy of what was kept, if anything was: zeros cost less power to move. The device
        is busy with it while the step is being launched."""
        if self._kept_gradients is not None:
            self.gradients[0]._base.copy_(self._kept_gradients)

    def _uniform(self, tensor, low, high):
        tensor.uniform_(low, high, generator=self._generator)

    def _normal(self, tensor, deviation):
        tensor.normal_(0, deviation, generator=self._generator)

    def _make(self, dtype, fill):
        # Every tensor starts at a multiple of 128 elements, as an allocator would give it.
        padded = [(n + 127) // 128 * 128 for n in self.numels]
        memory = torch.empty(sum(padded), dtype=dtype, device=self.device)
        fill(memory)
        return [piece[:n] for piece, n in zip(memory.split(padded), self.numels)]

    def moments(self, dtype):
        """(first, second) moments of each tensor."""
        if dtype not in self._moments:
            first = self._make(dtype, lambda t: self._normal(t, 0.01))
            second = self._make(dtype, lambda t: self._uniform(t, 0, 1e-4))
            self._moments[dtype] = (first, second)
        return self._moments[dtype]


class Reference:
    """The same step in double precision, from the state that `tensors` have now."""

    def __init__(self, tensors, moments_dtype, options):
        def doubles(listed):
            return [t.detach().double().clone() for t in listed]

        first, second = tensors.moments(moments_dtype)
        self.parameters = doubles(tensors.parameters)
        self.gradients = doubles(tensors.gradients)
        self.first, self.second = doubles(first), doubles(second)
        self.options = options
        self.steps = 0

    def step(self):
        self.steps += 1
        correction1 = 1 - BETAS[0] ** self.steps
        correction2 = 1 - BETAS[1] ** self.steps
        scale = 1.0
        if self.options.full:
            norm = math.sqrt(sum(float(g.square().sum()) for g in self.gradients))
            scale = min(1.0, MAX_NORM / (norm + 1e-6))
        for p, g, m, v in zip(self.parameters, self.gradients, self.first, self.second):
            scaled = g * scale
            m.mul_(BETAS[0]).add_(scaled, alpha=1 - BETAS[0])
            v.mul_(BETAS[1]).addcmul_(scaled, scaled, value=1 - BETAS[1])
            p.mul_(1 - self.options.lr * WEIGHT_DECAY)
            p.sub_(self.options.lr * (m / correction1) / ((v / correction2).sqrt() + EPS))
            if self.options.full:
                g.zero_()

    def largest_relative_difference(self, parameters):
        """Largest difference of a parameter, relative to the largest parameter."""
        largest = max(float(p.abs().max()) for p in self.parameters)
        difference = max(
            float((ours.detach().double() - reference).abs().max())
            for ours, reference in zip(parameters, self.parameters)
        )
        return difference / largest


def optimizer_step(optimizer, tensors, options):
    """The step as a training loop would write it around an optimizer."""

    def step():
        if options.full:
            torch.nn.utils.clip_grad_norm_(tensors.parameters, MAX_NORM, foreach=True)
        optimizer.step()
        if options.full:
            # Kept rather than freed: captured addresses must stay, and stepgraph does the same.
            optimizer.zero_grad(set_to_none=False)

    return step


def with_state(optimizer, tensors, moments_dtype, with_step):
    """Gives the optimizer the shared moments instead of its own."""
    first, second = tensors.moments(moments_dtype)
    for parameter, m, v in zip(tensors.parameters, first, second):
        state = {"exp_avg": m, "exp_avg_sq": v}
        if with_step:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = state
    return optimizer


def torch_adamw(tensors, options, **arguments):
    lr = options.lr
    if arguments.get("capturable"):
        lr = torch.tensor(lr, dtype=torch.float32, device=tensors.device)
    optimizer = torch.optim.AdamW(
        tensors.parameters, lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **arguments
    )
    return optimizer_step(with_state(optimizer, tensors, tensors.dtype, True), tensors, options)


def imported(module, name):
    """A class of a package that need not be there."""
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except ImportError as error:
        if module.split(".")[0] in str(error):
            raise NotAvailable("not installed") from None
        raise NotAvailable(f"cannot be imported: {error}") from None


def transformer_engine_adam(tensors, options, capturable):
    fused_adam = imported("transformer_engine.pytorch.optimizers", "FusedAdam")
    optimizer = fused_adam(
        tensors.parameters, lr=options.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, capturable=capturable
    )
    return optimizer_step(with_state(optimizer, tensors, torch.float32, False), tensors, options)


def apex_adam(tensors, options, capturable):
    fused_adam = imported("apex.optimizers", "FusedAdam")
    optimizer = fused_adam(
        tensors.parameters,
        lr=options.lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        capturable=capturable,
        set_grad_none=False,
    )
    return optimizer_step(with_state(optimizer, tensors, torch.float32, False), tensors, options)


def stepgraph_adam(tensors, options, moments, use_graph):
    first, second = tensors.moments(DTYPES[moments])
    parameter = next(name for name, dtype in DTYPES.items() if dtype == tensors.dtype)
    on_device = tensors.device.type == "cuda"
    listed = {
        "parameter": tensors.parameters,
        "gradient": tensors.gradients,
        "exp_avg": first,
        "exp_avg_sq": second,
    }
    executor = stepgraph_peer.Executor(
        options.library,
        f"{parameter}/{parameter}/none/{moments}/{moments}",
        tensors.numels,
        {kind: [t.data_ptr() for t in operand] for kind, operand in listed.items()},
        learning_rate=options.lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_NORM if options.full else 0.0,
        zero_gradients=options.full,
        device=torch.cuda.current_device() if on_device else -1,
        use_graph=use_graph,
        stream=torch.cuda.current_stream().cuda_stream if on_device else None,
    )
    if not on_device:
        return executor.launch
    return lambda: executor.launch(torch.cuda.current_stream().cuda_stream)


def captured(step):
    """The step as a CUDA graph. Runs it WARMUP_STEPS times first, as capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # The graph uses the memory of the optimizer, which `step` keeps.
    return lambda owner=step: graph.replay()


class Implementation:
    """A name, how to make its step, and the precision of its moments."""

    def __init__(self, name, moments, make, graph=False):
        self.name = name
        self.moments = moments
        self.graph = graph
        self._make = make

    def make(self, tensors, options):
        """(step, steps already taken). Raises NotAvailable."""
        step = self._make(tensors, options)
        return (captured(step), WARMUP_STEPS) if self.graph else (step, 0)


def implementations(options):
    """Everybody, stepgraph first: it is what the others are compared with."""
    dtype = options.dtype
    ours = ["f32"] if dtype == "f32" else ["bf16", "f32"]
    listed = []

    def add(name, moments, make, graph=False):
        listed.append(Implementation(name, moments, make, graph))

    if options.device == "cpu":
        for moments in ours:
            add("stepgraph host", moments, lambda t, o, m=moments: stepgraph_adam(t, o, m, False))
        add("PyTorch fused", dtype, lambda t, o: torch_adamw(t, o, fused=True))
        add("PyTorch foreach", dtype, lambda t, o: torch_adamw(t, o, foreach=True))
        return listed

    for moments in ours:
        if options.graph:
            add("stepgraph graph", moments, lambda t, o, m=moments: stepgraph_adam(t, o, m, True))
        add("stepgraph stream", moments, lambda t, o, m=moments: stepgraph_adam(t, o, m, False))
    add("PyTorch fused", dtype, lambda t, o: torch_adamw(t, o, fused=True))
    capturable = [
        ("PyTorch fused capturable", dtype, lambda t, o: torch_adamw(t, o, fused=True, capturable=True)),
        ("Transformer Engine capturable", "f32", lambda t, o: transformer_engine_adam(t, o, True)),
        ("apex capturable", "f32", lambda t, o: apex_adam(t, o, True)),
    ]
    add("Transformer Engine", "f32", lambda t, o: transformer_engine_adam(t, o, False))
    add("apex", "f32", lambda t, o: apex_adam(t, o, False))
    for name, moments, make in capturable:
        add(name, moments, make)
        if options.graph:
            add(name.replace("capturable", "graph"), moments, make, graph=True)
    return listed


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def verify(implementation, options):
    """Largest relative difference from double precision after a few steps. Raises NotAvailable."""
    steps = 5
    small = argparse.Namespace(**{**vars(options), "lr": 1e-2})
    tensors = Tensors([1000, 65536, 3, 20480], DTYPES[options.dtype], options.device, seed=7)
    reference = Reference(tensors, DTYPES[implementation.moments], small)
    step, taken = implementation.make(tensors, small)
    for _ in range(steps):
        step()
    synchronize(options.device)
    for _ in range(taken + steps):
        reference.step()
    return reference.largest_relative_difference(tensors.parameters)


def seconds_a_step(step, runs, tensors):
    """Seconds of one of `runs` steps back to back, the first on the tensors' own gradients."""
    tensors.restore_gradients()
    if tensors.device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(runs):
            step()
        return (time.perf_counter() - begin) / runs
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(runs):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / runs


def processor_seconds(step, device):
    """Seconds until a step on an idle device has been enqueued."""
    synchronize(device)
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def bytes_a_step(numels, options, moments):
    """What must move: each operand read once, written once if it changes."""
    element = DTYPES[options.dtype].itemsize
    update = 2 * element + element + 4 * DTYPES[moments].itemsize
    # The norm reads every gradient before the update may start, and zeroing writes it.
    return sum(numels) * (update + (2 * element if options.full else 0))


def measure(options, numels):
    """Rows of results, in the order of `implementations`."""
    rows = []
    running = []
    # f32: relative to the largest parameter, 1; clipping by PyTorch alone costs 8e-6. bf16: a few
    # roundings to 8 bits.
    tolerance = 2e-5 if options.dtype == "f32" else 3e-2
    tensors = Tensors(numels, DTYPES[options.dtype], options.device)
    if options.full:
        tensors.keep_gradients()
    for implementation in implementations(options):
        row = {"implementation": implementation.name, "moments": implementation.moments}
        rows.append(row)
        try:
            row["difference"] = verify(implementation, options)
            if not row["difference"] <= tolerance:
                row["error"] = f"wrong: differs by {row['difference']:.1e} from double precision"
                continue
            step, _ = implementation.make(tensors, options)
            for _ in range(WARMUP_STEPS):
                step()
            synchronize(options.device)
            estimate = seconds_a_step(step, 1, tensors)
        except NotAvailable as reason:
            row["error"] = str(reason)
            continue
        except torch.OutOfMemoryError:
            row["error"] = "not enough memory"
            continue
        runs = max(1, min(MOST_STEPS_A_MEASUREMENT, int(SHORTEST_MEASUREMENT_SECONDS / estimate)))
        running.append((row, step, runs, [], []))
    for _ in range(options.steps):
        for _, step, runs, seconds, processor in running:
            seconds.append(seconds_a_step(step, runs, tensors))
            processor.append(processor_seconds(step, options.device))
        synchronize(options.device)
    for row, _, _, seconds, processor in running:
        row["seconds"] = statistics.median(seconds)
        row["cpu_seconds"] = statistics.median(processor)
        row["bytes_per_second"] = bytes_a_step(numels, options, row["moments"]) / row["seconds"]
    if "seconds" in rows[0]:  # stepgraph's own
        for row, *_ in running:
            row["ratio"] = row["seconds"] / rows[0]["seconds"]
    return rows


def print_table(rows, numels, options):
    headings = ("implementation", "moments", "ms/step", "us/tensor", "GB/s", "x stepgraph", "CPU us", "difference")
    lines = [headings]
    for row in rows:
        line = [row["implementation"], row["moments"]]
        if "seconds" in row:
            line += [
                f"{row['seconds'] * 1e3:.3f}",
                f"{row['seconds'] * 1e6 / len(numels):.1f}",
                f"{row['bytes_per_second'] / 1e9:.0f}",
                f"{row['ratio']:.2f}" if "ratio" in row else "-",
                f"{row['cpu_seconds'] * 1e6:.1f}",
                f"{row['difference']:.0e}",
            ]
        else:
            line += [row["error"]]
        lines.append(line)
    complete = [line for line in lines if len(line) == len(headings)]
    widths = [max(len(line[i]) for line in complete) for i in range(len(headings))]
    widths[0] = max(len(line[0]) for line in lines)
    print(f"{options.list_name} {options.dtype}, {'clip + AdamW + zero' if options.full else 'AdamW'}, {options.device}")
    for line in lines:
        cells = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        if len(line) == len(headings):
            cells += [cell.rjust(width) for cell, width in zip(line[2:], widths[2:])]
        else:
            cells += line[2:]
        print("  ".join(cells).rstrip())


def first_line_with(path, prefix):
    try:
        with open(path) as file:
            return next((line.strip() for line in file if line.startswith(prefix)), "")
    except OSError:
        return ""


def context(device, program, commit):
    """What the results depend on, under the names that the benchmark programs use."""
    described = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "executable": program,
        "commit": commit,
        "torch": torch.__version__,
    }
    if torch.device(device).type == "cuda":
        described["gpu"] = torch.cuda.get_device_name()
        described["cuda_runtime"] = torch.version.cuda
        words = first_line_with("/proc/driver/nvidia/version", "NVRM").split()
        versions = [word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()]
        described["driver"] = versions[0] if versions else "unknown"
    else:
        name = first_line_with("/proc/cpuinfo", "model name")
        described["processor"] = name.partition(": ")[2] or "unknown"
        described["threads"] = torch.get_num_threads()
    return described


def as_benchmarks(rows, options):
    """The rows in the form of Google Benchmark's results."""
    program = "host_peers" if options.device == "cpu" else "peers"
    prefix = f"{program}/{options.step}/{options.dtype}/{options.list_name}"
    listed = []
    for row in rows:
        name = f"{prefix}/{row['implementation'].lower().replace(' ', '_')}/{row['moments']}"
        entry = {"name": name, "run_name": name, "run_type": "iteration", "label": row["implementation"]}
        if "seconds" in row:
            entry |= {
                "iterations": options.steps,
                "real_time": row["seconds"] * 1e6,
                "cpu_time": row["cpu_seconds"] * 1e6,
                "time_unit": "us",
                "bytes_per_second": row["bytes_per_second"],
                "difference": row["difference"],
            }
            if "ratio" in row:
                entry["ratio"] = row["ratio"]
        else:
            entry |= {"error_occurred": True, "error_message": row["error"]}
        listed.append(entry)
    return listed


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description="AdamW implementations side by side.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--n-tensors", type=int, help="201 on cuda, 16 on cpu")
    parser.add_argument("--numel", type=int, help="elements of a tensor: 20971520 on cuda, 2097152 on cpu")
    parser.add_argument("--parameters", metavar="MODEL", help="a model's parameters instead, such as gpt2-124m")
    parser.add_argument("--steps", type=int, default=20, help="rounds of measurements")
    parser.add_argument("--step", choices=("adam", "full"), default="adam", help="full: clip + AdamW + zero")
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=True, help="also time replayed CUDA graphs"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="f32", help="of parameters and gradients")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--library", help="libstepgraph_peer.so; the newest under build*/ if not given")
    parser.add_argument("--json", metavar="FILE", help="write the results in the form of Google Benchmark's")
    options = parser.parse_args(arguments)
    on_cpu = options.device == "cpu"
    options.n_tensors = options.n_tensors or (16 if on_cpu else 201)
    options.numel = options.numel or (2097152 if on_cpu else 20971520)
    options.full = options.step == "full"
    options.lr = 1e-4
    if options.steps < 1 or options.n_tensors < 1 or options.numel < 1:
        parser.error("--steps, --n-tensors and --numel must be positive")
    return options


def main():
    options = parse_arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device; --device cpu compares on the processor")
    try:
        options.library = stepgraph_peer.Library(options.library)
        if options.parameters:
            numels = options.library.parameter_list(options.parameters)
            options.list_name = options.parameters
        else:
            numels = [options.numel] * options.n_tensors
            options.list_name = f"{options.n_tensors}x{options.numel}"
    except (stepgraph_peer.StepgraphError, OSError) as error:
        raise SystemExit(str(error)) from None
    if options.device == "cuda":
        # The legacy default stream waits for everything else, and nothing can be captured on it.
        with torch.cuda.stream(torch.cuda.Stream()):
            rows = measure(options, numels)
    else:
        rows = measure(options, numels)
    print_table(rows, numels, options)
    if options.json:
        described = context(options.device, pathlib.Path(__file__).name, options.library.commit())
        result = {"context": described, "benchmarks": as_benchmarks(rows, options)}
        pathlib.Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    # A peer that is not installed is no failure; one that computes something else is.
    if any(row.get("error", "").startswith("wrong") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
