"""One of several processes that train together; run by `test_processes`.

``python process_worker.py PORT PROCESSES PROCESS OUT``
"""

import sys

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

PORT, PROCESSES, PROCESS = map(int, sys.argv[1:4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
# Before anything makes an array.
jax.distributed.initialize(f"127.0.0.1:{PORT}", PROCESSES, PROCESS)

from devices import ADAM, BAD_X, PARAMS, RULE, loss_fn, vary  # noqa: E402
from helpers import make_step, train  # noqa: E402

MESH = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
SPLIT, EVERYWHERE = NamedSharding(MESH, P("d")), NamedSharding(MESH, P())
ROWS = np.split(np.asarray(BAD_X), PROCESSES, axis=1)[PROCESS]


def global_batch(x):
    return jax.make_array_from_process_local_data(SPLIT, x)


def run(mapped):
    """The parameters and states of all steps, gathered from all processes."""
    tx = ls.with_loss_scaling(ADAM, RULE, axis_name="d" if mapped else None)

    def mapped_step(params, state, x):
        _, grads = ls.value_and_grad(loss_fn, state)(vary(params, "d"), x)
        local_flag = ls.all_finite(grads)
        grads = jax.lax.pmean(grads, "d")
        updates, state = tx.update(grads, state, params, grads_finite=local_flag)
        return optax.apply_updates(params, updates), state

    step = make_step(tx, loss_fn)
    if mapped:
        step = jax.shard_map(
            mapped_step, mesh=MESH, in_specs=(P(), P(), P("d")), out_specs=(P(), P())
        )
    shardings = {"w": EVERYWHERE if mapped else SPLIT, "b": EVERYWHERE}
    params = jax.jit(lambda: PARAMS, out_shardings=shardings)()
    state = jax.jit(tx.init)(params)
    reached = train(jax.jit(step), params, state, map(global_batch, ROWS))
    return multihost_utils.process_allgather(reached, tiled=True)


results = {
    f"{mapped}{jax.tree_util.keystr(path)}": leaf
    for mapped in (False, True)
    for path, leaf in jax.tree_util.tree_leaves_with_path(run(mapped))
}
# As if the batch with the NaN were gradients.
report = ls.gradient_report({"x": global_batch(ROWS[2])}, loss_scale=2.0**15)
results |= {"nan": np.isnan(ROWS).any(), "report": ls.format_report(report)}
np.savez(sys.argv[4], **results)
