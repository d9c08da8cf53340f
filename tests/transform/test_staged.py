"""The layout for XLA: what loops and callbacks see in a skipped step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_no_update, assert_same_bits, transformation
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

ONE, TWO = jnp.ones(3), jnp.full(3, 2.0)


@jax.custom_vjp
def thrice(x):
    return 3 * x


thrice.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))


def finite(x):
    assert np.isfinite(x).all() and np.all(x != 0)
    return 1 / x


def called(like, x):
    return jax.pure_callback(finite, like, x, vmap_method="sequential")


def ends(step):
    """A loop that ends early if the step is positive."""
    return jax.lax.while_loop(
        lambda c: (c[0] < 50.0) & (c[1] < 10**6),
        lambda c: (c[0] + step, c[1] + 1),
        (0.0, 0),
    )[0]


ZERO, BAD = jnp.zeros(3), jnp.array([1.0, jnp.nan, 2.0])
STEERED = {
    "loop": lambda g, m: ends(m[0]),
    "nested loop": lambda g, m: jax.jit(ends)(m[0]),
    "loop in a branch": lambda g, m: jax.lax.cond(
        m[1] > 0, lambda: ends(m[0]), lambda: ends(m[1])
    ),
    "loop on gradients": lambda g, m: ends(jnp.abs(g[1])),
    "loop in a loop": lambda g, m: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, ends(jnp.abs(g[1]))), (0, 0.0)
    )[1],
    "callback in a loop": lambda g, m: jax.lax.fori_loop(
        0, m[0].astype(int), lambda i, x: called(g[0], g[1] + 1), 1.0
    ),
    "loop after a loop": lambda g, m: called(m[0], ends(m[0])),
    "callback": lambda g, m: called(m, m)[0],
    "callback on gradients": lambda g, m: called(g, g + 1)[0],
    "ordered callback": lambda g, m: io_callback(finite, m, m + g + 1, ordered=True)[0],
    "branch": lambda g, m: jax.lax.cond(
        m[0] > 0, lambda: 2.0, lambda: called(m[0], m[0])
    ),
}


@pytest.mark.parametrize("name", STEERED)
def test_a_skipped_step_ends_whatever_a_loop_or_a_callback_depends_on(name):
    """Masked where it is defined, a new leaf has its old value, here 0."""

    def update(g, m):
        new = m + 1
        return STEERED[name](g, new) * g, (new,)

    inner = transformation(update, ZERO)
    tx = ls.with_loss_scaling(inner)
    step = jax.jit(tx.update)
    updates, state = step(BAD, tx.init(ONE))
    assert_no_update(updates)
    assert_same_bits(state.inner_state, (ZERO,))
    assert_same_bits(step(ONE, state)[1].inner_state, (ONE,))
    assert_same_bits(step(ONE, state)[0], jax.jit(inner.update)(ONE, (ZERO,))[0])


@pytest.mark.parametrize(
    "name",
    [
        n if n == "loop in a loop" else pytest.param(n, marks=pytest.mark.slow)
        for n in STEERED
        if "ordered" not in n  # which vmap refuses
    ],
)
def test_so_does_that_of_one_member_of_an_ensemble(name):
    """Whatever one member computes in a loop or a branch, all of them do."""

    def update(g, m):
        new = m + 1
        return STEERED[name](g, new) * g, (new,)

    tx = ls.with_loss_scaling(transformation(update, ZERO))
    step = jax.jit(jax.vmap(tx.update, in_axes=(0, None)))
    state = tx.init(ONE)
    updates, new_state = step(jnp.stack([ONE, BAD]), state)
    assert_no_update(updates[1])
    assert_same_bits(new_state.inner_state, (jnp.stack([ONE, ZERO]),))
    assert_same_bits(updates[0], jax.jit(tx.update)(ONE, state)[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_reach_a_collective_in_a_loop(check_vma):
    """Also where each of them trains a model of its own and one skips its step."""

    def update(g, m):
        largest = jax.lax.fori_loop(
            0, m[0].astype(int), lambda i, x: 0 * x + jax.lax.pmax(x, "d"), jnp.sum(m)
        )
        return g * largest, (m + 1,)

    tx = ls.with_loss_scaling(transformation(update, ONE))
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(
        jax.shard_map(
            lambda g, s: jax.tree.map(
                lambda x: x[None],
                tx.update(*jax.tree.map(lambda x: x[0], (g, s))),
            ),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P("d"),
            check_vma=check_vma,
        )
    )
    states = jax.tree.map(lambda x: jnp.stack([x] * 4), tx.init(ONE))
    updates, _ = step(jnp.stack([ONE, BAD, ONE, ONE]), states)
    assert updates[:, 0].tolist() == [3.0, 0.0, 3.0, 3.0]


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="has another name")
def test_an_optimizer_may_have_mutable_arrays():
    seen = jax.new_ref(ZERO) if hasattr(jax, "new_ref") else None

    def update(g, m):
        seen[...] = seen[...] + 1
        own = jax.new_ref(g)
        own[...] = own[...] * 2
        return own[...], (m + 1,)

    tx = ls.with_loss_scaling(transformation(update, ZERO))
    step = jax.jit(tx.update)
    updates, state = step(BAD, tx.init(ONE))
    assert_no_update(updates)
    updates, state = step(ONE, state)
    assert_same_bits((updates, state.inner_state, seen[...]), (TWO, (ONE,), TWO))


def test_derivatives_of_an_ensemble_whose_optimizer_has_a_custom_vjp():
    inner = transformation(lambda g, m: (m * thrice(g), (m + g,)), ONE)
    tx = ls.with_loss_scaling(inner)

    def total(x):
        return jnp.sum(jax.vmap(lambda x: tx.update(x * ONE, tx.init(ONE))[0])(x))

    derivative = jax.jit(jax.grad(total))(jnp.array([1.0, jnp.inf]))
    assert derivative.tolist() == [9.0, 0.0]


def selects(tx, grads):
    """How many arrays of the size of the gradients one step selects."""
    program = jax.jit(tx.update).lower(grads, tx.init(grads), grads).as_text()
    return len(re.findall(r"call @_where\S* .* -> tensor<3xf32>", program))


@pytest.mark.parametrize("steering", [0, 1, 4])
def test_only_what_steers_is_sanitized(steering):
    """A norm of the others need not wait for the check."""

    def normalized(grads, params):
        norms = [jnp.linalg.norm(g) for g in grads]
        ends_at = [jax.jit(ends)(x) for x in norms[:steering]]
        norm = sum(norms + ends_at)
        return [g / norm for g in grads]

    tx = ls.with_loss_scaling(optax.stateless(normalized))
    masks = 4
    assert selects(tx, [jnp.ones(3)] * 4) == masks + steering


def test_an_error_of_the_inner_transformation_is_its_own_and_comes_at_once():
    traces = []

    def update(g, m):
        traces.append(1)
        raise ZeroDivisionError("from the optimizer")

    tx = ls.with_loss_scaling(transformation(update, ONE))
    state = tx.init(ONE)
    traces.clear()
    with pytest.raises(ZeroDivisionError, match="from the optimizer"):
        jax.jit(tx.update)(ONE, state)
    assert len(traces) == 1


LOOKING = {
    "branch": lambda m: 2.0 if m[0] > 0 else 3.0,
    "mask": lambda m: jnp.sum(m[m > 0]) - 1,
    "shape": lambda m: jnp.sum(jnp.ones((m[0],))) + 1,
}


@pytest.mark.parametrize("look", LOOKING.values(), ids=LOOKING)
def test_an_inner_transformation_may_look_at_numbers_where_there_are_some(look):
    """Under eager ``jax.vmap`` what is not mapped is there; in a program nothing is."""
    inner = transformation(lambda g, m: (look(m) * g, (m + 1,)), jnp.ones(3, jnp.int32))
    tx = ls.with_loss_scaling(inner)
    state = tx.init(ONE)
    grads = jnp.array([[1.0, 2.0, 3.0], [1.0, jnp.nan, 3.0]])
    updates, new_state = jax.vmap(tx.update, in_axes=(0, None))(grads, state)
    np.testing.assert_array_equal(updates, [2 * grads[0], jnp.zeros(3)])
    assert new_state.inner_state[0].tolist() == [[2, 2, 2], [1, 1, 1]]
    with pytest.raises((TypeError, IndexError)):
        jax.jit(tx.update)(ONE, state)


def test_no_tracer_outlives_its_trace():
    tx = ls.with_loss_scaling(optax.adam(0.1))
    with jax.check_tracer_leaks():
        updates, _ = jax.jit(tx.update)(ONE, tx.init(TWO), TWO)
    assert jnp.all(updates < 0)
