"""The benchmark runs, and its report says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "benchmarks" / "step.py"


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
