"""README and book are complete, and their tables and numbers are those of the code."""

import inspect
import re
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PAGES, README, ROOT, code_blocks, page, table

import optax_lossscale as ls

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = {path: path.read_text() for path in [*PAGES.rglob("*.md"), ROOT / "README.md"]}


def test_the_readme_has_the_first_program_and_two_commands_for_a_fresh_machine():
    assert code_blocks(README, "python") == code_blocks(page("index"), "python")
    assert code_blocks(README, "bash") == [
        "pip install -e '.[demo]' && python -m optax_lossscale\n",
        "pip install -e '.[test]' && pytest\n",
    ]


def test_the_table_of_contents_names_every_page():
    named = {PAGES / "index"}
    for path, text in TEXTS.items():
        for tree in code_blocks(text, r"\{toctree\}"):
            named |= {path.parent / x for x in re.findall(r"^\w\S*$", tree, re.M)}
    files = [*PAGES.rglob("*.md"), *PAGES.glob("*.ipynb")]
    assert named == {path.with_suffix("") for path in files}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(path):
    """Sphinx checks those of the book, but neither README's nor headings there."""
    text = re.sub(r"^```.*?^```$", "", TEXTS[path], flags=re.M | re.S)
    links = re.findall(r"\]\((?!http)(.+?)\)|src=\"(?!http)(.+?)\"", text)
    for address, _, heading in ("".join(link).partition("#") for link in links):
        target = path.parent / address if address else path
        assert target.is_file(), address
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text().lower(), re.M)
            assert heading in [
                re.sub(r"[^\w -]", "", t).replace(" ", "-") for t in titles
            ]


def test_every_public_name_is_in_the_reference_once():
    text = "\n".join(p.read_text() for p in sorted(PAGES.glob("reference/*.md")))
    documented = re.findall(r"^\.\. auto(?!module|summary)\w+:: (\w+)$", text, re.M)
    names = sorted({*documented})
    assert sorted([*names, "plots", "presets"]) == sorted(
        [*ls.__all__, *ls.plots.__all__]
    )
    assert sorted(re.findall(r"^   (\w+)$", text, re.M)) == names
    assert len(documented) == len({*documented})


@pytest.mark.parametrize(
    "name",
    ["FixedLossScale", "DynamicLossScale", "HeadroomLossScale", "LogNormalLossScale"],
)
def test_the_tables_of_rules_name_every_argument_with_its_default(name):
    rows = table(page("start/rules"), f"`{name}`")
    parameters = inspect.signature(getattr(ls, name)).parameters.values()
    assert {row[0].strip("`"): eval(row[1].strip("`")) for row in rows} == {
        parameter.name: parameter.default for parameter in parameters
    }


def column(name, header, number):
    """A column of a table of a page, by the first cells of its rows."""
    return {row[0]: row[number] for row in table(page(name), header)}


def test_the_readmes_figures_are_those_of_the_book():
    h100 = column("what_it_costs", "H100 and T4, one update", 1)
    tpu = column("what_it_costs", "TPU v5e, one update", 1)
    cpu = column("what_it_costs", "16.8 million float32 parameters in 64 arrays", 2)
    whole = column("what_it_costs", "H100, whole step of a transformer", 1)["adamw"]
    timed = cpu["whole step of a small transformer, float32"]
    clipping = "clipping and adamw"
    assert table(README, "a step") == [
        ["one update by adamw", *(x["adamw"] for x in (h100, tpu, cpu))],
        [f"one update with {clipping}", *(x[clipping] for x in (h100, tpu, cpu))],
        ["whole step of a transformer, adamw", whole, "", timed],
    ]
    loss = column("start/do_i_need_it", "trained in", 1)
    flushed = column("start/do_i_need_it", "trained in", 4)["float16, no scale"]
    assert f"{flushed} of the gradients are flushed to zero" in README
    assert f"the held-out loss is {loss['float16, no scale']}" in README
    assert f"the loss is {loss['float32']}" in README


def test_versions_and_addresses_agree():
    jax, jaxlib, optax = (x.split(">=") for x in METADATA["dependencies"])
    noxfile = (ROOT / ".ci" / "noxfile.py").read_text()
    for name, version in (jax, jaxlib, optax):
        assert f"{name}=={version}" in noxfile
    for text in (README, page("index")):
        assert all(
            f"{name} {version} or newer" in text for name, version in (jax, optax)
        )
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nrepository-code: {METADATA['urls']['Source']}\n" in citation
    assert f"\nversion: {ls.__version__}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.+?)\]", changelog, re.M)[1] == ls.__version__


def test_what_is_said_of_float16_and_bfloat16():
    half = np.float16
    assert half(2.9e-8) == 0 < half(3.1e-8)
    assert jnp.finfo(jnp.bfloat16).tiny < 1.2e-38
    weights = np.linspace(1, 2, 1000, endpoint=False).astype(half).astype(float)
    assert np.all((weights * (1 + 1 / 4100)).astype(half) == weights)
    assert np.any((weights * (1 + 1 / 3900)).astype(half) != weights)
    with np.errstate(over="ignore"):
        assert half(65504) < np.inf == half(65520) == half(2.0**16)
