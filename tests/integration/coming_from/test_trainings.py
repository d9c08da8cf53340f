"""The programs of all migration guides train, skip, save and resume."""

import contextlib
import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, kept, state_in
from book import code_blocks, page, run_blocks
from flax import jax_utils, nnx, serialization
from flax.training import checkpoints
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ls

# The text below each heading "From ...", or below such a title.
GUIDES = {}
for stem in ("pytorch", "keras_and_tensorflow", "mindspore", "flax_and_jmp"):
    text = page(f"coming_from/{stem}")
    _, *parts = re.split(r"^#+ .*?[Ff]rom (\w+)", text, flags=re.M)
    GUIDES |= zip(map(str.lower, parts[::2]), parts[1::2], strict=True)
MPX = ["mpx", "mpx with its casts"]  # a step alone
WHOLE = [name for name in GUIDES if name not in MPX]
slow = pytest.mark.slow


def programs(guide, language="python"):
    """The blocks of a guide. A diff shows both programs, TensorFlow's is Keras's."""
    blocks = code_blocks(GUIDES[guide], language)
    if guide in ("flax", "jmp"):
        side = "+" if language == "python" else "-"
        return [side_of(code_blocks(GUIDES[guide], "diff")[0], side), *blocks]
    if guide == "tensorflow" and language == "python":
        rule, *blocks = blocks
        whole = programs("keras")[0]
        blocks = [re.sub(r"^rule = .*\n", rule, whole, flags=re.M), *blocks]
        assert blocks[0] != whole
    return blocks


def side_of(diff, side):
    """The lines of one side of a diff."""
    lines = [x for x in diff.splitlines() if x[:1] in ("", " ", side)]
    return "".join(f"{x[1:]}\n" for x in lines)


@functools.cache
def run(guide, language="python"):
    if guide in MPX:
        return run_mpx(guide)
    return run_blocks(programs(guide, language), guide, {})


def run_mpx(guide):
    """A step of Equinox with the rule of mpx, and perhaps with its casts."""

    def loss_fn(model, x):
        out = jax.vmap(model)(x).astype(jnp.float32)
        return jnp.mean((out - x[:, :1]) ** 2)

    def half_loss(model, x):
        mpx = pytest.importorskip("mpx")
        return loss_fn(*mpx.cast_to_half_precision((model, x)))

    tx = ls.with_loss_scaling(optax.adam(1e-2), ls.presets.mpx_dynamic(2.0**15))
    loss_here = ls.autocast(loss_fn, jnp.float16) if guide == "mpx" else half_loss

    @eqx.filter_jit
    def step(model, opt_state, x):
        differentiate = eqx.filter_value_and_grad
        fun = ls.value_and_grad(loss_here, opt_state, value_and_grad=differentiate)
        loss, grads = fun(model, x)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return eqx.apply_updates(model, updates), opt_state, loss

    model, losses = eqx.nn.MLP(8, 1, 32, depth=1, key=jax.random.key(0)), []
    x = jax.random.normal(jax.random.key(1), (1, 64, 8))
    state = model, tx.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(100):
        *state, loss = step(*state, x[0])
        losses.append(loss)
    model, opt_state = state
    names = {"train_step": step, "x": x, "losses": losses}
    return {**names, "model": model, "opt_state": opt_state}


@pytest.mark.parametrize("guide", ["pytorch", "keras", "flax", "jmp"])
def test_programs_of_other_systems_are_python(guide):
    (program,) = programs(guide, "python theirs")
    compile(program, guide, "exec")


@slow
@pytest.mark.parametrize("guide", ["flax", "jmp"])
def test_both_programs_print_the_same_scale_and_loss(guide):
    theirs, ours = (run(guide, x)["printed"] for x in ("python theirs", "python"))
    (their_loss, their_scale), (loss, scale) = (
        re.findall(r"[\d.]+", printed) for printed in (theirs, ours)
    )
    assert their_scale == scale
    assert float(loss) == pytest.approx(float(their_loss), rel=0.02)


@slow
@pytest.mark.parametrize("guide", [*WHOLE, *MPX])
def test_every_program_trains(guide):
    losses = np.array(run(guide)["losses"])
    assert losses[-1] < 0.05 * losses[0]


@slow
def test_window_in_nnx_trains_and_is_dropped_as_a_whole():
    guide = run("pytorch")
    model, optimizer, step = (guide[x] for x in ("model", "optimizer", "nnx_step"))
    assert guide["nnx_losses"][-1] < 0.05 * guide["nnx_losses"][0]
    before = jax.tree.map(jnp.copy, kept((nnx.state(model), optimizer)))
    x, y = guide["x"][0].copy(), guide["y"][0]
    x[2, 0, 0] = 1e6
    step(model, optimizer, (x, y))
    assert not ls.was_applied(optimizer)
    assert_same_bits(kept((nnx.state(model), optimizer)), before)


