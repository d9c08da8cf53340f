"""README and book are complete, and their tables and numbers are those of the code."""

import ast
import importlib
import pkgutil
import re
import tomllib

import numpy as np
import pytest
from book import PAGES, README, code_blocks, headings, page, table, text_of
from every_rule import PRESETS
from flax import nnx
from shared import ROOT

import optax_lossscale as ls
from optax_lossscale._diagnostics.stop_message import ERRORS, Event
from optax_lossscale._validation import BOOK

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = {path: path.read_text() for path in [*PAGES.rglob("*.md"), ROOT / "README.md"]}


def test_readme_begins_as_the_start_page_does():
    start = re.sub(r"^<!-- search: .+ -->\n\n", "", page("index"), flags=re.M)
    readme = re.sub(r"^\[!\[.+\n\n", "", README, flags=re.M)
    shared, *_ = readme.replace("(notebooks/", "(").partition("\n## What you gain")
    assert "\n## bfloat16\n" in shared
    assert start.startswith(shared)


def test_readme_has_the_command_of_the_demonstration_and_that_of_the_tests():
    """Each alone in a block, to be copied."""
    blocks = code_blocks(README, "bash")
    assert "pip install -e '.[demo]' && python -m optax_lossscale\n" in blocks
    assert "pip install -e '.[test]' && pytest\n" in blocks


def test_lines_that_the_diff_of_readme_adds_are_in_the_program():
    (diff,) = code_blocks(README, "diff")
    program, *_ = code_blocks(README, "python")
    old, new = ([x[1:] for x in diff.splitlines() if x[0] == sign] for sign in "-+")
    assert len(old) == len(new) == 3
    for line in new:
        assert re.search(rf"^ *{re.escape(line)}(?:  #.*)?$", program, re.M)
    assert [x for x in old[:2] if f"was: {x}\n" not in program] == []


def test_start_page_links_to_every_page_and_the_sidebar_has_no_name_twice():
    _, pages = page("index").split("\n## All pages\n")
    links = {*re.findall(r"\]\((?!http)([^)]+)\)", pages)}
    files = {x for suffix in ("md", "ipynb") for x in PAGES.rglob(f"*.{suffix}")}
    assert links == {x.relative_to(PAGES).as_posix() for x in files} - {"index.md"}
    captions = re.findall(r"^:caption: (.+)$", pages, re.M)
    titles = [re.search(r"^# (.+)$", text_of(x), re.M)[1] for x in files]
    assert captions == re.findall(r"^\*\*(.+)\*\*$", pages, re.M)
    assert len({*captions, *titles}) == len(captions) + len(titles)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(path):
    """Sphinx checks those of the book, but neither README's nor headings there."""
    text = re.sub(r"^```.*?^```$", "", TEXTS[path], flags=re.M | re.S)
    links = re.findall(r"\]\((?!http)(.+?)\)|src=\"(?!http)(.+?)\"", text)
    for address, _, heading in ("".join(link).partition("#") for link in links):
        target = path.parent / address if address else path
        assert target.is_file(), address
        if heading:
            assert heading in headings(text_of(target))


@pytest.mark.skipif(not hasattr(nnx, "capture"), reason="this Flax lacks newer names")
def test_names_in_the_prose_exist():
    modules = {
        **{"ls": "optax_lossscale", "jnp": "jax.numpy", "nnx": "flax.nnx"},
        **{"eqx": "equinox", "hk": "haiku", "jax": "jax", "optax": "optax"},
    }
    importlib.import_module("jax.experimental.topologies")
    dotted = rf"(?<![\w.\[\"'/-])(?:{'|'.join(modules)})(?:\.[a-zA-Z_]\w*)+"
    for text in TEXTS.values():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        inline = " ".join(re.findall(r"`([^`\n]+)`", prose))
        for name in {*re.findall(dotted, inline)}:
            root, _, attributes = name.partition(".")
            pkgutil.resolve_name(f"{modules[root]}:{attributes}")


def test_every_warning_is_in_the_table_of_warnings():
    """By the first 20 characters of its first constant text."""
    first_words = [event.text[:20] for event in Event if event not in ERRORS]
    for path in (ROOT / "optax_lossscale").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "warn":
                message = ast.walk(call.args[0])
                fixed = [x.value for x in message if isinstance(x, ast.Constant)]
                texts = [x for x in fixed if isinstance(x, str) and len(x) >= 20]
                first_words += [text[:20] for text in texts[:1]]
    rows = table(page("troubleshooting"), "warning")
    assert [x for x in first_words if not any(x in row[0] for row in rows)] == []
    assert "No loss has been scaled for"[:20] in first_words  # calls are found


def test_every_public_name_is_in_the_reference_once():
    text = "\n".join(p.read_text() for p in sorted(PAGES.glob("reference/*.md")))
    documented = re.findall(r"^\.\. auto(?!module)\w+:: (\w+)$", text, re.M)
    names = {*ls.__all__} - {"plots", "presets"}
    assert sorted(documented) == sorted([*names, *ls.plots.__all__])


def test_table_of_the_reference_has_every_public_name():
    names = {*ls.__all__} - {"plots"}
    in_table = [row[0].strip("`") for row in table(page("reference/index"), "name")]
    names |= {f"plots.{name}" for name in ls.plots.__all__}
    assert sorted(in_table) == sorted(names)


