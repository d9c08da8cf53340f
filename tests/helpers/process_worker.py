"""Training in several processes, which `test_processes` stops and starts again.

``python process_worker.py PORT PROCESSES PROCESS STEPS FOLDER``

It goes on from the last checkpoint in ``FOLDER``.
"""

import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from training import float16_loss, make_step

import optax_lossscale as ls

STEPS, SAVED_EVERY = 16, 4
# The rows with a NaN, by step. Each of the four devices has four of 16 rows.
BAD_ROWS = {3: 13, 4: 1, 6: 10, 9: 0, 14: 15}
RULE = ls.DynamicLossScale(init_scale=2.0**10, growth_interval=2, hysteresis=2)
TX = ls.with_loss_scaling(ls.with_master_weights(optax.adam(1e-2)), RULE)


def start():
    w = jax.random.normal(jax.random.key(0), (8, 4), jnp.float16)
    params = {"w": w, "b": jnp.zeros(4, jnp.float16)}
    return params, TX.init(params)


def make_target(mesh):
    """What `start` makes, as types, and split as far as it can be."""

    def on_mesh(leaf):
        sharding = NamedSharding(mesh, P("d") if leaf.ndim else P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(on_mesh, jax.eval_shape(start))


def batch(step):
    x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    if step in BAD_ROWS:
        x[BAD_ROWS[step], 3] = np.nan
    return x


def main():
    port, processes, process, steps = map(int, sys.argv[1:5])
    folder = Path(sys.argv[5])
    signal.alarm(180)  # It ends even if the test has been killed.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))

    def global_batch(step):
        x, split = batch(step), NamedSharding(mesh, P("d"))
        return jax.make_array_from_callback(x.shape, split, lambda rows: x[rows])

    target = make_target(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    options = ocp.CheckpointManagerOptions(save_interval_steps=SAVED_EVERY)
    with ocp.CheckpointManager(folder / "saved", options=options) as manager:
        first = manager.latest_step() or 0
        print("from step", first, flush=True)
        run = jax.jit(start, out_shardings=shardings)()
        if first:
            run = manager.restore(first, args=ocp.args.StandardRestore(target))
        step = jax.jit(make_step(TX, float16_loss), out_shardings=shardings)
        for i in range(first, steps):
            run = step(*run, global_batch(i))
            manager.save(i + 1, args=ocp.args.StandardSave(run))

    # As if the batch with the NaN were gradients.
    report = ls.gradient_report({"x": global_batch(3)}, loss_scale=2.0**15)
    reached = multihost_utils.process_allgather(run, tiled=True)
    np.savez(
        folder / f"{process}.npz",
        *jax.tree.leaves(reached),
        report=ls.format_report(report),
    )


if __name__ == "__main__":
    main()