STATE, BATCH = ("params", "opt_state"), ("x", "y")
# The page's names of a step, of its state and of its batch, and what the system does to
# the scale after an overflow: nothing with `value=loss`, which is not finite.
TRAININGS = [
    ("pytorch", "train_step", STATE, BATCH, 1.0),
    ("keras", "train_step", STATE, BATCH, 0.5),
    ("keras", "network_step", ("trainable", "other", "network_state"), BATCH, 0.5),
    ("tensorflow", "train_step", STATE, BATCH, 0.5),
    ("mindspore", "train_step", STATE, BATCH, 0.5),
    ("flax", "train_step", ("state",), ("x",), 1.0),
    ("jmp", "train_step", STATE, ("x",), 0.5),
    *((name, "train_step", ("model", "opt_state"), ("x",), 1.0) for name in MPX),
]


@slow
@pytest.mark.parametrize(
    ("guide", "step", "state", "batch", "backoff"),
    TRAININGS,
    ids=[f"{guide}, {step}" for guide, step, *_ in TRAININGS],
)
def test_bad_batch_changes_nothing_but_perhaps_the_scale(
    guide, step, state, batch, backoff
):
    page, index = run(guide), slice(64) if guide in ("keras", "tensorflow") else 0
    x, *labels = (jnp.asarray(page[name][index]) for name in batch)
    before = tuple(page[name] for name in state)

    def after(x):
        data = x, *labels
        # PyTorch's step takes micro-batches.
        return page[step](*before, *([data] if guide == "pytorch" else data))[:-1]

    assert ls.was_applied(state_in(after(x)))
    bad = after(x.at[(-1,) * x.ndim].set(1e6))  # too much for float16 alone
    assert not ls.was_applied(state_in(bad))
    assert_same_bits(kept(bad), kept(before))
    old, new = (ls.get_loss_scale_state(state_in(run)) for run in (before, bad))
    assert new.loss_scale == backoff * old.loss_scale


@slow
@pytest.mark.parametrize("guide", WHOLE)
def test_run_of_another_system_continues_here(guide):
    """With the scale and the counters: the next step moves the scale, good or bad."""
    page = run(guide)
    state, rule = page["resumed_state"], page["rule"]
    scales = [rule.update(state.scale_state, x).loss_scale for x in (False, True)]
    assert scales[0] < ls.get_loss_scale(state) == 16384.0 < scales[1] == 32768.0


def resumed_from(guide, *names):
    """What the page defines if it resumes a run of the other system."""
    ours, theirs = run(guide), run(guide, "python theirs")
    block = programs(guide)[1]
    # The page makes an old state of its own, which has no other inside.
    block, count = re.subn(r"(old_opt_state = .*?)\.inner_state", r"\1", block)
    assert count == 1
    return run_blocks([block], guide, {**ours, **{x: theirs[x] for x in names}}), theirs


@slow
def test_optimizer_state_of_flax_is_kept_and_trained():
    new, theirs = resumed_from("flax", "state")
    assert_same_bits(new["resumed_state"].inner_state, theirs["state"].opt_state)
    resumed, _ = new["train_step"](new["resumed"], new["x"][0])
    assert resumed.step == new["old"].step + 1 and ls.was_applied(resumed)


@slow
def test_optimizer_state_of_jmp_is_kept():
    new, theirs = resumed_from("jmp", "opt_state", "params")
    assert_same_bits(new["resumed_state"].inner_state, theirs["opt_state"])


def test_run_of_megatron_continues_with_its_master_weights():
    params = {"w": np.full((8, 1), 1.0 + 2.0**-12, np.float32)}
    names = {"jax": jax, "jnp": jnp, "optax": optax, "ls": ls, "params": params}
    blocks = code_blocks(page("coming_from/index"), "python")
    run = run_blocks(blocks, "megatron", names)
    state, update = run["resumed_state"], jax.jit(run["tx"].update)
    assert ls.get_loss_scale(state) == 2.0**14
    assert_same_bits(optax.tree.get(state, "master_weights"), params)
    for gradient, scale in ((1.0, 2.0**15), (np.inf, 2.0**13)):
        grads = {"w": np.full((8, 1), gradient, np.float32)}
        _, new = update(grads, state, run["half_params"])
        assert ls.get_loss_scale(new) == scale


@slow
def test_checkpoint_of_flax_is_restored_into_the_old_train_state_alone(tmp_path):
    """Into the new one, Flax restores the weights, and leaves Adam at its start."""
    ours, theirs = run("flax"), run("flax", "python theirs")
    old, tx = theirs["state"], ours["tx"]
    checkpoints.save_checkpoint(tmp_path, old, step=100)
    fresh = tx.init(old.params)
    same = checkpoints.restore_checkpoint(tmp_path, old.replace(opt_state=fresh))
    assert_same_bits(same.opt_state, old.opt_state)
    raw = serialization.msgpack_restore(theirs["checkpoint"])["opt_state"]
    assert_same_bits(serialization.from_state_dict(fresh, raw), old.opt_state)

    new = ours["state"].replace(opt_state=ours["state"].tx.init(old.params))
    reset = checkpoints.restore_checkpoint(tmp_path, new)
    assert_same_bits((reset.params, reset.opt_state), (old.params, new.opt_state))


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, dtype=jnp.float16)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name="batch")(x)
        return nn.Dense(1, dtype=jnp.float16)(nn.relu(x)).astype(jnp.float32)


