"""A training run that saves itself, and goes on from what it finds saved.

``python checkpoint_worker.py CHECKPOINTER FOLDER [HANG_AFTER]``, run by
`test_checkpoint`. It ends after `STEPS` steps, or stands still after ``HANG_AFTER``.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import serialization
from helpers import float16_loss, make_step

import optax_lossscale as ls

STEPS, EVERY = 20, 5
RULE = ls.DynamicLossScale(init_scale=2.0**10, growth_interval=4, hysteresis=2)
INNER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS)),
)
TX = ls.with_loss_scaling(INNER, RULE)


@jax.jit
def train_step(params, opt_state, step):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (8, 4))
    x = jnp.where((step == 7) | (step == 12), 1e6 * x, x)  # overflows float16
    return make_step(TX, float16_loss)(params, opt_state, x)


def start():
    params = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
    return {"step": jnp.int32(0), "params": params, "opt_state": TX.init(params)}


def save(checkpointer, folder, run):
    path = folder / str(run["step"])
    if checkpointer == "orbax":
        with ocp.StandardCheckpointer() as orbax:
            orbax.save(path, run)
            orbax.wait_until_finished()
    else:
        path.with_suffix(".part").write_bytes(serialization.to_bytes(run))
        path.with_suffix(".part").rename(path)


def restore(checkpointer, folder):
    saved = [path for path in folder.iterdir() if path.name.isdigit()]
    if not saved:
        return start()
    path = max(saved, key=lambda path: int(path.name))
    if checkpointer == "orbax":
        with ocp.StandardCheckpointer() as orbax:
            return orbax.restore(path, jax.eval_shape(start))
    return serialization.from_bytes(start(), path.read_bytes())


def main():
    checkpointer, folder = sys.argv[1], Path(sys.argv[2])
    hang_after = int(sys.argv[3]) if len(sys.argv) > 3 else None
    run = restore(checkpointer, folder)
    for step in range(int(run["step"]), STEPS):
        params, opt_state = train_step(run["params"], run["opt_state"], step)
        run = {"step": jnp.int32(step + 1), "params": params, "opt_state": opt_state}
        if (step + 1) % EVERY == 0:
            save(checkpointer, folder, run)
        print(step + 1, flush=True)
        if step + 1 == hang_after:
            time.sleep(600)


if __name__ == "__main__":
    main()
