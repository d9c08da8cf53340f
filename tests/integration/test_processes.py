"""Several processes on this machine train together, stop, and go on as fewer.

``python test_processes.py PORT PROCESSES PROCESS STEPS FOLDER`` is one of them. It goes
on from the last checkpoint in ``FOLDER``.
"""

import contextlib
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from asserts import assert_same_bits
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from shared import worker_environment
from training import float16_loss, make_step, train

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


def types_on(mesh):
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


def main(port, processes, process, steps, folder):
    signal.alarm(180)  # It ends even if the test has been killed.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))
    mesh = make_mesh(d=jax.device_count())

    def global_batch(step):
        x, split = batch(step), NamedSharding(mesh, P("d"))
        return jax.make_array_from_callback(x.shape, split, lambda rows: x[rows])

    target = types_on(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    options = ocp.CheckpointManagerOptions(save_interval_steps=SAVED_EVERY)
    with ocp.CheckpointManager(Path(folder) / "saved", options=options) as manager:
        first = manager.latest_step() or 0
        print("from step", first, flush=True)
        run = jax.jit(start, out_shardings=shardings)()
        if first:
            run = manager.restore(first, args=ocp.args.StandardRestore(target))
        step = jax.jit(make_step(TX, float16_loss), out_shardings=shardings)
        for i in range(first, int(steps)):
            run = step(*run, global_batch(i))
            manager.save(i + 1, args=ocp.args.StandardSave(run))

    # As if the batch with the NaN were gradients.
    report = ls.gradient_report({"x": global_batch(3)}, loss_scale=2.0**15)
    reached = jax.tree.leaves(multihost_utils.process_allgather(run, tiled=True))
    texts = {"report": ls.format_report(report)}
    try:
        ls.nonfinite_report(jnp.exp, global_batch(3))
    except ValueError as error:
        texts["refusal"] = str(error)
    gathered = multihost_utils.process_allgather(global_batch(3), tiled=True)
    texts["gathered"] = repr(ls.nonfinite_report(jnp.exp, gathered))
    np.savez(f"{folder}/{process}.npz", *reached, **texts)


def run(count, folder, steps):
    """Let processes share the devices; what the first of them prints."""
    with socket.socket() as address, contextlib.ExitStack() as stack:
        # While this socket is open, nobody but jax is given its port.
        address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address.bind(("127.0.0.1", 0))
        flags = f"--xla_force_host_platform_device_count={4 // count}"
        processes = []
        for i in range(count):
            arguments = address.getsockname()[1], count, i, steps, folder
            process = subprocess.Popen(
                [sys.executable, __file__, *map(str, arguments)],
                env=worker_environment(XLA_FLAGS=flags),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of two processes that train without a stop. Each starts jax anew."""
    folder = tmp_path_factory.mktemp("whole")
    run(2, folder, STEPS)
    return folder


@pytest.mark.slow
def test_stopped_run_goes_on_bit_for_bit_with_fewer_processes(whole, tmp_path):
    run(2, tmp_path, 6)
    assert "from step 4\n" in run(1, tmp_path, STEPS)
    # Restored on one device: the number of devices may change.
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1])
    target = ocp.args.StandardRestore(types_on(mesh))
    restored = []
    for folder in (whole, tmp_path):
        with ocp.CheckpointManager(folder / "saved") as manager:
            restored.append(manager.restore(STEPS, args=target))
    assert_same_bits(*restored)


@pytest.mark.slow
def test_processes_agree_on_scale_counters_and_report(whole):
    first, second = (np.load(whole / f"{i}.npz") for i in range(2))
    for name in first:  # Arrays are gathered from both.
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.slow
def test_run_of_processes_is_close_to_that_of_one_device(whole):
    result = np.load(whole / "0.npz")
    step = jax.jit(make_step(TX, float16_loss))
    expected = train(step, *start(), map(batch, range(STEPS)))
    assert ls.get_loss_scale_state(expected[1]).skipped_steps == len(BAD_ROWS)
    for i, leaf in enumerate(jax.tree.leaves(expected)):
        # The scale and the counters are exact.
        atol = 1e-3 if leaf.ndim else 0
        np.testing.assert_allclose(result[f"arr_{i}"], leaf, rtol=0, atol=atol)


@pytest.mark.slow
def test_report_of_processes_is_that_of_one_device(whole):
    report = ls.gradient_report({"x": batch(3)}, loss_scale=2.0**15)
    assert str(np.load(whole / "0.npz")["report"]) == ls.format_report(report)


@pytest.mark.slow
def test_nonfinite_report_needs_arrays_of_one_process(whole):
    """Its error says how to get them."""
    texts = np.load(whole / "1.npz")
    assert "process_allgather" in str(texts["refusal"])
    assert "argument 0\n    float32[16, 8] up to" in str(texts["gathered"])


if __name__ == "__main__":
    main(*sys.argv[1:])
