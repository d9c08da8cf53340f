"""was_applied and keep_if_applied."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax import nnx
from flax.training.train_state import TrainState

import optax_lossscale as ls

PARAMS = np.ones(2, np.float32)
TX = ls.with_loss_scaling(optax.chain(optax.scale(1.0), optax.adam(0.1)))
GOOD, BAD = PARAMS, np.float32([1, np.nan])


@jax.jit
def after(grads, **extra_args):
    return TX.update(grads, TX.init(PARAMS), PARAMS, **extra_args)[1]


def test_a_step_was_applied_if_nothing_about_it_was_non_finite():
    assert ls.was_applied(TX.init(PARAMS)) and ls.was_applied(after(GOOD))
    assert not ls.was_applied(after(BAD))
    assert not ls.was_applied(after(GOOD, value=jnp.inf))
    assert not ls.was_applied(after(GOOD, grads_finite=False))
    never_skips = ls.FixedLossScale(1.0, skip_nonfinite=False)
    assert ls.was_applied(never_skips.update(never_skips.init(), False))


KEYS = [jax.random.wrap_key_data(np.uint32([0, i])) for i in range(2)]
OLD = {"mean": np.float32([0, 0]), "key": KEYS[0], "name": "norm", "f": jax.nn.relu}
NEW = {**OLD, "mean": np.float32([1, 1]), "key": KEYS[1]}
OVERFLOWED = {**NEW, "mean": np.float32([1, np.inf])}
# A running minimum starts from infinity, and may stay there.
LEAST, LESS = np.float32([np.inf, np.inf]), np.float32([3, np.inf])


@pytest.mark.parametrize(
    ("grads", "old", "new", "kept"),
    [
        (GOOD, OLD, NEW, NEW),
        (BAD, OLD, NEW, OLD),
        (GOOD, OLD, OVERFLOWED, OLD),
        (GOOD, LEAST, LESS, LESS),
        (GOOD, GOOD, BAD, GOOD),
    ],
)
def test_new_values_are_kept_where_applied_and_finite(grads, old, new, kept):
    assert_same_bits(ls.keep_if_applied(after(grads), new, old), kept)


def test_with_an_axis_name_the_members_keep_together():
    new, state = np.float32([[1, 2], [np.nan, 3]]), after(GOOD)
    for axis_name, kept in ((None, [[1, 2], [0, 0]]), ("i", [[0, 0], [0, 0]])):

        def member(new, axis_name=axis_name):
            return ls.keep_if_applied(state, new, jnp.zeros(2), axis_name=axis_name)

        actual = jax.jit(jax.vmap(member, axis_name="i"))(new)
        np.testing.assert_array_equal(actual, kept)


def test_values_that_do_not_match_and_states_of_many_are_refused():
    for old in ({"mean": 1.0, "new": 1.0}, {"mean": np.zeros(3, np.float32)}):
        with pytest.raises(ValueError, match="must have the same"):
            ls.keep_if_applied(after(GOOD), {"mean": GOOD}, old)
    many = jax.jit(jax.vmap(TX.init))(np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match="the loss scale of one run.* `jax.vmap`"):
        ls.keep_if_applied(many, 1.0, 2.0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_statistics_not_copied_before_they_change_are_told(copied, compiled):
    model, loss_fn = nnx.BatchNorm(8, rngs=nnx.Rngs(0)), lambda model, x: model(x).sum()
    tx = ls.with_loss_scaling(optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, x):
        old = nnx.state(model, nnx.BatchStat)
        old = jax.tree.map(jnp.copy, old) if copied else old
        fun = ls.value_and_grad(loss_fn, optimizer, value_and_grad=nnx.value_and_grad)
        optimizer.update(model, fun(model, x)[1])
        new = nnx.state(model, nnx.BatchStat)
        nnx.update(model, ls.keep_if_applied(optimizer, new, old))

    told = pytest.warns(UserWarning, match="same arrays.* copy them before it")
    with contextlib.nullcontext() if copied else told as seen:
        x = np.full((2, 8), np.inf, np.float32)
        (nnx.jit(step) if compiled else step)(model, optimizer, x)
    assert copied or seen[0].filename == __file__
    assert bool(ls.all_finite(nnx.state(model))) == copied


class Trained(TrainState):
    stats: object


@pytest.mark.parametrize(
    ("grads", "stats"), [(GOOD, GOOD), (BAD, BAD), (GOOD, BAD), (BAD, GOOD)]
)
def test_whole_train_state_is_new_or_old_but_the_scale_moves_on(grads, stats):
    old = Trained.create(apply_fn=None, params={"w": PARAMS}, tx=TX, stats=PARAMS)
    old = old.replace(step=jnp.int32(0))

    @jax.jit
    def step(old, grads, stats):
        new = old.apply_gradients(grads={"w": grads}, stats=stats)
        return new, ls.keep_if_applied(new, new, old)

    new, kept = step(old, grads, stats)
    expected = new if grads is stats is GOOD else old
    scale_state = new.opt_state.scale_state
    opt_state = expected.opt_state._replace(scale_state=scale_state)
    assert_same_bits(kept, expected.replace(opt_state=opt_state))
    with pytest.warns(UserWarning, match="same arrays"):
        ls.keep_if_applied(new, new, new)


def test_only_values_that_are_all_the_same_arrays_are_warned_of():
    """Frozen statistics with a new key, a counter, nothing at all."""
    state = after(GOOD)
    for new in ({**OLD, "key": NEW["key"]}, {"count": jnp.int32(1)}, {}):
        old = {name: OLD.get(name, x) for name, x in new.items()}
        assert_same_bits(ls.keep_if_applied(state, new, old), new)
