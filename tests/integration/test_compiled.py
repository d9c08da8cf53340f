"""Programs are counted from their text, and clipping on a TPU keeps the check free."""

import importlib
import json
import subprocess
import sys

import pytest
from shared import DATA, ROOT

BENCHMARKS = ROOT / "tests" / "benchmarks"


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
