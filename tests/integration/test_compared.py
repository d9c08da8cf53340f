"""The table that compares packages: each cell begins with what its step does."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from book import page, table
from flax.training.dynamic_scale import DynamicScale
from shared import recordings

import optax_lossscale as ls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:. of . parameters are float16"),
]
jmp, mpx = pytest.importorskip("jmp"), pytest.importorskip("mpx")

ONES, BAD = {"w": np.ones(2, np.float32)}, {"w": np.float32([1, np.inf])}


def linear_loss(params, batch):
    """Its gradients are the batch."""
    return jnp.vdot(params["w"], batch["w"])


# Of each: the optimizer, the first scale, and a step as its documentation has it. Two
# have no scale beside the state of the optimizer.


def of_optimizer(tx, value_and_grad):
    def step(params, opt_state, _, batch):
        loss, grads = value_and_grad(opt_state)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, None, loss

    return tx, None, step


def this_package(inner, loss_fn, init, interval, floor):
    rule = ls.DynamicLossScale(init, growth_interval=interval, min_scale=floor)
    tx = ls.with_loss_scaling(inner, rule)
    return of_optimizer(tx, lambda opt_state: ls.value_and_grad(loss_fn, opt_state))


def apply_if_finite(inner, loss_fn, init, interval, floor):
    tx = optax.apply_if_finite(inner, 5)
    return of_optimizer(tx, lambda _: jax.value_and_grad(loss_fn))


def flax(tx, loss_fn, init, interval, floor):
    def step(params, opt_state, scale, batch):
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, batch)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        select = functools.partial(jnp.where, finite)
        return *jax.tree.map(select, new, (params, opt_state)), scale, loss

    return tx, DynamicScale(2.0, 0.5, interval, 0, init, floor), step


def of_jmp(tx, loss_fn, init, interval, floor):
    def step(params, opt_state, scale, batch):
        def scaled_loss_fn(params):
            return scale.scale(loss_fn(params, batch))

        loss, grads = scale.unscale(jax.value_and_grad(scaled_loss_fn)(params))
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        kept = jmp.select_tree(finite, new, (params, opt_state))
        return *kept, scale.adjust(finite), loss

    first, floor = jnp.float32(init), jnp.float32(floor)
    return tx, jmp.DynamicLossScale(first, jnp.int32(0), interval, 2, floor), step


def of_mpx(tx, loss_fn, init, interval, floor):
    def step(params, opt_state, scale, batch):
        fun = mpx.filter_value_and_grad(loss_fn, scale)
        loss, scale, finite, grads = fun(params, batch)
        kept = mpx.optimizer_update(params, tx, opt_state, grads, finite)
        return *kept, scale, loss

    first, floor = jnp.float32(init), jnp.float32(floor)
    return tx, mpx.DynamicLossScaling(first, floor, period=interval), step


MAKE = {
    "this package": this_package,
    "Flax": flax,
    "jmp": of_jmp,
    "mpx": of_mpx,
    "`apply_if_finite`": apply_if_finite,
}
COLUMNS = [*MAKE]
CELLS = {row[0]: row[1:] for row in table(page("start/do_i_need_it"), "| this package")}
SCALE = {"Flax": "scale", "jmp": "loss_scale", "mpx": "loss_scaling"}
ADAMW = optax.adamw(optax.linear_schedule(3e-2, 0.0, 100))


def run(name, batches, loss_fn=linear_loss, inner=ADAMW, params=ONES, **numbers):
    """Of the start and of each step: what a skip keeps, the scale, and the loss."""
    numbers = {"init": 2.0**15, "interval": 2000, "floor": 1.0} | numbers
    tx, scale, step = MAKE[name](inner, loss_fn, **numbers)
    state, loss, step = (params, tx.init(params), scale), None, jax.jit(step)
    for batch in [None, *batches]:
        if batch is not None:
            *state, loss = step(*state, batch)
        params, opt_state, scale = state
        if name in SCALE:
            scale = float(getattr(scale, SCALE[name]))
        elif name == "this package":
            scale = float(ls.get_loss_scale(opt_state))
        yield (params, getattr(opt_state, "inner_state", opt_state)), scale, loss


def scales(name):
    def loss_fn(params, batch):
        loss = linear_loss({"w": jnp.float16(params["w"])}, batch)
        return 2.0**-28 * jnp.float32(loss)

    *_, ((params, _), _, _) = run(name, [ONES], loss_fn, optax.sgd(2.0**28))
    return "no" if np.array_equal(params["w"], ONES["w"]) else "yes"


def keeps(name):
    start, *skipped, last = (kept for kept, _, _ in run(name, 6 * [BAD]))
    for kept in skipped:
        assert_same_bits(kept, start)
    if not ls.all_finite(last[0]):
        return "yes, until `max_consecutive_errors`"
    # The steps of the other two select in lines of their own.
    return "you select" if name in ("Flax", "jmp") else "yes"


def lowers(name):
    (_, before, _), (_, after, _) = run(name, [{"w": np.full(2, np.nan, np.float32)}])
    return "yes" if before and after == before / 2 else ""


@functools.cache
def like_pytorch(name):
    """The steps of a recorded run, and the scale and the weights after each."""
    cases = recordings("torch_end_to_end")["cases"]
    case = next(case for case in cases if case["id"] == "sgd_momentum")
    steps, arguments = case["steps"], case["scaler_arguments"]
    used = np.array(steps["scale_used"], np.float32)
    grads = np.array(steps["scaled_grads"], np.float32) / used[:, None]
    _, *found = run(
        name,
        [{"w": grad} for grad in grads],
        inner=optax.sgd(*case["optimizer_arguments"].values()),
        params={"w": np.array(case["initial_params"], np.float32)},
        init=float(arguments["init_scale"]),
        interval=arguments["growth_interval"],
    )
    weights = np.array([params["w"] for (params, _), _, _ in found])
    return steps, [scale for _, scale, _ in found], weights


def steps_alike(same):
    return f"all {len(same)}" if all(same) else str([*same].index(False))


def pytorchs_scale(name):
    steps, scales, _ = like_pytorch(name)
    if scales[0] is None:
        return ""
    return steps_alike(np.equal(scales, steps["scale_after"]))


def pytorchs_weights(name):
    steps, _, weights = like_pytorch(name)
    expected = np.array(steps["params"])
    off = np.abs(weights - expected).max(axis=1)
    return steps_alike(off < 0.01 * np.abs(expected).max(axis=1))


def reported(name):
    def loss_fn(params, batch):
        return jnp.float32(1e35) + 0 * params["w"].sum()

    *_, (_, _, loss) = run(name, [ONES], loss_fn)
    return f"{loss:.0e}".replace("+", "")


def after(steps, grad, name, **numbers):
    *_, (_, scale, _) = run(
        name, steps * [{"w": np.full(2, grad, np.float32)}], **numbers
    )
    return scale


def of_zeros(name):
    def loss_fn(params, batch):
        return linear_loss({"w": jnp.float32(params["w"])}, batch)

    half, zeros = {"w": np.ones(2, np.float16)}, {"w": np.zeros(2, np.float32)}
    try:
        *_, ((params, _), _, _) = run(name, [zeros], loss_fn, optax.adam(1e-3), half)
    except TypeError:
        return "TypeError"
    return f"{params['w'][0] - 1:g}".replace("nan", "NaN")


CHECKS = {
    "scales the loss": scales,
    "a skipped step keeps weights, moments and schedule": keeps,
    "a batch with NaN lowers the scale": lowers,
    "steps with PyTorch's scale, in a run recorded from `GradScaler`": pytorchs_scale,
    "steps with PyTorch's weights in that run, within 1%": pytorchs_weights,
    "a loss of 1e35 is reported as": reported,
    "a smallest scale of 8, under `jit`": functools.partial(
        after, 20, np.nan, floor=8.0
    ),
    "Adam's update of a float16 parameter whose gradient is 0": of_zeros,
    "the largest scale": functools.partial(after, 300, 1e-30, interval=1),
}


@pytest.mark.parametrize("row", CELLS)
@pytest.mark.parametrize("name", COLUMNS)
def test_cell_says_what_the_step_does(row, name):
    cell, found = CELLS[row][COLUMNS.index(name)], CHECKS[row](name)
    if isinstance(found, float):
        base, exponent = re.match(r"([\d.e]+)(?:\^(\d+))?", cell).groups()
        assert found == pytest.approx(float(base) ** int(exponent or 1), rel=1e-4)
    else:
        assert re.split(", unless|:| in a row", cell)[0] == (found or "")
