"""What the package exports, and that all of it is documented."""

import doctest
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import typing

import jax.numpy as jnp
import pytest
from every_rule import PRESETS

import optax_lossscale as ls

PUBLIC = [name for name in vars(ls) if not name.startswith("_")]


def test_all_equals_the_sorted_public_names():
    assert ls.__all__ == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example(name):
    docstring = inspect.getdoc(getattr(ls, name))
    assert doctest.DocTestParser().get_examples(docstring), "an example that runs"


FUNCTIONS = [
    function
    for module in (ls, ls.presets, ls.plots)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if not name.startswith("_")
]


@pytest.mark.parametrize("module", [ls.presets, ls.plots])
def test_all_of_a_module_equals_the_sorted_public_names(module):
    names = [n for n in vars(module) if not n.startswith("_")]
    assert module.__all__ == sorted(names)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_argument_is_documented(function):
    docstring = inspect.getdoc(function)
    for argument in inspect.signature(function).parameters:
        assert f"\n    {argument}: " in docstring, argument
    for section in ("Args:", "Returns:", "Examples:"):
        assert f"\n{section}\n" in docstring, section
    if function.__name__ in PRESETS:
        # The book lists them, and `presets` says what all raise.
        assert "See `departures`." in re.sub(r"\s+", " ", docstring)
    else:
        assert "\nRaises:\n" in docstring


def test_public_names_are_at_home_where_users_import_them_from():
    for module in (ls, ls.presets, ls.plots):
        for name in module.__all__:
            member = getattr(module, name)
            if not inspect.ismodule(member):
                assert member.__module__ == module.__name__, name
    assert repr(ls.DynamicLossScale) == "<class 'optax_lossscale.DynamicLossScale'>"
    for rule in (ls.HeadroomLossScale(), ls.presets.VerbatimLossScale()):
        pickled = pickle.dumps(rule)
        assert b"_rules" not in pickled and pickle.loads(pickled) == rule


def test_every_example_of_a_method_is_run_too():
    """Doctest looks for methods where their class is at home."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {test.name for test in finder.find(ls) if test.examples}
    for name in ("LossScale.from_config", "LossScaleState.create", "value_and_grad"):
        assert f"optax_lossscale.{name}" in found


def test_help_opens_with_something_to_read():
    text = pydoc.plain(pydoc.render_doc(ls))
    assert text.index("with_loss_scaling(optax.adamw") < text.index("CLASSES")
    names = {n for n in ls.__all__ if not inspect.isclass(getattr(ls, n))}
    assert names - {"grad", "max_magnitude"} <= set(
        re.findall(r"`(\w+)`", inspect.getdoc(ls))
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_annotated_with_what_it_returns(name):
    """So that a type checker knows which fields there may be."""
    preset = getattr(ls.presets, name)
    for signature in typing.get_overloads(preset) or [preset]:
        kinds = typing.get_args(kind := typing.get_type_hints(signature)["return"])
        assert ls.LossScale not in (kinds or (kind,))
        assert all(issubclass(kind, ls.LossScale) for kind in kinds or (kind,))
    hint = typing.get_type_hints(preset)["return"]
    assert isinstance(PRESETS[name], hint)


def test_the_signatures_are_the_contract():
    def signature(name):
        return str(inspect.signature(getattr(ls, name), eval_str=False))

    def names(name):
        return list(inspect.signature(getattr(ls, name)).parameters)

    scaling = ["inner", "loss_scale", "axis_name", "check_updates"]
    assert names("with_loss_scaling") == scaling
    assert names("with_master_weights") == ["inner", "dtype"]
    assert ls.MasterWeightsState._fields == ("master_weights", "inner_state")
    options = ["argnums", "has_aux", "holomorphic", "allow_int", "value_and_grad"]
    assert names("value_and_grad") == names("grad") == ["fun", "state", *options]
    retries = ["max_retries", "backoff_factor", "axis_name"]
    assert names("value_and_grad_with_retries") == ["fun", "state", *retries, *options]
    assert "*, max_retries: int = 4, back" in signature("value_and_grad_with_retries")
    assert names("scale_backward") == ["fun", "dtype", "headroom", "axis_name"]
    assert "headroom: float = 6.0, axis" in signature("scale_backward")
    assert names("scale_loss") == ["loss", "state"]
    assert names("unscale_grads") == ["grads", "state"]
    assert names("all_finite") == ["tree", "axis_name"]
    assert names("select") == ["pred", "on_true", "on_false"]
    assert names("get_loss_scale") == names("get_loss_scale_state") == ["state"]
    assert names("max_magnitude") == ["tree", "axis_name"]
    assert "*, axis_name" in signature("with_loss_scaling")
    assert "*, max_consecutive_skips" in signature("check_loss_scale")
    assert "*, max_consecutive_skips" in signature("watch_loss_scale")
    check = ["state", "max_consecutive_skips", "report"]
    assert names("check_loss_scale") == check
    watch = ["state", "max_consecutive_skips", "every", "grads", "on_error"]
    assert names("watch_loss_scale") == [*watch, "axis_name"]
    report = ["grads", "loss_scale", "dtype", "axis_name"]
    assert names("gradient_report") == report
    assert "*, loss_scale" in signature("gradient_report")
    suggestion = ["grads", "dtype", "headroom", "min_scale", "max_scale"]
    assert names("suggest_loss_scale") == suggestion
    assert "*, dtype" in signature("suggest_loss_scale")
    assert "state: Any, *, argnums" in signature("value_and_grad")
    assert "state: Any, *, argnums" in signature("grad")
    assert "*, loss_scale" in str(inspect.signature(ls.plots.plot_gradient_range))
    assert names("format_report") == ["report", "limit"]
    defaults = inspect.signature(ls.gradient_report).parameters
    assert defaults["loss_scale"].default == 1.0
    assert defaults["dtype"].default == jnp.float16
    assert inspect.signature(ls.format_report).parameters["limit"].default == 20
    assert ls.GradientReport._fields == (
        *("nan", "inf", "zero", "underflow", "subnormal", "overflow"),
        *("max_abs", "size"),
    )
    suggested = ("loss_scale", "rescued", "lost", "informative")
    assert ls.SuggestedLossScale._fields == suggested


def test_importing_needs_neither_extras_nor_test_packages_and_starts_no_backend():
    """So that a user may still set XLA flags or initialize jax.distributed."""
    heavy = ["rich", "matplotlib", "flax", "equinox", "hypothesis", "pytest"]
    code = (
        "import sys, optax_lossscale\n"
        f"assert not set({heavy}) & set(sys.modules), sys.modules.keys() & set({heavy})"
        "\nfrom jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
