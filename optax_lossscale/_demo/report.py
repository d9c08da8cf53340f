"""The output of the demonstration: a table, sentences, a plot and a JSON file."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Table

from ..plots import plot_loss_scale
from .task import VOCABULARY
from .train import BATCH, Result

Results = Mapping[str, Result]


def make_table(results: Results, true_words: float) -> Table:
    """Make a table with one row per way to train."""
    table = Table(
        title="On held-out text",
        title_justify="left",
        caption=(
            f"words: number of words predicted per position; the true number is "
            f"{true_words:.2f}. flushed: share of the logits' gradients that are zero "
            "in the backward pass with the final weights, but not in float32. scale: "
            "the final loss scale; for scale_backward, the scale of the last layer for "
            "one batch."
        ),
        caption_justify="left",
    )
    table.add_column("trained in", no_wrap=True)
    for heading in ("loss", "F1", "words", "flushed", "scale", "skipped"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.held_out_loss:.4f}",
            f"{result.held_out_f1:.3f}",
            f"{result.words_predicted:.2f}",
            f"{result.flushed_share:.1%}",
            f"2^{math.log2(result.final_scale):g}",
            f"{result.skipped_steps}",
        )
    return table


def compare(results: Results) -> str:
    """Compare the held-out losses of all runs with that of the first."""
    (name, reference), *others = results.items()
    ratios = [
        f"{result.held_out_loss / reference.held_out_loss:.3f}x ({other})"
        for other, result in others
    ]
    return f"Held-out loss relative to {name}: {', '.join(ratios)}."


def explain() -> str:
    """Explain why float16 fails here without a scale."""
    elements = BATCH * VOCABULARY
    lost_below = elements * 2.0**-25
    return (
        f"Why float16 needs a scale here: the loss is a mean over {elements:,} labels, "
        f"so a wrong word with probability p has the gradient p / {elements:,}. "
        f"float16 rounds it to zero as soon as p < {lost_below:.2f}, because it is "
        "then below half the smallest float16 number, 2^-24. Nothing pushes the wrong "
        "words down any further."
    )


def explain_poisoned(result: Result) -> str:
    """Describe what happened in the poisoned step, from the records of the run."""
    step = result.poisoned_step
    if step is None:
        return ""
    fate = "skipped" if result.skipped[step] else "applied"
    scale, next_scale = result.scales[step : step + 2]
    return (
        f"In the dynamic run, the batch of step {step} contained an inf. The step was "
        f"{fate}, the scale went from 2^{math.log2(scale):g} to "
        f"2^{math.log2(next_scale):g}, and training continued. The loss was "
        f"{result.losses[step - 1]:.4f} before that step and "
        f"{result.losses[-1]:.4f} at the end."
    )


def save_json(
    path: Path, settings: Mapping[str, int], results: Results, true_words: float
) -> None:
    """Write the same numbers, and the loss, the scale and the skips of each step."""
    runs = {name: result._asdict() for name, result in results.items()}
    # The loss of a skipped step is NaN or inf, which JSON cannot represent.
    for run in runs.values():
        run["losses"] = [x if math.isfinite(x) else None for x in run["losses"]]
    figures = {"settings": dict(settings), "true_words": true_words, "runs": runs}
    path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")


def save_plot(path: Path, results: Results) -> None:
    """Plot the loss and the scale of every run over the steps."""
    # Imported here, because only --plot needs it. Agg works without a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, scale_axes = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    styles = (
        {"color": "0.6", "linewidth": 4.0},
        {"color": "tab:red", "linewidth": 1.5},
        {"color": "tab:blue", "linewidth": 1.5, "linestyle": "--"},
        {"color": "tab:green", "linewidth": 2.5, "linestyle": ":"},
        {"color": "tab:purple", "linewidth": 1.5, "linestyle": "-."},
    )
    for (name, result), style in zip(results.items(), styles, strict=True):
        losses = np.array(result.losses)
        losses[~np.isfinite(losses)] = np.nan
        loss_axes.plot(losses, label=name, **style)
        plot_loss_scale(result.scales, result.skipped, scale_axes, **style)
    loss_axes.set(ylabel="training loss", yscale="log", title="Same seed, same batches")
    loss_axes.set_yticks(ticks := [0.01, 0.02, 0.05, 0.1, 0.2, 0.5], map(str, ticks))
    loss_axes.minorticks_off()
    loss_axes.legend(frameon=False)
    loss_axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
