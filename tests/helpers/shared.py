"""Paths, recordings, and what many test files need."""

import json
import lzma
import os
from pathlib import Path

import jax
import jax.experimental
import pytest

# Newer names, and those of the oldest supported jax.
enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
new_ref = getattr(jax, "new_ref", None) or jax.experimental.mutable_array

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def worker_environment(**variables):
    """The environment of a program that imports from the package and the tests."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers")))
    # Two may meet at one entry of the cache of compiled programs.
    ignored = [
        f"ignore:Error {x} persistent compilation" for x in ("reading", "writing")
    ]
    fixed = {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": ",".join(ignored)}
    return {**os.environ, "PYTHONPATH": path, **fixed, **variables}


def slow_but(quick, cases):
    """Cases of a test: all but the quick ones are slow."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x not in quick)) for x in cases]


def recordings(name):
    """What was recorded from other loss scalers, in a file of ``tests/data``."""
    return json.loads(lzma.decompress((DATA / f"{name}.json.xz").read_bytes()))