def after_imagenet_steps(side, batches):
    """The state on 8 devices after the lines of one side of the page's diff."""
    lines = side_of(code_blocks(GUIDES["flax"], "diff")[1], side)
    names = run("flax", "python theirs" if side == "-" else "python")

    class State(names["TrainState"]):
        batch_stats: dict

    def step(state, x):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
            return jnp.mean((out - x[:, :1]) ** 2), (new, out)

        found = {**names, "state": state, "loss_fn": loss_fn}
        return run_blocks([lines], "diff", found)["new_state"]

    net, tx = Norm(), optax.adam(1e-2)
    fields = net.init(jax.random.key(0), batches[0])
    if side == "-":
        fields["dynamic_scale"] = DynamicScale(scale=jnp.float32(2.0**15))
    else:
        tx = ls.with_loss_scaling(tx)
    state = jax_utils.replicate(State.create(apply_fn=net.apply, tx=tx, **fields))
    mapped = jax.pmap(step, axis_name="batch")
    for batch in batches:
        state = mapped(state, batch.reshape(8, -1, 8))
    return state


@slow
def test_imagenet_program_of_flax_is_converted_line_by_line():
    """A bad shard leaves weights, statistics and step as they were, on all devices."""
    good = jnp.asarray(run("flax")["x"][0])
    bad, both = good.at[-1, -1].set(jnp.inf), [good, good]
    ours, undisturbed, theirs = (
        after_imagenet_steps(side, batches)
        for side, batches in (("+", [good, bad, good]), ("+", both), ("-", both))
    )
    for name in ("params", "batch_stats", "step"):
        assert_same_bits(*(getattr(x, name) for x in (ours, undisturbed)))
    ours, theirs = (x.params["Dense_0"]["kernel"] for x in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert len(np.unique(ours, axis=0)) == 1


SCALED = "(lambda *x: loss_fn(*x) * ls.get_loss_scale(opt_state),"
DIVIDED = "grads = jax.tree.map(lambda x: x / ls.get_loss_scale(opt_state), grads)"
SELECTED = "opt_state = ls.select(jnp.isfinite(loss), opt_state, old)"
OLD_LINES = {
    "scale": ("`scale`, `unscale`,", "(loss_fn,", SCALED),
    "division": ("and a division by", "    updates", f"    {DIVIDED}\n    updates"),
    "select": ("`jmp.select_tree` of", "    return", f"    {SELECTED}\n    return"),
}
WARNINGS = {
    "scale": "The loss is scaled twice",
    "division": "divided by the loss scale by hand",
}


@slow
@pytest.mark.parametrize("name", OLD_LINES)
def test_page_names_old_lines_of_jmp_that_harm(name):
    """An old line, put back, changes the loss or the scale."""
    words, line, old_line = OLD_LINES[name]
    head, step = programs("jmp")[0].split("@jax.jit\n")
    step = f"@jax.jit\n{step}".replace("x):\n", "x):\n    old = opt_state\n", 1)

    def after_a_bad_batch(step):
        names = run_blocks([head, step], "jmp", {})
        bad = np.full_like(names["x"][0], 1e6)
        _, state, _ = names["train_step"](names["params"], names["opt_state"], bad)
        return names["losses"][-1], ls.get_loss_scale(state)

    right = after_a_bad_batch(step)
    warns = pytest.warns(UserWarning, match=WARNINGS.get(name))
    with warns if name in WARNINGS else contextlib.nullcontext():
        wrong = after_a_bad_batch(step.replace(line, old_line, 1))
    assert not np.allclose(right, wrong, rtol=0.01)
    removed = page("coming_from/flax_and_jmp").split("## Lines to remove")[1]
    assert words in removed.split("\n## ")[0]


def test_gradients_are_sent_in_float16_while_they_are_scaled():
    """As in Haiku's imagenet program; unscaled gradients near 1e-8 become 0."""
    state, x = ls.FixedLossScale(2.0**15).init(), np.linspace(1e-8, 2e-8, 8)

    def sent(grads):
        return jax.lax.pmean(grads.astype(jnp.float16), "batch").astype(jnp.float32)

    def gradients(w, x):
        scaled = jax.grad(lambda w: ls.scale_loss(jnp.sum(w * x), state))(w)
        true = ls.grad(lambda w: jnp.sum(w * x), state)(w)
        return ls.unscale_grads(sent(scaled), state), sent(true)

    mapped = jax.jit(jax.vmap(gradients, axis_name="batch", in_axes=(None, 0)))
    right, wrong = mapped(np.ones(3, np.float32), np.float32(x))
    np.testing.assert_allclose(right, np.mean(x), rtol=1e-3)
    assert not np.any(wrong)
