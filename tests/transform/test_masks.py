"""What a skipped step keeps and costs, whatever the optimizer computes."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update, assert_same_bits
from jax.experimental import io_callback
from shared import slow_but
from training import transformation

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

NUMBERS = np.float32([-0.0, 0.0, 1.0, -1.5, np.inf, -np.inf])
ONE = np.ones(3, np.float32)
BAD = np.float32([1.0, np.nan, 2.0])


def test_skipped_update_changes_no_bit_of_any_number():
    """Added to -0.0, an update of 0.0 would make 0.0."""
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2)
    params = [NUMBERS.astype(dtype) for dtype in dtypes]
    params += [np.complex64([complex(x, -0.0) for x in NUMBERS])]
    params += [np.array([True, False]), np.int32([-(2**31), 2**31 - 1, 0])]
    tx = ls.with_loss_scaling(optax.identity())
    # An infinity is among them.
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert [u.dtype for u in updates] == [p.dtype for p in params]

    @jax.jit
    def add(params, updates):
        pairs = zip(params, updates, strict=True)
        return [p | u if p.dtype == bool else p + u for p, u in pairs]

    assert_same_bits(add(params, updates), params)


@pytest.mark.parametrize("check_updates", [False, True], ids=["unchecked", "checked"])
def test_side_effects_happen_once_in_a_step(check_updates):
    seen = []

    def note(kind, m):
        seen.append((kind, np.asarray(m)[0]))
        return m

    def update(g, m):
        jax.debug.callback(functools.partial(note, "debug"), m)
        total = io_callback(functools.partial(note, "io"), m, m, ordered=True)
        return g, (total + g,)

    tx = ls.with_loss_scaling(transformation(update, ONE), check_updates=check_updates)
    step = jax.jit(lambda g, state: tx.update(g, state)[1])
    step(BAD, step(ONE, step(BAD, tx.init(ONE))))
    jax.effects_barrier()
    expected = [(kind, m) for kind in ("debug", "io") for m in (1.0, 1.0, 2.0)]
    assert sorted(seen) == expected


def test_two_leaves_set_to_one_array_keep_the_old_value_of_each():
    def update(g, a, b):
        total = a + b + g
        return total, (total, total)

    tx = ls.with_loss_scaling(transformation(update, ONE, 2 * ONE))
    state = tx.init(ONE)
    for grads, new in ((BAD, (ONE, 2 * ONE)), (ONE, (4 * ONE, 4 * ONE))):
        assert_same_bits(jax.jit(tx.update)(grads, state)[1].inner_state, new)


def test_optimizer_gets_numbers_off_zero_and_off_their_mean_for_bad_gradients():
    """A norm has no derivative at 0, and a standard deviation none of equal numbers."""
    shapes = [(2,), (3,), (4,), (2, 2), (3, 5)]
    bad = [np.full(shape, np.nan, np.float32) for shape in shapes]
    inner = mock.Mock(return_value=((), ()))
    tx = ls.with_loss_scaling(transformation(inner))
    tx.update(bad, tx.init(bad))
    for x in map(np.asarray, inner.call_args.args[0]):
        assert (np.float16(1e-3) * np.float16(x) ** 2 > 0).all(), x.shape
        assert (x != x.mean()).all(), x.shape


SEARCHES = {
    "zoom": optax.lbfgs(),
    "backtracking": optax.chain(
        optax.sgd(0.1), optax.scale_by_backtracking_linesearch(1000)
    ),
}


@pytest.mark.parametrize("search", slow_but(("backtracking",), SEARCHES))
def test_line_search_stops_at_once_in_a_skipped_step_and_keeps_its_state(search):
    """On NaN it would go on to its last evaluation. Only the first zoom takes a few."""
    tx, evaluated = ls.with_loss_scaling(SEARCHES[search]), []
    params, bad = np.float32([1.0, 2.0]), np.float32([1.0, np.nan])

    def value_fn(params, factor):
        jax.debug.callback(lambda: evaluated.append(1))
        return factor * jnp.sum(params**2)

    @jax.jit
    def step(grads, state, value, factor):
        given = {"value": value, "grad": grads, "factor": factor}
        return tx.update(grads, state, params, value_fn=value_fn, **given)

    first = tx.init(params)
    _, second = step(2 * params, first, 5.0, 1.0)
    for state in (first, second):
        for numbers in ((5.0, 1.0), (np.nan, 1.0), (5.0, np.nan)):
            jax.effects_barrier()
            evaluated.clear()
            updates, new_state = step(bad, state, *numbers)
            jax.effects_barrier()
            is_first_zoom = search == "zoom" and state is first
            assert len(evaluated) <= (7 if is_first_zoom else 1), numbers
            assert_no_update(updates)
            assert_same_bits(new_state.inner_state, state.inner_state)
