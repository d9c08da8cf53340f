"""The migration guides, their programs, and how these train."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import code_blocks, page, run_blocks

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


@functools.cache
def run_theirs(guide, programs=1):
    """What the first of their programs define."""
    namespace: dict[str, Any] = {}
    for code in code_blocks(GUIDES[guide], "python theirs")[:programs]:
        exec(compile(code, f"{guide}, theirs", "exec"), namespace)
    return namespace


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
        like = names["shards"] if "parallel_state" in self.state else first
        x = jax.device_put(x, like.sharding)
        return ((x, *labels),) if self.guide == "pytorch" else (x, *labels)

    def step(self, state, data):
        return run(self.guide)[self.name](*state, *data)[:-1]


def of(prefix):
    """The names of parameters and state in a second program of a page."""
    return f"{prefix}_step", (f"{prefix}_params", f"{prefix}_state")


TRAININGS = [
    Training("pytorch", backoff=1.0),  # `value=loss` is not finite
    Training("keras"),
    Training("tensorflow"),
    Training("tensorflow", *of("graph")),
    Training("mindspore"),
    Training("mindspore", *of("fixed"), backoff=1.0),
    Training("flax_dynamic_scale", state=("state",), batch=("x",)),
    Training("flax_dynamic_scale", state=("parallel_state",), batch=("x",)),
    Training("jmp", batch=("x",)),
]
every_training = pytest.mark.parametrize(
    "training", TRAININGS, ids=lambda t: f"{t.guide} {t.state[0]}"
)
