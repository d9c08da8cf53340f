"""The benchmark runs, and its report says what it measured."""

import json
import re
import runpy
import subprocess
import sys

import pytest
from helpers import ROOT, page

PROGRAM = ROOT / "tests" / "benchmarks" / "step.py"


@pytest.mark.slow
def test_the_benchmark_measures_every_recipe(tmp_path):
    pytest.importorskip("jmp")
    pytest.importorskip("flax")
    sizes = ["--optimizers", "adamw", "--leaves", "4", "8", "--parameters", "16384"]
    files = ["--json", tmp_path / "step.json", "--plot", tmp_path / "step.png"]
    run = subprocess.run(
        [sys.executable, PROGRAM, *sizes, *files, "--repeats", "3", "--transformer"],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads((tmp_path / "step.json").read_text())
    assert [row["leaves"] for row in report["optimizer_steps"]] == [4, 8]
    for row in report["optimizer_steps"]:
        results = {r["recipe"]: r for r in row["results"]}
        assert list(results) == [
            "plain",
            "optax_lossscale",
            "its masks alone",
            "headroom rule",
            "master weights",
            "check_updates",
            "apply_if_finite",
            "jmp",
            "flax",
        ]
        assert results["plain"]["ratio"] == 1
        for result in results.values():
            low, high = result["ratio_quartiles"]
            assert 0 < low <= result["ratio"] <= high
            assert result["milliseconds"] > 0 < result["compile_seconds"]
            assert result["recipe"] in run.stdout
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_rules_is_what_the_comparison_prints(monkeypatch, capsys):
    program = PROGRAM.with_name("compare_rules.py")
    # In this process, which has imported jax already.
    monkeypatch.syspath_prepend(program.parent)
    monkeypatch.setattr("sys.argv", [program.name, "--recorded"])
    runpy.run_path(str(program), run_name="__main__")
    number = r"([\d.]+)"
    printed = {
        (training, rule.strip()): [float(x) for x in numbers]
        for training, rule, *numbers in re.findall(
            rf"^(\w+) +(\w[\w -]+?)  +{number} +{number}% +{number}%$",
            capsys.readouterr().out,
            re.M,
        )
    }
    in_the_book = {
        (training, rule): [float(x) for x in numbers]
        for training, rule, *numbers in re.findall(
            rf"^\| `(\w+)` \| ([\w -]+) \| {number} \| {number} % \| {number} % \|$",
            page("start/rules"),
            re.M,
        )
    }
    assert in_the_book.keys() == printed.keys() and len(printed) == 24
    for key, figures in printed.items():
        # The averages of the log-normal rules round differently on other machines.
        assert in_the_book[key] == pytest.approx(figures, rel=0.02, abs=0.011), key
