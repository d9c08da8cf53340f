"""Eight CPU devices, two processes, one cache of programs, fixed Hypothesis cases."""

import gc
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

accelerated = any(importlib.metadata.entry_points(group="jax_plugins"))
accelerated |= importlib.util.find_spec("libtpu") is not None
ON_CPU = os.environ.get("JAX_PLATFORMS") == "cpu" or not accelerated

# Nearly all of the time goes into compiling: half of it is saved if XLA does not
# optimize. `XLA_FLAGS= pytest` runs optimized programs, as users do.
XLA_FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
version = importlib.metadata.version("jaxlib")
if [*map(int, version.split(".")[:2])] < [0, 11]:  # A newer XLA ends at this name.
    XLA_FLAGS += ["--xla_cpu_use_fusion_emitters=false"]

# What one process has compiled, the others and the next run load, on one Python: each
# compresses in its own way. The environment reaches the programs that tests start, too.
CACHE = Path(__file__).parents[1] / ".pytest_cache" / f"jax-{sys.version_info.minor}"
for name, value in {
    **({"XLA_FLAGS": " ".join(XLA_FLAGS)} if ON_CPU else {}),
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # A program is lowered faster without.
}.items():
    os.environ.setdefault(name, value)

import chex  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Programs, with dependencies of their own.
collect_ignore = ["benchmarks", "helpers"]

chex.set_n_cpu_devices(8)


def pytest_addoption(parser, pluginmanager):
    """Without xdist, its options in pyproject.toml change nothing."""
    if not pluginmanager.hasplugin("xdist"):
        for name in ("--numprocesses", "--dist", "--no-loadscope-reorder"):
            parser.addoption(name, nargs="?")


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def around(request):
    """A function is called as it is, or compiled."""
    return request.param


@pytest.fixture
def new_process():
    """As if the package had just been imported."""
    from optax_lossscale._gradients.notes import notes

    notes.clear()


@pytest.fixture
def unread(monkeypatch):
    """No array may be read on the host, but by NumPy, which nothing on a CPU sees."""

    def read(array):
        raise AssertionError("the host reads an array")

    monkeypatch.setattr(type(jax.device_put(0.0)), "_value", property(read))


hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.load_profile("fixed")


@hypothesis.given(hypothesis.strategies.none())
def first_case(_):
    """Hypothesis looks here for all that refers to NumPy's generator."""


def pytest_collection_finish():
    """Nothing of what has been imported goes away: it is not looked at again."""
    first_case()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two processes, but one where they would fight for an accelerator's memory."""
    return min(2, os.cpu_count() or 1) if ON_CPU else 0
