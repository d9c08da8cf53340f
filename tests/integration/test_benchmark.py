"""Benchmarks run, report what they measure, and count a program from its text."""

import importlib
import json
import re
import runpy
import subprocess
import sys

import pytest
from book import PAGES, text_of
from shared import DATA, ROOT, worker_environment

BENCHMARKS = ROOT / "tests" / "benchmarks"


def run(program, file, *options):
    """The report of a program."""
    pytest.importorskip("jmp")
    subprocess.run(
        [sys.executable, BENCHMARKS / program, "--json", file, *options],
        env=worker_environment(),
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
def test_one_command_measures_this_device(tmp_path):
    step, tests = "step in float16", "tests of transform/test_rounding.py"
    report = run("on_device.py", tmp_path / "found.json", "--parts", step, tests)
    assert " passed" in report["parts"][tests][0]["outcome"]
    assert "| plain | " in (tmp_path / "found.md").read_text()


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


def test_a_program_is_counted_from_its_text(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    # Of a 1 KiB array: a prefetch, half of it sliced, a branch, an update, a copy, an
    # all-reduce before a loop and three in it, and a kernel that carries another array.
    counts = importlib.import_module("hlo").count((DATA / "program.hlo").read_text())
    prefetch, half, branch, fusion, all_reduce, copy = 1024, 512, 2048, 2048, 2048, 2048
    expected = prefetch + half + branch + 2 * fusion + 4 * all_reduce + copy
    assert (counts.bytes_moved, counts.copied_bytes) == (expected, 1024)
    assert (counts.kernels, counts.estimated_cycles) == (10, 75)
    assert counts.collectives == {"all-reduce": 4}
    assert (counts.collective_bytes, counts.asynchronous_collectives) == (4 * 1024, 1)


@pytest.mark.slow
def test_on_a_tpu_the_state_is_updated_in_place_and_the_check_rides_with_clipping(
    tmp_path,
):
    """In a process of its own: in this one jax must not look for TPUs."""
    pytest.importorskip("libtpu")
    path = tmp_path / "tpu.json"
    arrays = ["--arrays", "4x4096x1024", "--mesh-arrays", "10x1024x1024"]
    cases = ["--optimizers", "adamw", "clip + adamw", "--mesh", "v5e:4x4"]
    subprocess.run(
        [sys.executable, BENCHMARKS / "compiled.py", "tpu", *arrays, *cases]
        + ["--recipes", "optax_lossscale", "master weights", "--json", path],
        check=True,
    )
    for case in json.loads(path.read_text())["cases"]:
        plain, wrapped, masters = case["results"]
        for result in (wrapped, masters):
            assert result["aliased_bytes"] >= plain["aliased_bytes"] > 0
            assert result["copied_bytes"] <= plain["copied_bytes"] + 1024
            if case["optimizer"] == "clip + adamw":
                assert result["collectives"] == plain["collectives"]
        if (case["device"], case["optimizer"]) == ("v5e", "clip + adamw"):
            assert wrapped["estimated_cycles"] <= 1.03 * plain["estimated_cycles"]
