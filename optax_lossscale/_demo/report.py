"""The output of the demonstration: a table, sentences, a plot and a JSON file."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from ..plots import plot_loss_scale
from .task import BATCH, VOCABULARY
from .train import Result


def make_table(results: dict[str, Result]) -> Table:
    """Make a table with one row per way to train."""
    table = Table("trained in", title="On held-out text", title_justify="left")
    for heading in ("loss", "F1", "words", "flushed", "scale", "skipped"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.held_out_loss:.4f}",
            f"{result.held_out_f1:.3f}",
            f"{result.words_predicted:.2f}",
            f"{result.flushed_share:.1%}",
            _power(result.final_scale),
            f"{result.skipped_steps}",
        )
    return table


def sentences(results: dict[str, Result], true_words: float) -> Iterator[str]:
    """Explain the columns and the differences between the runs."""
    yield (
        f"words: words predicted per position; the true number is {true_words:.2f}. "
        "flushed: logits' gradients that are zero in the backward pass with the final "
        "weights. scale: the loss scale of the last step, or that of scale_block."
    )
    best = results["float32"].held_out_loss
    ratios = [f"{r.held_out_loss / best:.3f}x ({n})" for n, r in results.items()]
    yield f"Held-out loss relative to float32: {', '.join(ratios[1:])}."
    elements = BATCH * VOCABULARY
    yield (
        f"Why float16 needs a scale here: the loss is a mean over {elements:,} labels, "
        f"so a wrong word with probability p has the gradient p / {elements:,}. "
        f"float16 rounds that to zero as soon as p < {elements * 2.0**-25:.2f}. "
        "Nothing pushes the wrong words down any further."
    )
    for result in results.values():
        if (step := result.poisoned_step) is not None:
            fate = "skipped" if result.skipped[step] else "applied"
            scale, next_scale = map(_power, result.scales[step : step + 2])
            yield (
                f"In the dynamic run, the batch of step {step} had an infinite weight. "
                f"The step was {fate}, the scale went from {scale} to {next_scale}, "
                f"and training continued. The loss was {result.losses[step - 1]:.4f} "
                f"before that step and {result.losses[-1]:.4f} at the end."
            )


def save_json(path: Path, results: dict[str, Result], **figures: Any) -> None:
    """Write the same numbers, and the loss, the scale and the skips of each step."""
    runs = {name: result._asdict() for name, result in results.items()}
    for run in runs.values():  # JSON cannot represent the loss of the poisoned step
        run["losses"] = [x if math.isfinite(x) else None for x in run["losses"]]
    path.write_text(json.dumps(figures | {"runs": runs}, indent=1, allow_nan=False))


def save_plot(path: Path, results: dict[str, Result]) -> None:
    """Plot the loss and the scale of every run over the steps."""
    # Imported here, because only --plot needs it. A figure works without a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    loss_axes, scale_axes = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    styles: tuple[dict[str, Any], ...] = (
        {"color": "0.6", "linewidth": 4.0},
        {"color": "tab:red"},
        {"color": "tab:blue", "linestyle": "--"},
        {"color": "tab:green", "linestyle": ":", "linewidth": 2.5},
        {"color": "tab:purple", "linestyle": "-."},
    )
    for (name, result), style in zip(results.items(), styles, strict=True):
        loss_axes.plot(result.losses, label=name, **style)
        plot_loss_scale(result.scales, result.skipped, ax=scale_axes, **style)
    loss_axes.set(ylabel="training loss", yscale="log", title="Same seed, same batches")
    loss_axes.set_yticks(ticks := [0.01, 0.02, 0.05, 0.1, 0.2, 0.5], ticks)
    loss_axes.minorticks_off()
    loss_axes.legend(frameon=False)
    loss_axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"
