"""The benchmark runs, and its report says what it measured."""

import importlib
import json
import re
import runpy
import subprocess
import sys

import jax
import pytest
from book import PAGES, text_of
from processes import worker_environment
from shared import ROOT

BENCHMARKS = ROOT / "tests" / "benchmarks"
# No time that is measured here matters, and unoptimized programs compile faster.
FLAGS = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):  # A newer XLA ends at this name.
    FLAGS += " --xla_cpu_use_fusion_emitters=false"


def run(program, file, *options):
    """The report of a program."""
    pytest.importorskip("jmp")
    subprocess.run(
        [sys.executable, BENCHMARKS / program, "--json", file, *options],
        env=worker_environment(JAX_PLATFORMS="cpu", XLA_FLAGS=FLAGS),
        check=True,
    )
    return json.loads(file.read_text())


@pytest.mark.slow
def test_benchmark_measures_every_recipe(tmp_path):
    sizes = ["--optimizers", "adamw", "--leaves", "4", "--parameters", "16384"]
    options = ["--repeats", "3", "--transformer", "--plot", tmp_path / "step.png"]
    report = run("step.py", tmp_path / "step.json", *sizes, *options)
    results = report["optimizer_steps"][0]["results"]
    recipes = {result["recipe"] for result in results}
    assert {"plain", "optax_lossscale", "jmp", "flax"} <= recipes
    assert all(result["ratio"] > 0 for result in results)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_command_measures_the_device_that_is_here(tmp_path):
    parts = ["update by sgd", "step in float16", "tests of transform/test_rounding.py"]
    report = run("on_device.py", tmp_path / "found.json", "--parts", *parts)
    assert " passed" in report["parts"][parts[2]][0]["outcome"]
    assert (tmp_path / "found.md").read_text().count("| plain | ") == 2


def test_picture_of_costs_is_drawn_from_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    chart = importlib.import_module("chart")
    drawn = "run `python tests/benchmarks/chart.py`"
    assert chart.PICTURE.read_text() == chart.draw(), drawn


def test_table_of_rules_is_what_the_comparison_prints(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("sys.argv", ["compare_rules.py", "--recorded"])
    runpy.run_path(str(BENCHMARKS / "compare_rules.py"), run_name="__main__")
    texts = capsys.readouterr().out, text_of(PAGES / "how_the_scale_moves.ipynb")
    printed, in_the_book = (
        [re.sub(r"[|`%]", " ", line).split() for line in text.splitlines()]
        for text in texts
    )
    _, *rows = printed
    assert len(rows) == 16
    assert [row for row in rows if row not in in_the_book] == []
