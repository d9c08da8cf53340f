"""``python -m optax_lossscale``."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from processes import WARNINGS_ARE_ERRORS

from optax_lossscale.__main__ import main

WAYS = ("no scale", "fixed scale", "dynamic scale", "scale_block")
NAMES = ["float32", *(f"float16, {way}" for way in WAYS)]
DYNAMIC = NAMES[3]


def results(folder, *arguments):
    """What the program prints, and what it saves."""
    plot, figures = folder / "plot.png", folder / "run[final].json"
    arguments += ("--plot", plot, "--json", figures)
    command = [sys.executable, *WARNINGS_ARE_ERRORS, "-m", "optax_lossscale"]
    printed = subprocess.check_output([*command, *arguments], text=True)
    assert plot.read_bytes().startswith(b"\x89PNG")
    # Rich takes words in brackets for markup.
    assert "run[final].json" in "".join(printed.split())
    saved = json.loads(figures.read_text())
    assert list(saved["runs"]) == NAMES and all(name in printed for name in NAMES)
    return " ".join(printed.split()), saved


@pytest.mark.slow
def test_a_short_run_records_every_step_and_skips_the_poisoned_one(tmp_path):
    printed, saved = results(tmp_path, "--steps", "10", "--seed", "1")
    assert "100%" in printed, "the progress bar"
    assert saved["settings"] == {"steps": 10, "seed": 1}
    for name, run in saved["runs"].items():
        assert f"{run['held_out_loss']:.4f}" in printed
        poisoned = [step == 5 and name == DYNAMIC for step in range(10)]
        assert run["skipped"] == [loss is None for loss in run["losses"]] == poisoned
        assert run["skipped_steps"] == sum(poisoned) and len(run["scales"]) == 10
        assert run["poisoned_step"] == (5 if name == DYNAMIC else None)
    scales = saved["runs"][DYNAMIC]["scales"]
    assert scales[6] == scales[5] / 2 == saved["runs"][DYNAMIC]["final_scale"]


@pytest.mark.slow
def test_float16_with_a_scale_is_float32_and_without_one_is_not(tmp_path):
    """The claims of the README's table and of the sentences printed below it."""
    printed, saved = results(tmp_path)
    reference, unscaled, fixed, dynamic, wrapped = saved["runs"].values()
    assert unscaled["held_out_loss"] > 2 * reference["held_out_loss"]
    assert unscaled["words_predicted"] > 5 * saved["true_words"]
    assert unscaled["flushed_share"] > 0.9 and reference["flushed_share"] == 0.0
    for name in ("held_out_loss", "held_out_f1", "words_predicted"):
        figures = [run[name] for run in (fixed, dynamic, wrapped)]
        np.testing.assert_allclose(figures, reference[name], rtol=0.02)
    assert max(run["flushed_share"] for run in (fixed, dynamic, wrapped)) < 0.1
    assert wrapped["skipped_steps"] == 0
    assert min(wrapped["scales"]) > 2.0**13, "its own scale, not the loss's"
    assert "The step was skipped, the scale went from 2^18 to 2^17" in printed
    assert dynamic["losses"][-1] < dynamic["losses"][74]
    assert re.search(r"[2-4]\.\d+x \(float16, no scale\)", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "9"], "--steps: must be a whole number from 10 to 100000, got"),
        (["--seed", "-1"], "--seed: must be a whole number from 0 .* got '-1'"),
        (["--plot", "plot.jpg"], "--plot: must end in .png, got 'plot.jpg'"),
        (["--plot", "/no/such/plot.png"], "--plot: must be a file in a folder that ex"),
        (["--json", "."], "--json: must be a file .* name another"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--plot", "plot.png"])
    message = (
        "rich and matplotlib must be installed. Run `pip install rich matplotlib`."
    )
    assert message in capsys.readouterr().err
