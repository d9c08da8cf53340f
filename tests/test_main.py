"""``python -m optax_lossscale``."""

import io
import json
import re
import subprocess
import sys
import zlib
from unittest import mock

import numpy as np
import pytest
from book import README, page
from shared import worker_environment

import optax_lossscale as ls
from optax_lossscale.__main__ import main
from optax_lossscale._demonstration import training

slow = pytest.mark.slow
NAMES = [*training.WAYS]
REFERENCE, UNSCALED, *SCALED = NAMES
DYNAMIC = "float16, dynamic scale"


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    """What a run prints, and the picture and the numbers that it saves."""
    folder = tmp_path_factory.mktemp("demonstration")
    plot, figures = folder / "plot.png", folder / "runs.json"
    command = [sys.executable, "-m", "optax_lossscale"]
    command += ["--plot", plot, "--json", figures]
    environment = worker_environment(XLA_FLAGS="")  # as users run it
    options = {"capture_output": True, "text": True, "env": environment}
    run = subprocess.run(command, **options, check=True)
    assert run.stderr == ""  # no warning, and no bar where there is no terminal
    return " ".join(run.stdout.split()), plot, json.loads(figures.read_text())


@pytest.fixture
def runs(demonstration):
    return demonstration[-1]


@slow
def test_run_saves_a_picture_and_prints_the_losses_of_its_json(demonstration):
    printed, plot, runs = demonstration
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(runs) == NAMES
    for name, run in runs.items():
        assert f"{name} {run['loss']:.3f} {run['words']:.1f}" in printed
    ratio = runs[UNSCALED]["loss"] / runs[REFERENCE]["loss"]
    assert f"float16 has {ratio:.2f} times the loss of float32. Why" in printed


@slow
def test_readme_has_the_figures_that_the_run_prints(runs):
    pattern = r"(\S+) of the gradients .* held-out loss is (\S+)\. .* loss is (\S+) "
    flushed, *losses = re.search(pattern, README).groups()
    assert flushed == f"{runs[UNSCALED]['flushed']:.0%}"
    assert losses[0] == f"{runs[UNSCALED]['loss']:.2f}"
    for name in (REFERENCE, *SCALED):
        assert losses[1] == f"{runs[name]['loss']:.3f}"


@slow
def test_book_has_the_table_that_the_run_prints(runs):
    table = page("start/do_i_need_it").partition("\n| trained in")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:7]]
    assert [row[0].startswith(name) for row, name in zip(rows, runs, strict=True)]
    for row, (name, run) in zip(rows, runs.items(), strict=True):
        digits = 2 if name == UNSCALED else 3  # those that all machines agree on
        loss = f"{run['loss']:.{digits}f}"
        assert row[1:] == [loss, f"{run['words']:.0f}", f"{run['flushed']:.0%}"]


@pytest.fixture(scope="module")
def positions():
    return training.load_positions()


def test_text_is_the_same_in_every_python(positions):
    assert [x.shape for x in positions] == [(33548, 12), (3727, 12)]
    assert [zlib.crc32(x) for x in positions] == [3659717933, 3702058372]


def test_number_of_right_words_is_that_of_the_held_out_text(positions, short_run):
    right = positions[1][:, training.CONTEXT :].tolist()
    occur = np.mean([len({*row}) for row in right])
    assert f"; {occur:.1f} are right." in short_run("--no-plot")[0]
    assert f"(right: {occur:.0f})" in page("start/do_i_need_it")


@slow
def test_float16_without_a_scale_flushes_gradients_and_is_worse_than_float32(runs):
    reference, unscaled = runs[REFERENCE], runs[UNSCALED]
    assert unscaled["loss"] > 2 * reference["loss"]
    assert unscaled["words"] > 5 * reference["words"]
    assert unscaled["flushed"] > 0.9 and reference["flushed"] == 0.0


