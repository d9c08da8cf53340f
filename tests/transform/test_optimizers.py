"""Every optimizer that optax has: wrapped, it is itself, and a skip leaves no trace."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_no_update, assert_same_bits, assert_same_types, without_keys
from book import page
from every_optimizer import (
    IGNORED_WARNINGS,
    NAMES,
    OPTIMIZERS,
    VARIANTS,
    compiled_step,
    grads_for,
    make,
    params_for,
    update,
)
from shared import slow_but

import optax_lossscale as ls
from optax_lossscale._transform.in_place import tolerates_nan

pytestmark = IGNORED_WARNINGS

# What most people use, and what is made in a way of its own.
USUAL = {
    *("optax.adafactor", "optax.adamw", "optax.lion", "optax.masked"),
    *("clip + adamw", "momentum", "hyperparameters", "MultiSteps"),
}
# bfloat16 is not widened, so it goes the way of float32.
ASKED = {"float32": NAMES, "float16": {*OPTIMIZERS, *VARIANTS}, "bfloat16": USUAL}
# In float16 its line search may accept another step, as good as the unwrapped one's.
CHOOSES_OTHERWISE = ("optax.lbfgs", "float16")
CASES = [(name, kind) for kind, names in ASKED.items() for name in sorted(names)]
CASES.remove(CHOOSES_OTHERWISE)
QUICK = [(name, "float32") for name in ("optax.adafactor", "optax.masked")]
QUICK += [(name, "float32") for name in ("hyperparameters", "MultiSteps")]
QUICK += [("clip + adamw", "float16"), ("clip + adamw", "bfloat16")]


@pytest.mark.parametrize("case", slow_but(QUICK, CASES), ids="-".join)
def test_wrapped_optimizer_is_close_to_the_unwrapped_and_skips_without_trace(case):
    """Good steps are Optax's, and bad ones leave every bit as it was."""
    name, kind = case
    inner = make(name)
    tx = ls.with_loss_scaling(inner)

    def wide(params):
        wider = jnp.float32 if kind == "float16" else kind
        return jax.tree.map(lambda p: p.astype(wider), params)

    step, plain_step = compiled_step(name, tx), compiled_step(name, inner, wide)
    params = plain_params = params_for(name, jnp.dtype(kind))
    state, plain_state = jax.jit(tx.init)(params), jax.jit(inner.init)(wide(params))
    chex.assert_trees_all_equal_shapes_and_dtypes(state.inner_state, plain_state)
    for _ in range(3):
        grads = grads_for(name, params)
        if not ls.all_finite(grads):
            break  # injected into bfloat16, Adam's decay is 1, and Optax's own step NaN
        params, new_state, updates = step(params, state, grads)
        assert_same_types(new_state, state)  # so one program serves all steps
        state = new_state
        plain = plain_step(plain_params, plain_state, grads)
        plain_params, plain_state, _ = plain
        actual, plain = map(without_keys, ((params, state.inner_state, updates), plain))
        rtol = 2.0**-7 if kind == "bfloat16" else 2e-5
        chex.assert_trees_all_close(actual, plain, rtol=rtol, atol=2e-6)
    for leaf, number in zip(grads, itertools.cycle([np.nan, np.inf, -np.inf])):
        bad = np.array(grads[leaf])
        bad.flat[-1] = number
        new_params, new_state, updates = step(params, state, {**grads, leaf: bad})
        assert not new_state.scale_state.applied
        assert_no_update(updates)
        assert_same_bits(new_params, params)
        assert_same_bits(new_state.inner_state, state.inner_state)
        state = new_state


# They divide 0 by 0 in float32, too.
NAN_OF_ZEROS = {"optax.contrib.dadapt_adamw", "optax.contrib.prodigy"}


@pytest.mark.parametrize("name", slow_but(["optax.adafactor"], OPTIMIZERS))
@pytest.mark.filterwarnings("ignore")
def test_wrapped_optimizer_makes_finite_updates_of_float16_zeros(name):
    tx, params = ls.with_loss_scaling(make(name)), params_for(name, jnp.float16)
    grads = grads_for(name, params)
    zeros = jax.tree.map(lambda g: np.zeros(g.shape, np.float16), grads)
    step = jax.jit(functools.partial(update, name, tx))
    _, state = step(zeros, jax.jit(tx.init)(params), params)
    updates, _ = step(zeros, state, params)
    assert ls.all_finite(updates) == (name not in NAN_OF_ZEROS)


def test_plain_optimizers_named_on_the_page_make_nan_of_float16_zeros():
    text = page("guides/float16_parameters")
    names = re.findall(r"`(\w+)`", re.search("of NaN from (.+?) and others", text)[1])
    assert {"adam", "adamw"} <= {*names}
    txs = {name: make(f"optax.{name}") for name in names}
    steps = jax.jit(lambda x: {k: tx.update(x, tx.init(x), x) for k, tx in txs.items()})
    for name, (updates, _) in steps(np.zeros(8, np.float16)).items():
        assert np.isnan(updates).all(), name


# They have loops that may never end, branches, or decompositions that iterate. Another
# one is only slow on a CPU: `NAN_TOLERANT` lacks an operation.
MASKED_LATE = {
    *("MultiSteps", "optax.apply_if_finite", "optax.conditionally_mask", "optax.lbfgs"),
    *("optax.conditionally_transform", "optax.novograd", "optax.scale_by_novograd"),
    *("optax.contrib.galore", "optax.contrib.scale_by_galore", "optax.contrib.sophia"),
    *("optax.contrib.mechanize", "optax.contrib.reduce_on_plateau"),
    *("optax.scale_by_backtracking_linesearch", "optax.scale_by_zoom_linesearch"),
}


@pytest.mark.parametrize("name", slow_but(USUAL, NAMES))
def test_state_is_masked_in_place_unless_the_update_branches_or_iterates(name):
    tx, params = make(name), params_for(name)
    args = grads_for(name, params), jax.eval_shape(tx.init, params), params
    program = jax.make_jaxpr(functools.partial(update, name, tx))(*args)
    assert tolerates_nan(program.jaxpr) == (name not in MASKED_LATE)
