"""What the package exports, and that all of it is documented."""

import doctest
import inspect
import subprocess
import sys

import pytest

import optax_lossscale as ls

PUBLIC = [name for name in vars(ls) if not name.startswith("_")]


def test_all_equals_the_sorted_public_names():
    assert ls.__all__ == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example(name):
    docstring = inspect.getdoc(getattr(ls, name))
    assert doctest.DocTestParser().get_examples(docstring), "an example that runs"


@pytest.mark.parametrize(
    "name", [n for n in PUBLIC if inspect.isfunction(getattr(ls, n))]
)
def test_every_argument_is_documented(name):
    function = getattr(ls, name)
    docstring = inspect.getdoc(function)
    for argument in inspect.signature(function).parameters:
        assert f"\n    {argument}: " in docstring, argument
    for section in ("Args:", "Returns:", "Raises:", "Examples:"):
        assert f"\n{section}\n" in docstring, section


def test_the_signatures_are_the_contract():
    def signature(name):
        return str(inspect.signature(getattr(ls, name), eval_str=False))

    def names(name):
        return list(inspect.signature(getattr(ls, name)).parameters)

    assert names("with_loss_scaling") == ["inner", "loss_scale", "axis_name"]
    gradient = ["fun", "state", "argnums", "has_aux", "holomorphic", "allow_int"]
    assert names("value_and_grad") == names("grad") == gradient
    assert names("scale_loss") == ["loss", "state"]
    assert names("unscale_grads") == ["grads", "state"]
    assert names("all_finite") == ["tree", "axis_name"]
    assert names("select") == ["pred", "on_true", "on_false"]
    assert names("get_loss_scale") == names("get_loss_scale_state") == ["state"]
    assert "*, axis_name" in signature("with_loss_scaling")


def test_importing_needs_neither_the_extras_nor_the_test_packages():
    heavy = ["rich", "matplotlib", "flax", "equinox", "hypothesis", "pytest"]
    code = (
        "import sys, optax_lossscale\n"
        f"assert not set({heavy}) & set(sys.modules), sys.modules.keys() & set({heavy})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_starts_no_backend():
    """So that a user may still set XLA flags or initialise jax.distributed."""
    code = (
        "import optax_lossscale\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
