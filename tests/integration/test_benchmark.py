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


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """The programs of the benchmarks can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)


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
def test_benchmark_measures_and_draws_every_recipe_of_an_update(tmp_path):
    sizes = ["--optimizers", "adamw", "--leaves", "4", "--parameters", "16384"]
    options = ["--repeats", "3", "--plot", tmp_path / "step.png"]
    options.append("--transformer")  # it names no dtype, so none is measured
    report = run("step.py", tmp_path / "step.json", *sizes, *options)
    results = report["optimizer_steps"][0]["results"]
    recipes = importlib.import_module("recipes")
    measured = {result["recipe"] for result in results}
    assert measured == recipes.RECIPES.keys() - recipes.NEED_A_LOSS
    assert all(result["ratio"] > 0 for result in results)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_command_measures_this_device(tmp_path):
    small, tests = "6 small arrays, adam", "tests of transform/test_rounding.py"
    parts = ("--parts", "step in float16", small, tests)
    report = run("on_device.py", tmp_path / "found.json", *parts)
    recipes = [result["recipe"] for result in report["parts"][small]]
    assert recipes == ["plain", "optax_lossscale", "flax", "jmp"]
    [result] = report["parts"][tests]
    assert " passed" in result["outcome"] and result["failed"] == []
    assert "| plain | " in (tmp_path / "found.md").read_text()


def test_picture_of_costs_is_drawn_from_the_tables():
    chart = importlib.import_module("chart")
    drawn = "run `python tests/benchmarks/chart.py`"
    assert chart.PICTURE.read_text() == chart.draw(), drawn


def test_table_of_rules_is_what_the_comparison_prints(monkeypatch, capsys):
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


@pytest.fixture
def counts():
    """What is counted from the text of a program, whose arrays are of 1 KiB."""
    return importlib.import_module("hlo").count((DATA / "program.hlo").read_text())


def test_bytes_of_a_program_are_counted_from_its_text(counts):
    kernels = {
        "copy-done": 1024,  # read into on-chip memory, where the result stays
        "slice-done": 512,  # half an array, read in the same way
        "cond": 2048,  # its costliest branch reads and writes an array
        "fusion": 2048,  # one operand and one result are on the chip
        "all-reduce-done": 2048,
        "while": 3 * 2048,  # three rounds of an all-reduce
        "async-collective-done": 2048,  # it carries another array, which is not moved
        "copy.1": 2048,
    }
    assert counts.bytes_moved == sum(kernels.values())
    assert counts.copied_bytes == 1024  # what copy.1 writes


def test_kernels_and_cycles_of_a_program_are_counted_from_its_text(counts):
    # Eight instructions, of which the loop runs its kernel three times.
    assert counts.kernels == 7 + 3
    assert counts.estimated_cycles == 70 + 5  # fusion, and cond's costliest branch


def test_collectives_of_a_program_are_counted_from_its_text(counts):
    # One that other work runs beside, and the three of the loop.
    assert counts.collectives == {"all-reduce": 1 + 3}
    assert counts.collective_bytes == 4 * 1024
    assert counts.asynchronous_collectives == 1


@pytest.fixture(scope="module")
def for_a_tpu(tmp_path_factory):
    """Steps that another process compiles: in this one jax must not look for TPUs."""
    pytest.importorskip("libtpu")
    path = tmp_path_factory.mktemp("tpu") / "tpu.json"
    arrays = ["--arrays", "4x4096x1024", "--mesh-arrays", "10x1024x1024"]
    arrays += ["--mesh-transformer"]  # without a value: none
    cases = ["--optimizers", "adamw", "clip + adamw", "--mesh", "v5e:4x4"]
    subprocess.run(
        [sys.executable, BENCHMARKS / "compiled.py", "tpu", *arrays, *cases]
        + ["--recipes", "optax_lossscale", "master weights", "--json", path],
        check=True,
    )
    return json.loads(path.read_text())["cases"]


@pytest.mark.slow
def test_compiled_for_a_tpu_the_state_is_updated_in_place(for_a_tpu):
    for case in for_a_tpu:
        plain, *scaled = case["results"]
        for result in scaled:
            assert result["aliased_bytes"] >= plain["aliased_bytes"] > 0
            assert result["copied_bytes"] <= plain["copied_bytes"] + 1024


@pytest.mark.slow
def test_compiled_for_a_tpu_the_check_shares_the_collectives_of_clipping(
    for_a_tpu,
):
    clipped = [case for case in for_a_tpu if case["optimizer"] == "clip + adamw"]
    assert {case["device"] for case in clipped} == {"v5e", "v5e:4x4"}
    for case in clipped:
        plain, *scaled = case["results"]
        for result in scaled:
            assert result["collectives"] == plain["collectives"]


@pytest.mark.slow
def test_compiled_for_a_tpu_the_check_costs_few_cycles_beside_clipping(
    for_a_tpu,
):
    one_chip = [case for case in for_a_tpu if case["device"] == "v5e"]
    [case] = [case for case in one_chip if case["optimizer"] == "clip + adamw"]
    plain, scaled, _ = case["results"]
    assert scaled["estimated_cycles"] <= 1.03 * plain["estimated_cycles"]
