"""The notebooks run from top to bottom and show what they say."""

import importlib
import re

import nbformat
import numpy as np
import pytest
from book import PAGES
from shared import worker_environment

every_notebook = pytest.mark.parametrize(
    "path", sorted(PAGES.glob("*.ipynb")), ids=lambda path: path.stem
)


@pytest.fixture
def refresh(monkeypatch):
    monkeypatch.syspath_prepend(PAGES)
    return importlib.import_module("refresh")


# Machines and versions of jax round differently. From AVX2 to AVX-512 and from jax 0.10
# to 0.12, printed numbers differ by up to 5%.
TOLERANCE = 0.1
# This one trains on Python's manual, which is 12% longer in Python 3.13 than in 3.11.
# A difference of float32 rounding errors then differs by 21%, and the largest of many
# by 31% in jax 0.7.0.
TOLERANCES = {"float16_or_bfloat16": 0.4}
# The few numbers that round differently make the first two up: a factor of 4 between
# them. The others are times.
UNSTABLE = ("of the letters differ", "same operations:", "ms a step", "times as long")
# The digits of float16 and 2^15 belong to words.
NUMBER = re.compile(r"(?<![\w^.])[\d,]*\d(?:\.\d+)?(?:e[+-]?\d+)?")


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def shown(cell):
    """The pictures and words that a cell shows, and the numbers that are stable."""
    outputs = cell.get("outputs", [])
    pictures = ["image/png" in x.get("data", {}) for x in outputs]
    texts = [x.get("text") or x.get("data", {}).get("text/plain", "") for x in outputs]
    lines = "".join(texts).splitlines()
    stable = [x for x in lines if not any(name in x for name in UNSTABLE)]
    numbers = [x.replace(",", "") for x in NUMBER.findall("\n".join(stable))]
    words = [NUMBER.sub("#", line).split() for line in lines]
    return pictures, words, np.array(numbers, float)


@pytest.mark.slow
@every_notebook
def test_notebook_shows_its_stored_outputs_and_what_it_says(
    path, tmp_path, monkeypatch, refresh
):
    program, copy = read(path), tmp_path / path.name
    claims = f"notebook_claims.{path.stem}(types.SimpleNamespace(**globals()))"
    cell = nbformat.v4.new_code_cell(f"import types, notebook_claims\n{claims}")
    program.cells.append(cell)
    nbformat.write(program, copy)
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)
    refresh.refresh(copy)
    for stored, now in zip(read(path).cells, read(copy).cells[:-1], strict=True):
        assert stored.source == now.source, "the badge is another"
        message = f"`python notebooks/refresh.py` stores what this shows:\n{now.source}"
        (*words, numbers), (*new_words, new_numbers) = shown(stored), shown(now)
        assert words == new_words, message
        rtol = TOLERANCES.get(path.stem, TOLERANCE)
        np.testing.assert_allclose(new_numbers, numbers, rtol, err_msg=message)


@every_notebook
def test_notebook_installs_the_package_and_is_stored_with_a_picture(path, refresh):
    install, *cells = (x for x in read(path).cells if x.cell_type == "code")
    assert install.source == refresh.INSTALL
    assert any(any(shown(cell)[0]) for cell in cells)
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr"
