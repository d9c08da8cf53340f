"""``python -m optax_lossscale``."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import WARNINGS_ARE_ERRORS

from optax_lossscale.__main__ import main

NAMES = [
    "float32",
    "float16, no scale",
    "float16, fixed scale",
    "float16, dynamic scale",
    "float16, scale_backward",
]
DYNAMIC = NAMES[3]


def run(*arguments):
    return subprocess.run(
        [sys.executable, *WARNINGS_ARE_ERRORS, "-m", "optax_lossscale", *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.slow
def test_a_short_run_prints_a_table_and_writes_what_it_is_asked_for(tmp_path):
    plot, figures = tmp_path / "plot.png", tmp_path / "figures.json"
    printed = run("--steps", "10", "--plot", str(plot), "--json", str(figures))
    assert all(name in printed for name in NAMES)
    assert "100%" in printed, "the progress bar"
    assert plot.read_bytes().startswith(b"\x89PNG")
    saved = json.loads(figures.read_text())
    assert saved["settings"] == {"steps": 10, "seed": 0}
    assert list(saved["runs"]) == NAMES
    for name, result in saved["runs"].items():
        assert f"{result['held_out_loss']:.4f}" in printed
        for history in ("losses", "scales", "skipped"):
            assert len(result[history]) == 10
        assert result["skipped_steps"] == sum(result["skipped"])
        assert (result["poisoned_step"] is None) == (name != DYNAMIC)
    dynamic = saved["runs"][DYNAMIC]
    assert dynamic["skipped"] == [step == 5 for step in range(10)]
    assert dynamic["losses"][5] is None
    assert dynamic["scales"][6] == dynamic["scales"][5] / 2


@pytest.mark.slow
def test_float16_with_a_scale_is_float32_and_without_one_is_not(tmp_path):
    """The claims of the README's table and of the sentences printed below it."""
    figures = tmp_path / "figures.json"
    printed = " ".join(run("--json", str(figures)).split())
    saved = json.loads(figures.read_text())
    reference, unscaled, fixed, dynamic, wrapped = map(saved["runs"].get, NAMES)

    assert unscaled["held_out_loss"] > 2 * reference["held_out_loss"]
    assert unscaled["words_predicted"] > 5 * saved["true_words"]
    assert unscaled["flushed_share"] > 0.9
    assert reference["flushed_share"] == 0.0
    for scaled in (fixed, dynamic, wrapped):
        np.testing.assert_allclose(
            scaled["held_out_loss"], reference["held_out_loss"], rtol=0.01
        )
        np.testing.assert_allclose(
            scaled["held_out_f1"], reference["held_out_f1"], atol=0.01
        )
        assert scaled["flushed_share"] < 0.1
    assert wrapped["skipped_steps"] == 0
    assert min(wrapped["scales"]) > 2.0**13, "its own scale, not the loss's"

    assert dynamic["skipped"][dynamic["poisoned_step"]]
    assert f"the batch of step {dynamic['poisoned_step']} contained an inf" in printed
    assert "The step was skipped, the scale went from 2^18 to 2^17" in printed
    assert dynamic["losses"][-1] < dynamic["losses"][dynamic["poisoned_step"] - 1]
    assert re.search(r"[23]\.\d+x \(float16, no scale\)", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--steps", "0"],
            "--steps: must be a whole number from 10 to 100000, got '0'",
        ),
        (["--steps", "ten"], "--steps: must be a whole number .* got 'ten'"),
        (["--steps", "1.5"], "--steps: must be a whole number .* got '1.5'"),
        (["--seed", "-1"], "--seed: must be a whole number from 0 .* got '-1'"),
        (["--plot", "plot.jpg"], "--plot: must end in .png, got 'plot.jpg'"),
        (["--plot", "/no/such/plot.png"], "--plot: must be a file in a folder that ex"),
        (["--json", "."], "--json: must be a file .* name another"),
        (["--epochs", "3"], "unrecognized arguments: --epochs 3"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--plot", "plot.png"])
    message = capsys.readouterr().err
    assert "rich and matplotlib must be installed" in message
    assert "pip install 'optax_lossscale[demo]'" in message
