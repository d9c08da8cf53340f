"""The layout for XLA: what it computes, and when it yields to the plain one."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import OPTIMIZERS, grads_for, make, params_for, update
from helpers import (
    assert_no_update,
    assert_same_bits,
    assert_same_types,
    without_keys,
)
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls
from optax_lossscale._transform import staged


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")
@pytest.mark.filterwarnings('ignore:"seed" is deprecated')  # dpsgd takes no key
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_layouts_agree_on_every_optimizer(name, plain_layout):
    tx = ls.with_loss_scaling(make(name))
    start = params_for(name)
    grads = grads_for(name, start)
    bad = {**grads, "b": grads["b"].at[..., 1].set(jnp.nan)}

    def run():
        @jax.jit
        def step(params, state, grads):
            updates, state = update(name, tx, grads, state, params)
            return optax.apply_updates(params, updates), state, updates

        trajectory, params, state = [], start, tx.init(start)
        for g in (grads, bad, grads):
            params, state, updates = step(params, state, g)
            trajectory.append((params, state, updates))
        return trajectory

    actual, expected = run(), plain_layout(run)
    chex.assert_trees_all_close(
        *map(without_keys, (actual, expected)), rtol=2e-5, atol=1e-6
    )
    assert_same_types(actual[-1][1], expected[-1][1])
    (params, state, _), (skipped_params, skipped_state, updates), _ = actual
    assert_same_bits(skipped_params, params)
    assert_same_bits(skipped_state.inner_state, state.inner_state)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))


def transformation(update, *state):
    """A stateful transformation from a function of gradients and states."""

    def update_fn(updates, state, params=None):
        return update(updates, *state)

    return optax.GradientTransformation(lambda params: state, update_fn)


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

ONE, TWO = jnp.ones(3), jnp.full(3, 2.0)
INNER = {
    "cond": transformation(
        lambda g, m: jax.lax.cond(
            m[0] > 1, lambda: (g, (m + g,)), lambda: (m, (m - g,))
        ),
        ONE,
    ),
    "while_loop": transformation(
        lambda g, m: (lambda y: (g * y, (y,)))(
            jax.lax.while_loop(lambda y: jnp.sum(y) < 50, lambda y: 2 * y + g, m)
        ),
        ONE,
    ),
    "scan": transformation(
        lambda g, m: (lambda total, y: (y, (total,)))(
            *jax.lax.scan(lambda c, x: (c + x, c * x), m, g)
        ),
        jnp.float32(1),
    ),
    "nested jit": transformation(jax.jit(lambda g, m: (m * g, (m + g,))), ONE),
    "custom derivatives": transformation(
        lambda g, m: (twice(m) + g, (thrice(m + g),)), ONE
    ),
    "key": transformation(
        lambda g, key: (
            g + jax.random.normal(key, g.shape),
            (jax.random.split(key)[0],),
        ),
        jax.random.key(0),
    ),
    "gradient as state": transformation(lambda g, m: (m, (g,)), ONE),
    "passed through": transformation(lambda g, m, n: (g + m, (n, m)), ONE, TWO),
    "constant": transformation(lambda g, m: (m * g, (jnp.zeros(3),)), ONE),
    "numpy constant": transformation(lambda g, m: (m * g, (np.ones(3, "f4"),)), ONE),
    "one value, two leaves": transformation(
        lambda g, m, n: (lambda y: (y * n, (y, y)))(m + g), ONE, TWO
    ),
    "state as update": transformation(lambda g, m: (lambda y: (y, (y,)))(m + g), ONE),
    "another dtype": transformation(
        lambda g, m: (g, (m.astype(jnp.float32) + g,)), ONE.astype(jnp.float16)
    ),
    "weak type": transformation(
        lambda g, m: (g, (jnp.where(g[0] > 0, 1.5, 2.5),)), jnp.float32(1)
    ),
    "stateless": optax.identity(),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize(
    "transform",
    [
        "jit",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("vmap", "scan", "grad")),
    ],
)
def test_both_layouts_agree_on_every_construct(name, transform, plain_layout):
    tx = ls.with_loss_scaling(INNER[name])
    # A bad step first, while the leaves of the state are still told apart.
    rows = [[jnp.inf, 0, 0], [0.5, 1, 2], [0.5, jnp.nan, 2], [1, 1, 1]]
    grads = jnp.array(rows, jnp.float32)

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (params + updates, state), updates

    def steps(factor):
        carry = ONE, tx.init(ONE)
        for g in grads:
            carry, _ = step(carry, factor * g)
        return carry

    # A while_loop has no reverse mode, a custom_vjp no forward mode.
    derivative = jax.jacrev if name == "custom derivatives" else jax.jacfwd
    function = {
        # A function of its own for each layout: jax would trace a common one once.
        "jit": lambda x: jax.jit(lambda x: steps(x))(x),
        "vmap": lambda x: jax.jit(jax.vmap(lambda x: steps(x)))(jnp.stack([x, 2 * x])),
        "scan": lambda x: jax.lax.scan(
            lambda carry, g: step(carry, g), (ONE, tx.init(ONE)), x * grads
        ),
        "grad": lambda x: jax.jit(derivative(lambda x: steps(x)[0]))(x),
    }[transform]
    actual = function(jnp.float32(1))
    expected = plain_layout(function, jnp.float32(1))
    chex.assert_trees_all_close(*map(without_keys, (actual, expected)), rtol=1e-6)
    if transform != "grad":
        assert_same_types(actual, expected)


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


def test_effects_happen_once_in_a_step():
    seen = []

    def update(g, m):
        jax.debug.callback(lambda m: seen.append(("debug", float(m[0]))), m)
        total = io_callback(
            lambda m: seen.append(("io", float(m[0]))) or m, m, m, ordered=True
        )
        return g, (total + g,)

    tx = ls.with_loss_scaling(transformation(update, ONE))
    step = jax.jit(lambda g, state: tx.update(g, state))
    _, state = step(ONE, tx.init(ONE))
    step(ONE, state)
    jax.effects_barrier()
    expected = [(kind, m) for m in (1.0, 2.0) for kind in ("debug", "io")]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("with_effect", [False, True])
def test_what_cannot_be_evaluated_again_is_masked_in_the_plain_layout(
    with_effect, monkeypatch
):
    """And says so, because the step is slower then."""
    seen = []

    def update(g, m):
        if with_effect:
            io_callback(lambda: seen.append(1), None, ordered=True)
        return m * g, (m + g,)

    bind = staged.bind

    def refuse(eqn, args):
        if eqn.primitive.name == "mul":  # which comes after the effect
            raise RuntimeError("not here")
        return bind(eqn, args)

    monkeypatch.setattr(staged, "bind", refuse)
    tx = ls.with_loss_scaling(transformation(update, ONE))
    message = r"correct, but slower .*equation by equation \(RuntimeError: not here\)"
    with pytest.warns(UserWarning, match=message):
        updates, state = jax.jit(tx.update)(TWO, tx.init(ONE))
    jax.effects_barrier()
    assert_same_bits((updates, state.inner_state), (TWO, (jnp.full(3, 3.0),)))
    assert seen == [1] * with_effect


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
