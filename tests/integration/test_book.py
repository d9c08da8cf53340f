"""README and book are complete, and their tables and numbers are those of the code."""

import inspect
import re
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PAGES, README, ROOT, code_blocks, page, table

import optax_lossscale as ls

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXTS = {path: path.read_text() for path in [*PAGES.rglob("*.md"), ROOT / "README.md"]}
MODULES = {"": ls, "plots": ls.plots, "presets": ls.presets}


def test_the_readme_fits_on_a_screen_and_has_two_commands_for_a_fresh_machine():
    assert len(README.splitlines()) <= 250
    assert code_blocks(README, "bash") == [
        "pip install -e '.[demo]' && python -m optax_lossscale\n",
        "pip install -e '.[test]' && pytest\n",
    ]


def test_the_readme_begins_with_the_first_program_of_the_book():
    assert code_blocks(README, "python") == code_blocks(page("index"), "python")


def test_the_table_of_contents_names_every_page():
    named = {"index"}
    for path, text in TEXTS.items():
        for tree in code_blocks(text, r"\{toctree\}"):
            entries = re.findall(r"^\w\S*$", tree, re.M)
            folder = path.parent.relative_to(PAGES)
            named |= {(folder / entry).as_posix() for entry in entries}
    files = [*PAGES.rglob("*.md"), *PAGES.glob("*.ipynb")]
    assert named == {
        path.relative_to(PAGES).with_suffix("").as_posix() for path in files
    }


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_lead_to_files(path):
    """Sphinx checks those of the book, but neither README's nor headings there."""
    text = re.sub(r"^```.*?^```$", "", TEXTS[path], flags=re.M | re.S)
    for link in re.findall(r"\]\((.+?)\)|src=\"(.+?)\"", text):
        address, _, heading = "".join(link).partition("#")
        if address.startswith("http"):
            continue
        target = path.parent / address if address else path
        assert target.is_file(), address
        if heading:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            anchors = {
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            }
            assert heading in anchors, link


def test_every_public_name_is_in_the_reference_once():
    reference = "\n".join(
        text for path, text in TEXTS.items() if path.parent.name == "reference"
    )
    documented: dict[str, list[str]] = {}
    for module, names in re.findall(
        r"^\.\. (?:current)?module:: optax_lossscale\.?(\w*)$(.*?)^```$",
        reference,
        re.M | re.S,
    ):
        found = re.findall(
            r"^\.\. auto(?:function|class|exception):: (\w+)$", names, re.M
        )
        documented.setdefault(module, []).extend(found)
    for name, module in MODULES.items():
        public = {x for x in module.__all__ if not inspect.ismodule(getattr(module, x))}
        assert sorted(documented[name]) == sorted(public)
    listed = re.findall(r"^   (\w+)$", page("reference/index"), re.M)
    assert sorted(listed) == sorted(documented[""] + documented["plots"])


@pytest.mark.parametrize(
    "rule",
    [
        ls.FixedLossScale,
        ls.DynamicLossScale,
        ls.HeadroomLossScale,
        ls.LogNormalLossScale,
    ],
)
def test_the_tables_of_rules_name_every_argument_with_its_default(rule):
    rows = table(page("start/rules"), f"`{rule.__name__}`")
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(rule).parameters.items()
    }
    written = {name.strip("`"): eval(text.strip("`")) for name, text, _ in rows}
    assert written == defaults


def test_the_readmes_figures_are_those_of_the_book():
    def column(number, first_cell, name="what_it_costs"):
        return {row[0]: row[number] for row in table(page(name), first_cell)}

    h100 = column(1, "H100 and T4, one update of 64 arrays of 512 x 512: bytes moved")
    tpu = column(
        1,
        "TPU v5e, one update of 16 arrays of 4096 x 1024: cycles as the compiler "
        "estimates them",
    )
    cpu = column(2, "16.8 million float32 parameters in 64 arrays")
    whole = column(
        1,
        "H100, whole step of a transformer with 21 million parameters in float16: "
        "bytes moved",
    )
    devices = [h100, tpu, cpu]
    assert {row[0]: row[1:] for row in table(README, "a step")} == {
        "one update by adamw": [x["adamw"] for x in devices],
        "one update with clipping and adamw": [
            x["clipping and adamw"] for x in devices
        ],
        "whole step of a transformer, adamw": [
            whole["adamw"],
            "",
            cpu["whole step of a small transformer, float32"],
        ],
    }

    demonstration = "start/do_i_need_it"
    loss = column(1, "trained in", demonstration)
    flushed = column(4, "trained in", demonstration)["float16, no scale"]
    assert f"{flushed} of the gradients are flushed to zero" in README
    assert f"the held-out loss is {loss['float16, no scale']}" in README
    assert f"the loss is {loss['float32']}" in README


def test_the_versions_named_are_those_of_the_metadata_and_of_ci():
    dependencies = METADATA["project"]["dependencies"]
    ci = (ROOT / ".ci" / "run").read_text()
    for package, version in (("jax", "0.7.0"), ("optax", "0.2.5")):
        assert f"{package} {version} or newer" in README
        assert f"{package} {version}" in page("index")
        assert f"{package}>={version}" in dependencies
        assert f"{package}=={version}" in ci
    assert "jaxlib>=0.7.0" in dependencies and "jaxlib==0.7.0" in ci
    assert len(dependencies) == 3


def test_the_jobs_of_ci_are_listed_for_contributors():
    ci = (ROOT / ".ci" / "run").read_text()
    [jobs] = re.findall(r"^    (lint \|.*)\)$", ci, re.M)
    rows = re.findall(r"^\| `(\w+)` \|", page("contributing"), re.M)
    assert sorted(rows) == sorted(jobs.split(" | "))
    [by_default] = re.findall(r"^    all\)\n(?:\s*#.*\n)?((?: +\w+\n)+)", ci, re.M)
    assert by_default.split() == rows[: len(by_default.split())]


def test_the_repositorys_address_stands_in_one_place():
    urls = METADATA["project"]["urls"]
    source = urls["Source"]
    assert all(source in url for name, url in urls.items() if name != "Documentation")
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nrepository-code: {source}\n" in citation
    assert f"\nversion: {ls.__version__}\n" in citation
    assert not any(source in text for text in TEXTS.values())


def test_what_is_said_of_float16_and_bfloat16():
    half = np.float16
    assert half(2.9e-8) == 0 < half(3.1e-8)
    assert jnp.finfo(jnp.bfloat16).tiny < 1.2e-38
    weights = np.linspace(1, 2, 1000, endpoint=False).astype(half).astype(float)
    assert np.all((weights * (1 + 1 / 4100)).astype(half) == weights)
    assert np.any((weights * (1 + 1 / 3900)).astype(half) != weights)
    with np.errstate(over="ignore"):
        assert half(65504) < np.inf == half(65520) == half(2.0**16)


def test_the_changelog_has_this_version_first():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.+?)\]", changelog, re.M)[1] == ls.__version__
