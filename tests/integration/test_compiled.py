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
from helpers import ROOT

BENCHMARKS = ROOT / "tests" / "benchmarks"
# Of a 1 KiB array: a prefetch, half of it sliced, a branch, an update, a copy.
PROGRAM = """HloModule jit_step, is_scheduled=true

%fused (param: f32[256]) -> f32[256] {
  %param = f32[256]{0} parameter(0)
  ROOT %twice = f32[256]{0} add(%param, %param)
}

%small (a: f32[256]) -> f32[256] {
  ROOT %a = f32[256]{0} parameter(0)
}

%large (b: f32[256]) -> f32[256] {
  %b = f32[256]{0} parameter(0)
  ROOT %negate = f32[256]{0} negate(%b), backend_config={"estimated_cycles":"5"}
}

ENTRY %main (p: f32[256], q: f32[256], i: s32[]) -> (f32[256], /*index=1*/f32[256]) {
  %p = f32[256]{0} parameter(0)
  %q = f32[256]{0:T(128)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %copy-start = (f32[256]{0:T(128)S(1)}, f32[256]{0}, u32[]{:S(2)}) copy-start(%p)
  %slice-start = ((f32[256]{0}), f32[128]{0:S(1)}, s32[]{:S(2)}) slice-start(%q)
  %copy-done = f32[256]{0:T(128)S(1)} copy-done(%copy-start)
  %slice-done = f32[128]{0:S(1)} slice-done(%slice-start)
  %cond = f32[256]{0} conditional(%i, %p, %p), branch_computations={%small, %large}
  %fusion = (f32[256]{0}, bf16[8,2]{1,0:S(1)}) fusion(%copy-done, /*index=1*/%cond), \
kind=kLoop, calls=%fused, backend_config={"window":{"estimated_cycles":"70"}}
  %x = f32[256]{0} get-tuple-element(%fusion), index=0
  %all-reduce-start = f32[256]{0} all-reduce-start(%x), to_apply=%fused
  %all-reduce-done = f32[256]{0} all-reduce-done(%all-reduce-start)
  %copy.1 = f32[256]{0} copy(%all-reduce-done), metadata={op_name="p"}
  ROOT %tuple = (f32[256]{0}, /*index=1*/f32[256]{0}) tuple(%copy.1, %x)
}
"""


@pytest.fixture
def load(monkeypatch):
    """Import a module of the benchmarks, which are programs beside the tests."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_a_program_is_counted_from_its_text(load):
    counts = load("hlo").count(PROGRAM)
    prefetch, half, branch, fusion, all_reduce, copy = 1024, 512, 2048, 2048, 2048, 2048
    expected = prefetch + half + branch + fusion + all_reduce + copy
    assert counts.bytes_moved == expected
    assert counts.copied_bytes == 1024
    assert counts.kernels == 6
    assert counts.estimated_cycles == 75
    assert counts.collectives == {"all-reduce": 1}


def test_the_text_is_that_of_this_jax(load):
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
    for module in ("libtpu", "flax", "jmp"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    path = tmp_path_factory.mktemp("compiled") / "tpu.json"
    arrays = ["--arrays", "4x4096x1024", "--mesh-arrays", "10x1024x1024"]
    cases = ["--optimizers", "adamw", "clip + adamw", "--mesh", "v5e:4x4"]
    subprocess.run(
        [sys.executable, BENCHMARKS / "compiled.py", "tpu", *arrays, *cases]
        + ["--recipes", "optax_lossscale", "master weights", "--json", path],
        check=True,
    )
    return {
        (case["device"], case["optimizer"]): case["results"]
        for case in json.loads(path.read_text())["cases"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("device", ["v5e", "v5e:4x4"])
@pytest.mark.parametrize("optimizer", ["adamw", "clip + adamw"])
def test_no_donated_buffer_is_copied_on_a_tpu(compiled_for_tpu, device, optimizer):
    plain, *wrapped = compiled_for_tpu[device, optimizer]
    for result in wrapped:
        assert result["aliased_bytes"] >= plain["aliased_bytes"] > 0
        assert result["copied_bytes"] <= plain["copied_bytes"] + 1024


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "clip + adamw"])
def test_no_array_is_temporary_on_a_tpu(compiled_for_tpu, optimizer):
    _, *wrapped = compiled_for_tpu["v5e", optimizer]
    for result in wrapped:
        assert result["temporary_bytes"] < 4 * 4096 * 1024


@pytest.mark.slow
def test_the_check_rides_along_with_clipping_on_a_tpu(compiled_for_tpu):
    plain, wrapped, _ = compiled_for_tpu["v5e", "clip + adamw"]
    assert wrapped["estimated_cycles"] <= 1.03 * plain["estimated_cycles"]


@pytest.mark.slow
def test_the_check_adds_no_collective_to_clipping(compiled_for_tpu):
    plain, *wrapped = compiled_for_tpu["v5e:4x4", "clip + adamw"]
    for result in wrapped:
        assert result["collectives"] == plain["collectives"] != {}
