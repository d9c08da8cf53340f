"""`keep_if_applied`: the new values, or the old ones of a skipped step."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, kept
from flax import nnx
from flax.training.train_state import TrainState

import optax_lossscale as ls

GOOD, BAD = np.ones(2, np.float32), np.float32([1, np.nan])
TX = ls.with_loss_scaling(optax.chain(optax.scale(1.0), optax.adam(0.1)))
KEYS = [jax.random.wrap_key_data(np.uint32([0, i])) for i in range(2)]
# As in an Equinox module, not all leaves are arrays.
STATIC = {"name": "norm", "f": jax.nn.relu, "rate": 0.5, "inference": False}
OLD = {**STATIC, "mean": np.float32([0, 0]), "key": KEYS[0]}
NEW = {**OLD, "mean": np.float32([1, 1]), "key": KEYS[1]}
SAME_MEAN = {**NEW, "mean": OLD["mean"]}
LEAST, LESS = np.float32([np.inf, np.inf]), np.float32([3, np.inf])
COUNT = {"count": np.int32(1)}


@jax.jit
def after(grads):
    return TX.update(grads, TX.init(GOOD), GOOD)[1]


# The gradients, the old values, the new ones, and those that are kept.
ROWS = {
    "applied": (GOOD, OLD, NEW, NEW),
    "skipped": (BAD, OLD, NEW, OLD),
    "NaN in one leaf": (GOOD, OLD, {**NEW, "mean": BAD}, SAME_MEAN),
    "infinite minimum": (GOOD, LEAST, LESS, LESS),
    "NaN where it was": (GOOD, BAD, 2 * BAD, 2 * BAD),
    "NaN where it was, and elsewhere": (GOOD, BAD, BAD[::-1], BAD),
    "one array passed through": (GOOD, OLD, SAME_MEAN, SAME_MEAN),
    "all integers": (GOOD, COUNT, COUNT, COUNT),
    "nothing": (GOOD, {}, {}, {}),
}


@pytest.mark.parametrize("row", ROWS)
def test_finite_leaves_are_new_and_all_are_old_after_a_skipped_step(row):
    grads, old, new, kept = ROWS[row]
    assert_same_bits(ls.keep_if_applied(after(grads), new=new, old=old), kept)


@pytest.mark.parametrize(
    ("axis_name", "means"),
    [(None, [[1, 2], [0, 0]]), ("i", [[0, 0], [0, 0]])],
    ids=["no axis", "axis"],
)
def test_axis_decides_each_leaf_alike_with_one_collective(axis_name, means):
    def member(mean):
        new, old = (mean, 2 * ones), (0 * ones, ones)
        return ls.keep_if_applied(state, new=new, old=old, axis_name=axis_name)

    state, ones = after(GOOD), np.ones(2, np.float32)
    new = np.float32([[1, 2], [np.nan, 3]])
    members = jax.jit(jax.vmap(member, axis_name="i"))
    np.testing.assert_array_equal(members(new)[0], means)
    np.testing.assert_array_equal(members(new)[1], [[2, 2], [2, 2]])
    program = jax.make_jaxpr(member, axis_env=[("i", 2)])(new[0])
    assert str(program).count("pmin") == (axis_name is not None)


class Norm(nnx.Module):
    """A module that changes its statistics in place, as nnx.BatchNorm does."""

    def __init__(self):
        self.weight, self.mean = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(2))

    def __call__(self, x):
        self.mean[...] = x
        return jnp.sum(self.weight[...] * x)


def test_statistics_of_nnx_that_are_not_copied_warn():
    """NNX changes them in place."""
    model = Norm()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        old = nnx.state(model, nnx.BatchStat)
        optimizer.update(model, nnx.grad(lambda model: model(BAD))(model))
        ls.keep_if_applied(optimizer, new=nnx.state(model, nnx.BatchStat), old=old)

    words = "same object at .*'mean'.* copy it before"
    with pytest.warns(UserWarning, match=words) as seen:
        step(model, optimizer)
    assert seen[-1].filename == __file__


@pytest.mark.parametrize("is_late", [False, True])
def test_statistics_of_nnx_that_are_copied_late_warn(is_late):
    """What the step does not change may be copied at any time."""
    model = Norm()
    model.unchanged = nnx.BatchStat(jnp.ones(2))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def copied(model):
        return jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))

    @nnx.jit
    def step(model, optimizer, x):
        old = copied(model)
        grads = nnx.grad(lambda model: model(2 * x))(model)
        old = copied(model) if is_late else old
        optimizer.update(model, grads)
        ls.keep_if_applied(optimizer, new=nnx.state(model, nnx.BatchStat), old=old)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step(model, optimizer, BAD)
    words = [str(x.message) for x in seen if "`old` is a copy" in str(x.message)]
    assert len(words) == is_late


def test_same_object_warns_and_the_same_arrays_in_another_do_not():
    state = after(GOOD)
    ls.keep_if_applied(state, new={**OLD}, old=OLD)
    with pytest.warns(UserWarning, match="same object at the root"):
        ls.keep_if_applied(state, new=OLD, old=OLD)


class Trained(TrainState):
    stats: object


@jax.jit
def step(old, grads, stats):
    new = old.apply_gradients(grads={"w": grads}, stats=stats)
    return new, ls.keep_if_applied(new, new=new, old=old)


STATE = Trained.create(apply_fn=None, params={"w": GOOD}, tx=TX, stats=GOOD)
STATE = STATE.replace(step=jnp.int32(0))


@pytest.mark.parametrize("grads", [GOOD, BAD], ids=["applied", "skipped"])
@pytest.mark.parametrize("stats", [2 * GOOD, BAD], ids=["finite", "NaN"])
def test_train_state_of_a_skipped_step_is_the_old_one_but_for_its_scale(grads, stats):
    new, kept = step(STATE, grads, stats)
    expected = new.replace(stats=GOOD) if stats is BAD else new
    if grads is BAD:
        opt_state = STATE.opt_state._replace(scale_state=new.opt_state.scale_state)
        expected = STATE.replace(opt_state=opt_state)
    assert_same_bits(kept, expected)


def test_nnx_state_of_a_skipped_step_is_the_old_one_but_for_its_scale():
    model = Norm()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    before, old_scale = kept((model, optimizer)), ls.get_loss_scale(optimizer)

    @nnx.jit
    def step(model, optimizer):
        old = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
        optimizer.update(model, nnx.grad(lambda model: model(BAD))(model))
        new = nnx.state((model, optimizer))
        nnx.update((model, optimizer), ls.keep_if_applied(optimizer, new=new, old=old))

    step(model, optimizer)
    assert_same_bits(kept((model, optimizer)), before)
    assert int(optimizer.step[...]) == 0
    assert ls.get_loss_scale(optimizer) == old_scale / 2


def test_compiled_step_warns_of_the_state_that_update_was_given():
    tx = ls.skip_nonfinite(optax.sgd(0.1))

    def step(state, new, old):
        _, new_state = tx.update(new, state)
        return [ls.keep_if_applied(x, new=new, old=old) for x in (new_state, state)]

    with pytest.warns(UserWarning, match="state that `update` was given") as seen:
        jax.eval_shape(step, tx.init(GOOD), GOOD, BAD)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda new, old: ls.keep_if_applied(new, new=old, old=new),
        lambda new, old: ls.keep_if_applied(old, new=new, old=old),
    ],
    ids=["exchanged", "before the step"],
)
def test_exchanged_trees_and_the_state_before_the_step_raise(wrong, around):
    new, _ = step(STATE, BAD, GOOD)
    with pytest.raises(ValueError, match="`new` must be the values after the step"):
        around(wrong)(new, STATE)
