"""Draw the losses of `stepgraph train --compare --json` and print its result as a table."""

import argparse
import json
import pathlib


def print_table(result):
    def microseconds(key):
        value = result.get(key)
        return "-" if value is None else f"{value:.1f} us"

    def number(key):
        value = result.get(key)
        return "-" if value is None else f"{value:.6g}"

    rows = [
        ("", "stepgraph", "reference"),
        ("first loss", number("first_loss"), number("first_loss")),
        ("final loss", number("final_loss"), number("reference_final_loss")),
        ("optimizer step", microseconds("optimizer_step_us"), microseconds("reference_optimizer_step_us")),
        ("replay launch", microseconds("replay_launch_us"), "-"),
    ]
    if result.get("loss_scaling", "none") != "none":
        rows.append(("loss scale", number("final_loss_scale"), "-"))
        skipped = [result.get(key) for key in ("skipped_steps", "reference_skipped_steps")]
        rows.append(("skipped steps", *("-" if steps is None else str(len(steps)) for steps in skipped)))
    print(f"{result['steps']} steps, backend {result['backend']}, device {result['device']}")
    for name, ours, theirs in rows:
        print(f"  {name:<16}{ours:>14}{theirs:>14}")
    print(f"  largest difference of the two losses: {number('max_loss_difference')}")


def draw(result, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    losses = result["losses"]
    reference = result.get("reference_losses") or []
    steps = range(1, len(losses) + 1)

    figure, (loss_axis, difference_axis) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=[3, 1], layout="constrained"
    )
    # The reference lies under a dashed line: where both agree, both stay visible.
    if reference:
        loss_axis.plot(steps, reference, color="#c9c9c9", linewidth=4, label="reference optimizer")
    loss_axis.plot(steps, losses, color="#1f5fbf", linewidth=1.5, linestyle="--", label="stepgraph")
    loss_axis.set_ylabel("training loss")
    loss_axis.set_title(f"{result['backend']} on {result['device']}, {result['steps']} steps")
    loss_axis.legend(frameon=False)

    if reference:
        difference = [ours - theirs for ours, theirs in zip(losses, reference, strict=True)]
        difference_axis.plot(steps, difference, color="#b03a2e", linewidth=1)
    difference_axis.axhline(0, color="black", linewidth=0.5)
    difference_axis.set_ylabel("difference")
    difference_axis.set_xlabel("optimizer step")
    difference_axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)

    for axis in (loss_axis, difference_axis):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=pathlib.Path, help="what `stepgraph train --json` wrote")
    parser.add_argument("png", type=pathlib.Path, help="picture to write")
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text())
    print_table(result)
    try:
        draw(result, arguments.png)
    except ModuleNotFoundError as error:
        # The numbers above are the result; only the picture needs matplotlib.
        parser.exit(0, f"no picture: {error}\n")
    print(f"wrote {arguments.png}")


if __name__ == "__main__":
    main()
