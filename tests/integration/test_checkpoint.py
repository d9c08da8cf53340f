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

both_checkpointers = pytest.mark.parametrize("checkpointer", ["orbax", "flax"])


def launch(*arguments):
    return subprocess.Popen(
        [sys.executable, worker.__file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=worker_environment(),
    )


@pytest.mark.slow
@both_checkpointers
def test_a_run_that_was_killed_goes_on_bit_for_bit(checkpointer, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    with launch(checkpointer, whole) as process:
        assert process.wait(timeout=240) == 0
    with launch(checkpointer, killed, 13) as process:
        while int(process.stdout.readline()) < 13:
            pass
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert sorted(int(path.name) for path in killed.iterdir()) == [5, 10]
    # It goes on in the middle of what is counted.
    middle = worker.restore(checkpointer, killed)["opt_state"].scale_state
    assert (middle.growth_tracker, middle.skipped_steps) == (2, 1)
    with launch(checkpointer, killed) as process:
        assert [int(line) for line in process.stdout] == list(range(11, 21))
        assert process.wait(timeout=240) == 0

    expected = worker.restore(checkpointer, whole)
    assert_same_bits(worker.restore(checkpointer, killed), expected)
    assert int(expected["opt_state"].scale_state.skipped_steps) == 2
    assert int(expected["opt_state"].inner_state[1][0].count) == 18


@both_checkpointers
def test_restoring_keeps_types_and_compiles_nothing_again(checkpointer, tmp_path):
    run = worker.start()
    worker.save(checkpointer, tmp_path, run)
    restored = worker.restore(checkpointer, tmp_path)
    assert_same_bits(restored, run)
    if checkpointer == "orbax":
        assert_same_types(restored, run)
    traces = []

    @jax.jit
    def step(params, opt_state):
        traces.append(1)
        return worker.TX.update(params, opt_state, params)

    for trees in (run, restored):
        jax.eval_shape(step, trees["params"], trees["opt_state"])
    assert len(traces) == 1


def test_an_optimizer_is_wrapped_in_the_middle_of_a_run_and_keeps_its_moments():
    optimizer = optax.adam(0.1)
    params, grads = jnp.ones(3), jnp.array([1.0, -2.0, 3.0])
    old_state = optimizer.init(params)
    for _ in range(3):
        _, old_state = optimizer.update(grads, old_state, params)
    tx = ls.with_loss_scaling(optimizer)
    opt_state = tx.init(params)._replace(inner_state=old_state)
    updates, new_state = jax.jit(tx.update)(grads, opt_state, params)
    expected = jax.jit(optimizer.update)(grads, old_state, params)
    assert_same_bits((updates, new_state.inner_state), expected)


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({"max_scale": 2.0**8, "init_scale": 2.0**8}, 2.0**8),
        ({"min_scale": 2.0**12, "init_scale": 2.0**12}, 2.0**12),
        ({}, 2.0**10),
    ],
    ids=["lower", "higher", "the same"],
)
def test_a_restored_scale_outside_new_limits_is_clipped(limits, expected):
    run, rule = worker.start(), ls.DynamicLossScale(**limits)
    assert ls.get_loss_scale(run["opt_state"]) == 2.0**10
    tx = ls.with_loss_scaling(worker.INNER, rule)
    grads = jax.tree.map(jnp.ones_like, run["params"])
    _, opt_state = jax.jit(tx.update)(grads, run["opt_state"], run["params"])
    assert ls.get_loss_scale(opt_state) == expected
