"""The types of the inner state: settled in init, the same ever after."""

import warnings

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same_types
from optax import contrib

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

PARAMS = {"w": jnp.linspace(-1, 1, 8), "b": jnp.zeros(2)}
HALF = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
GRADS = jax.tree.map(jnp.ones_like, PARAMS)


def run(tx, params, steps, size=1.0):
    @jax.jit
    def step(carry, key):
        params, state = carry
        grads = jax.tree.map(lambda p: size * jax.random.normal(key, p.shape), params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), updates

    carry, updates = (params, tx.init(params)), []
    for key in jax.random.split(jax.random.key(0), steps):
        carry, update = step(carry, key)
        updates.append(update)
    return *carry, updates


WIDENED_BY_OPTAX = {
    "adabelief": optax.adabelief(5e-3),
    "adan": optax.adan(5e-3),
    "radam": optax.radam(5e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDENED_BY_OPTAX)
def test_float16_parameters_have_the_updates_that_optax_gives_them(name):
    """Rounding the moments to float16 makes these 10 to 4,000 times too large."""
    inner = WIDENED_BY_OPTAX[name]
    params, state, updates = run(ls.with_loss_scaling(inner), HALF, 30)
    plain_params, plain_state, plain_updates = run(inner, HALF, 30)
    assert_same_types(state.inner_state, plain_state)
    chex.assert_trees_all_close(updates, plain_updates, rtol=1e-5)
    chex.assert_trees_all_close(params, plain_params, rtol=2e-3)
    assert max(float(jnp.abs(u["w"]).max()) for u in updates) < 0.02


def test_adams_second_moment_of_small_gradients_is_not_zero():
    """Newer versions of Optax keep it in float16, where the square of 1e-3 is zero."""
    _, state, updates = run(ls.with_loss_scaling(optax.adam(5e-3)), HALF, 10, 1e-3)
    _, _, expected = run(optax.adam(5e-3), PARAMS, 10, 1e-3)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5)
    assert all(x.min() > 0 for x in jax.tree.leaves(state.inner_state[0].nu))


@pytest.mark.parametrize("name", ["galore", "novograd"])
def test_what_optax_cannot_do_with_float16_parameters_works(name):
    if not hasattr(contrib, name) and not hasattr(optax, name):
        pytest.skip("needs a newer optax")
    inner = getattr(optax, name, None) or getattr(contrib, name)
    params, state, _ = run(ls.with_loss_scaling(inner(1e-2)), HALF, 2)
    assert ls.all_finite(params) and ls.all_finite(state)


def test_types_asked_for_are_kept():
    tx = ls.with_loss_scaling(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    _, state, _ = run(tx, HALF, 2)
    assert state.inner_state[0].mu["w"].dtype == jnp.bfloat16
    assert state.inner_state[0].nu["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    "init",
    [
        lambda tx: tx.init(HALF),
        lambda tx: jax.jit(tx.init)(HALF),
        lambda tx: jax.eval_shape(tx.init, HALF),
        lambda tx: tx.init(jax.eval_shape(lambda: HALF)),
        lambda tx: jax.tree.map(
            lambda x: x[0], jax.vmap(tx.init)(jax.tree.map(lambda x: x[None], HALF))
        ),
    ],
    ids=["eager", "jit", "eval_shape", "abstract", "vmap"],
)
def test_every_way_to_init_gives_the_same_types(init):
    for inner in (optax.adam(1e-3), optax.trace(0.9)):
        state = init(ls.with_loss_scaling(inner)).inner_state
        wide = ls.with_loss_scaling(inner).init(PARAMS).inner_state
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(wide), strict=True):
            assert x.dtype == y.dtype


def transformation(first, step):
    """A state that starts as ``first`` and becomes ``step(state)``, by which it acts"""

    def update(updates, state, params=None):
        new = step(state)
        return jax.tree.map(lambda u: u * (1 + jnp.real(new)), updates), new

    return optax.GradientTransformation(lambda params: first, update)


RULES = [ls.DynamicLossScale(), ls.FixedLossScale(1.0, skip_nonfinite=False)]


