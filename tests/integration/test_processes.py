"""Several processes on this machine train together, are killed, and go on."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

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

DEVICES = 4


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(scope="module")
def launch():
    """Start processes that have the devices between them; none outlives the tests."""
    with contextlib.ExitStack() as stack:

        def launch(count, folder, *killed):
            # While this socket is open, nobody but jax is given its port.
            address = stack.enter_context(socket.socket())
            address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            address.bind(("127.0.0.1", 0))
            flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
            processes = []
            for i in range(count):
                arguments = address.getsockname()[1], count, i, folder, *killed
                process = subprocess.Popen(
                    [sys.executable, worker.__file__, *map(str, arguments)],
                    env=worker_environment(XLA_FLAGS=flags),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
                stack.callback(stop, process)
                processes.append(process)
            return processes

        yield launch


def finish(processes):
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs[0]


def kill(processes, victim, where):
    """`kill -9` one of them when it says where it is. The others wait, or fail."""
    victim, output = processes.pop(victim), ""
    while f"in the {where}\n" not in output:
        output += (line := victim.stdout.readline())
        assert line, output
    time.sleep(0.5)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    for survivor in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            survivor.communicate("\n", timeout=2)
        stop(survivor)
        assert survivor.returncode != 0
    return output


def restore(folder, step):
    """On one device: whatever the number was, it may be another."""
    target = worker.make_target(jax.make_mesh((1,), ("d",), devices=jax.devices()[:1]))
    with ocp.CheckpointManager(folder / "saved") as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(target))


@pytest.fixture(scope="module")
def undisturbed(launch, tmp_path_factory):
    """The folder of a run of two processes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(launch(2, folder))
    return folder


def test_processes_killed_in_a_step_and_in_a_save_go_on_bit_for_bit(
    launch, undisturbed, tmp_path
):
    kill(launch(2, tmp_path, "step", 0), 0, "step")
    assert "from step 4\n" in kill(launch(4, tmp_path, "save", 3), 3, "save")
    # Nobody takes what is half written for a checkpoint: it is renamed at the end.
    (part,) = {path.name for path in (tmp_path / "saved").iterdir()} - {"1", "4", "8"}
    assert part.startswith("12.")
    assert "from step 8\n" in finish(launch(2, tmp_path))
    for step in (4, 8, 12, 16):
        assert_same_bits(restore(tmp_path, step), restore(undisturbed, step))


def test_the_processes_agree_and_equal_one_device(undisturbed):
    results = [np.load(undisturbed / f"{i}.npz") for i in range(2)]
    step = jax.jit(make_step(worker.TX, float16_loss))
    expected = train(step, *worker.start(), map(worker.batch, range(worker.STEPS)))
    assert ls.get_loss_scale_state(expected).skipped_steps == len(worker.BAD_ROWS)
    for i, leaf in enumerate(jax.tree.leaves(expected)):
        first, second = (result[f"arr_{i}"] for result in results)
        np.testing.assert_array_equal(first, second)
        # The scale and the counters are exact.
        np.testing.assert_allclose(first, leaf, rtol=0, atol=1e-3 if leaf.ndim else 0)
    report = ls.gradient_report({"x": worker.batch(3)}, loss_scale=2.0**15)
    for result in results:
        assert str(result["report"]) == ls.format_report(report)
