"""`check_updates`: what an optimizer makes of finite gradients is checked, too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import (
    IGNORED_WARNINGS,
    OPTIMIZERS,
    VARIANTS,
    grads_for,
    make,
    params_for,
    update,
)
from helpers import (
    assert_no_update,
    assert_same_bits,
    assert_same_types,
    enable_x64,
    make_mesh,
    on_mesh,
    transformation,
    without_keys,
)
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls
from optax_lossscale._transform.outcome import outcome_finite

pytestmark = IGNORED_WARNINGS

QUICK = [("optax.adamw", "float16"), ("momentum", "float32")]
SIZES = [0.0, 1e-7, 300.0, 1e20, 1e30]


def is_new_and_bad(new, old):
    new, old = (np.asarray(x, np.complex128) for x in (new, old))
    return (~np.isfinite(new) & (new != old)).any()


def cases():
    """Two by default; the others are slow, or have a job of their own."""
    for name in [*OPTIMIZERS, *VARIANTS]:
        for dtype in ("float16", "float32", "bfloat16"):
            marks = [] if (name, dtype) in QUICK else [pytest.mark.slow]
            if dtype == "bfloat16":
                marks += [pytest.mark.longest]
            yield pytest.param(name, dtype, marks=marks)


@pytest.mark.parametrize("name, dtype", list(cases()))
def test_no_optimizer_puts_anything_bad_anywhere(name, dtype):
    """Whatever the gradients are; without the check most do."""
    tx = ls.with_loss_scaling(make(name), check_updates=True)

    @jax.jit
    def step(params, state, grads):
        updates, state = update(name, tx, grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    start = params_for(name, jnp.dtype(dtype))
    for size in SIZES:
        params, state = start, tx.init(start)
        for of_size in (True, False, True, True):
            grads = grads_for(name, params)
            if of_size:
                grads = optax.tree.scale(size, jax.tree.map(jnp.sign, grads))
            old, old_scale = (params, state.inner_state), state.scale_state
            params, state, updates = step(params, state, grads)
            new = params, state.inner_state
            leaves = [jax.tree.leaves(without_keys(x)) for x in (new, old)]
            assert not any(map(is_new_and_bad, *leaves))
            assert ls.all_finite((params, updates))
            if not ls.was_applied(state):
                assert_no_update(updates)
                assert_same_bits(new, old)
                assert_same_bits(state.scale_state, old_scale.record(False))


RULE = ls.DynamicLossScale(growth_interval=5, hysteresis=2)
PARAMS = {"w": jnp.ones(3), "b": jnp.ones(())}


def test_only_an_overflow_of_gradients_moves_the_scale():
    tx = ls.with_loss_scaling(optax.adam(0.1), RULE, check_updates=True)
    step = jax.jit(tx.update)

    def after(factor, state, value=1.0):
        grads = optax.tree.scale(factor, PARAMS)
        return step(grads, state, PARAMS, value=jnp.float32(value))[1].scale_state

    state = step(PARAMS, tx.init(PARAMS), PARAMS)[1]
    scale_state = state.scale_state
    skipped = scale_state.record(False)
    # No scale cures an optimizer that overflows; the hysteresis is not used up either.
    assert_same_bits(after(1e30, state), skipped)
    assert_same_bits(after(1e30, state, jnp.nan), skipped)
    # An overflow is the rule's own affair.
    assert_same_bits(after(jnp.inf, state), RULE.update(scale_state, False))
    assert_same_bits(after(jnp.inf, state, jnp.nan), skipped)
    assert_same_bits(after(1.0, state), RULE.update(scale_state, True))


@pytest.mark.parametrize("wrap", [lambda tx: tx, ls.with_master_weights])
def test_parameters_that_only_their_type_makes_overflow_are_seen(wrap):
    """Master weights may be beyond, and the parameters not."""
    params = jnp.array([60000.0, 1.0], jnp.float16)
    tx = ls.with_loss_scaling(wrap(optax.sgd(1.0)), check_updates=True)
    for last, applied in ((-5000.0, True), (-6000.0, False)):
        grads = jnp.array([last, 0.0])
        updates, state = tx.update(grads, tx.init(params), params)
        assert bool(ls.was_applied(state)) is applied
        assert np.isfinite(optax.apply_updates(params, updates)).all()


BAD_RESULTS = {
    "number": lambda g: (g, (g, jnp.float32(jnp.nan))),
    "array": lambda g: (g, (g.at[1].set(jnp.inf), jnp.zeros(()))),
    "update": lambda g: (g.at[1].set(-jnp.inf), (g, jnp.zeros(()))),
    "imaginary part": lambda g: (
        jax.lax.complex(g, g.at[2].set(jnp.nan)),
        (g, jnp.zeros(())),
    ),
}


@pytest.mark.parametrize("bad", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_a_bad_result_is_found_wherever_it_is(bad):
    inner = transformation(lambda g, m, n: bad(m + g), jnp.ones(3), jnp.zeros(()))
    tx = ls.with_loss_scaling(inner, check_updates=True)
    state = tx.init(jnp.ones(3))
    for step, params in ((tx.update, None), (jax.jit(tx.update), jnp.ones(3))):
        updates, new_state = step(jnp.ones(3), state, params)
        assert not ls.was_applied(new_state) and not np.any(updates)
        assert_same_bits(new_state.inner_state, state.inner_state)


def test_what_was_not_finite_may_stay_so_and_is_no_obstacle():
    """A mask of -inf among the parameters, and the best loss so far in the state."""
    inf, nan, one = (jnp.full(2, x) for x in (jnp.inf, jnp.nan, 1.0))

    def finite(update, param, new, old):
        return bool(outcome_finite([update], (new,), (old,), [param]))

    assert finite(one, -inf, inf, inf) and finite(one, nan, nan, nan)
    assert finite(one, one, one, nan)
    assert not finite(one, one, inf, -inf) and not finite(one, one, nan, inf)
    assert not finite(inf, -inf, one, one) and not finite(inf, inf, one, one)
    integers = jnp.arange(2)
    assert finite(integers, integers, integers, integers)
    key = jax.random.key(0)
    assert finite(None, one, key, key) and outcome_finite((), (), (), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, large, inner",
    [
        ("complex128", 1e200, optax.adam(0.1)),
        ("float64", 1e200, optax.adam(0.1)),
        ("complex64", 1e30, optax.adam(0.1)),
        ("float8_e5m2", 1e5, optax.sgd(1.0)),
    ],
)
def test_results_of_every_type_are_checked(dtype, large, inner):
    with enable_x64(True):
        params = jnp.ones(2, dtype)
        wide = jnp.float32 if "8_" in dtype else dtype
        tx = ls.with_loss_scaling(inner, check_updates=True)
        for size, applied in ((1.0, True), (large, False)):
            state = tx.init(params)
            grads = jnp.full(2, size, wide)
            updates, new_state = tx.update(grads, state, params)
            assert bool(ls.was_applied(new_state)) is applied
            assert updates.dtype == wide
            assert_same_types(new_state, state)


@pytest.mark.parametrize("spec", [P("d"), P()])
def test_all_devices_decide_alike(spec):
    """Where each updates its own shard, and where arrays are global."""
    params = jnp.ones(16)
    grads = params.at[5].set(1e30)  # on one device

    def step(params, grads, axis_name=None):
        tx = ls.with_loss_scaling(
            optax.adam(0.1), axis_name=axis_name, check_updates=True
        )
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), ls.was_applied(state)

    mapped = on_mesh(lambda p, g: step(p, g, "d"), P("d"), (P("d"), P()))
    placed = jax.device_put((params, grads), jax.NamedSharding(make_mesh(d=8), spec))
    for function in (mapped, jax.jit(step)):
        new_params, applied = function(*placed)
        assert not applied
        assert_same_bits(new_params, params)


def test_members_of_an_ensemble_decide_each_for_themselves():
    tx = ls.with_loss_scaling(optax.adam(0.1), check_updates=True)
    params, factors = jnp.ones(2), jnp.array([1.0, 1e30, jnp.nan])
    members = jax.jit(jax.vmap(tx.update, in_axes=(0, None, None)))
    _, states = members(factors[:, None] * params, tx.init(params), params)
    assert states.scale_state.applied.tolist() == [True, False, False]
    assert states.scale_state.loss_scale.tolist() == [2.0**15, 2.0**15, 2.0**14]


@pytest.mark.parametrize("compiled", [True, False])
def test_derivatives_are_those_without_the_skipped_step(compiled):
    """A zero that goes back through an infinite exponential would be NaN."""
    grads = jnp.array([0.1, -0.2, 0.3])
    exponential = optax.stateless(lambda g, params: jax.tree.map(jnp.exp, g))
    inner = optax.chain(exponential, optax.sgd(0.1, momentum=0.9))

    def reached(tx, factors):
        def train(x):
            params = x * jnp.ones(3)
            state = tx.init(params)
            for factor in factors:
                updates, state = tx.update(factor * x * grads, state, params)
                params = optax.apply_updates(params, updates)
            return jnp.sum(params**2)

        function = jax.value_and_grad(train)
        return (jax.jit(function) if compiled else function)(1.0)

    tx = ls.with_loss_scaling(inner, check_updates=True)
    actual = reached(tx, (1e4, 1.0, 1e4, 1.0))
    np.testing.assert_allclose(actual, reached(inner, (1.0, 1.0)), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parameters_beside_leaves_without_an_update_are_checked(dtype):
    """Such as the functions in an Equinox model, whose gradients are None."""
    huge = jnp.full(2, jnp.finfo(dtype).max, dtype)
    params = {"w": huge, "f": jnp.tanh, "name": "mlp", "not trained": jnp.ones(3)}
    wide = {"w": huge.astype(jnp.float32), "f": None, "name": None}
    tx = ls.with_loss_scaling(optax.sgd(-1.0), check_updates=True)
    for sign, applied in ((-1, True), (1, False)):
        grads = {**wide, "w": sign * wide["w"]}
        _, state = tx.update(grads, tx.init(wide), params)
        assert bool(ls.was_applied(state)) is applied
