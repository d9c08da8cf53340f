"""The benchmark runs, and its report says what it measured."""

import importlib
import json
import re
import runpy
import subprocess
import sys

import pytest
from book import PAGES, text_of
from processes import worker_environment
from shared import ROOT

BENCHMARKS = ROOT / "tests" / "benchmarks"


@pytest.mark.slow
def test_the_benchmark_measures_every_recipe(tmp_path):
    pytest.importorskip("jmp")
    sizes = ["--optimizers", "adamw", "--leaves", "4", "--parameters", "16384"]
    files = ["--json", tmp_path / "step.json", "--plot", tmp_path / "step.png"]
    subprocess.run(
        [sys.executable, BENCHMARKS / "step.py", "--repeats", "3", "--transformer"]
        + sizes
        + files,
        check=True,
    )
    report = json.loads((tmp_path / "step.json").read_text())
    [row] = report["optimizer_steps"]
    recipes = {result["recipe"] for result in row["results"]}
    assert {"plain", "optax_lossscale", "jmp", "flax"} <= recipes
    assert all(result["ratio"] > 0 for result in row["results"])
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_command_measures_the_device_that_is_here(tmp_path):
    pytest.importorskip("jmp")
    parts = ["update by sgd", "step in float16", "tests of test_finite.py"]
    subprocess.run(
        [sys.executable, BENCHMARKS / "on_device.py"]
        + ["--json", tmp_path / "found.json", "--parts", *parts],
        env=worker_environment(JAX_PLATFORMS="cpu"),
        check=True,
    )
    found = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert " passed" in found[parts[2]][0]["outcome"]
    assert (tmp_path / "found.md").read_text().count("| plain | ") == 2


def test_the_picture_of_costs_is_drawn_from_the_tables(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    chart = importlib.import_module("chart")
    drawn = "run `python tests/benchmarks/chart.py`"
    assert chart.PICTURE.read_text() == chart.draw(), drawn


def figures(text):
    """The three numbers that end a line, by the training and the rule before them."""
    lines = [re.sub(r"[|`%]", " ", line) for line in text.splitlines()]
    found = (
        re.fullmatch(r" *([a-z]\w+ .*?)" + 3 * r" +([\d.]+)" + " *", x) for x in lines
    )
    return {tuple(x[1].split()): [float(x[i]) for i in (2, 3, 4)] for x in found if x}


def test_the_table_of_rules_is_what_the_comparison_prints(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("sys.argv", ["compare_rules.py", "--recorded"])
    runpy.run_path(str(BENCHMARKS / "compare_rules.py"), run_name="__main__")
    printed = figures(capsys.readouterr().out)
    in_the_book = figures(text_of(PAGES / "how_the_scale_moves.ipynb"))
    assert printed and in_the_book.keys() == printed.keys()
    for key, numbers in printed.items():
        assert in_the_book[key] == pytest.approx(numbers, rel=0.02, abs=0.011), key
