"""The notebooks run from top to bottom and show what they say."""

import re
import subprocess
import sys
import tomllib

import nbformat
import numpy as np
import pytest
from book import PAGES
from processes import CACHE_WARNINGS, worker_environment
from shared import ROOT

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
every_notebook = pytest.mark.parametrize(
    "path", sorted(PAGES.glob("*.ipynb")), ids=lambda path: path.stem
)

# Machines and versions of jax round differently. From AVX2 to AVX-512 and from jax 0.10
# to 0.12, printed numbers differ by up to 5 %.
TOLERANCE = 0.1
# This one trains on Python's manual, which is 12 % longer in Python 3.13 than in 3.11.
# A difference of float32 rounding errors then differs by 21 %, and the largest of many
# by 31 % in jax 0.7.0.
TOLERANCES = {"float16_or_bfloat16": 0.4}
# The few numbers that round differently make the first two up: a factor of 4 between
# them. The others are times.
UNSTABLE = ("of the letters differ", "same operations:", "ms a step", "times as long")


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_and_shows_what_it_says(path, tmp_path):
    notebook = read(path)
    notebook.cells.append(
        nbformat.v4.new_code_cell(
            "import types, notebook_claims\n"
            f"notebook_claims.{path.stem}(types.SimpleNamespace(**globals()))"
        )
    )
    copy = tmp_path / path.name
    nbformat.write(notebook, copy)
    run = subprocess.run(
        [sys.executable, PAGES / "refresh.py", copy],
        env=worker_environment(PYTHONWARNINGS=",".join(CACHE_WARNINGS)),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    tolerance = TOLERANCES.get(path.stem, TOLERANCE)
    for stored, now in zip(read(path).cells, read(copy).cells, strict=False):
        assert stored.source == now.source, "the badge is another"
        assert_same_outputs(stored, now, tolerance)


def assert_same_outputs(stored, now, tolerance):
    """Words must be equal, numbers as close as the tolerance says."""
    refresh = f"`python notebooks/refresh.py` stores what this shows:\n{now.source}"
    assert has_picture(stored) == has_picture(now), refresh
    lines = printed(stored).splitlines(), printed(now).splitlines()
    assert len(lines[0]) == len(lines[1]), refresh
    for pair in zip(*lines, strict=True):
        words, numbers = zip(*map(words_and_numbers, pair), strict=True)
        assert words[0] == words[1], refresh
        if not any(name in pair[0] for name in UNSTABLE):
            np.testing.assert_allclose(*numbers, rtol=tolerance, err_msg=refresh)


def printed(cell):
    outputs = cell.get("outputs", [])
    texts = [x.get("text") or x.get("data", {}).get("text/plain", "") for x in outputs]
    return "".join(texts)


def has_picture(cell):
    return any("image/png" in x.get("data", {}) for x in cell.get("outputs", []))


def words_and_numbers(line):
    """Split a line. The digits of float16 and 2^15 belong to words."""
    number = r"(?<![\w^.])[\d,]*\d(?:\.\d+)?(?:e[+-]?\d+)?"
    numbers = [float(x.replace(",", "")) for x in re.findall(number, line)]
    return re.sub(number, "#", line).split(), numbers


@every_notebook
def test_a_notebook_installs_the_package_and_is_stored_with_its_outputs(path):
    install, *cells = (x for x in read(path).cells if x.cell_type == "code")
    package = f"optax_lossscale[plots] @ git+{METADATA['urls']['Source']}"
    assert install.source == f'%pip install -q "{package}"'
    assert any(map(has_picture, cells))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [
        x for x in outputs if x.output_type == "error" or x.get("name") == "stderr"
    ]
