"""The page that compares packages: each cell is what its step does."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from book import code_blocks, first_program, page, table
from flax.training.dynamic_scale import DynamicScale
from shared import recordings

import optax_lossscale as ls

pytestmark = pytest.mark.slow
jmp, mpx = pytest.importorskip("jmp"), pytest.importorskip("mpx")

COLUMNS = ["this package", "Flax", "jmp", "mpx", "`apply_if_finite`"]
OURS, FLAX, JMP, MPX, OPTAX = COLUMNS
PLAIN, *STEPS = code_blocks(page("start/compared"), "python theirs")
BLOCKS = dict(zip(COLUMNS, STEPS, strict=True))
TABLE = {row[0]: row[1:] for row in table(page("start/compared"), "| this package")}
ONES = {"w": jnp.ones(2)}
BAD = {"w": jnp.array([1.0, jnp.inf])}


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


class Run:
    """A run of a step of the page, with another loss, optimizer or rule."""

    def __init__(self, name, loss_fn=linear_loss, inner=None, scale=None, params=ONES):
        self.name, self.names = name, first_program() | {"loss_fn": loss_fn}
        exec(BLOCKS[name], self.names)
        tx = inner or optax.adamw(optax.constant_schedule(3e-2))
        if name == OURS:
            tx = ls.with_loss_scaling(tx, scale or rule(OURS))
        elif name == OPTAX:
            tx = optax.apply_if_finite(tx, 5)
        else:
            self.names["scale"] = scale or self.names["scale"]
        self.names["tx"] = tx
        scales = [] if name in (OURS, OPTAX) else [self.names["scale"]]
        self.state = (params, tx.init(params), *scales)

    def step(self, batch):
        *state, self.loss = self.names["train_step"](*self.state, batch)
        self.state = tuple(state)
        return self

    def scale(self):
        if self.name == OURS:
            return float(ls.get_loss_scale(self.state))
        name = {FLAX: "scale", JMP: "loss_scale", MPX: "loss_scaling"}[self.name]
        return float(getattr(self.state[2], name))

    def kept(self):
        """Weights, moments and the count of the schedule."""
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
        return (
            "yes, until `max_consecutive_errors` in a row: then the bad step is applied"
        )
    assert_same_bits(run.kept(), start)
    return "you select" if "new_state" in BLOCKS[name] else "yes"


def lowers(name):
    if name == OPTAX:
        return ""
    run = Run(name)
    before = run.scale()
    assert run.step({"w": jnp.full(2, jnp.nan)}).scale() == before / 2
    return "yes, unless it passes `value=loss`" if name == OURS else "yes"


@functools.cache
def recorded(name):
    """For how many steps scale and weights are those of PyTorch."""
    cases = recordings("torch_end_to_end")["cases"]
    case = next(case for case in cases if case["id"] == "sgd_momentum")
    steps, arguments = case["steps"], case["scaler_arguments"]
    scale = rule(name, float(arguments["init_scale"]), arguments["growth_interval"])
    inner = optax.sgd(*case["optimizer_arguments"].values())
    params = {"w": jnp.array(case["initial_params"], jnp.float32)}
    run, same_scale, same_weights = Run(name, linear_loss, inner, scale, params), [], []
    used = np.array(steps["scale_used"], np.float32)
    grads = np.array(steps["scaled_grads"], np.float32) / used[:, None]
    for step, grad in enumerate(grads):
        run.step({"w": jnp.asarray(grad)})
        if name != OPTAX:
            same_scale.append(run.scale() == steps["scale_after"][step])
        weights = np.array(steps["params"][step])
        close = np.abs(run.state[0]["w"] - weights) < 0.01 * np.abs(weights).max()
        same_weights.append(bool(np.all(close)))
    return same_scale, same_weights


def length(same):
    return f"all {len(same)}" if all(same) else str(same.index(False))


def like_pytorchs_scale(name):
    same, _ = recorded(name)
    reason = ": it grows a step late" if name == FLAX else ""
    return length(same) + reason if same else ""


def like_pytorchs_weights(name):
    _, same = recorded(name)
    reason = ": it halves the gradients when the scale grows" if name == MPX else ""
    return length(same) + reason


def reported(name):
    def loss_fn(params, batch):
        return jnp.float32(1e35) + 0 * params["w"].sum()

    return f"{Run(name, loss_fn).step(None).loss:.0e}".replace("+", "")


def floor(name):
    if name == OPTAX:
        return ""
    run = Run(name, scale=rule(name, floor=8.0))
    for _ in range(20):
        run.step(BAD)
    return f"{run.scale():.0f}"


def ceiling(name):
    if name == OPTAX:
        return ""
    run = Run(name, scale=rule(name, interval=1))
    for _ in range(300):
        run.step({"w": jnp.full(2, 1e-30)})
    octaves = np.log2(run.scale())
    whole = octaves == round(octaves) and name in (OURS, JMP)
    text = f"2^{octaves:.0f}" if whole else f"{run.scale():.5g}".replace("e+", "e")
    return text + ", or yours" * (name == OURS)


ROWS = {
    "scales the loss": scales,
    "a skipped step keeps weights, moments and schedule": keeps,
    "a batch with NaN lowers the scale": lowers,
    "steps with PyTorch's scale, in a run recorded from `GradScaler`": (
        like_pytorchs_scale
    ),
    "steps with PyTorch's weights in that run, within 1 %": like_pytorchs_weights,
    "a loss of 1e35 is reported as": reported,
    "a smallest scale of 8, under `jit`": floor,
    "the largest scale": ceiling,
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_cell_says_what_the_step_does(row, name):
    assert ROWS[row](name) == TABLE[row][COLUMNS.index(name)]


def test_every_row_is_checked():
    assert ROWS.keys() == TABLE.keys()
