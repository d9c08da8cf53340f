"""The migration guides, their programs, and how these train."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import PAGES, code_blocks, run_page

PATHS = sorted(PAGES.glob("coming_from/*.md"))
GUIDES = {path.stem: path for path in PATHS if path.stem != "index"}
every_guide = pytest.mark.parametrize("guide", GUIDES)


@functools.cache
def run(guide):
    # Apex's page says that `O3` makes a warning.
    warned = pytest.warns(UserWarning, match="keeps no float32 copies of them")
    with warned if guide == "apex" else contextlib.nullcontext():
        return run_page(GUIDES[guide])


@dataclasses.dataclass
class Training:
    """A step of a guide, and what its system does to the scale after an overflow."""

    guide: str
    step: str = "train_step"
    state: tuple[str, ...] = ("params", "opt_state")
    batch: tuple[str, ...] = ("x", "y")
    backoff: float = 0.5

    def start(self) -> Any:
        """The state at the end of the page."""
        return tuple(run(self.guide)[name] for name in self.state)

    def data(self, bad: bool = False) -> Any:
        """A batch, or one that overflows, in PyTorch's in one micro-batch."""
        page, index = run(self.guide), slice(64) if self.guide == "keras" else 0
        first, *labels = (jnp.asarray(page[name][index]) for name in self.batch)
        x = np.array(first)
        if bad:
            x.reshape(-1)[-1] = 1e6  # too much for float16 alone
        like = page["shards"] if "parallel_state" in self.state else first
        x = jax.device_put(x, like.sharding)
        return ((x, *labels),) if self.guide == "pytorch" else (x, *labels)

    def run(self, state: Any, data: Any) -> Any:
        return run(self.guide)[self.step](*state, *data)[:-1]


TRAININGS = {
    "pytorch": Training("pytorch"),
    "keras": Training("keras"),
    "tensorflow": Training("tensorflow"),
    "tensorflow graph": Training(
        "tensorflow", "graph_step", ("graph_params", "graph_state")
    ),
    "mindspore": Training("mindspore"),
    "mindspore fixed": Training(
        "mindspore", "fixed_step", ("fixed_params", "fixed_state"), backoff=1.0
    ),
    "flax_dynamic_scale": Training(
        "flax_dynamic_scale", state=("state",), batch=("x",)
    ),
    "flax parallel": Training(
        "flax_dynamic_scale", state=("parallel_state",), batch=("x",)
    ),
    "jmp": Training("jmp", batch=("x",)),
    "apex": Training("apex"),
    "apex O2": Training("apex", "half_step", ("half_params", "half_state")),
    "apex O3": Training(
        "apex", "unscaled_step", ("unscaled_params", "unscaled_state"), backoff=1.0
    ),
    "megatron_lm": Training("megatron_lm", backoff=1.0),
    "deepspeed": Training("deepspeed", backoff=1.0),
    "deepspeed ZeRO": Training(
        "deepspeed",
        "zero_step",
        ("zero_params", "zero_state"),
        ("shards", "y"),
        backoff=1.0,
    ),
    "fairseq": Training("fairseq"),
    "metaseq": Training("fairseq", "metaseq_step", ("metaseq_params", "metaseq_state")),
    "mpx": Training("mpx", state=("model", "opt_state"), batch=("x",)),
}


every_training = pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)


def params_and_opt_state(state):
    return state if len(state) == 2 else (state[0].params, state[0].opt_state)


def kept(state):
    """What a skipped step leaves as it was: neither the scale nor Flax's `step`."""
    params, opt_state = params_and_opt_state(state)
    return params, opt_state.inner_state


def counts(state):
    """How many steps Adam and the schedule have counted."""
    found = optax.tree.get_all_with_path(kept(state), "count")
    return [int(count) for _, count in found]


def scales(rule, flags, state=None):
    """In units of the first one."""
    found, state = [], rule.init() if state is None else state
    for flag in flags:
        state = rule.update(state, flag)
        found.append(float(state.loss_scale) / rule.init_scale)
    return found


@functools.cache
def run_theirs(guide, programs=1):
    """What the first of their programs define, or more of them."""
    namespace: dict[str, Any] = {}
    for code in code_blocks(GUIDES[guide].read_text(), "python theirs")[:programs]:
        exec(compile(code, f"{guide}, theirs", "exec"), namespace)
    return namespace


def batches(x):
    """Good ones, one that is infinite, and one that overflows in float16."""
    x = np.array(x)
    x[3], x[5] = np.inf, 2e4 * x[5]
    return [jnp.asarray(batch) for batch in x]


def assert_close(ours, theirs):
    """Compiled they differ in the last bits: XLA fuses and rounds differently."""
    close = functools.partial(np.testing.assert_allclose, atol=2e-3)
    jax.tree.map(close, ours, theirs)
