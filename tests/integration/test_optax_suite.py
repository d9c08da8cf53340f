"""optax's own tests, with every optimizer that they test wrapped."""

import re
import subprocess
import sys

import pytest
from processes import worker_environment

ALIAS, COMMON = "optax._src.alias_test", "optax.contrib._common_test"
# In this one, the expected parameters are NaN; with loss scaling they stay finite.
DIVERGES = "test_against_plain_implementation9"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module, tests, least",
    [
        ("optax._src.sharding_test", "", 20),
        ("optax._src.float64_test", "", 40),
        (ALIAS, "explicit_dtype", 70),
        pytest.param(ALIAS, f"not {DIVERGES}", 500, marks=pytest.mark.longest),
        pytest.param(COMMON, "", 200, marks=pytest.mark.longest),
    ],
)
def test_the_tests_of_optax_pass_wrapped(module, tests, least, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "wrap_optax", "-k", tests]
        # Otherwise pytest imports another copy of the module, without the wrappers.
        + ["-o", "consider_namespace_packages=true"]
        + ["-p", "no:cacheprovider", "--pyargs", module],
        cwd=tmp_path,  # away from this project's own configuration
        env=worker_environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert int(re.search(r"(\d+) optimizers were wrapped", run.stdout)[1]) >= least