@slow
@pytest.mark.parametrize("name", SCALED)
def test_float16_with_a_scale_is_as_good_as_float32(runs, name):
    for figure in ("loss", "words"):
        expected = runs[REFERENCE][figure]
        np.testing.assert_allclose(runs[name][figure], expected, rtol=0.02)
    assert runs[name]["flushed"] < 0.2


@slow
def test_dynamic_scale_skips_the_poisoned_step_and_training_continues(demonstration):
    printed, _, runs = demonstration
    assert "The step was skipped, the scale went from 2^18 to 2^17" in printed
    losses, skipped = runs[DYNAMIC]["losses"], runs[DYNAMIC]["skipped"]
    assert skipped == [loss is None for loss in losses]
    assert losses[-1] < losses[skipped.index(True) - 1]


@slow
def test_training_moves_the_bar_in_each_step(monkeypatch):
    monkeypatch.setattr(training, "BATCH", 8)
    positions, bar = np.zeros((2, 8, 12), np.int32), mock.Mock()
    training.train(*training.WAYS[REFERENCE], positions, 3, bar)
    assert bar.update.call_count == 3


@pytest.fixture
def short_run(tmp_path, monkeypatch, capsys):
    """A run of 10 steps that do not train; what it prints, and on a terminal."""

    def train(network, rule, positions, steps, bar):
        for _ in range(steps if bar else 0):
            bar.update()
        return training.Result(1.0, 4.0, 0.0, *([x] * 10 for x in (1.0, 2.0, False)))

    def run(*options):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stderr", terminal)  # pytest sets it for each phase
        main(["--steps", "10", *options])
        return capsys.readouterr().out, terminal.getvalue()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training, "load_positions", lambda: None)
    return run


def test_short_run_shows_its_progress_on_a_terminal(short_run):
    _, shown = short_run("--no-plot")
    bars = re.findall(r"(\d of 5: .+?): +(\d+)%", shown)
    runs = [f"{i} of 5: {name}" for i, name in enumerate(NAMES, 1)]
    assert bars == [(run, f"{10 * step}") for run in runs for step in range(11)]


@slow  # It imports matplotlib.
def test_short_run_says_where_its_picture_is(short_run, tmp_path):
    printed, _ = short_run()
    path = tmp_path / "optax_lossscale.png"
    assert f": {path}\nNext: " in printed and printed.endswith("/quickstart.ipynb\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_run_without_a_difference_says_that_float16_falls_behind_later(short_run):
    printed, _ = short_run("--no-plot")
    assert "times the loss of float32. It falls behind later." in printed


def test_growth_intervals_that_are_printed_are_those_of_the_rules(short_run):
    printed, _ = short_run("--no-plot")
    interval = training.WAYS[DYNAMIC][1].growth_interval
    assert f"doubles after {interval} finite steps" in printed
    assert f"takes {ls.DynamicLossScale().growth_interval:,}." in printed


def test_no_plot_writes_no_file(short_run, tmp_path):
    printed, _ = short_run("--no-plot")
    assert "at the end.\n\nNext: " in printed
    assert not [*tmp_path.iterdir()]


def test_run_without_extras_has_no_bar_and_says_first_that_there_is_no_picture(
    short_run, monkeypatch, tmp_path
):
    for module in ("tqdm", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    printed, shown = short_run()
    assert printed.startswith("matplotlib is not installed, so this run draws no pict")
    assert "pip install -e '.[demo]'" in printed.partition("The text is")[0]
    assert "at the end.\n\nNext: " in printed and shown == ""
    assert not [*tmp_path.iterdir()]


@slow  # It imports matplotlib.
def test_run_with_matplotlib_does_not_speak_of_it(short_run):
    assert short_run()[0].startswith("The text is")


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "9"])
    assert "--steps: must be 10 or more, got 9" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_file_that_cannot_be_written_is_refused_before_training(
    option, short_run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(training, "train", None)
    with pytest.raises(SystemExit):
        short_run(option, str(tmp_path / "missing" / "file.png"))