def test_every_preset_is_in_the_table_of_systems():
    cells = " ".join(row[1] for row in table(page("coming_from/index"), "system"))
    assert sorted(re.findall(r"presets\.(\w+)", cells)) == sorted(PRESETS)


def numbers(name, header):
    """The numbers in a table, by the first cell of their row."""
    cells = {first: " ".join(rest) for first, *rest in table(page(name), header)}
    return {
        first: np.array(re.findall(r"\d[\d.]*", row.replace(",", "")), float)
        for first, row in cells.items()
    }


CASTS = numbers("start/cast_costs", "device, program")
CASTS |= numbers("start/cast_costs", "device, program in bfloat16")
TIMES = numbers("start/cast_costs", "H200, program")
TRAINED = numbers("start/do_i_need_it", "trained in")
ON_H200 = numbers("what_it_costs", "H200, time")
ON_CPU = numbers("what_it_costs", "16.8 million")
LOOPS = CASTS["T4, Python loop"], CASTS["H100, Python loop"]
TRAFFIC = [x[6] for x in CASTS.values()]  # of autocast over that of float32
OWN = [CASTS[x][6:] for x in CASTS if x.startswith("T4") and "checkpoint" in x]


def traffic(*programs):
    """Of autocast over that of float32."""
    return [CASTS[program][6] for program in programs]


def over_loops(program):
    """Memory traffic and temporary memory on T4 and H100, over the Python loop's."""
    rows = CASTS[f"T4, {program}"], CASTS[f"H100, {program}"]
    return np.ravel(
        [row[4:6] / loop[:2] for row, loop in zip(rows, LOOPS, strict=True)]
    )


def saved(*ratios):
    return [100 - 100 * ratio for ratio in ratios]


# Words in lines of README or of the pages on casts, and all figures in these lines.
FIGURES = {
    "cast_costs.md#memory)": saved(
        *(*LOOPS[0][6:], np.max(OWN), np.min(OWN), *CASTS["T4, scan"][6:]),
        *traffic("H100, Python loop", "H100, scan"),
        *traffic("TPU v5e, Python loop", "TPU v5e, scan"),
    ),
    "what_it_costs.md)": [
        100 * ON_CPU["whole step of a small transformer, float16"][0] - 100,
        *(100 * x - 100 for x in ON_H200["whole step of the transformer below"][:2]),
        100 * numbers("what_it_costs", "H100,")["adamw"][0] - 100,
    ],
    "#timed-on-an-h200)": saved(
        *(TIMES[f"float16, {x}"][-1] for x in ("Python loop", "scan"))
    ),
    "#what-it-does-for-training)": [
        *TRAINED["float16, no scale"][[2, 0]],
        TRAINED["float32"][0],
    ],
    "In the programs below": saved(
        *(np.max(TRAFFIC), np.min(TRAFFIC)),
        *(max(x[-1] for x in TIMES.values()), min(x[-1] for x in TIMES.values())),
    ),
    " on a T4": saved(
        *traffic("T4, scan, checkpoint of each layer"),
        *traffic("H100, scan, checkpoint of each layer"),
        *traffic("T4, Python loop", "H100, Python loop"),
        *(loop[2] / loop[4] for loop in LOOPS),
    ),
    "| without this line ": over_loops("Python loop"),
    "| with it ": over_loops("loop, checkpoint of the loss"),
    "| such a checkpoint ": over_loops("loop, checkpoint of each layer"),
}


@pytest.mark.parametrize("words", FIGURES)
def test_figures_in_the_text_are_those_of_the_tables(words):
    text = README + page("start/cast_recipes") + page("start/cast_costs")
    lines = "\n".join(x for x in text.splitlines() if words in x)
    number = r"(?<![\w.])(?:\d+\.\d+(?!\))|\d+(?= ?%| to \d+%))(?!\.?\d)"
    found = re.findall(number, lines)
    for written, figure in zip(found, FIGURES[words], strict=True):
        assert written == f"{figure:.{len(written.partition('.')[2])}f}"


def test_shares_in_the_table_of_casts_are_those_of_its_columns():
    for row in CASTS.values():
        np.testing.assert_allclose(row[6:], row[4:6] / row[:2], rtol=0, atol=0.006)


def test_most_of_the_saving_in_a_scan_is_recomputation():
    plain, again = (CASTS[f"T4, scan{x}"] for x in ("", ", checkpoint of each layer"))
    assert plain[0] - again[0] > again[0] - again[4]
    assert "most of the saving is recomputation" in page("start/cast_costs")


def test_noxfile_readme_citation_and_changelog_agree_with_pyproject():
    noxfile = (ROOT / ".ci" / "noxfile.py").read_text()
    for dependency in METADATA["dependencies"]:
        assert dependency.replace(">=", "==") in noxfile
        # jax says which numpy it needs.
        if not dependency.startswith(("jaxlib", "numpy")):
            needed = f"{dependency.replace('>=', ' ')} or newer"
            assert needed in README and needed in page("index")
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nrepository-code: {METADATA['urls']['Source']}\n" in citation
    assert f"\nversion: {ls.__version__}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.search(r"^## \[(.+?)\] - (.+)$", changelog, re.M).groups()
    assert version == ls.__version__
    # Errors lead to the pages of the installed release.
    tag = "main" if date == "unreleased" else f"v{version}"
    assert f"{METADATA['urls']['Source']}/blob/{tag}/notebooks/" == BOOK
