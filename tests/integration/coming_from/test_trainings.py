"""The programs of all migration guides train, skip, save and resume."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, kept, state_in
from book import code_blocks, page, run_blocks
from flax import serialization
from flax.training import checkpoints

import optax_lossscale as ls

# By page, in the order of its headings "From ...".
PARTS = {
    "pytorch": ["pytorch"],
    "keras_and_tensorflow": ["keras", "tensorflow"],
    "mindspore": ["mindspore"],
    "flax_and_jmp": ["flax_dynamic_scale", "jmp", "mpx"],
}
GUIDES = {
    name: text
    for stem, names in PARTS.items()
    for name, text in zip(
        names,
        re.split(r"^## From ", page(f"coming_from/{stem}"), flags=re.M)[-len(names) :],
        strict=True,
    )
}
MPX = GUIDES.pop("mpx")  # a step alone
every_guide = pytest.mark.parametrize("guide", GUIDES)


@functools.cache
def run(guide):
    return run_blocks(code_blocks(GUIDES[guide], "python"), guide, {})


class Training(NamedTuple):
    """A step of a guide, and what its system does to the scale after an overflow."""

    guide: str
    name: str = "train_step"
    state: tuple[str, ...] = ("params", "opt_state")
    batch: tuple[str, ...] = ("x", "y")
    backoff: float = 0.5  # 1.0 with `value=loss`, which is not finite

    def start(self):
        """The state at the end of the page."""
        return tuple(run(self.guide)[name] for name in self.state)

    def data(self, bad=False):
        """A batch, or one that overflows, in PyTorch's in one micro-batch."""
        names, index = run(self.guide), slice(64) if self.guide == "keras" else 0
        first, *labels = (jnp.asarray(names[name][index]) for name in self.batch)
        x = np.array(first)
        if bad:
            x.reshape(-1)[-1] = 1e6  # too much for float16 alone
        return ((x, *labels),) if self.guide == "pytorch" else (x, *labels)

    def step(self, state, data):
        return run(self.guide)[self.name](*state, *data)[:-1]


TRAININGS = [
    Training("pytorch", backoff=1.0),
    Training("keras"),
    Training("keras", "network_step", ("trainable", "other", "network_state")),
    Training("tensorflow"),
    Training("mindspore"),
    Training("flax_dynamic_scale", state=("state",), batch=("x",), backoff=1.0),
    Training("jmp", batch=("x",)),
]


@every_guide
def test_their_programs_are_python(guide):
    compile("".join(code_blocks(GUIDES[guide], "python theirs")), guide, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["flax_dynamic_scale", "jmp"])
def test_their_program_and_ours_print_the_same_scale_and_loss(guide):
    theirs = run_blocks(code_blocks(GUIDES[guide], "python theirs"), guide, {})
    printed = [re.findall(r"[\d.]+", x["printed"]) for x in (theirs, run(guide))]
    (their_loss, their_scale), (loss, scale) = printed
    assert their_scale == scale
    assert float(loss) == pytest.approx(float(their_loss), rel=0.02)


@pytest.mark.slow
@every_guide
def test_every_program_trains(guide):
    losses = np.array(run(guide)["losses"])
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS, ids=lambda t: f"{t.guide} {t.state[0]}")
def test_a_bad_batch_changes_the_scale_alone(training):
    assert ls.was_applied(state_in(training.step(training.start(), training.data())))
    before = training.start()
    bad = training.step(before, training.data(bad=True))
    assert not ls.was_applied(state_in(bad))
    assert_same_bits(kept(bad), kept(before))
    old, new = (ls.get_loss_scale_state(state_in(run)) for run in (before, bad))
    assert new.loss_scale == training.backoff * old.loss_scale


@pytest.mark.slow
@every_guide
def test_a_run_begun_there_goes_on_here(guide):
    """With the scale and the counter: the next finite step is one that grows."""
    page = run(guide)
    state, rule = page["resumed_state"], page["rule"]
    assert ls.get_loss_scale(state) == 16384.0
    assert rule.update(state.scale_state, True).loss_scale == 32768.0
    assert_same_bits(state.inner_state, page.get("old_opt_state", state.inner_state))


@pytest.mark.slow
def test_a_whole_train_state_is_kept_but_for_the_scale():
    """By `keep_if_applied`; what does not know our states puts the old scale back."""
    state = jax.tree.map(jnp.asarray, run("flax_dynamic_scale")["state"])
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), state.params)
    new_state = state.apply_gradients(grads=bad, value=1.0)
    scale, applied = ls.get_loss_scale(state), ls.was_applied(new_state)
    kept_state = ls.keep_if_applied(new_state, new_state, state)
    assert ls.get_loss_scale(kept_state) == scale / 2
    assert_same_bits(kept(kept_state), kept(state))
    assert kept_state.step == state.step == new_state.step - 1
    jmp = pytest.importorskip("jmp")
    for select in (ls.select, jmp.select_tree, select_leaves):
        assert ls.get_loss_scale(select(applied, new_state, state)) == scale


