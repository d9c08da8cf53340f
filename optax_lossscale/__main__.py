"""The demonstration: train in float16 with and without loss scales, and compare."""

import argparse
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax

from ._demonstration import training
from ._validation import BOOK
from .plots import plot_loss_scale

NO_PICTURE = """\
matplotlib is not installed, so this run draws no picture. To get one, stop it and run
`pip install -e '.[demo]'` in the clone, or `pip install matplotlib`."""
ROW = "{:22}  {:>7}  {:>6}  {:>7}  {:>5}  {:>7}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m optax_lossscale",
        description="Train a small network on the list of Unicode's character names, "
        "five times from the same seed: in float32, and in float16 without a loss "
        "scale, with a fixed scale, with a dynamic scale, and with scale_block. Then "
        "compare the results.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=150, help="training steps per run (150)")
    text, file = "where to draw losses and scales (%(default)s)", "optax_lossscale.png"
    add("--plot", type=Path, metavar="FILE.png", default=file, help=text)
    add("--no-plot", dest="plot", action="store_const", help="draw nothing")
    add("--json", type=Path, metavar="FILE", help="write the numbers of every step")
    options = parser.parse_args(arguments)
    if options.steps < 10:
        parser.error(f"argument --steps: must be 10 or more, got {options.steps}.")
    if options.plot and not _can_plot():
        options.plot = None
        print(f"{NO_PICTURE}\n")
    for name in ("plot", "json"):
        if path := getattr(options, name):
            try:
                path.open("ab").close()  # before two minutes of training
            except OSError as error:
                cause = f"cannot write {path}: {error.strerror}"
                parser.error(f"argument --{name}: {cause}. Choose another file.")
    positions = training.load_positions()
    print(f"""\
The text is the list of Unicode's character names. The task is to predict which of its
1,000 most common words are among the next 4. The network is written in float32, and
ls.autocast makes it float16. Each run has {options.steps} steps on \
{jax.devices()[0].device_kind}.
""")
    print(ROW.format("trained in", "loss", "words", "flushed", "scale", "skipped"))
    results: dict[str, training.Result] = {}
    for name, way in training.WAYS.items():
        with _bar(f"{len(results) + 1} of 5: {name}", options.steps) as bar:
            results[name] = x = training.train(*way, positions, options.steps, bar)
        shares = f"{x.loss:.3f}", f"{x.words:.1f}", f"{x.flushed:.1%}"
        print(ROW.format(name, *shares, _power(x.scales[-1]), sum(x.skipped)))
    elements, step = training.BATCH * training.VOCABULARY, options.steps // 2
    ratio = results["float16, no scale"].loss / results["float32"].loss
    later = "" if ratio > 1.1 else " It falls behind later."
    dynamic = results["float16, dynamic scale"]
    fate = "skipped" if dynamic.skipped[step] else "applied"
    losses = dynamic.losses
    before, after = map(_power, dynamic.scales[step : step + 2])
    print(f"""
loss: on held-out text. words: words predicted per position; 3.6 are right. flushed:
gradients of the logits that are zero at the end. scale: the scale of the last step.

Without a scale, float16 has {ratio:.2f} times the loss of float32.{later}
Why float16 needs a scale here: the loss is a mean over {elements:,} labels, so a
wrong word with probability p has the gradient p / {elements:,}. float16 rounds that
to zero as soon as p < {elements * 2.0**-25:.2f}. Then nothing pushes it further down.

In the dynamic run, the batch of step {step} had an infinite weight. The step was
{fate}, the scale went from {before} to {after}, and training continued. The scale
doubles after 20 finite steps in a row, so that a short run shows it. By default it
takes 2,000. The loss of a training batch was {losses[step - 1]:.4f} before that step,
and is {losses[-1]:.4f} at the end.
""")
    if options.json:
        runs = {name: result._asdict() for name, result in results.items()}
        for run in runs.values():  # JSON cannot represent the loss of the poisoned step
            run["losses"] = [x if math.isfinite(x) else None for x in run["losses"]]
        options.json.write_text(json.dumps(runs, indent=1, allow_nan=False))
    if options.plot:
        save_plot(options.plot, results)
        print(f"Losses and scales, step by step: {options.plot.resolve()}")
    print(f"Next: the quickstart, {BOOK}quickstart.ipynb")


def save_plot(path: Path, results: dict[str, training.Result]) -> None:
    """Plot the loss and the scale of every run over the steps, from thick to thin."""
    from matplotlib.figure import Figure  # works without a display

    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for i, (name, result) in enumerate(results.items()):
        above.plot(result.losses, label=name, linewidth=6 - i)
        plot_loss_scale(result.scales, result.skipped, ax=below, linewidth=6 - i)
    above.set(ylabel="training loss", yscale="log", title="Same seed, same batches")
    above.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _can_plot() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def _bar(run: str, steps: int) -> Any:
    """Return a progress bar, which only a terminal shows, or nothing without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext()
    return tqdm(desc=run, total=steps, mininterval=0, leave=False, disable=None)


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"


if __name__ == "__main__":
    main()
