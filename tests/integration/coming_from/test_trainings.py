"""The programs of all migration guides train, skip, save and resume."""

import functools
import re
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits, kept, state_in
from book import code_blocks, page, run_blocks

import optax_lossscale as ls

# By page, in the order of its headings "From ...".
PARTS = {
    "pytorch": ["pytorch"],
    "keras_and_tensorflow": ["keras", "tensorflow"],
    "mindspore": ["mindspore"],
    "flax_and_jmp": ["flax_dynamic_scale", "jmp"],
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
    backoff: float = 0.5

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
    Training("pytorch", backoff=1.0),  # `value=loss` is not finite
    Training("keras"),
    Training("keras", "network_step", ("trainable", "other", "network_state")),
    Training("tensorflow"),
    Training("mindspore"),
    Training("flax_dynamic_scale", state=("state",), batch=("x",)),
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
