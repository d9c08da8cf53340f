"""README and book are complete, and their tables and numbers are those of the code."""

import ast
import functools
import importlib
import re
import tomllib

import numpy as np
import pytest
from book import PAGES, README, code_blocks, headings, page, table, text_of
from every_rule import PRESETS
from flax import nnx
from shared import ROOT

import optax_lossscale as ls
from optax_lossscale._diagnostics.stop_message import WARNINGS

METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = {path: path.read_text() for path in [*PAGES.rglob("*.md"), ROOT / "README.md"]}


def test_readme_has_the_program_of_the_start_page():
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
            root, *parts = name.split(".")
            found = importlib.import_module(modules[root])
            for part in parts:
                found = getattr(found, part)


def test_every_warning_is_in_the_table_of_warnings():
    """By the beginning of its first fixed part, which a search would be for."""
    first_words = [x.text[:20] for x in WARNINGS.values()]
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


def test_every_preset_is_in_the_table_of_systems_with_rules_that_exist():
    cells = " ".join(row[1] for row in table(page("coming_from/index"), "system"))
    assert sorted(re.findall(r"presets\.(\w+)", cells)) == sorted(PRESETS)
    for expression in re.findall(r"`(ls\.[^`]+)`", cells):
        assert isinstance(eval(expression, {"ls": ls}), ls.LossScale)


def figures(name, header, first):
    """The numbers of a row of a table."""
    (row,) = [x for x in table(page(name), header) if x[0] == first]
    numbers = re.findall(r"[\d,.]*\d", " ".join(row[1:]))
    return [float(x.replace(",", "")) for x in numbers]


def cast(name, beside="", header="device, program"):
    """Memory traffic and memory of `autocast`, as shares of those in float32."""
    numbers = figures("start/casts", header, name)
    return np.divide(numbers[4:], figures("start/casts", header, beside or name)[:2])


def test_figures_in_the_text_are_those_of_the_tables():
    """In README, and below the table of casts."""
    t4, h100, tpu = (f"{x}, transformer in a `scan`" for x in ("T4", "H100", "TPU v5e"))
    again, again_h100 = (f"{x}, the same with `jax.checkpoint`" for x in ("T4", "H100"))
    cpu = functools.partial(figures, "what_it_costs", "16.8 million")
    gpu = functools.partial(figures, "what_it_costs", first="adamw")
    trained = functools.partial(figures, "start/do_i_need_it", "trained in")
    in_bfloat16 = "TPU v5e, the transformer in a `scan` then moves {:.2f} of the memory"
    said = [
        (
            "moves {0:.1f} to {2:.1f} of the memory traffic of float32, in {1:.1f} to "
            "{3:.1f} of its",
            [*cast(t4), *cast("T4, the same with relu and dropout")],
        ),
        ("has {:.2f} of the memory traffic and {:.2f} of the memory", cast(t4, again)),
        ("has {:.2f} of the memory traffic on a T4", cast(t4, again)),
        ("and {:.2f} on an H100", cast(h100, again_h100)),
        (in_bfloat16, cast(h100)),
        (in_bfloat16, cast(tpu, header="device, program in bfloat16")),
        ("adds {:.0f} % memory", [100 * gpu("H100 and T4")[0] - 100]),
        ("that is {:.0f} % (counted", [100 * gpu("H100, whole step")[0] - 100]),
        ("step takes {:.2f} times", cpu("whole step of a small transformer, float16")),
        ("adamw update alone {1:.2f} times", cpu("adamw")),
        ("{2:.0f} % of the gradients", trained("float16, no scale")),
        ("held-out loss is {}.", trained("float16, no scale")),
        ("the loss is {} ", trained("float32")),
    ]
    found = [words.format(*numbers) for words, numbers in said]
    assert [x for x in found if x not in README + page("start/casts")] == []
    plain, _, _, _, autocast, _ = figures("start/casts", "device, program", t4)
    recomputed, *_ = figures("start/casts", "device, program", again)
    assert plain - recomputed > recomputed - autocast  # "most of the saving"


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
