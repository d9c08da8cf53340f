"""Report and suggestion under XLA's fast math."""

import ast
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import WARNINGS_ARE_ERRORS, worker_environment
from report_oracle import host

import optax_lossscale as ls

# With these flags, XLA takes no number for NaN or infinite.
FLAGS = ["--xla_cpu_enable_fast_math=true"] + [
    f"--xla_cpu_fast_math_honor_{name}=false" for name in ("nans", "infs", "functions")
]


def results():
    """A report, its totals and a suggestion, as tuples."""
    elements = [1.0, 0.0, -3.0, 2.0**-14, 2.0**14, 2.0**-16, np.nan, np.inf, -np.inf]
    types = (np.float32, np.float16, jnp.float8_e5m2, np.complex64)
    grads = [np.resize(elements, 64).astype(x) for x in types]
    report = jax.jit(lambda x: ls.gradient_report(x, dtype="float8_e4m3fn"))(grads)
    suggested = jax.jit(ls.suggest_loss_scale)(grads)
    return [tuple(host(x)) for x in (report, report.totals, suggested)]


@pytest.mark.slow
def test_fast_math_changes_no_count():
    environment = worker_environment(XLA_FLAGS=" ".join(FLAGS))
    command = [sys.executable, *WARNINGS_ARE_ERRORS, __file__]
    output = subprocess.check_output(command, env=environment, text=True)
    expected = results()
    assert ast.literal_eval(output) == expected
    nan, inf, zero, underflow, _, overflow, *_ = expected[1]
    assert min(nan, inf, zero, underflow, overflow) > 0


if __name__ == "__main__":
    print(results())