def select_leaves(applied, new, old):
    return jax.tree.map(functools.partial(jnp.where, applied), new, old)


@pytest.mark.slow
def test_a_checkpoint_of_flax_is_restored_into_its_own_state(tmp_path):
    """Into the new one, Flax restores the weights, and leaves Adam at its start."""
    ours = run("flax_dynamic_scale")
    blocks = code_blocks(GUIDES["flax_dynamic_scale"], "python theirs")
    theirs = run_blocks(blocks, "flax", {})
    old, tx = theirs["state"], ours["tx"]
    checkpoints.save_checkpoint(tmp_path, old, step=100)

    fresh = old.replace(opt_state=tx.init(old.params))
    restored = checkpoints.restore_checkpoint(tmp_path, fresh)
    assert_same_bits(restored.opt_state, old.opt_state)
    d = serialization.msgpack_restore(theirs["checkpoint"])
    restored = serialization.from_state_dict(tx.init(old.params), d["opt_state"])
    assert_same_bits(restored, old.opt_state)

    new = ours["state"].replace(opt_state=ours["state"].tx.init(old.params))
    reset = checkpoints.restore_checkpoint(tmp_path, new)
    assert_same_bits(reset.params, old.params)
    assert_same_bits(reset.opt_state, new.opt_state)


@pytest.mark.slow
@pytest.mark.parametrize("cast", ["scaled", "true"])
def test_gradients_are_sent_in_float16_while_they_are_scaled(cast):
    """As in Haiku's imagenet program; true gradients near 1e-8 become 0."""
    state, x = ls.FixedLossScale(2.0**15).init(), jnp.linspace(1e-8, 2e-8, 8)

    def sent(grads):
        half = jax.tree.map(lambda g: g.astype(jnp.float16), grads)
        return jax.tree.map(
            lambda g: g.astype(jnp.float32), jax.lax.pmean(half, "batch")
        )

    def gradients(w, x):
        def loss_fn(w):
            return jnp.sum(w * x)

        if cast == "true":
            return sent(ls.grad(loss_fn, state)(w))
        grads = jax.grad(lambda w: ls.scale_loss(loss_fn(w), state))(w)
        return ls.unscale_grads(sent(grads), state)

    mapped = jax.vmap(gradients, axis_name="batch", in_axes=(None, 0))
    off = mapped(jnp.ones(3), x) / jnp.mean(x) - 1
    np.testing.assert_allclose(off, 0 if cast == "scaled" else -1, atol=1e-3)


@pytest.fixture(scope="module")
def mpx_step():
    """The step of the page, with a loss, and its first state."""
    eqx = pytest.importorskip("equinox")

    def loss_fn(model, x):
        out = jax.vmap(model)(x).astype(jnp.float32)
        return jnp.mean((out - x[:, :1]) ** 2)

    tx = ls.with_loss_scaling(optax.adam(1e-2), ls.presets.mpx_dynamic(2.0**15))
    names = {"eqx": eqx, "ls": ls, "loss_fn": loss_fn, "tx": tx}
    names = run_blocks(code_blocks(MPX, "python"), "mpx", names)
    model = eqx.nn.MLP(8, 1, 32, depth=1, key=jax.random.key(0))
    start = model, tx.init(eqx.filter(model, eqx.is_inexact_array))
    return names, start, jax.random.normal(jax.random.key(1), (64, 8))


@pytest.mark.slow
@pytest.mark.parametrize("casts", ["autocast", "mpx"])
def test_the_step_for_mpx_trains_and_skips(mpx_step, casts):
    names, state, x = mpx_step
    loss_fn = names["loss_fn"]
    if casts == "mpx":
        mpx = pytest.importorskip("mpx")

        def half_loss(model, x):
            return loss_fn(*mpx.cast_to_half_precision((model, x)))

        (block,) = code_blocks(MPX, "python")
        block = block.replace("ls.autocast(loss_fn)", "loss_fn")
        names = run_blocks([block], "mpx", {**names, "loss_fn": half_loss})
    losses = []
    for _ in range(100):
        *state, loss = names["train_step"](*state, x)
        losses.append(loss)
    assert losses[-1] < 0.05 * losses[0]
    *after, _ = names["train_step"](*state, x.at[0, 0].set(1e6))
    assert not ls.was_applied(after[1])
    assert_same_bits(kept(after), kept(state))
