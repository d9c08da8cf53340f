"""Random optimizers are right. `.ci/run random` tries hundreds, once a week."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "random_optimizers.py"


@pytest.mark.parametrize(
    ("first", "number", "masks"),
    [
        # Seed 2 never ends with masks inside of loops.
        (0, 5, []),
        pytest.param(5, 45, [], marks=pytest.mark.slow),
        pytest.param(0, 50, ["--late"], marks=pytest.mark.slow),
    ],
)
def test_random_optimizers_are_themselves(first, number, masks):
    """In a process of its own: an update that never ends fails, and is named."""
    options = [f"--first={first}", f"--number={number}", *masks]
    command = [sys.executable, PROGRAM, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1]
    assert last == f"0 wrong, of {number} random optimizers", done.stdout + done.stderr
