"""Two real processes on this machine: a NaN in one makes both skip."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from devices import BAD_X, one_device
from helpers import worker_environment

import optax_lossscale as ls

# Each process starts jax anew.
pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("process_worker.py")
PROCESSES = 2


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("processes"), str(free_port())
    flags = "--xla_force_host_platform_device_count=4"
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, port, str(PROCESSES), str(i), folder / f"{i}.npz"],
            env=worker_environment(XLA_FLAGS=flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=240)
            assert worker.returncode == 0, output
    finally:
        for worker in workers:
            worker.kill()  # or the other would wait for ever
            worker.communicate()
    return [dict(np.load(folder / f"{i}.npz")) for i in range(PROCESSES)]


def test_each_process_reports_the_gradients_of_all(results):
    assert [bool(result["nan"]) for result in results] == [False, True]
    report = ls.gradient_report({"x": BAD_X[2]}, loss_scale=2.0**15)
    for result in results:
        assert str(result["report"]) == ls.format_report(report)


@pytest.mark.parametrize("mapped", [False, True], ids=["jit", "shard_map"])
def test_the_processes_agree_and_equal_one_device(mapped, results):
    for path, expected in jax.tree_util.tree_leaves_with_path(one_device("bad")):
        name = f"{mapped}{jax.tree_util.keystr(path)}"
        first, second = (result[name] for result in results)
        np.testing.assert_array_equal(first, second)
        exact = "scale_state" in name or "count" in name
        tolerance = {"rtol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
        np.testing.assert_allclose(first, expected, **tolerance)
    assert results[0][f"{mapped}[1].scale_state.skipped_steps"] == 1
