"""Draw the report of `step.py`."""

import pathlib
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette, gray, and two of Tol's, which colour-blind readers can tell
# apart.
COLOURS = {
    "plain": "#000000",
    "optax_lossscale": "#0072B2",
    "its masks alone": "#56B4E9",
    "headroom rule": "#CC79A7",
    "master weights": "#F0E442",
    "check_updates": "#999999",
    "scale_block": "#882255",
    "retries": "#332288",
    "apply_if_finite": "#009E73",
    "jmp": "#E69F00",
    "flax": "#D55E00",
}


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    rows = report["optimizer_steps"]
    cases = {f"{r['optimizer']}\n{r['leaves']}, {r['dtype']}": r for r in rows}
    for row in report["transformer_steps"]:
        cases[f"transformer\n{row['dtype']}"] = row
    size = max(9, 1.5 + 1.2 * len(cases)), 7
    figure, axes = plt.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    for axis, key, title in (
        (axes[0], "ratio", "time of a step / plain"),
        (axes[1], "trace_and_compile_ratio", "trace and compile / plain"),
    ):
        _bars(axis, cases, key)
        axis.set_title(title, loc="left")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=5, frameon=False, loc="outside upper left")
    machine = report["machine"]
    axes[1].set_xlabel(
        f"{machine['device']} ({machine['processor']}), jax {machine['jax']}; "
        "line: quartiles of the ratio"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis: Any, cases: dict[str, Any], key: str) -> None:
    rows = [{r["recipe"]: r for r in row["results"]} for row in cases.values()]
    # Not every case has every recipe.
    recipes = [name for name in COLOURS if any(name in row for row in rows)][1:]
    width = 0.8 / len(recipes)
    for i, recipe in enumerate(recipes):
        places = np.array([x for x, row in enumerate(rows) if recipe in row])
        results = [row[recipe] for row in rows if recipe in row]
        heights = np.array([r[key] for r in results])
        errors = None
        if key == "ratio":
            quartiles = np.array([r["ratio_quartiles"] for r in results])
            errors = np.abs(quartiles.T - heights)
        axis.bar(
            places + (i - (len(recipes) - 1) / 2) * width,
            heights - 1,
            width,
            bottom=1,
            yerr=errors,
            color=COLOURS[recipe],
            label=recipe,
            error_kw={"linewidth": 0.8},
        )
    axis.set_xticks(np.arange(len(cases)), list(cases), fontsize="small")
