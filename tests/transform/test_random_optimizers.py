"""Random optimizers are right. `.ci/run random` tries hundreds, once a week."""

import subprocess
import sys
from pathlib import Path

import pytest
from shared import slow_but

PROGRAM = Path(__file__).parents[1] / "helpers" / "random_optimizers.py"
# Seed 18 never ends with masks inside of loops.
QUICK = ["--first=18", "--number=5"]
RUNS = [QUICK, ["--number=50"], ["--number=50", "--late"]]


@pytest.mark.parametrize("options", slow_but([QUICK], RUNS), ids=" ".join)
def test_random_optimizers_are_themselves(options):
    """In a process of its own: an update that never ends fails, and is named."""
    command = [sys.executable, PROGRAM, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("0 wrong, of"), done.stdout + done.stderr
