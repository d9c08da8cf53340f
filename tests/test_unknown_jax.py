"""A new jax may change what programs are made of: the core works, the rest says so."""

import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared import ROOT, worker_environment

import optax_lossscale as ls
from optax_lossscale import _jax_internals
from optax_lossscale._transform import in_place

W, X = jnp.full((8, 8), 0.1), jnp.ones((3, 8))
TX = ls.with_loss_scaling(optax.adam(0.1), ls.DynamicLossScale(8.0))
VERSIONS = f"jax {jax.__version__} .*tested with jax 0.7.0 to "


def loss_fn(w, x):
    def body(h, _):
        return jnp.tanh(h @ w), None

    return jnp.sum(jax.lax.scan(body, x, length=2)[0])


# What needs the rewriting of programs, and the helpers that it fails without.
REWRITING = {
    "autocast": lambda: ls.autocast(loss_fn, jnp.bfloat16)(W, X),
    "derivative of autocast": lambda: jax.grad(ls.autocast(loss_fn, jnp.float16))(W, X),
    "autocast_report": lambda: ls.autocast_report(loss_fn, W, X),
    "errors of a report": lambda: ls.autocast_report(loss_fn, W, X, errors=True),
    "nonfinite_report": lambda: ls.nonfinite_report(loss_fn, W, X),
    "scale_backward": lambda: jax.grad(ls.scale_backward(loss_fn, 8.0))(W, X),
    "scale_block": lambda: jax.grad(ls.scale_block(loss_fn))(W, X),
    "retries": lambda: ls.value_and_grad_with_retries(loss_fn, TX.init(W))(W, X),
}
HELPERS = {
    "without_constants": [*REWRITING],
    "with_eqns": [
        *("autocast", "autocast_report", "errors of a report", "nonfinite_report")
    ],
    "eqn_like": ["autocast"],
    "eqn_of": ["autocast_report", "errors of a report"],
    "operations": ["autocast"],
    "with_calls": ["derivative of autocast"],
}


@pytest.fixture
def without(monkeypatch):
    """Return a function that makes a helper of the rewriting fail in every module."""

    def broken(*_, **__):
        raise AttributeError("'JaxprEqn' object has no attribute 'ctx'")

    assert in_place  # which `mask.py` imports when it is needed, perhaps broken

    def break_it(name):
        for module in [x for n, x in sys.modules.items() if n.startswith(ls.__name__)]:
            if name in vars(module):
                monkeypatch.setattr(module, name, broken)

    return break_it


@pytest.mark.parametrize(
    ("helper", "name"), [(x, name) for x, names in HELPERS.items() for name in names]
)
def test_what_needs_rewriting_names_the_versions(without, helper, name):
    without(helper)
    with pytest.raises(RuntimeError, match=VERSIONS) as raised:
        REWRITING[name]()
    assert isinstance(raised.value.__cause__, AttributeError)


def steps(update):
    """The results of an applied and of a skipped step."""
    params, state, results = W, TX.init(W), []
    for x in (X, X * jnp.inf):
        loss, grads = ls.value_and_grad(loss_fn, state)(params, x)
        updates, state = update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        results.append((params, state))
    return results


@pytest.mark.parametrize(
    "helper", ["without_constants", "operations", "with_eqns", "eqn_like"]
)
def test_updates_are_right_without_rewriting_and_warn(without, helper):
    expected = steps(TX.update)
    without(helper)
    with pytest.warns(UserWarning, match=f"more time and memory on a CPU.*{VERSIONS}"):
        found = steps(jax.jit(lambda *args, **kw: TX.update(*args, **kw)))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    (params, state), (skipped_params, skipped) = found
    assert jnp.array_equal(params, skipped_params)
    assert state.inner_state[0].count == skipped.inner_state[0].count == 1


@jax.custom_jvp
def without_derivative(x):
    return jnp.sin(x)


@without_derivative.defjvp
def _(primals, tangents):
    raise AttributeError("mine")


def raises(x):
    raise AttributeError("mine")


@pytest.mark.parametrize("fun", [raises, without_derivative])
def test_errors_of_the_users_optimizer_stay_as_they_are(fun):
    def update(updates, state, params=None):
        return updates, fun(updates)

    tx = ls.skip_nonfinite(optax.GradientTransformation(jnp.zeros_like, update))
    with pytest.raises(AttributeError, match="mine"):
        jax.jit(lambda w: jax.jvp(lambda w: tx.update(w, tx.init(W)), (w,), (w,)))(W)


def test_error_of_the_users_derivative_in_a_loop_is_raised_if_it_is_taken():
    def body(x, _):
        return without_derivative(x @ W), None

    fun = ls.autocast(lambda x: jnp.sum(jax.lax.scan(body, x, length=2)[0]), "float16")
    fun(X)
    with pytest.raises(AttributeError, match="mine"):
        jax.grad(fun)(X)


PROGRAM = """
import sys
{change}
import jax, jax.numpy as jnp, optax
import optax_lossscale as ls
from optax_lossscale import *

SGD = optax.sgd(0.25, momentum=0.9)
for tx in (ls.with_loss_scaling(SGD), ls.skip_nonfinite(SGD)):
    @jax.jit
    def step(w, state, x):
        loss, grads = ls.value_and_grad(lambda w: jnp.sum(w * x), state)(w)
        updates, state = tx.update(grads, state, w, value=loss)
        return optax.apply_updates(w, updates), state, ls.get_loss_scale(state)

    w, state = jnp.ones(2), tx.init(jnp.ones(2))
    w, state, _ = step(w, state, jnp.inf)
    w, state, scale = step(w, state, 2.0)
    print(w, scale)
for name in {names}:
    try:
        getattr(ls, name)(jnp.sin, jnp.float16)
    except RuntimeError as error:
        print(name, "tested with" in str(error))
"""
NAMES = [
    *("autocast", "autocast_report", "nonfinite_report", "scale_backward"),
    "scale_block",
    "value_and_grad_with_retries",
]


CHANGES = {
    "without the files that rewrite": 'sys.modules["optax_lossscale._programs"] = None',
    "a name of jax": "import jax.extend.core; del jax.extend.core.Var",
}


@pytest.mark.slow  # Each starts Python.
@pytest.mark.parametrize("change", CHANGES)
def test_train_step_needs_nothing_that_rewrites_programs(change):
    program = PROGRAM.format(change=CHANGES[change], names=NAMES)
    command = [sys.executable, "-W", "ignore", "-c", program]
    options = dict(capture_output=True, text=True, env=worker_environment())
    run = subprocess.run(command, **options)
    steps = ["[0.5 0.5] 32768.0", "[0.5 0.5] 1.0"]
    expected = [*steps, *(f"{name} True" for name in NAMES)]
    assert run.stdout.splitlines() == expected, run.stderr


def test_oldest_tested_jax_is_the_oldest_that_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"jax>={_jax_internals.TESTED[0]}" in project["dependencies"]
