"""The table that compares packages: each cell begins with what its step does."""

import functools
import inspect
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

COLUMNS = ["this package", "Flax", "jmp", "mpx", "`apply_if_finite`"]
OURS, FLAX, JMP, MPX, OPTAX = COLUMNS
CELLS = {row[0]: row[1:] for row in table(page("start/do_i_need_it"), "| this package")}
ONES, BAD = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, jnp.inf])}


def linear_loss(params, batch):
    """Its gradients are the batch."""
    return jnp.vdot(params["w"], batch["w"])


def rule(name, init=2.0**15, interval=2000, floor=1.0):
    init32, floor32 = jnp.float32(init), jnp.float32(floor)
    return {
        OURS: ls.DynamicLossScale(init, growth_interval=interval, min_scale=floor),
        FLAX: DynamicScale(2.0, 0.5, interval, 0, init, floor),
        JMP: jmp.DynamicLossScale(init32, jnp.int32(0), interval, 2, floor32),
        MPX: mpx.DynamicLossScaling(init32, floor32, period=interval),
        OPTAX: None,
    }[name]


# A step of each, as its documentation has it.


def step_of_ours(tx, loss_fn, params, opt_state, batch):
    loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def step_of_flax(tx, loss_fn, params, opt_state, scale, batch):
    scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, batch)
    updates, new_state = tx.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_state
    select = functools.partial(jnp.where, finite)
    return *jax.tree.map(select, new, (params, opt_state)), scale, loss


def step_of_jmp(tx, loss_fn, params, opt_state, scale, batch):
    def scaled_loss_fn(params, batch):
        return scale.scale(loss_fn(params, batch))

    scaled = jax.value_and_grad(scaled_loss_fn)(params, batch)
    loss, grads = scale.unscale(scaled)
    finite = jmp.all_finite(grads)
    updates, new_state = tx.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_state
    kept = jmp.select_tree(finite, new, (params, opt_state))
    return *kept, scale.adjust(finite), loss


def step_of_mpx(tx, loss_fn, params, opt_state, scale, batch):
    fun = mpx.filter_value_and_grad(loss_fn, scale)
    loss, scale, finite, grads = fun(params, batch)
    params, opt_state = mpx.optimizer_update(params, tx, opt_state, grads, finite)
    return params, opt_state, scale, loss


