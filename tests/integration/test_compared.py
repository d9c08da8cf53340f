"""The page that compares packages: each cell is what its step does."""

import functools
import importlib
import inspect
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from book import code_blocks, first_program, page, table
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec as P
from meshes import on_mesh
from shared import recordings

import optax_lossscale as ls

pytestmark = pytest.mark.slow
jmp, mpx = pytest.importorskip("jmp"), pytest.importorskip("mpx")

COLUMNS = ["this package", "Flax", "jmp", "mpx", "`apply_if_finite`"]
OURS, FLAX, JMP, MPX, OPTAX = COLUMNS
PLAIN, *STEPS = code_blocks(page("start/compared"), "python theirs")
BLOCKS = dict(zip(COLUMNS, STEPS, strict=True))
TABLE = {row[0]: row[1:] for row in table(page("start/compared"), "| this package")}
BAD = {"w": jnp.array([1.0, jnp.inf])}


def linear_loss(params, batch):
    """Its gradients are the batch."""
    return sum(jnp.vdot(params[name], batch[name]) for name in params)


def rule(name, init=2.0**15, interval=2000, floor=1.0):
    init32, floor32 = jnp.float32(init), jnp.float32(floor)
    return {
        OURS: ls.DynamicLossScale(init, growth_interval=interval, min_scale=floor),
        FLAX: DynamicScale(2.0, 0.5, interval, 0, init, floor),
        JMP: jmp.DynamicLossScale(init32, jnp.int32(0), interval, 2, floor32),
        MPX: mpx.DynamicLossScaling(init32, floor32, period=interval),
        OPTAX: None,
    }[name]


class Program:
    """A step of the page, with another loss, optimizer or rule."""

    def __init__(self, name, scale=None, loss_fn=linear_loss, inner=None, change=None):
        block = BLOCKS[name].replace("optax.adamw(3e-2)", "inner")
        if change:
            assert change[0] in block
            block = block.replace(*change)
        names = first_program() | {"loss_fn": loss_fn}
        names["inner"] = inner or optax.adamw(optax.constant_schedule(3e-2))
        if scale is not None and name == OURS:
            names["rule"] = scale
            block = block.replace("inner)", "inner, rule)")
        exec(block, names)
        if scale is not None and name != OURS:
            names["scale"] = scale
        self.name, self.names = name, names

    def start(self, params):
        state = params, self.names["tx"].init(params)
        return (*state, self.names["scale"]) if "scale" in self.names else state

    def step(self, run, batch):
        *run, self.loss = self.names["train_step"](*run, batch)
        return tuple(run)

    def scale(self, run):
        if self.name == OURS:
            return float(ls.get_loss_scale(run))
        name = {FLAX: "scale", JMP: "loss_scale", MPX: "loss_scaling"}[self.name]
        return float(getattr(run[2], name))


def kept(run):
    """Weights, moments and the count of the schedule."""
    return run[0], getattr(run[1], "inner_state", run[1])


def lines(name):
    old = {line.strip() for line in PLAIN.splitlines()}
    new = [line.strip() for line in BLOCKS[name].splitlines()]
    changed = [x for x in new if x not in old and not x.startswith(("import", "from"))]
    with_value = f", {len(changed) + 1} with `value=loss`" if name == OURS else ""
    return f"{len(changed)}{with_value}"


def scales(name):
    def loss_fn(params, batch):
        loss = linear_loss({"w": jnp.float16(params["w"])}, batch)
        return 2.0**-28 * jnp.float32(loss)

    program = Program(name, loss_fn=loss_fn, inner=optax.sgd(2.0**28))
    params, batch = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
    new, *_ = program.step(program.start(params), batch)
    return "no" if jnp.array_equal(new["w"], params["w"]) else "yes"


def keeps(name):
    program = Program(name)
    run = start = program.start({"w": jnp.ones(2)})
    for _ in range(5):
        run = program.step(run, BAD)
        assert_same_bits(kept(run), kept(start))
    run = program.step(run, BAD)
    if not np.all(np.isfinite(run[0]["w"])):
        allowed = "max_consecutive_errors"
        assert f"{allowed}=5" in BLOCKS[name]
        return f"yes, until `{allowed}` in a row: then the bad step is applied"
    assert_same_bits(kept(run), kept(start))
    return "you select" if "new_state" in BLOCKS[name] else "yes"


def keeps_statistics(name):
    program = Program(name)
    run = program.step(program.start({"w": jnp.ones(2)}), BAD)
    new, old = jnp.full(2, jnp.inf), jnp.zeros(2)
    if name == FLAX:
        return "you select"
    if name == OPTAX:
        assert not run[1].last_finite
        return "you select, by `last_finite`"
    selected = {
        OURS: lambda: ls.keep_if_applied(run[1], new, old),
        JMP: lambda: jmp.select_tree(jmp.all_finite(BAD), new, old),
        MPX: lambda: mpx.select_tree(mpx.all_finite(BAD), new, old),
    }[name]()
    assert_same_bits(selected, old)
    return "`keep_if_applied`" if name == OURS else "`select_tree`"


def lowers(name):
    if name == OPTAX:
        return ""
    batch, params = {"w": jnp.full(2, jnp.nan)}, {"w": jnp.ones(2)}
    program = Program(name, rule(name))
    before = program.start(params)
    after = program.step(before, batch)
    assert program.scale(after) == program.scale(before) / 2
    if name != OURS:
        return "yes"
    value = "opt_state, params)\n", "opt_state, params, value=loss)\n"
    after = Program(name, rule(name), change=value).step(before, batch)
    assert program.scale(after) == program.scale(before)
    return "not with `value=loss`"


