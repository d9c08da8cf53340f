"""``python -m optax_lossscale``."""

import json
import subprocess
import sys

import numpy as np
import pytest
from processes import WARNINGS_ARE_ERRORS

from optax_lossscale.__main__ import main

WAYS = ("no scale", "fixed scale", "dynamic scale", "scale_block")
NAMES = ["float32", *(f"float16, {way}" for way in WAYS)]


@pytest.mark.slow
def test_float16_with_a_scale_is_float32_and_without_one_is_not(tmp_path):
    """The claims of the README and of what is printed."""
    plot, figures = tmp_path / "plot.png", tmp_path / "run.json"
    command = [sys.executable, *WARNINGS_ARE_ERRORS, "-m", "optax_lossscale"]
    command += ["--plot", plot, "--json", figures]
    printed = " ".join(subprocess.check_output(command, text=True).split())
    assert plot.read_bytes().startswith(b"\x89PNG")
    runs = json.loads(figures.read_text())
    assert list(runs) == NAMES
    for name, run in runs.items():
        assert f"{name} {run['loss']:.4f} {run['words']:.2f}" in printed
    reference, unscaled, *scaled = runs.values()
    assert unscaled["loss"] > 2 * reference["loss"]
    assert unscaled["words"] > 5 * reference["words"]
    assert unscaled["flushed"] > 0.9 and reference["flushed"] == 0.0
    for run in scaled:
        figures = [run["loss"], run["words"]]
        expected = [reference["loss"], reference["words"]]
        np.testing.assert_allclose(figures, expected, rtol=0.02)
        assert run["flushed"] < 0.1
    assert "The step was skipped, the scale went from 2^18 to 2^17" in printed
    dynamic = runs[NAMES[3]]
    assert dynamic["skipped"] == [loss is None for loss in dynamic["losses"]]
    assert dynamic["losses"][-1] < dynamic["losses"][74]


def test_too_few_steps_are_refused_before_anything_runs(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "9"])
    assert "--steps: must be 10 or more, got 9" in capsys.readouterr().err