def step_of_optax(tx, loss_fn, params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


STEPS = [step_of_ours, step_of_flax, step_of_jmp, step_of_mpx, step_of_optax]
STEP_OF = dict(zip(COLUMNS, STEPS, strict=True))


class Run:
    """A run of a step, with a loss, an optimizer and a rule."""

    def __init__(self, name, loss_fn=linear_loss, inner=None, params=ONES, **numbers):
        self.name = name
        tx, scale = inner or optax.adamw(3e-2), rule(name, **numbers)
        if name == OURS:
            tx = ls.with_loss_scaling(tx, scale)
        if name == OPTAX:
            tx = optax.apply_if_finite(tx, 5)
        self.train_step = jax.jit(functools.partial(STEP_OF[name], tx, loss_fn))
        scales = [] if name in (OURS, OPTAX) else [scale]
        self.state = (params, tx.init(params), *scales)

    def step(self, batch):
        *self.state, self.loss = self.train_step(*self.state, batch)
        return self

    def scale(self):
        if self.name == OPTAX:
            return None
        if self.name == OURS:
            return float(ls.get_loss_scale(self.state[1]))
        name = {FLAX: "scale", JMP: "loss_scale", MPX: "loss_scaling"}[self.name]
        return float(getattr(self.state[2], name))

    def kept(self):
        params, state, *_ = self.state
        return params, getattr(state, "inner_state", state)


def scales(name):
    def loss_fn(params, batch):
        loss = linear_loss({"w": jnp.float16(params["w"])}, batch)
        return 2.0**-28 * jnp.float32(loss)

    [w] = Run(name, loss_fn, optax.sgd(2.0**28)).step(ONES).state[0].values()
    return "no" if jnp.array_equal(w, ONES["w"]) else "yes"


def keeps(name):
    run = Run(name)
    start = run.kept()
    for _ in range(5):
        assert_same_bits(run.step(BAD).kept(), start)
    if not ls.all_finite(run.step(BAD).kept()[0]):
        return "yes, until `max_consecutive_errors`"
    selects = "new_state" in inspect.getsource(STEP_OF[name])
    return "you select" if selects else "yes"


def lowers(name):
    run = Run(name)
    before = run.scale()
    after = run.step({"w": jnp.full(2, jnp.nan)}).scale()
    return "yes" if before and after == before / 2 else ""


def like_pytorch(name):
    """For how many steps the scale is that of PyTorch, and the weights are."""
    cases = recordings("torch_end_to_end")["cases"]
    case = next(case for case in cases if case["id"] == "sgd_momentum")
    steps, arguments = case["steps"], case["scaler_arguments"]
    run = Run(
        name,
        inner=optax.sgd(*case["optimizer_arguments"].values()),
        params={"w": jnp.array(case["initial_params"], jnp.float32)},
        init=float(arguments["init_scale"]),
        interval=arguments["growth_interval"],
    )
    same = []
    used = np.array(steps["scale_used"], np.float32)
    grads = np.array(steps["scaled_grads"], np.float32) / used[:, None]
    for step, grad in enumerate(grads):
        run.step({"w": jnp.asarray(grad)})
        weights = np.array(steps["params"][step])
        off = np.abs(run.state[0]["w"] - weights).max() / np.abs(weights).max()
        same.append((run.scale() == steps["scale_after"][step], off < 0.01))
    return [
        f"all {len(x)}" if all(x) else str(x.index(False) or "")
        for x in zip(*same, strict=True)
    ]


def reported(name):
    def loss_fn(params, batch):
        return jnp.float32(1e35) + 0 * params["w"].sum()

    return f"{Run(name, loss_fn).step(None).loss:.0e}".replace("+", "")


def after(steps, grad, name, **numbers):
    run = Run(name, **numbers)
    for _ in range(steps):
        run.step({"w": jnp.full(2, grad)})
    return run.scale()


def of_zeros(name):
    def loss_fn(params, batch):
        return linear_loss({"w": jnp.float32(params["w"])}, batch)

    params = {"w": jnp.ones(2, jnp.float16)}
    run = Run(name, loss_fn, optax.adam(1e-3), params)
    try:
        run.step({"w": jnp.zeros(2)})
    except TypeError:
        return "TypeError"
    [w] = run.state[0].values()
    return f"{w[0] - 1:g}".replace("nan", "NaN")


CHECKS = {
    "scales the loss": scales,
    "a skipped step keeps weights, moments and schedule": keeps,
    "a batch with NaN lowers the scale": lowers,
    "steps with PyTorch's scale, in a run recorded from `GradScaler`": (
        lambda name: like_pytorch(name)[0]
    ),
    "steps with PyTorch's weights in that run, within 1 %": (
        lambda name: like_pytorch(name)[1]
    ),
    "a loss of 1e35 is reported as": reported,
    "a smallest scale of 8, under `jit`": lambda name: after(
        20, jnp.nan, name, floor=8
    ),
    "Adam's update of a float16 parameter whose gradient is 0": of_zeros,
    "the largest scale": lambda name: after(300, 1e-30, name, interval=1),
}


@pytest.mark.parametrize("row", CELLS)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_cell_says_what_the_step_does(row, name):
    cell, found = CELLS[row][COLUMNS.index(name)], CHECKS[row](name)
    if isinstance(found, float):
        number = re.match(r"[\d.e]+(\^\d+)?", cell)[0].replace("^", "**")
        assert found == pytest.approx(eval(number), rel=1e-4)
    else:
        assert re.split(", unless|:| in a row", cell)[0] == (found or "")
