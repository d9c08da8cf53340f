"""`keep_if_applied`: the new values, or the old ones of a skipped step."""

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

GOOD, BAD = np.ones(2, np.float32), np.float32([1, np.nan])
TX = ls.with_loss_scaling(optax.chain(optax.scale(1.0), optax.adam(0.1)))


@jax.jit
def after(grads):
    return TX.update(grads, TX.init(GOOD), GOOD)[1]


KEYS = [jax.random.wrap_key_data(np.uint32([0, i])) for i in range(2)]
OLD = {"mean": np.float32([0, 0]), "key": KEYS[0], "name": "norm", "f": jax.nn.relu}
NEW = {**OLD, "mean": np.float32([1, 1]), "key": KEYS[1]}
COUNT = {"count": np.int32(1)}
OVERFLOWED = {**NEW, "mean": np.float32([1, np.inf])}
FROZEN = {**OLD, "key": KEYS[1]}
LEAST, LESS = np.float32([np.inf, np.inf]), np.float32([3, np.inf])


@pytest.mark.parametrize(
    ("grads", "old", "new", "kept"),
    [
        (GOOD, OLD, NEW, NEW),
        (BAD, OLD, NEW, OLD),
        (GOOD, OLD, OVERFLOWED, OLD),
        # A running minimum starts from infinity, and may stay there.
        (GOOD, LEAST, LESS, LESS),
        (BAD, LEAST, LESS, LEAST),
        (GOOD, GOOD, BAD, GOOD),
        # Only values that are all the same arrays are warned of.
        (GOOD, OLD, FROZEN, FROZEN),
        (GOOD, COUNT, COUNT, COUNT),
        (GOOD, {}, {}, {}),
    ],
)
def test_new_values_are_kept_if_applied_and_finite(grads, old, new, kept):
    assert_same_bits(ls.keep_if_applied(after(grads), new, old), kept)


@pytest.mark.parametrize(
    ("axis_name", "kept"), [(None, [[1, 2], [0, 0]]), ("i", [[0, 0], [0, 0]])]
)
def test_members_of_a_named_axis_keep_together(axis_name, kept):
    def member(new):
        return ls.keep_if_applied(state, new, jnp.zeros(2), axis_name=axis_name)

    state = after(GOOD)
    actual = jax.jit(jax.vmap(member, axis_name="i"))(np.float32([[1, 2], [np.nan, 3]]))
    np.testing.assert_array_equal(actual, kept)


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("copied", [False, True])
def test_statistics_that_are_not_copied_are_warned_of(copied, around):
    """Flax NNX changes them in place, so that old ones are the new ones."""
    model, loss_fn = nnx.BatchNorm(8, rngs=nnx.Rngs(0)), lambda model, x: model(x).sum()
    sgd = ls.with_loss_scaling(optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, sgd, wrt=nnx.Param)

    @around
    def step(model, optimizer, x):
        old = nnx.state(model, nnx.BatchStat)
        old = jax.tree.map(jnp.copy, old) if copied else old
        fun = ls.value_and_grad(loss_fn, optimizer, value_and_grad=nnx.value_and_grad)
        optimizer.update(model, fun(model, x)[1])
        new = nnx.state(model, nnx.BatchStat)
        nnx.update(model, ls.keep_if_applied(optimizer, new, old))

    told = pytest.warns(UserWarning, match="same arrays.* copy them before it")
    with contextlib.nullcontext() if copied else told as seen:
        step(model, optimizer, np.full((2, 8), np.inf, np.float32))
    assert copied or seen[0].filename == __file__
    assert bool(ls.all_finite(nnx.state(model))) == copied


class Trained(TrainState):
    stats: object


@pytest.mark.parametrize(
    ("grads", "stats"), [(GOOD, GOOD), (BAD, BAD), (GOOD, BAD), (BAD, GOOD)]
)
def test_whole_train_state_is_new_or_old_but_the_scale_moves_on(grads, stats):
    old = Trained.create(apply_fn=None, params={"w": GOOD}, tx=TX, stats=GOOD)
    old = old.replace(step=jnp.int32(0))

    @jax.jit
    def step(old, grads, stats):
        new = old.apply_gradients(grads={"w": grads}, stats=stats)
        return new, ls.keep_if_applied(new, new, old)

    new, kept = step(old, grads, stats)
    expected, scale_state = new if grads is stats is GOOD else old, new.opt_state[0]
    opt_state = expected.opt_state._replace(scale_state=scale_state)
    assert_same_bits(kept, expected.replace(opt_state=opt_state))
    # `select` puts the old scale back.
    assert_same_bits(
        ls.select(ls.was_applied(new), new, old), new if ls.was_applied(new) else old
    )
    with pytest.warns(UserWarning, match="same arrays"):
        ls.keep_if_applied(new, new, new)
