"""README and book are complete, and their tables and numbers are those of the code."""

import ast
import importlib
import re
import tomllib

import pytest
from book import PAGES, README, code_blocks, headings, page, table, text_of
from flax import nnx
from shared import ROOT

import optax_lossscale as ls
from optax_lossscale._diagnostics.stop_message import WARNINGS

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = {path: path.read_text() for path in [*PAGES.rglob("*.md"), ROOT / "README.md"]}


def test_the_readme_has_the_program_of_the_start_page():
    for language in ("python", "text"):
        assert code_blocks(README, language) == code_blocks(page("index"), language)


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


@pytest.mark.skipif(not hasattr(nnx, "capture"), reason="names of today")
def test_the_names_in_the_prose_exist():
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
            root, *parts = name.split(".")
            found = importlib.import_module(modules[root])
            for part in parts:
                found = getattr(found, part)


def test_every_warning_is_in_the_table_of_warnings():
    """By the beginning of its first fixed part, which a search would be for."""
    first_words = [event.value[:20] for event in WARNINGS]
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
    in_table = [row[0].strip("`") for row in table(page("reference/index"), "name")]
    names |= {f"plots.{name}" for name in ls.plots.__all__}
    names |= {f"presets.{name}" for name in ls.presets.__all__}
    assert sorted(in_table) == sorted(names)


def test_the_readmes_figures_are_those_of_the_book():
    costs = page("what_it_costs")
    for figure, said in (("1.03", "1.03 times"), ("1.27", "1.27 times")):
        assert said in README and f"| {figure} |" in costs
    for figure, said in (("1.143", "14 % memory"), ("1.013", "that is 1 %")):
        assert said in README and f"| {figure} |" in costs
    rows = {row[0]: row for row in table(page("start/do_i_need_it"), "trained in")}
    _, loss, *_, flushed = rows["float16, no scale"]
    assert f"{float(flushed[:-2]):.0f} % of the gradients" in README
    assert f"loss is {loss}" in README
    assert f"the loss is {rows['float32'][1]}" in README


def test_what_autocast_saves_is_that_of_its_table():
    text = page("start/casts")
    cells = {
        name: [[float(x.replace(",", "")) for x in c.split(" / ")] for c in row if c]
        for name, *row in table(text, "device, program")
    }
    for name, ratios in {
        "transformer in a `scan`": [0.3, 0.2],
        "the same with relu and dropout": [0.5, 0.4],
    }.items():
        float32, _, autocast = cells[f"T4, {name}"]
        found = [round(x / y, 1) for x, y in zip(autocast, float32, strict=True)]
        assert found == ratios  # as README says
    rows = table(text, "device, program in bfloat16")
    [tpu] = [row for row in rows if row[0] == "TPU v5e, transformer in a `scan`"]
    tpu = [float(x.split(" / ")[0].replace(",", "")) for x in tpu[1:]]
    h100 = [x[0] for x in cells["H100, transformer in a `scan`"]]
    assert {f"{x[2] / x[0]:.2f}" for x in (tpu, h100)} == {"0.30"}  # and so README
    for device in ("T4", "H100"):
        plain = cells[f"{device}, transformer in a `scan`"]
        recomputed = cells[f"{device}, the same with `jax.checkpoint`"]
        moved = plain[0][0], recomputed[0][0], plain[2][0]
        assert f"{moved[2] / moved[1]:.2f} " in text.partition("Beside that")[2]
        assert moved[0] - moved[1] > moved[1] - moved[2]  # "most of the saving"


def test_versions_and_addresses_agree():
    noxfile = (ROOT / ".ci" / "noxfile.py").read_text()
    for dependency in METADATA["dependencies"]:
        assert dependency.replace(">=", "==") in noxfile
        if not dependency.startswith("jaxlib"):
            needed = f"{dependency.replace('>=', ' ')} or newer"
            assert needed in README and needed in page("index")
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nrepository-code: {METADATA['urls']['Source']}\n" in citation
    assert f"\nversion: {ls.__version__}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.+?)\]", changelog, re.M)[1] == ls.__version__