@pytest.mark.parametrize("rule", RULES, ids=["skips", "never skips"])
@pytest.mark.parametrize(
    "first, step",
    [
        (0, lambda s: 0.5 * s + 0.3),
        (0.0, lambda s: s + 0.5j),
        (False, lambda s: s + 1),
        (jnp.float16(0.0), lambda s: s + jnp.float32(1e-9)),
    ],
    ids=["number", "float", "bool", "half"],
)
def test_a_state_that_becomes_wider_is_not_frozen(first, step, rule):
    inner = transformation(first, step)
    tx = ls.with_loss_scaling(inner, rule)
    state, plain_state = tx.init(PARAMS), inner.init(PARAMS)
    for _ in range(3):
        updates, new_state = jax.jit(tx.update)(GRADS, state, PARAMS)
        expected, plain_state = inner.update(GRADS, plain_state, PARAMS)
        chex.assert_trees_all_close(updates, expected, rtol=1e-6)
        assert_same_types(new_state, state)
        state = new_state


@pytest.mark.parametrize("rule", RULES, ids=["skips", "never skips"])
@pytest.mark.parametrize(
    "first, step",
    [
        (jnp.int32(0), lambda s: 0.5 * s + 0.3),
        (jnp.float32(0), lambda s: s + 0.5j),
        (jnp.zeros((), bool), lambda s: s + 1),
    ],
    ids=["int to float", "float to complex", "bool to int"],
)
def test_a_state_that_changes_its_kind_is_refused(first, step, rule):
    tx = ls.with_loss_scaling(transformation(first, step), rule)
    match = "`inner` must keep the types of its state, .* Start with the wider type"
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=match):
            update(GRADS, tx.init(PARAMS), PARAMS)


def test_a_state_that_is_given_in_half_precision_is_warned_of():
    inner = optax.sgd(0.1, momentum=0.9)
    tx = ls.with_loss_scaling(inner)
    state = tx.init(HALF)._replace(inner_state=inner.init(HALF))
    message = r"\[0\].trace\['b'\], from float32 to fl"
    with pytest.warns(UserWarning, match=message) as record:
        _, new_state = tx.update(GRADS, state, HALF)
    assert record[0].filename == __file__
    assert_same_types(new_state, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx.update(HALF, state, HALF)  # gradients of the same type


def test_a_settled_state_costs_no_second_look():
    """Only a state whose types may change is tried out."""
    calls = []

    def update(updates, state, params=None):
        calls.append(1)
        return updates, state

    for first, tried in ((jnp.zeros(2), 0), (jnp.zeros(2, jnp.float16), 1), (0, 1)):
        calls.clear()
        inner = optax.GradientTransformation(lambda p, first=first: first, update)
        ls.with_loss_scaling(inner).init(PARAMS)
        assert len(calls) == tried


@pytest.mark.parametrize(
    "dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
def test_of_narrow_gradients_updates_are_as_narrow_and_moments_may_be(dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    for inner in (optax.adam(0.1), optax.sgd(0.1, 0.9)):
        tx = ls.with_loss_scaling(inner)
        narrow = tx.init(params)._replace(inner_state=inner.init(params))
        expected, expected_state = inner.update(params, inner.init(params), params)
        for state in (tx.init(params), narrow):
            updates, new_state = jax.jit(tx.update)(params, state, params)
            assert_same_types(updates, expected)
            assert_same_types(new_state, state)
        assert_same_types(new_state.inner_state, expected_state)
        wide, _ = tx.update(GRADS, tx.init(params), params)
        assert_same_types(wide, GRADS)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_branches_of_the_optimizer_agree_for_gradients_of_any_type(dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    for wrap in (
        lambda tx: optax.conditionally_transform(tx, lambda step, **kwargs: step < 1),
        lambda tx: optax.apply_if_finite(tx, 3),
    ):
        tx = ls.with_loss_scaling(wrap(optax.adam(0.1)), ls.FixedLossScale(1.0))
        for grads in (params, GRADS):
            state = tx.init(params)
            for _ in range(2):
                updates, state = tx.update(grads, state, params)
                assert_same_types(updates, grads)
