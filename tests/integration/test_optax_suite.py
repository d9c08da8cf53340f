"""optax's own tests, with every optimizer that they test wrapped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, least",
    [
        pytest.param("optax._src.alias_test", 500, marks=pytest.mark.longest),
        pytest.param("optax.contrib._common_test", 200, marks=pytest.mark.longest),
        ("optax._src.float64_test", 20),
        ("optax._src.sharding_test", 20),
    ],
)
def test_the_tests_of_optax_pass_wrapped(module, least, tmp_path):
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "wrap_optax"]
        + ["-p", "no:cacheprovider", "--pyargs", module],
        cwd=tmp_path,  # away from this project's own configuration
        env={**os.environ, "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    passed = int(re.search(r"(\d+) passed", run.stdout)[1])
    assert passed >= least
