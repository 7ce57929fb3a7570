"""Tables and a picture from the committed results.

    report.py            # print all tables
    report.py --update   # write the README's tables and perf/results/<gpu>/bandwidth.png
    report.py --check    # fail unless the README's tables are those of the results

Reads perf/results/<gpu>/*.json: Google Benchmark's files of the programs here, and those of peers.py
and fused_adam_bench.py, which have the same form. The README's tables stand between the two marker lines below.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "<!-- perf:begin -->"
END = "<!-- perf:end -->"

# What the README shows; the rest is printed only.
README_SECTIONS = ("adam", "step", "python", "peers", "replay")

# Elements from which launches and caches no longer show in a bandwidth.
LONG_ENOUGH_FOR_BANDWIDTH = 100_000_000


class Results:
    """Everything measured on one GPU."""

    def __init__(self, directory):
        self.directory = directory
        self.contexts = {}
        files = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
        # A benchmark that was measured again later replaces the earlier figure, in its place.
        by_name = {}
        for stem, loaded in sorted(files.items(), key=lambda item: item[1]["context"]["date"]):
            self.contexts[stem] = loaded["context"]
            for benchmark in loaded["benchmarks"]:
                if benchmark.get("run_type") != "aggregate":
                    by_name[benchmark["name"]] = benchmark
        self.benchmarks = list(by_name.values())

    def of(self, program):
        """(parts of the name after the program's, benchmark) of each result that is not an error."""
        for benchmark in self.benchmarks:
            parts = benchmark["name"].split("/")
            if parts[0] == program and not benchmark.get("error_occurred"):
                yield parts[1:], benchmark

    def gpu(self):
        return next((c["gpu"] for c in self.contexts.values() if "gpu" in c), self.directory.name)

    def provenance(self):
        """One line that says where the numbers come from."""
        contexts = [c for c in self.contexts.values() if "gpu" in c] or list(self.contexts.values())
        dates = sorted({c["date"][:10] for c in contexts})
        facts = [self.gpu()]
        for key, text in (("driver", "driver {}"), ("cuda_runtime", "CUDA {}"), ("torch", "PyTorch {}")):
            found = sorted({c[key] for c in contexts if key in c})
            if found:
                facts.append(text.format(found[-1]))
        facts.append(dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}")
        return ", ".join(facts)


def table(headings, rows):
    """A Markdown table, numbers to the right; nothing without rows."""
    if not rows:
        return []
    numeric = [all(cell[:1].isdigit() or cell[:1] in "-<" for cell in column) for column in zip(*rows)]
    lines = ["| " + " | ".join(headings) + " |"]
    lines.append("| " + " | ".join("---:" if right else "---" for right in numeric) + " |")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return lines


def gigabytes(benchmark, key="bytes_per_second"):
    return f"{benchmark[key] / 1e9:,.0f}"


def grouped_size(name):
    """201x20971520 -> 201 x 20,971,520; other names stay."""
    tensors, by, elements = name.partition("x")
    if not (by and tensors.isdigit() and elements.isdigit()):
        return name
    return f"{int(tensors):,} x {int(elements):,}"


def moments_of(exp_avg, exp_avg_sq):
    return exp_avg if exp_avg == exp_avg_sq else f"{exp_avg}, {exp_avg_sq}"


def elements_of(size):
    """Of "<tensors>x<elements>"; 0 for the name of a model."""
    tensors, _, elements = size.partition("x")
    return int(tensors) * int(elements) if tensors.isdigit() and elements.isdigit() else 0


def adam_section(results):
    rows = []
    for (parameter, gradient, master, exp_avg, exp_avg_sq, *options, size), b in results.of("adam"):
        moved = b["bytes_per_second"] * b["median_us"] * 1e-6 / elements_of(size)
        kind = "" if b.get("tuned", 1) else " (generic kernel)"
        rows.append(
            (
                " ".join([parameter, *options]) + kind,
                gradient,
                master,
                moments_of(exp_avg, exp_avg_sq),
                grouped_size(size),
                f"{moved:.4g}",
                gigabytes(b),
                f"{b['stream_ratio']:.3f}",
                f"{b['regular_ratio']:.3f}" if "regular_ratio" in b else "-",
            )
        )
    headings = (
        "parameter",
        "gradient",
        "master",
        "moments",
        "tensors",
        "bytes an element",
        "GB/s",
        "of the fastest copy",
        "captured / regular",
    )
    return table(headings, rows)


def peers_section(results, program="peers"):
    rows = []
    for (step, dtype, size, _, moments), b in results.of(program):
        rows.append(
            (
                grouped_size(size),
                "AdamW" if step == "adam" else "clip, AdamW, zero",
                dtype,
                b["label"],
                moments,
                f"{b['real_time'] / 1e3:.3f}",
                gigabytes(b),
                f"{b['cpu_time']:.1f}",
                f"{b['ratio']:.2f}" if "ratio" in b else "-",
            )
        )
    headings = ("tensors", "step", "dtype", "implementation", "moments", "ms", "GB/s", "CPU µs", "time / stepgraph's")
    return table(headings, rows)


def replay_section(results):
    rows = [
        (
            grouped_size(parts[0]),
            f"{b['replay_cpu_us']:.2f}",
            f"{b['stream_cpu_us']:.2f}",
            f"{b['replay_gpu_us']:.1f}",
            f"{b['stream_gpu_us']:.1f}",
            f"{b['latency_us']:.1f}",
        )
        for parts, b in results.of("replay")
    ]
    headings = (
        "tensors",
        "CPU µs a replay",
        "one by one",
        "GPU µs a replay",
        "one by one",
        "launch to finish µs",
    )
    return table(headings, rows)


def step_section(results):
    rows = [
        (
            grouped_size(parts[0]),
            parts[1].replace("+", ", "),
            f"{b['replay_gpu_us']:,.1f}",
            f"{b['floor_us']:,.1f}",
            f"{b['floor_ratio']:.3f}",
            f"{b['replay_cpu_us']:.2f}",
            f"{b['kernel_nodes']:.0f}",
        )
        for parts, b in results.of("step")
    ]
    headings = (
        "tensors",
        "step",
        "GPU µs a replay",
        "its parts alone µs",
        "replay / parts",
        "CPU µs",
        "kernels",
    )
    return table(headings, rows)


def update_section(results):
    rows = [
        (
            parts[0].replace("_", " "),
            parts[1].removesuffix("groups"),
            f"{b['change_cpu_us']:.2f}",
            f"{b['added_cpu_us']:.2f}",
            f"{b['added_gpu_us']:.2f}",
        )
        for parts, b in results.of("update")
    ]
    return table(("way", "groups", "CPU µs of the change", "added CPU µs", "added GPU µs"), rows)


def instantiate_section(results):
    rows = [
        (
            grouped_size(parts[0]),
            f"{b['plan_us'] / 1e3:.2f}",
            f"{b['construct_us'] / 1e3:.2f}",
            f"{b['instantiate_us']:.0f}",
            f"{b['graph_update_us']:.1f}",
            f"{b['table_bytes'] / 1024:,.0f}",
        )
        for parts, b in results.of("instantiate")
    ]
    headings = ("tensors", "plan ms", "executor ms", "instantiate µs", "graph update µs", "tables KiB")
    return table(headings, rows)


def host_section(results):
    rows = [
        (
            "/".join(parts[:5]) + (" with clipping" if "clip" in parts else ""),
            f"{b['threads']:.0f}",
            f"{b['median_us'] / 1e3:.2f}",
            f"{b['bytes_per_second'] / 1e9:.1f}",
        )
        for parts, b in results.of("host")
    ]
    return table(("host", "threads", "ms", "GB/s"), rows)


def python_section(results):
    rows = [
        (
            grouped_size(size),
            b["label"],
            "fresh" if b["fresh_gradients"] else "kept",
            f"{b['cpu_time']:,.1f}",
            f"{b['real_time']:,.1f}" if "real_time" in b else "-",
        )
        for (size, *_), b in results.of("python")
    ]
    headings = (
        "tensors",
        "optimizer.step() of",
        "gradients",
        "CPU µs until it returns",
        "µs a step, many in a row",
    )
    return table(headings, rows)


SECTIONS = {
    "adam": ("The update, replayed as a graph", adam_section),
    "peers": ("Beside other implementations, in one process on the same tensors", peers_section),
    "step": ("The whole step, beside the fastest kernel for each of its parts", step_section),
    "replay": ("What a step costs beside its memory traffic (AdamW with clipping)", replay_section),
    "update": ("Changing a learning rate or a gradient's address between replays", update_section),
    "instantiate": ("Getting a step running", instantiate_section),
    "python": ("What step() costs in Python (AdamW, f32)", python_section),
    "host": ("On the processor", host_section),
    "host_peers": (
        "On the processor, beside other implementations",
        lambda results: peers_section(results, "host_peers"),
    ),
}


def markdown(all_results, sections):
    """The chosen tables of all GPUs."""
    blocks = []
    for results in all_results:
        tables = []
        for section in sections:
            title, make = SECTIONS[section]
            lines = make(results)
            if lines:
                tables.append("\n".join([f"{title}:", "", *lines]))
        if tables:
            blocks.append("\n\n".join([results.provenance() + ".", *tables]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def replace_between_markers(text, content):
    """`text` with `content` between the markers. Raises ValueError without exactly one pair."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected one line '{BEGIN}' and after it one line '{END}'")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{content}{END}{after}"


def draw(results, path):
    """Achieved bandwidth as bars, the fastest copy of the same run as a line across each."""
    bars = []  # label, achieved, limit or None, is ours
    for (parameter, gradient, master, exp_avg, exp_avg_sq, *options, size), b in results.of("adam"):
        if elements_of(size) < LONG_ENOUGH_FOR_BANDWIDTH:
            continue
        label = f"{parameter}/{gradient}/{master}/{moments_of(exp_avg, exp_avg_sq)}"
        label = "/".join([label, *options]) + ("" if b.get("tuned", 1) else " (generic)")
        if not size.startswith("1x"):
            label += f"  {grouped_size(size)}"
        bars.append((label, b["bytes_per_second"] / 1e9, b["stream_bytes_per_second"] / 1e9, True))
    for (step, dtype, size, name, _), b in results.of("peers"):
        long_enough = elements_of(size) >= LONG_ENOUGH_FOR_BANDWIDTH
        if step == "adam" and long_enough and not name.startswith("stepgraph"):
            bars.append((f"{b['label']}, {dtype}", b["bytes_per_second"] / 1e9, None, False))
    if not bars:
        return False

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 0.9 + 0.3 * len(bars)), layout="constrained")
    for position, (_, achieved, limit, ours) in enumerate(bars):
        axis.barh(position, achieved, height=0.7, color="#1f5fbf" if ours else "#b5b5b5")
        axis.text(achieved - 30, position, f"{achieved:,.0f}", va="center", ha="right", color="white", fontsize=8)
        if limit:
            axis.plot([limit, limit], [position - 0.45, position + 0.45], color="#c0392b", linewidth=2)
    axis.plot([], [], color="#c0392b", linewidth=2, label="the fastest of ten copies of the same bytes")
    axis.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0)
    axis.set_xlabel("GB/s of the bytes that an AdamW step must move")
    axis.set_title(f"parameter/gradient/master/moments\n{results.provenance()}", fontsize=9)
    axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, -0.2), fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    # Without a date or version in the file, equal results give an equal picture.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return True


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Tables and a picture from the committed results.")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "perf" / "results")
    parser.add_argument("--readme", type=pathlib.Path, default=ROOT / "README.md")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--update", action="store_true", help="write the README's tables and the pictures")
    mode.add_argument("--check", action="store_true", help="fail unless the README agrees with the results")
    options = parser.parse_args(arguments)

    directories = sorted(path for path in options.results.glob("*") if path.is_dir())
    all_results = [Results(directory) for directory in directories]
    all_results = [results for results in all_results if results.benchmarks]
    if not options.update and not options.check:
        sys.stdout.write(markdown(all_results, SECTIONS))
        return 0

    text = options.readme.read_text()
    if not all_results and BEGIN not in text:
        print("no results and no tables")
        return 0
    try:
        wanted = replace_between_markers(text, markdown(all_results, README_SECTIONS))
    except ValueError as error:
        print(f"{options.readme}: {error}", file=sys.stderr)
        return 1
    if options.check:
        if text != wanted:
            print(f"{options.readme}: the tables differ from the results; run report.py --update", file=sys.stderr)
            return 1
        print("the tables are those of the results")
        return 0
    if text != wanted:
        options.readme.write_text(wanted)
    for results in all_results:
        draw(results, results.directory / "bandwidth.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
