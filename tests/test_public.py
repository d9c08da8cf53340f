"""What the package exports, and that all of it is documented."""

import doctest
import inspect
import pickle
import re
import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest
from every_rule import RULES

import optax_lossscale as ls

MODULES = (ls, ls.presets, ls.plots)
FUNCTIONS = [
    function
    for module in (ls, ls.plots)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if not name.startswith("_")
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_equals_the_sorted_public_names(module):
    public = {n: x for n, x in vars(module).items() if not n.startswith("_")}
    if module is ls.presets:  # a file of functions, which imports what it needs
        public = {n: x for n, x in public.items() if inspect.getmodule(x) is module}
    assert module.__all__ == sorted(public)


def test_completion_shows_only_the_presets():
    assert dir(ls.presets) == ls.presets.__all__


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_docstring_has_every_argument_and_section(function):
    docstring, signature = inspect.getdoc(function), inspect.signature(function)
    for argument in signature.parameters:
        assert f"\n    {argument}: " in docstring, argument
    # As `help` shows it: names of types, and defaults that can be written.
    assert not re.search(r"Union\[| at 0x", str(signature))
    sections = ["Args:", "Raises:", "Examples:"]
    if signature.return_annotation is not None:
        sections.append("Returns:")
    for section in sections:
        assert f"\n{section}\n" in docstring, section


@pytest.mark.parametrize("name", ls.presets.__all__)
def test_preset_documents_its_system_its_source_and_its_arguments(name):
    preset = getattr(ls.presets, name)
    docstring = inspect.getdoc(preset)
    assert docstring.startswith("Return the rule of ")
    assert re.search(r"\n\nArgs:\n(    .*\n)+\nSource: https://\S+$", docstring)
    for argument in inspect.signature(preset).parameters:
        assert f"\n    {argument}: " in docstring


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.filterwarnings("ignore:1 of 1 parameters")
def test_rules_and_their_states_have_public_names_in_a_pickle(rule):
    """So that a checkpoint outlives any file of the package."""
    assert pickle.loads(pickle.dumps(rule)) == rule
    tx = ls.with_loss_scaling(ls.with_master_weights(optax.sgd(0.1)), rule)
    state = tx.init(jnp.ones(2, jnp.float16))
    for x in (rule, state, *state, state.scale_state.rule_state or rule):
        cls, home = type(x), sys.modules[type(x).__module__]
        assert home in MODULES and getattr(home, cls.__name__) is cls


NAMES = {*ls.__all__, "create", "from_config"} - {"plots", "presets"}
# The presets have one for all.
EXAMPLES = [(ls, NAMES), (ls.plots, {*ls.plots.__all__}), (ls.presets, {"presets"})]


@pytest.mark.parametrize(("module", "names"), EXAMPLES)
def test_every_public_name_has_an_example(module, names):
    """pytest runs them."""
    tests = [x for x in doctest.DocTestFinder().find(module) if x.examples]
    assert names <= {test.name.rpartition(".")[2] for test in tests}
    assert not any(x.options for test in tests for x in test.examples)


OPTIONS = "argnums=0 has_aux=False holomorphic=False allow_int=False value_and_grad"
RETRIES = "max_retries=4 backoff_factor=0.5 axis_name"
SIGNATURES = {
    "with_loss_scaling": "inner rule * axis_name check_updates=False",
    "skip_nonfinite": "inner * axis_name check_updates=False",
    "with_master_weights": "inner * dtype",
    **dict.fromkeys(("value_and_grad", "grad"), f"fun state * {OPTIONS}"),
    "value_and_grad_with_retries": f"fun state * {RETRIES} {OPTIONS}",
    "FixedLossScale": "loss_scale=128.0 skip_nonfinite=True",
    "DynamicLossScale": "init_scale=2.0**15 * growth_factor=2.0 backoff_factor=0.5 "
    "growth_interval=2000 min_scale=2.0**-14 max_scale=2.0**24 hysteresis=1 "
    "hysteresis_refill=finite",
    "HeadroomLossScale": "init_scale=2.0**15 * headroom=3.0 dtype=float16 "
    "half_life=1000 backoff_factor=0.25 min_scale=2.0**-14 max_scale=2.0**24",
    "scale_backward": "fun scale",
    "scale_block": "fun * dtype headroom=6.0 axis_name",
    "scale_loss": "loss state",
    "unscale_grads": "grads state",
    "keep_if_applied": "state * new old axis_name",
    **dict.fromkeys(("all_finite", "max_magnitude"), "tree * axis_name"),
    "select": "pred on_true on_false",
    "check_loss_scale": "state * max_consecutive_skips=100 every=1 grads value "
    "on_error axis_name",
    "gradient_report": "grads * loss_scale=1.0 dtype axis_name",
    "format_report": "report * limit=20",
    "suggest_loss_scale": "grads * dtype headroom=3.0 min_scale=2.0**-14 "
    "max_scale=2.0**24",
    "autocast": "fun dtype * keep",
    "autocast_report": "fun args * errors=False kwargs",
    "nonfinite_report": "fun args kwargs",
    **dict.fromkeys(("get_loss_scale", "get_loss_scale_state", "was_applied"), "state"),
    "WithLossScalingState": "scale_state inner_state",
    "MasterWeightsState": "master_weights inner_state",
}


def test_contract_has_every_function():
    functions = {f.__name__ for f in FUNCTIONS if f.__module__ == ls.__name__}
    assert SIGNATURES.keys() >= functions


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_contract(name):
    """With defaults that are no objects, and a star before arguments to be named."""
    function, words = getattr(ls, name), []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        is_plain = isinstance(parameter.default, int | float | str)
        words.append(parameter.name + f"={parameter.default}" * is_plain)
    power = re.compile(r"2\.0\*\*(-?\d+)")
    contract = power.sub(lambda found: str(2.0 ** int(found[1])), SIGNATURES[name])
    assert " ".join(words) == contract


def test_import_needs_no_extras_and_starts_no_backend():
    """So that a user may still set XLA flags or initialize jax.distributed."""
    program = (
        "import sys, optax_lossscale, jax._src.xla_bridge as bridge\n"
        "print(bridge.backends_are_initialized(), *sys.modules)"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    started, *modules = output.split()
    assert started == "False"
    assert {"matplotlib", "tqdm", "flax", "equinox", "pytest"}.isdisjoint(modules)
