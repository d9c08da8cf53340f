"""What is saved and restored is what it was; `test_processes` kills the run between."""

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import assert_same_bits, assert_same_types

import optax_lossscale as ls

RULE = ls.DynamicLossScale(init_scale=2.0**10, growth_interval=4, hysteresis=2)
INNER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20))
)
TX = ls.with_loss_scaling(INNER, RULE)


def start():
    params = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
    return {"params": params, "opt_state": TX.init(params)}


def save(checkpointer, path, run):
    if checkpointer == "orbax":
        with ocp.StandardCheckpointer() as orbax:
            orbax.save(path, run)
            orbax.wait_until_finished()
    else:
        path.write_bytes(serialization.to_bytes(run))


def restore(checkpointer, path):
    if checkpointer == "orbax":
        with ocp.StandardCheckpointer() as orbax:
            return orbax.restore(path, jax.eval_shape(start))
    return serialization.from_bytes(start(), path.read_bytes())


@pytest.mark.parametrize("checkpointer", ["orbax", "flax"])
def test_restoring_keeps_types_and_compiles_nothing_again(checkpointer, tmp_path):
    run = start()
    counted = {"growth_tracker": jnp.int32(2), "skipped_steps": jnp.int32(3)}
    run["opt_state"] = optax.tree.set(run["opt_state"], **counted)
    save(checkpointer, tmp_path / "run", run)
    restored = restore(checkpointer, tmp_path / "run")
    assert_same_bits(restored, run)
    if checkpointer == "orbax":
        assert_same_types(restored, run)
    traces = []

    @jax.jit
    def step(params, opt_state):
        traces.append(1)
        return TX.update(params, opt_state, params)

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
