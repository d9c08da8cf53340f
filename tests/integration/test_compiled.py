"""Programs are counted from their text, and clipping on a TPU keeps the check free."""

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers import DATA, ROOT

BENCHMARKS = ROOT / "tests" / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a module of the benchmarks, which are programs beside the tests."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_a_program_is_counted_from_its_text(load):
    # Of a 1 KiB array: a prefetch, half of it sliced, a branch, an update, a copy, an
    # all-reduce before a loop and three in it, and a kernel that carries another array.
    counts = load("hlo").count((DATA / "program.hlo").read_text())
    prefetch, half, branch, fusion, all_reduce, copy = 1024, 512, 2048, 2048, 2048, 2048
    expected = prefetch + half + branch + 2 * fusion + 4 * all_reduce + copy
    assert (counts.bytes_moved, counts.copied_bytes) == (expected, 1024)
    assert (counts.kernels, counts.estimated_cycles) == (10, 75)
    assert counts.collectives == {"all-reduce": 4}
    assert (counts.collective_bytes, counts.asynchronous_collectives) == (4 * 1024, 1)


def test_a_program_of_this_jax_is_counted(load):
    compiled = jax.jit(lambda x: 2 * x + 1).lower(jnp.ones(256)).compile()
    counts = load("hlo").count(compiled.as_text())
    assert (counts.kernels, counts.bytes_moved) == (1, 2048)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_missing_compiler_is_named_with_its_extra(load, monkeypatch, platform):
    topology = load("topology")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(SystemExit, match=rf"pip install -e '\.\[{platform}\]'"):
        topology.prepare(platform)


@pytest.fixture(scope="module")
def compiled_for_tpu(tmp_path_factory):
    """What the program reports of plain and of wrapped steps, by device and optimizer.

    In a process of its own: in this one jax must not look for TPUs.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    path = tmp_path_factory.mktemp("compiled") / "tpu.json"
    arrays = ["--arrays", "4x4096x1024", "--mesh-arrays", "10x1024x1024"]
    cases = ["--optimizers", "adamw", "clip + adamw", "--mesh", "v5e:4x4"]
    subprocess.run(
        [sys.executable, BENCHMARKS / "compiled.py", "tpu", *arrays, *cases]
        + ["--recipes", "optax_lossscale", "master weights", "--json", path],
        check=True,
    )
    found = json.loads(path.read_text())["cases"]
    return {(case["device"], case["optimizer"]): case["results"] for case in found}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["v5e", "v5e:4x4"])
@pytest.mark.parametrize("optimizer", ["adamw", "clip + adamw"])
def test_a_donated_state_is_updated_in_place_on_a_tpu(
    compiled_for_tpu, device, optimizer
):
    plain, *wrapped = compiled_for_tpu[device, optimizer]
    for result in wrapped:
        assert result["aliased_bytes"] >= plain["aliased_bytes"] > 0
        assert result["copied_bytes"] <= plain["copied_bytes"] + 1024
        assert device != "v5e" or result["temporary_bytes"] < 4 * 4096 * 1024


@pytest.mark.slow
def test_the_check_rides_along_with_clipping_on_a_tpu(compiled_for_tpu):
    plain, wrapped, _ = compiled_for_tpu["v5e", "clip + adamw"]
    assert wrapped["estimated_cycles"] <= 1.03 * plain["estimated_cycles"]
    plain, *wrapped = compiled_for_tpu["v5e:4x4", "clip + adamw"]
    for result in wrapped:
        assert result["collectives"] == plain["collectives"] != {}
