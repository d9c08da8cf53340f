"""Saved and restored, a run is the run that was not interrupted."""

import signal
import subprocess
import sys

import checkpoint_worker as worker
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same_bits, assert_same_types, worker_environment

import optax_lossscale as ls

CHECKPOINTERS = ["orbax", "flax"]


def launch(*arguments):
    return subprocess.Popen(
        [sys.executable, worker.__file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=worker_environment(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("checkpointer", ["orbax", "flax"])
def test_a_run_that_was_killed_goes_on_bit_for_bit(checkpointer, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    with launch(checkpointer, whole) as process:
        assert process.wait(timeout=240) == 0
    with launch(checkpointer, killed, 13) as process:
        reached = 0
        while reached < 13:
            reached = int(process.stdout.readline())
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert sorted(int(path.name) for path in killed.iterdir()) == [5, 10]
    with launch(checkpointer, killed) as process:
        steps = [int(line) for line in process.stdout]
        assert process.wait(timeout=240) == 0
    assert steps == list(range(11, 21))

    expected = worker.restore(checkpointer, whole)
    assert_same_bits(worker.restore(checkpointer, killed), expected)
    scale_state = expected["opt_state"].scale_state
    assert int(scale_state.skipped_steps) == 2
    assert int(expected["opt_state"].inner_state[1][0].count) == 18
    # The checkpoint from which it went on stood in the middle of what is counted.
    [at_10] = [path for path in killed.iterdir() if path.name == "10"]
    middle = restore_one(checkpointer, at_10)["opt_state"].scale_state
    assert int(middle.growth_tracker) == 2 and int(middle.skipped_steps) == 1
    assert float(middle.loss_scale) != 2.0**10


def restore_one(checkpointer, path):
    folder = path.parent.with_name("one")
    folder.mkdir()
    path.rename(folder / path.name)
    return worker.restore(checkpointer, folder)


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
def test_what_is_restored_has_the_types_that_were_saved(checkpointer, tmp_path):
    run = worker.start()
    run["params"], run["opt_state"] = worker.train_step(
        run["params"], run["opt_state"], 7
    )
    worker.save(checkpointer, tmp_path, run)
    restored = worker.restore(checkpointer, tmp_path)
    assert_same_bits(restored, run)
    if checkpointer == "orbax":
        assert_same_types(restored, run)
    # No second trace, whether arrays come as jax's or as numpy's.
    traces = []

    @jax.jit
    def step(params, opt_state):
        traces.append(1)
        return worker.TX.update(params, opt_state, params)

    for trees in (run, restored):
        jax.eval_shape(step, trees["params"], trees["opt_state"])
    assert len(traces) == 1


def test_a_running_job_is_wrapped_and_keeps_its_moments():
    """Restore what the unwrapped optimizer saved, then put it inside."""
    optimizer = optax.adam(0.1)
    params, grads = jnp.ones(3), jnp.array([1.0, -2.0, 3.0])
    old_state = optimizer.init(params)
    for _ in range(3):
        _, old_state = jax.jit(optimizer.update)(grads, old_state, params)
    tx = ls.with_loss_scaling(optimizer)
    opt_state = tx.init(params)._replace(inner_state=old_state)
    updates, new_state = jax.jit(tx.update)(grads, opt_state, params)
    expected, expected_state = jax.jit(optimizer.update)(grads, old_state, params)
    assert_same_bits(updates, expected)
    assert_same_bits(new_state.inner_state, expected_state)
    assert float(ls.get_loss_scale(opt_state)) == 2.0**15


@pytest.mark.parametrize(
    "checkpointer, limits, expected",
    [
        ("orbax", {"max_scale": 2.0**8, "init_scale": 2.0**8}, 2.0**8),
        ("flax", {"min_scale": 2.0**12, "init_scale": 2.0**12}, 2.0**12),
        ("flax", {}, 2.0**10),
    ],
    ids=["lower", "higher", "the same"],
)
def test_a_scale_saved_under_other_limits_comes_into_the_new_ones(
    checkpointer, limits, expected, tmp_path
):
    worker.save(checkpointer, tmp_path, worker.start())
    run = worker.restore(checkpointer, tmp_path)
    assert float(ls.get_loss_scale(run["opt_state"])) == 2.0**10
    tx = ls.with_loss_scaling(worker.INNER, ls.DynamicLossScale(**limits))
    grads = jax.tree.map(jnp.ones_like, run["params"])
    _, opt_state = jax.jit(tx.update)(grads, run["opt_state"], run["params"])
    assert float(ls.get_loss_scale(opt_state)) == expected


def test_the_scale_can_be_started_afresh():
    rule = ls.DynamicLossScale(init_scale=2.0**4)
    tx = ls.with_loss_scaling(worker.INNER, rule)
    run = worker.start()
    opt_state = run["opt_state"]._replace(scale_state=rule.init())
    grads = jax.tree.map(jnp.ones_like, run["params"])
    _, opt_state = jax.jit(tx.update)(grads, opt_state, run["params"])
    assert float(ls.get_loss_scale(opt_state)) == 2.0**4
