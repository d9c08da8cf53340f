"""One of several processes that train together; run by `test_processes`.

``python process_worker.py PORT PROCESSES PROCESS OUT``
"""

import functools
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


def run(mesh, rows, mapped):
    """The parameters and states of all steps, gathered from all processes."""
    tx = ls.with_loss_scaling(ADAM, RULE, axis_name="d" if mapped else None)
    shardings = {"w": NamedSharding(mesh, P("d")), "b": NamedSharding(mesh, P())}
    everywhere = NamedSharding(mesh, P())
    if mapped:
        shardings["w"] = everywhere

    def mapped_step(params, state, x):
        _, grads = ls.value_and_grad(loss_fn, state)(vary(params, "d"), x)
        local_flag = ls.all_finite(grads)
        grads = jax.lax.pmean(grads, "d")
        updates, state = tx.update(grads, state, params, grads_finite=local_flag)
        return optax.apply_updates(params, updates), state

    step = make_step(tx, loss_fn)
    if mapped:
        step = jax.shard_map(
            mapped_step, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=(P(), P())
        )
    step = jax.jit(step)
    # Each process knows all parameters at first, and keeps its shards of them.
    params = jax.tree.map(
        lambda p, s: jax.make_array_from_callback(
            p.shape, s, functools.partial(np.asarray(p).__getitem__)
        ),
        PARAMS,
        shardings,
    )
    state = jax.jit(tx.init)(params)
    batches = [
        jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), x)
        for x in rows
    ]
    reached = train(step, params, state, batches)
    return multihost_utils.process_allgather(reached, tiled=True)


assert jax.process_count() == PROCESSES
mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
rows = np.split(np.asarray(BAD_X), PROCESSES, axis=1)[PROCESS]
results = {
    f"{mapped}{jax.tree_util.keystr(path)}": leaf
    for mapped in (False, True)
    for path, leaf in jax.tree_util.tree_leaves_with_path(run(mesh, rows, mapped))
}
# As if the batch with the NaN were gradients.
bad = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), rows[2])
report = ls.format_report(ls.gradient_report({"x": bad}, loss_scale=2.0**15))
np.savez(sys.argv[4], nan=np.isnan(rows).any(), report=report, **results)
