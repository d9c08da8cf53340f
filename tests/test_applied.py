"""was_applied, applied_steps and keep_if_applied."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

import optax_lossscale as ls

PARAMS = jnp.ones(2)
TX = ls.with_loss_scaling(optax.chain(optax.scale(1.0), optax.adam(0.1)))
GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.nan])


def after(grads, tx=TX, **extra_args):
    return tx.update(grads, tx.init(PARAMS), PARAMS, **extra_args)[1]


def test_a_step_was_applied_if_nothing_about_it_was_non_finite():
    assert ls.was_applied(TX.init(PARAMS)) and ls.was_applied(after(GOOD))
    assert not ls.was_applied(after(BAD))
    assert not ls.was_applied(after(GOOD, value=jnp.inf))
    assert not ls.was_applied(after(GOOD, grads_finite=False))
    never_skips = ls.FixedLossScale(1.0, skip_nonfinite=False)
    assert ls.was_applied(after(BAD, ls.with_loss_scaling(optax.sgd(0.1), never_skips)))


def test_applied_steps_are_all_but_those_skipped():
    state = TX.init(PARAMS)
    for grads in (GOOD, BAD, BAD, GOOD, GOOD):
        _, state = TX.update(grads, state, PARAMS)
    count = ls.applied_steps(state, 5)
    assert (int(count), count.dtype, count.shape) == (3, jnp.int32, ())
    assert int(optax.tree.get(state, "count")) == 3
    assert int(jax.jit(ls.applied_steps)(state, jnp.uint8(5))) == 3


OLD = {"mean": jnp.zeros(2), "key": jax.random.key(0), "name": "norm", "f": jax.nn.relu}
NEW = {"mean": jnp.ones(2), "key": jax.random.key(1), "name": "norm", "f": jax.nn.relu}
OVERFLOWED = {**NEW, "mean": jnp.array([1.0, jnp.inf])}


@pytest.mark.parametrize(
    "grads, new, kept",
    [
        (GOOD, NEW, NEW),
        (BAD, NEW, OLD),
        (GOOD, OVERFLOWED, OLD),
        (BAD, OVERFLOWED, OLD),
    ],
)
def test_new_values_are_kept_where_applied_and_finite(grads, new, kept):
    result = ls.keep_if_applied(after(grads), new, OLD)
    assert result["f"] is jax.nn.relu and result["name"] == "norm"
    arrays = ("mean", "key")
    assert_same_bits([result[k] for k in arrays], [kept[k] for k in arrays])


def test_what_was_infinite_before_may_be_so_now():
    old = {"least": jnp.array([jnp.inf, jnp.inf]), "mask": jnp.float32(-jnp.inf)}
    new = {**old, "least": jnp.array([3.0, jnp.inf])}
    assert_same_bits(ls.keep_if_applied(after(GOOD), new, old), new)
    worse = {**new, "least": jnp.array([jnp.nan, 1.0])}
    assert_same_bits(ls.keep_if_applied(after(GOOD), worse, new), new)


def test_with_an_axis_name_the_members_keep_together():
    new = jnp.array([[1.0, 2.0], [jnp.nan, 3.0]])

    state = after(GOOD)

    def member(new, axis_name):
        return ls.keep_if_applied(state, new, jnp.zeros(2), axis_name)

    apart = jax.vmap(lambda new: member(new, None))(new)
    together = jax.vmap(lambda new: member(new, "i"), axis_name="i")(new)
    np.testing.assert_array_equal(apart, [[1.0, 2.0], [0.0, 0.0]])
    np.testing.assert_array_equal(together, jnp.zeros((2, 2)))


def test_a_state_of_many_and_a_state_of_none_are_refused():
    many = jax.vmap(TX.init)(jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="the loss scale of one run.* `jax.vmap`"):
        ls.keep_if_applied(many, 1.0, 2.0)
    assert ls.was_applied(many).shape == (3,)
    for function in (ls.was_applied, lambda s: ls.applied_steps(s, 1)):
        with pytest.raises(ValueError, match="`state` must contain a LossScaleState"):
            function(optax.adam(0.1).init(PARAMS))
