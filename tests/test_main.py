"""``python -m optax_lossscale``."""

import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from processes import WARNINGS_ARE_ERRORS
from shared import ROOT

import optax_lossscale as ls
from optax_lossscale.__main__ import main
from optax_lossscale._demonstration import training

WAYS = ("no scale", "fixed scale", "dynamic scale", "scale_block")
NAMES = ["float32", *(f"float16, {way}" for way in WAYS)]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_float16_with_a_scale_is_float32_and_without_one_is_not(tmp_path):
    """The claims of the README and of what is printed."""
    plot, figures = tmp_path / "plot.png", tmp_path / "run.json"
    command = [sys.executable, *WARNINGS_ARE_ERRORS, "-m", "optax_lossscale"]
    command += ["--plot", plot, "--json", figures]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stderr == ""  # no terminal, no bar
    printed = " ".join(run.stdout.split())
    assert plot.read_bytes().startswith(b"\x89PNG")
    runs = json.loads(figures.read_text())
    assert list(runs) == NAMES
    for name, run in runs.items():
        assert f"{name} {run['loss']:.4f} {run['words']:.2f}" in printed
    reference, unscaled, *scaled = runs.values()
    ratio = unscaled["loss"] / reference["loss"]
    assert ratio > 2
    assert f"float16 has {ratio:.2f} times the loss of float32. Why" in printed
    readme = re.search(r"held-out loss is (\S+)\. .* loss is (\S+) ", README)
    losses = [unscaled["loss"], reference["loss"]]
    np.testing.assert_allclose([float(x) for x in readme.groups()], losses, rtol=0.05)
    assert unscaled["words"] > 5 * reference["words"]
    assert unscaled["flushed"] > 0.9 and reference["flushed"] == 0.0
    for run in scaled:
        for figure in ("loss", "words"):
            np.testing.assert_allclose(run[figure], reference[figure], rtol=0.02)
        assert run["flushed"] < 0.1
    assert "The step was skipped, the scale went from 2^18 to 2^17" in printed
    dynamic = runs[NAMES[3]]
    assert dynamic["skipped"] == [loss is None for loss in dynamic["losses"]]
    assert dynamic["losses"][-1] < dynamic["losses"][74]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.slow
def test_a_short_run_shows_progress_and_saves_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", Terminal())
    main(["--steps", "10"])
    bars = re.findall(r"(\d of 5: .+?): +(\d+)%", sys.stderr.getvalue())
    runs = [f"{i} of 5: {name}" for i, name in enumerate(NAMES, 1)]
    assert bars == [(run, f"{10 * step}") for run in runs for step in range(11)]
    printed, picture, following = capsys.readouterr().out.rsplit("\n", 3)[:3]
    assert "times the loss of float32. It falls behind later." in printed
    interval = training.WAYS[NAMES[3]][1].growth_interval
    assert f"doubles after {interval} finite steps" in printed
    assert f"takes {ls.DynamicLossScale().growth_interval:,}." in printed
    path = tmp_path / "optax_lossscale.png"
    assert picture.endswith(f": {path}")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert following.endswith("/notebooks/quickstart.ipynb")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "missing", "says"),
    [
        (["--no-plot"], [], "is easier.\n\nNext: "),
        ([], ["tqdm", "matplotlib.figure"], "matplotlib is not installed.\nNext: "),
    ],
    ids=["--no-plot", "no extras"],
)
def test_a_short_run_without_a_picture(
    options, missing, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "stderr", Terminal() if missing else io.StringIO())
    main(["--steps", "10", *options])
    assert sys.stderr.getvalue() == ""
    assert says in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "9"])
    assert "--steps: must be 10 or more, got 9" in capsys.readouterr().err
