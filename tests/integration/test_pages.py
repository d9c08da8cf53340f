"""Every block of every page runs, and does what the page says."""

import functools
import re
import sys
import unittest.mock
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from asserts import assert_same_bits, assert_same_types, kept
from book import PAGES, README, code_blocks, first_program, page, run_page

import optax_lossscale as ls

# The programs of frameworks, trainers and migration guides have tests of their own.
ELSEWHERE = re.compile(r"frameworks/|guides/trainers|coming_from/")
NAMES = [
    name
    for path in sorted(PAGES.rglob("*.md"))
    if code_blocks(path.read_text(), "python")
    and not ELSEWHERE.match(name := path.relative_to(PAGES).as_posix()[: -len(".md")])
]


def spoiled(x, value):
    bad = np.array(x)
    bad[0, 0] = value
    return bad


@functools.cache
def run(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", unittest.mock.MagicMock())
        return first_program() if name == "index" else run_page(PAGES / f"{name}.md")


@pytest.mark.parametrize("name", NAMES)
def test_every_block_runs(name):
    run(name)


def test_the_first_program_trains():
    printed = first_program()["printed"]
    loss = re.fullmatch(r"loss (0\.\d+), loss scale 32768\n", printed)[1]
    assert float(loss) < 0.3


def test_checkpoint_is_restored_bit_for_bit_on_any_mesh():
    guide = run("guides/checkpoints")
    saved = {"params": guide["params"], "opt_state": guide["opt_state"]}
    assert_same_bits(guide["restored"], saved)
    assert_same_bits(guide["resharded"], saved)
    assert_same_types(guide["restored"], saved)
    assert not guide["resharded"]["params"]["w"].sharding.is_fully_replicated


def test_a_checkpoint_made_without_loss_scaling_is_adopted():
    guide = run("guides/checkpoints")
    state, old = guide["adopted_state"], guide["old_run"]["opt_state"]
    assert_same_bits(state.inner_state, old)
    assert_same_types(state, guide["wrapped"].init(guide["params"]))
    target = {"params": guide["params"], "opt_state": state}
    mismatches = {
        "tree structures do not match": target,
        r"Structure mismatch: Target path \(": jax.eval_shape(lambda: target),
    }
    for message, target in mismatches.items():
        refused = pytest.raises(ValueError, match=message)
        with ocp.StandardCheckpointer() as checkpointer, refused:
            checkpointer.restore(guide["old_path"], target)


def test_sharded_run_goes_on_as_if_it_never_stopped(tmp_path):
    guide = run("guides/checkpoints")
    assert guide["printed"].startswith("from step 0\nfrom step 8\n")
    assert_same_bits(guide["resumed"], guide["train"](tmp_path, 20))


PRINTING = [name for name in NAMES if code_blocks(page(name), "text")]


@pytest.mark.parametrize("name", PRINTING)
def test_what_is_printed_stands_on_the_page(name):
    printed = run(name)["printed"]
    assert [x for x in code_blocks(page(name), "text") if x not in printed] == []


@pytest.mark.parametrize(("passed", "scale"), [(True, 2.0**15), (False, 1.0)])
def test_the_loss_keeps_the_scale_over_bad_batches(passed, scale):
    """README and the first page say so of 15 batches."""
    program = first_program()
    params, tx = program["params"], program["tx"]
    x, y = program["batch"]
    state, bad_batch = tx.init(params), (spoiled(x, np.inf), y)
    for _ in range(15):
        if passed:
            params, state, _ = program["train_step"](params, state, bad_batch)
        else:
            grads = ls.grad(ls.autocast(program["loss_fn"]), state)(params, bad_batch)
            _, state = tx.update(grads, state, params)
    assert ls.get_loss_scale(state) == scale
    assert_same_bits(params, program["params"])
    assert f"still {2**15}" in README and "the scale is 1." in README


def test_logging_reaches_every_logger_in_every_step():
    guide = run("guides/logging")
    assert len(guide["wandb"].init().log.mock_calls) == 200
    assert "step 199: " in guide["printed"]
    (events,) = Path(guide["writer"].logdir).iterdir()
    assert events.read_bytes().count(b"skipped") == 200


def test_the_log_marks_a_skip_at_the_scale_that_overflowed():
    guide = run("guides/logging")
    x, y = guide["batch"]
    state, history = guide["tx"].init(guide["params"]), []
    y = spoiled(y, 0.0)  # a wrong label: the loss is large, and the gradients overflow
    for bad in (False, True, False):
        batch = spoiled(x, 1e4) if bad else x, y
        _, state, metrics = guide["logged_step"](guide["params"], state, batch)
        history.append(metrics)
    scales, skipped = ([m[k] for m in history] for k in ("loss_scale", "skipped"))
    assert (scales, skipped) == ([2.0**15, 2.0**15, 2.0**14], [False, True, False])


def test_several_losses_have_a_scale_each_and_skip_together():
    guide = run("guides/several_losses")
    params, (x, y) = guide["params"], guide["batch"]
    scales = {name: guide["rule"].init() for name in guide["losses"]}
    start = params, guide["skip_only"].init(params)
    bad_batch = spoiled(x, np.inf), y
    params, state, scales = guide["two_loss_step"](*start, scales, bad_batch)
    assert_same_bits((params, state.inner_state), (start[0], start[1].inner_state))
    lowered = {name: float(state.loss_scale) for name, state in scales.items()}
    assert lowered == {"data": 2.0**14, "decay": 2.0**15}


def test_a_gan_skips_only_the_optimizer_whose_gradients_are_bad():
    guide = run("guides/several_losses")
    batch = spoiled(guide["x"], np.inf), guide["noise"]
    old = guide["generator"], guide["discriminator"]
    *new, states = guide["gan_step"](*old, guide["states"], *batch)
    assert [bool(ls.was_applied(state)) for state in states] == [True, False]
    start = guide["states_of_one_scale"], guide["scale_state"]
    *others, states, scale_state = guide["one_scale_step"](*old, *start, *batch)
    assert [bool(ls.was_applied(state)) for state in states] == [True, False]
    assert scale_state.loss_scale == 2.0**14
    assert ls.all_finite((new, others))


def test_one_gradient_moves_both_optimizers_or_none():
    guide = run("guides/several_losses")
    old = guide["generator"], guide["discriminator"], guide["states_of_one_scale"]
    real, noise = guide["x"], guide["noise"]
    *new, scale_state = guide["one_gradient"]
    assert all(map(ls.was_applied, new[2])) and scale_state.loss_scale == 2.0**15
    # Only the discriminator sees this NaN.
    bad = spoiled(real, np.nan), noise
    *new, scale_state = guide["one_gradient_step"](*old, scale_state, *bad)
    assert_same_bits(kept(new), kept(old))
    assert scale_state.loss_scale == 2.0**14


@pytest.mark.parametrize("half_precision", [True, False])
def test_one_program_scales_and_skips_only_in_half_precision(half_precision):
    (block,) = code_blocks(page("start/do_i_need_it"), "python")
    namespace = dict(run("index"))
    block = block.replace("half_precision = False", f"{half_precision = }")
    exec(block, namespace)
    tx = namespace["tx"]
    ones, bad = np.ones(2, np.float32), np.full(2, np.nan, np.float32)
    updates, state = jax.jit(tx.update)(bad, tx.init(ones), ones)
    assert bool(ls.all_finite(updates)) == half_precision
    assert ls.get_loss_scale(state) == (2.0**14 if half_precision else 1.0)


def test_schedule_inside_counts_only_applied_steps():
    guide = run("guides/wrappers")
    tx = guide["scheduled_tx"]
    good, bad = ({"w": np.full((8, 1), x, np.float32)} for x in (1, np.nan))
    state, update = jax.jit(tx.init)(good), jax.jit(tx.update)
    for grads in (good, bad, bad, good):
        _, state = update(grads, state, good)
    rate = state.inner_state.hyperparams["learning_rate"]
    assert float(guide["learning_rate"]) == 0.0
    np.testing.assert_allclose(rate, 0.003, rtol=1e-5)


@pytest.mark.parametrize("fix", ["hyperparam_dtype", "with_master_weights", None])
def test_hyperparameters_of_bfloat16_parameters_are_float32(fix):
    """Otherwise ``b2`` is 1, and the first update NaN."""
    guide = run("guides/wrappers")
    injected = optax.inject_hyperparams(optax.adamw)
    injected = guide["injected"] if fix == "hyperparam_dtype" else injected
    tx = injected(guide["schedule"])
    if fix == "with_master_weights":
        tx = ls.with_master_weights(tx)
    tx, params = ls.skip_nonfinite(tx), {"w": jnp.ones(4, jnp.bfloat16)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Every update rounds the state")
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert bool(ls.all_finite(updates)) == bool(fix)
    assert (optax.tree.get(state, "b2") < 1) == bool(fix)


@pytest.mark.parametrize(
    ("rule", "percent"), [(ls.DynamicLossScale(), 22), (ls.FixedLossScale(1.0), 63)]
)
def test_the_skip_rate_after_a_hundred_skips_in_a_row(rule, percent):
    state, skip = rule.init(), jax.jit(lambda state: state.record(False))
    for _ in range(100):
        state = skip(state)
    assert round(100 * float(state.skip_rate)) == percent
    assert f" {percent} %" in page("guides/logging")


@pytest.mark.parametrize("copied", [False, True])
def test_small_updates_of_bfloat16_weights_need_master_weights(copied):
    tx, weights = optax.adam(6e-4), jnp.ones(512, jnp.bfloat16)
    tx = ls.skip_nonfinite(ls.with_master_weights(tx) if copied else tx)
    state, update = tx.init(weights), jax.jit(tx.update)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            updates, state = update(jnp.ones_like(weights), state, weights)
            weights = optax.apply_updates(weights, updates)
    assert int(jnp.sum(weights != 1)) == (512 if copied else 0)
    assert "6e-4 moves none of 512 weights" in page("guides/float16_parameters")


def test_an_average_of_bfloat16_weights_does_not_move():
    one = jnp.ones((), jnp.bfloat16)
    assert optax.incremental_update(2 * one, one, 1e-3) == 1


@functools.cache
def guards():
    """Ours as the page has it, and Optax's."""
    nan = optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: x * np.nan, updates)
    )
    return {
        name: (
            ls.skip_nonfinite(inner, axis_name="d", check_updates=True),
            optax.apply_if_finite(inner, 5),
        )
        for name, inner in {"sgd": optax.sgd(1.0), "NaN of its own": nan}.items()
    }


@pytest.mark.parametrize(
    ("inner", "grads", "loss"),
    [
        ("sgd", [1.0, 1.0], np.nan),
        ("NaN of its own", [1.0, 1.0], 1.0),
        ("sgd", [1.0, np.nan], 1.0),
    ],
    ids=["NaN loss", "NaN of the optimizer", "NaN on one device"],
)
def test_guard_skips_what_apply_if_finite_applies(inner, grads, loss):
    """On each of two devices."""

    def is_skipped(tx, **extra):
        def update(grads):
            return tx.update(grads, tx.init(grads), grads, **extra)[0]

        updates = jax.vmap(update, axis_name="d")(np.float32(grads))
        return [float(x) == 0 for x in updates]

    ours, theirs = guards()[inner]
    assert is_skipped(ours, value=np.float32(loss)) == [True, True]
    assert not all(is_skipped(theirs))
