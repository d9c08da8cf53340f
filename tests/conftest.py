"""Eight CPU devices, the same Hypothesis cases every time, and no silent fallback."""

import contextlib
import io
import logging

import chex
import hypothesis
import pytest
from helpers import readme_blocks

# Programs, with dependencies of their own, and a plugin.
collect_ignore = ["benchmarks", "process_worker.py", "wrap_optax.py"]

chex.set_n_cpu_devices(8)

hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def no_fallback(caplog):
    """Fail a test in which a step fell back to the plain layout of the masks.

    A test that provokes it calls ``caplog.clear()``.
    """
    caplog.set_level(logging.DEBUG, logger="optax_lossscale")
    yield
    records = caplog.get_records("call")
    assert not [r.getMessage() for r in records if r.name.startswith("optax_lossscale")]


@pytest.fixture(scope="session")
def readme():
    """What the README's blocks define and print, after all of them have run."""
    namespace = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in readme_blocks("python"):
            exec(compile(block, "README.md", "exec"), namespace)
    return {**namespace, "printed": printed.getvalue()}
