"""The migration guides, their programs, and how these train."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PAGES, code_blocks, run_page

PATHS = sorted(PAGES.glob("coming_from/*.md"))
GUIDES = {path.stem: path for path in PATHS if path.stem != "index"}
every_guide = pytest.mark.parametrize("guide", GUIDES)


@functools.cache
def run(guide):
    return run_page(GUIDES[guide])


@functools.cache
def run_theirs(guide, programs=1):
    """What the first of their programs define."""
    namespace: dict[str, Any] = {}
    for code in code_blocks(GUIDES[guide].read_text(), "python theirs")[:programs]:
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
        page, index = run(self.guide), slice(64) if self.guide == "keras" else 0
        first, *labels = (jnp.asarray(page[name][index]) for name in self.batch)
        x = np.array(first)
        if bad:
            x.reshape(-1)[-1] = 1e6  # too much for float16 alone
        like = page["shards"] if "parallel_state" in self.state else first
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
