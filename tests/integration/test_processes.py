"""Several processes on this machine train together, are killed, and go on."""

import contextlib
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import process_worker as worker
import pytest
from asserts import assert_same_bits
from processes import worker_environment
from training import float16_loss, make_step, train

import optax_lossscale as ls

# Each process starts jax anew.
pytestmark = pytest.mark.slow


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
                [sys.executable, worker.__file__, *map(str, arguments)],
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


def test_processes_agree_equal_one_device_and_go_on_bit_for_bit(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(2, whole, worker.STEPS)
    run(2, stopped, 6)
    assert "from step 4\n" in run(4, stopped, worker.STEPS)
    # Restored on one device: whatever the number was, it may be another.
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices()[:1])
    target = ocp.args.StandardRestore(worker.make_target(mesh))
    restored = []
    for folder in (whole, stopped):
        with ocp.CheckpointManager(folder / "saved") as manager:
            restored.append(manager.restore(worker.STEPS, args=target))
    assert_same_bits(*restored)

    results = [np.load(whole / f"{i}.npz") for i in range(2)]
    step = jax.jit(make_step(worker.TX, float16_loss))
    expected = train(step, *worker.start(), map(worker.batch, range(worker.STEPS)))
    assert ls.get_loss_scale_state(expected[1]).skipped_steps == len(worker.BAD_ROWS)
    for i, leaf in enumerate(jax.tree.leaves(expected)):
        first, second = (result[f"arr_{i}"] for result in results)
        np.testing.assert_array_equal(first, second)
        # The scale and the counters are exact.
        np.testing.assert_allclose(first, leaf, rtol=0, atol=1e-3 if leaf.ndim else 0)
    report = ls.gradient_report({"x": worker.batch(3)}, loss_scale=2.0**15)
    for result in results:
        assert str(result["report"]) == ls.format_report(report)
