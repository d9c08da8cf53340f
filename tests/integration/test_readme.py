"""The README's commands, tables and numbers are those of the code."""

import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import README, ROOT, code_blocks

import optax_lossscale as ls


def test_there_are_two_commands_for_a_fresh_machine():
    assert code_blocks(README, "bash") == [
        "pip install -e '.[demo]' && python -m optax_lossscale\n",
        "pip install -e '.[test]' && pytest\n",
    ]


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
    table = README.split(f"| `{rule.__name__}` | default | |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M))
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(rule).parameters.items()
    }
    assert {name: eval(text) for name, text in rows.items()} == defaults


def test_the_versions_named_are_those_of_the_metadata_and_of_ci():
    metadata = (ROOT / "pyproject.toml").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    for package, version in (("jax", "0.7.0"), ("optax", "0.2.5")):
        assert f"{package} {version} or newer" in README
        assert f'"{package}>={version}"' in metadata
        assert f"{package}=={version}" in ci


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