@functools.cache
def recorded(name):
    """For how many steps scale and weights are those of PyTorch."""
    cases = recordings("torch_end_to_end")["cases"]
    case = next(case for case in cases if case["id"] == "sgd_momentum")
    steps, arguments = case["steps"], case["scaler_arguments"]
    scale = rule(name, float(arguments["init_scale"]), arguments["growth_interval"])
    if name == OURS:
        scale = ls.presets.torch_grad_scaler(**arguments)
    inner = optax.sgd(*case["optimizer_arguments"].values())
    program = Program(name, scale, inner=inner)
    run = program.start({"w": jnp.array(case["initial_params"], jnp.float32)})
    same_scale, same_weights = [], []
    used = np.array(steps["scale_used"], np.float32)
    grads = np.array(steps["scaled_grads"], np.float32) / used[:, None]
    for step, grad in enumerate(grads):
        run = program.step(run, {"w": jnp.asarray(grad)})
        if name != OPTAX:
            same_scale.append(program.scale(run) == steps["scale_after"][step])
        weights = np.array(steps["params"][step])
        close = np.abs(run[0]["w"] - weights) < 0.01 * np.abs(weights).max()
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

    program = Program(name, loss_fn=loss_fn)
    program.step(program.start({"w": jnp.ones(2)}), None)
    return f"{program.loss:.0e}".replace("+", "")


def floor(name):
    if name == OPTAX:
        return ""
    program = Program(name, rule(name, floor=8.0))
    run = program.start({"w": jnp.ones(2)})
    for _ in range(20):
        run = program.step(run, BAD)
    return f"{program.scale(run):.0f}"


def ceiling(name):
    if name == OPTAX:
        return ""
    program = Program(name, rule(name, interval=1))
    run, batch = program.start({"w": jnp.ones(2)}), {"w": jnp.full(2, 1e-30)}
    for _ in range(300):
        run = program.step(run, batch)
    scale = program.scale(run)
    text = f"2^{np.log2(scale):.0f}"
    if 2.0 ** round(np.log2(scale)) != scale:
        text = f"{scale:.0f}" if scale < 1e6 else f"{scale:.2g}".replace("+", "")
    return text + ", or yours" * (name == OURS)


def rules(name):
    if name == OPTAX:
        return ""
    if name == OURS:
        public = [getattr(ls, x) for x in ls.__all__]
        classes = [x for x in public if inspect.isclass(x)]
        number = sum(issubclass(x, ls.LossScale) for x in classes) - 1
        return f"{number}, yours, and those of 12 systems"
    module = {FLAX: "flax.training.dynamic_scale", JMP: "jmp", MPX: "mpx"}[name]
    names = dir(importlib.import_module(module))
    assert any(name.startswith("Dynamic") for name in names)
    fixed = any(name.startswith("Static") for name in names)
    return "dynamic, fixed" if fixed else "dynamic"


def on_eight_devices(name):
    mean = ("(loss_fn)", "(loss_fn, axis_name='d')") if name == FLAX else None
    inner = optax.sgd(0.1)
    program = Program(name, inner=inner, change=mean)
    if name == OURS:
        program.names["tx"] = ls.with_loss_scaling(inner, axis_name="d")
    params = {"w": jnp.ones(2)}
    _, *others = program.start(params)

    def step(grad):
        new, *_ = program.step((params, *others), {"w": grad[0]})
        return jnp.any(new["w"] != params["w"])[None]

    grads = jnp.ones((8, 2)).at[5, 0].set(jnp.inf)
    changed = on_mesh(step, P("d"), P("d"), check_vma=False)(grads)
    if not np.any(changed):
        return "all skip, with `axis_name`"
    assert list(changed) == [i != 5 for i in range(8)]
    return "each decides alone"


ROWS = {
    "lines that differ from a plain step": lines,
    "scales the loss": scales,
    "a skipped step keeps weights, moments and schedule": keeps,
    "it keeps BatchNorm statistics": keeps_statistics,
    "a batch with NaN lowers the scale": lowers,
    "steps with PyTorch's scale, in a run recorded from `GradScaler`": (
        like_pytorchs_scale
    ),
    "steps with PyTorch's weights in that run, within 1 %": like_pytorchs_weights,
    "a loss of 1e35 is reported as": reported,
    "a smallest scale of 8, under `jit`": floor,
    "the largest scale": ceiling,
    "rules": rules,
    "each device keeps its own gradients, and one overflows": on_eight_devices,
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_cell_says_what_the_step_does(row, name):
    assert ROWS[row](name) == TABLE[row][COLUMNS.index(name)]


def test_every_other_row_was_measured():
    costs = page("what_it_costs")
    of_mpx = re.search(r"update by adamw takes (\S+) .* float16 (\S+) times", costs)
    (counted,) = re.findall(r"mpx's recipe moves .*?, (\S+) with", costs)
    gpu = {row[0]: row for row in table(costs, "H100 and T4")}["adamw"]
    cpu = {row[0]: row for row in table(costs, "16.8 million")}

    def timed(row, mpx):
        _, _, ours, _, optax, jmp, flax = cpu[row]
        return [ours, flax, jmp, mpx, optax]

    assert [row for name, row in TABLE.items() if name not in ROWS] == [
        [gpu[1], gpu[3], gpu[3], counted, gpu[4]],
        timed("adamw", of_mpx[1]),
        timed("whole step of a small transformer, float16", of_mpx[2]),
    ]


def test_their_file_is_as_short_as_the_page_says():
    source = inspect.getsource(importlib.import_module(DynamicScale.__module__))
    assert len(source.splitlines()) < 200
