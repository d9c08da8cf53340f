"""The masked update: what a skipped step keeps, whatever the optimizer computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    assert_same_bits,
    transformation,
)
from jax.experimental import io_callback

import optax_lossscale as ls

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

NUMBERS = [-0.0, 0.0, 1.0, -1.5, jnp.inf, -jnp.inf]
ZERO, ONE, TWO = jnp.zeros(3), jnp.ones(3), jnp.full(3, 2.0)
BAD = jnp.array([1.0, jnp.nan, 2.0])
ADAM = optax.adam(0.1)


def test_added_to_any_number_a_skipped_update_changes_no_bit():
    """Also of -0.0, to which adding 0.0 makes 0.0."""
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64)
    params = [jnp.array(NUMBERS).astype(dtype) for dtype in dtypes]
    params += [jnp.array([True, False]), jnp.array([-(2**31), 2**31 - 1, 0])]
    tx = ls.with_loss_scaling(optax.identity())
    # An infinity is among them.
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert [u.dtype for u in updates] == [p.dtype for p in params]
    pairs = zip(params, updates, strict=True)
    new_params = [p | u if p.dtype == bool else p + u for p, u in pairs]
    assert_same_bits(new_params, params)


def test_updates_of_a_type_without_a_zero_are_refused():
    to_e8m0 = optax.stateless(lambda g, params: g.astype(jnp.float8_e8m0fnu))
    tx = ls.with_loss_scaling(to_e8m0)
    with pytest.raises(ValueError, match="type that has a zero.*float8_e8m0fnu"):
        tx.update(ONE, tx.init(ONE))


@jax.custom_jvp
def twice(x):
    return 2 * x


@twice.defjvp
def _(primals, tangents):
    return twice(*primals), 2 * tangents[0]


@jax.custom_vjp
def thrice(x):
    return 3 * x


thrice.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))


def finite(x):
    assert np.isfinite(x).all() and np.all(x != 0)
    return 1 / x


def called(x):
    return jax.pure_callback(finite, x, x, vmap_method="sequential")


def loop(x):
    return jax.lax.while_loop(lambda y: y < 9.0, lambda y: y + jnp.abs(x) + 0.1, 0.0)


def in_a_loop(f, x):
    return jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, f(x)), (0, jnp.zeros_like(x))
    )[1]


def in_a_branch(f, x):
    return jax.lax.cond(x > 0, lambda: f(x), lambda: -x)


def in_a_scan(f, x):
    return jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0]


def noted(x):
    jax.debug.callback(lambda x: None, x)
    return x


def in_place(x):
    own = jax.new_ref(x)
    own[...] = own[...] * 2
    return own[...]


# What an optimizer multiplies gradients by, from them and its state. These end on any
# numbers, so a leaf of the state is masked where it is defined:
SAFE = {
    "arithmetic": lambda g, m: g / jnp.linalg.norm(m),
    "custom_jvp": lambda g, m: twice(m) + g,
    "jit": lambda g, m: jax.jit(jnp.sin)(m + g),
    "scan": lambda g, m: in_a_scan(jnp.sin, m + g),
}
# These may not: their inputs are sanitized, and the masks stand at the end.
UNSAFE = {
    "branch": lambda g, m: in_a_branch(jnp.sin, m[0] + g[0]),
    "callback": lambda g, m: called(m),
    "callback in a loop": lambda g, m: in_a_loop(called, g),
    "custom_vjp": lambda g, m: thrice(m + g),
    "debug callback": lambda g, m: noted(m),
    "eigenvalues": lambda g, m: jnp.linalg.eigvalsh(jnp.diag(g + m)),
    "loop": lambda g, m: loop(m[0]),
    "loop in a branch": lambda g, m: in_a_branch(loop, m[1]),
    "loop in a loop": lambda g, m: in_a_loop(loop, g[1]),
    "loop in a scan": lambda g, m: in_a_scan(loop, g[1]),
    "loop in jit": lambda g, m: jax.jit(loop)(m[0]),
    "ordered callback": lambda g, m: io_callback(finite, m, m + g, ordered=True),
    "singular values": lambda g, m: jnp.linalg.norm(jnp.diag(g + m), 2),
}
if hasattr(jax, "new_ref"):  # which has another name in earlier versions
    UNSAFE["mutable array"] = lambda g, m: in_place(g + m)


def multiplies(factor):
    return transformation(lambda g, m: (g * factor(g, m + 1), (m + 1,)), ZERO)


INNER = {name: multiplies(factor) for name, factor in (SAFE | UNSAFE).items()}


def selects(tx):
    """How many arrays of the size of the gradients one step selects at once."""
    program = jax.jit(tx.update).lower(ONE, tx.init(ONE), ONE).as_text()
    return len(re.findall(r"call @_where\S* .* -> tensor<3xf32>", program))


@pytest.mark.parametrize("name", SAFE | UNSAFE)
def test_only_what_may_not_end_is_given_sanitized_inputs(name):
    """The norm of others need not wait for the check."""
    # The gradients and the state, and the updates in any layout.
    assert selects(ls.with_loss_scaling(INNER[name])) == (1 if name in SAFE else 3)
    checked = ls.with_loss_scaling(INNER[name], check_updates=True)
    # A scan would be made twice.
    assert (selects(checked) == 1) == (name in SAFE and name != "scan")


@pytest.mark.parametrize("check_updates", [False, True])
def test_effects_happen_once_in_a_step(check_updates):
    seen = []

    def update(g, m):
        jax.debug.callback(lambda m: seen.append(("debug", float(m[0]))), m)
        total = io_callback(
            lambda m: seen.append(("io", float(m[0]))) or m, m, m, ordered=True
        )
        return g, (total + g,)

    inner = transformation(update, ONE)
    tx = ls.with_loss_scaling(inner, check_updates=check_updates)
    step = jax.jit(lambda g, state: tx.update(g, state)[1])
    step(BAD, step(ONE, step(BAD, tx.init(ONE))))
    jax.effects_barrier()
    expected = [(kind, m) for m in (1.0, 1.0, 2.0) for kind in ("debug", "io")]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("check_updates", [False, True])
@pytest.mark.parametrize(
    "inner", [ADAM, pytest.param(optax.lbfgs(), marks=slow)], ids=["adam", "lbfgs"]
)
def test_an_optimizer_may_record_traced_values_for_the_caller(inner, check_updates):
    """As one that logs from compiled code does. They are not sanitized."""
    recorded = {}

    def record(updates, state, params=None, **extra_args):
        recorded["norm"] = jnp.linalg.norm(updates)
        return inner.update(updates, state, params, **extra_args)

    recording = optax.GradientTransformationExtraArgs(inner.init, record)
    tx, other = (
        ls.with_loss_scaling(x, check_updates=check_updates) for x in (recording, inner)
    )

    def of(tx):
        def step(grads, state):
            arguments = {"value": jnp.sum(ONE), "grad": grads, "value_fn": jnp.sum}
            updates, state = tx.update(grads, state, ONE, **arguments)
            return updates, state, recorded.pop("norm", None)

        return jax.jit(step)

    state, ours, theirs = tx.init(ONE), of(tx), of(other)
    for grads in (TWO, BAD, TWO):
        updates, new_state, norm = ours(grads, state)
        expected, expected_state, _ = theirs(grads, state)
        assert_same_bits((updates, new_state), (expected, expected_state))
        np.testing.assert_allclose(norm, jnp.linalg.norm(grads), rtol=1e-6)
        state = new_state


def test_a_recording_optimizer_calls_the_host_once_and_never_with_nan():
    recorded, seen = [], []

    def update(g, m):
        recorded.append(g.sum())
        jax.debug.callback(seen.append, g)
        return g, (m,)

    tx = ls.with_loss_scaling(transformation(update, ZERO))

    @jax.jit
    def step(grads, state):
        _, state = tx.update(grads, state)
        return state, recorded[-1]

    for grads in (TWO, BAD):
        _, total = step(grads, tx.init(ZERO))
        jax.effects_barrier()
        assert jnp.isfinite(total)
    assert len(seen) == 2
    np.testing.assert_array_equal(seen[0], TWO)
    assert np.isfinite(seen[1]).all()


def test_an_inner_transformation_may_look_at_numbers_where_there_are_some():
    """Under eager ``jax.vmap`` what is not mapped is there; in a program nothing is."""
    inner = transformation(
        lambda g, m: ((2.0 if m[0] > 0 else 3.0) * g * jnp.sum(m[m > 0]), (m + 1,)), ONE
    )
    tx = ls.with_loss_scaling(inner)
    state = tx.init(ONE)
    update = jax.vmap(tx.update, in_axes=(0, None))
    updates, new_state = update(jnp.stack([TWO, BAD]), state)
    np.testing.assert_array_equal(updates, [6 * TWO, ZERO])
    assert_same_bits(new_state.inner_state, (jnp.stack([TWO, ONE]),))
    with pytest.raises(TypeError):
        jax.jit(tx.update)(ONE, state)


def test_no_tracer_outlives_its_trace():
    tx = ls.with_loss_scaling(optax.adam(0.1))
    with jax.check_tracer_leaks():
        updates, _ = jax.jit(tx.update)(ONE, tx.init(TWO), TWO)
    assert jnp.all(updates < 0)
