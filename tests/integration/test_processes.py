"""Two real processes on this machine: a NaN in one makes both skip."""

import contextlib
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
    folder = tmp_path_factory.mktemp("processes")
    flags = "--xla_force_host_platform_device_count=4"
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        workers = []
        for i in range(PROCESSES):
            log = stack.enter_context((folder / f"{i}.log").open("w"))
            arguments = [port, str(PROCESSES), str(i), folder / f"{i}.npz"]
            worker = subprocess.Popen(
                [sys.executable, WORKER, *arguments],
                env=worker_environment(XLA_FLAGS=flags),
                stdout=log,
                stderr=log,
            )
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)  # or the other would wait for ever
        for i, worker in enumerate(workers):
            code = worker.wait(timeout=240)
            assert code == 0, (folder / f"{i}.log").read_text()
    return [dict(np.load(folder / f"{i}.npz")) for i in range(PROCESSES)]


def test_only_one_process_holds_the_nan(results):
    assert sorted(bool(result.pop("nan")) for result in results) == [False, True]


def test_each_process_reports_the_gradients_of_all(results):
    report = ls.gradient_report({"x": BAD_X[2]}, loss_scale=2.0**15)
    for result in results:
        assert str(result["report"]) == ls.format_report(report)
    assert "1 with NaN or inf" in str(results[0]["report"])


@pytest.mark.parametrize("mapped", [False, True], ids=["jit", "shard_map"])
def test_the_processes_agree_and_equal_one_device(mapped, results):
    expected = jax.tree_util.tree_leaves_with_path(one_device("bad"))
    for path, leaf in expected:
        name = f"{mapped}{jax.tree_util.keystr(path)}"
        first, second = (result[name] for result in results)
        np.testing.assert_array_equal(first, second)
        exact = "scale_state" in name or "count" in name
        np.testing.assert_allclose(
            first, leaf, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6
        )
    skipped = f"{mapped}[1].scale_state.skipped_steps"
    assert int(results[0][skipped]) == 1
