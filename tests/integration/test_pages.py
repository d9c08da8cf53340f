"""Every block of every page runs, and does what the page says."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    PAGES,
    assert_same_bits,
    code_blocks,
    first_program,
    page,
    run_page,
)

import optax_lossscale as ls

NAMES = [
    path.relative_to(PAGES).with_suffix("").as_posix()
    for path in sorted(PAGES.rglob("*.md"))
    if code_blocks(path.read_text(), "python")
]
# These have tests of their own, which run them too.
ELSEWHERE = re.compile(r"frameworks/|coming_from/(?!index)")


@functools.cache
def run(name):
    return run_page(PAGES / f"{name}.md")


@pytest.mark.parametrize("name", [name for name in NAMES if not ELSEWHERE.match(name)])
def test_every_block_runs(name):
    run(name)


def test_the_first_program_is_complete():
    """It finds nothing defined, trains, and prints."""
    printed = first_program()["printed"]
    loss = re.fullmatch(r"loss (0\.\d+), loss scale 32768\n", printed)[1]
    assert float(loss) < 0.3


def test_what_the_optimizer_does_not_see_is_kept():
    assert not jnp.isinf(run("guides/wrappers")["statistics"]["mean"]).any()


def test_a_checkpoint_is_restored_with_the_same_bits_and_under_another_mesh():
    guide = run("guides/checkpoints")
    saved = {"params": guide["params"], "opt_state": guide["opt_state"]}
    assert ls.all_finite(guide["restored"])
    assert_same_bits(guide["restored"], saved)
    assert_same_bits(guide["resharded"], saved)
    assert len(guide["resharded"]["params"]["w"].sharding.device_set) == 8
    assert not guide["resharded"]["params"]["w"].sharding.is_fully_replicated
    scale = ls.get_loss_scale(guide["resharded"]["opt_state"])
    assert scale.sharding.is_fully_replicated


def test_float16_parameters_follow_their_master_weights():
    guide = run("guides/float16_parameters")
    half, weights = guide["half_params"], guide["weights"]
    assert {p.dtype.name for p in jax.tree.leaves(half)} == {"float16"}
    assert {w.dtype.name for w in jax.tree.leaves(weights)} == {"float32"}
    assert_same_bits(half, jax.tree.map(lambda w: w.astype(jnp.float16), weights))
    sizes = [w.size for w in jax.tree.leaves(weights)]
    assert sum(x.nbytes for x in jax.tree.leaves((half, weights))) == 6 * sum(sizes)
    resumed, state = guide["resumed_half_state"], guide["half_state"]
    assert_same_bits(resumed.inner_state, state.inner_state)


def test_the_report_is_what_its_block_prints():
    (table,) = code_blocks(page("guides/finding_the_overflow"), "text")
    assert table in run("guides/finding_the_overflow")["printed"]


def test_scalars_of_every_step_reach_tensorboard_and_the_scan_speaks():
    guide = run("guides/logging")
    assert "scale_state.loss_scale=32768" in guide["printed"]
    assert "the last step was applied" in guide["printed"]
    assert guide["kept"] == [] and int(guide["metrics"]["skipped_steps"][-1]) == 0
    assert len(guide["metrics"]["loss"]) == 200
    (events,) = Path(guide["writer"].logdir).iterdir()
    # Each of the 200 steps has a record with each of the 4 names.
    assert events.read_bytes().count(b"skipped_steps") == 200
    for step in (99, 199):
        assert f"step {step}: gradient_norm " in guide["printed"]


def test_several_losses_have_a_scale_each_and_skip_together():
    guide = run("guides/several_losses")
    step, rule = guide["two_loss_step"], guide["rule"]
    params, opt_state = guide["params"], guide["skip_only"].init(guide["params"])
    scale_states = {name: rule.init() for name in guide["losses"]}
    x, y = guide["batch"]

    new_params, new_state, new_scales = step(params, opt_state, scale_states, (x, y))
    assert not np.array_equal(new_params["w"], params["w"])
    assert all(int(s.growth_tracker) == 1 for s in new_scales.values())
    # Both gradients are in the step: that of a sum, without scales, is the same.
    total = lambda p: sum(f(p, (x, y)) for f in guide["losses"].values())  # noqa: E731
    updates, _ = optax.adamw(3e-2).update(
        jax.grad(total)(params), optax.adamw(3e-2).init(params), params
    )
    expected = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new_params["w"], expected["w"], rtol=1e-3)

    bad = x.at[0, 0].set(jnp.inf), y
    skipped_params, skipped_state, skipped_scales = step(
        new_params, new_state, new_scales, bad
    )
    assert_same_bits(skipped_params, new_params)
    assert_same_bits(skipped_state.inner_state, new_state.inner_state)
    assert float(skipped_scales["data"].loss_scale) == 2.0**14
    assert float(skipped_scales["decay"].loss_scale) == 2.0**15
    assert int(skipped_scales["decay"].growth_tracker) == 2
