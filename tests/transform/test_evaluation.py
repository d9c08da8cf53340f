"""Updates evaluated from their jaxprs: what they compute, and when they cannot be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import OPTIMIZERS, grads_for, make, params_for, update
from helpers import (
    assert_same_bits,
    assert_same_types,
    transformation,
    without_keys,
)
from jax.experimental import io_callback

import optax_lossscale as ls
from optax_lossscale._transform import evaluation


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


QUICK = ("cond", "custom derivatives", "one value, two leaves", "scan", "while_loop")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in INNER],
)
@pytest.mark.parametrize(
    "transform",
    [
        "jit",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("vmap", "scan", "grad")),
    ],
)
def test_both_layouts_agree_on_every_construct(name, transform, plain_layout):
    both = [ls.with_loss_scaling(INNER[name], check_updates=c) for c in (False, True)]
    # A bad step first, while the leaves of the state are still told apart.
    rows = [[jnp.inf, 0, 0], [0.5, 1, 2], [0.5, jnp.nan, 2], [1, 1, 1]]
    grads = jnp.array(rows, jnp.float32)

    def step(carry, g):
        for i, tx in enumerate(both):
            params, state = carry[i]
            updates, state = tx.update(g, state, params)
            carry = *carry[:i], (params + updates, state), *carry[i + 1 :]
        return carry, updates

    def start():
        return tuple((ONE, tx.init(ONE)) for tx in both)

    def steps(factor):
        carry = start()
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
            lambda carry, g: step(carry, g), start(), x * grads
        ),
        "grad": lambda x: jax.jit(
            derivative(lambda x: [params for params, _ in steps(x)])
        )(x),
    }[transform]
    actual = function(jnp.float32(1))
    expected = plain_layout(function, jnp.float32(1))
    chex.assert_trees_all_close(*map(without_keys, (actual, expected)), rtol=1e-6)
    if transform != "grad":
        assert_same_types(actual, expected)


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

    bind = evaluation.bind

    def refuse(eqn, args):
        if eqn.primitive.name == "mul":  # which comes after the effect
            raise RuntimeError("not here")
        return bind(eqn, args)

    monkeypatch.setattr(evaluation, "bind", refuse)
    tx = ls.with_loss_scaling(transformation(update, ONE))
    message = r"correct, but slower .*equation by equation \(RuntimeError: not here\)"
    with pytest.warns(UserWarning, match=message):
        updates, state = jax.jit(tx.update)(TWO, tx.init(ONE))
    jax.effects_barrier()
    assert_same_bits((updates, state.inner_state), (TWO, (jnp.full(3, 3.0),)))
    assert seen == [1] * with_effect
