"""What warns, with the way out, once and at the user's line, and what does not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ls


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x, dtype), tree)


PARAMS = cast({"w": np.linspace(-1, 1, 8), "b": 1.0}, jnp.float32)
GRADS = cast({"w": np.linspace(-0.5, 1.5, 8), "b": 1.5}, jnp.float32)
HALF, BFLOAT16 = cast(PARAMS, jnp.float16), cast(PARAMS, jnp.bfloat16)
FLOAT8, HALF_W = cast(GRADS, jnp.float8_e5m2), {**GRADS, "w": HALF["w"]}
ADAM, SGD, MOMENTUM = optax.adam(5e-3), optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
NONE, RULE, UNIT = optax.identity(), ls.DynamicLossScale(), ls.FixedLossScale(1.0)
COPIED = ls.with_master_weights(SGD)
YES, OVERWRITTEN = np.bool_(True), "_overwrite_with_gradient"
NARROW = r"The unscaled gradients are float16 at \['w'\], but the parameter is float32"
FLOAT16 = "2 of 2 parameters are float16, .*put `with_master_weights` directly around"
ROUNDED = r"rounds the state .*\].trace\['b'\], from float32 to float16.*cast the"


def warns_here(words, call, *args, **options):
    """Call a function, which warns once in these words, at a line of this file."""
    with pytest.warns(UserWarning, match=words) as seen:
        call(*args, **options)
    where = [x.filename for x in seen if re.search(words, str(x.message))]
    assert where == [__file__]


def update(grads=GRADS, params=PARAMS, inner=NONE, rule=RULE, of=None, **extra_args):
    """Trace an update from a state, which may be of other parameters."""
    inner_state = jax.eval_shape(inner.init, params if of is None else of)
    state = ls.WithLossScalingState(rule.init(), inner_state)
    step = functools.partial(ls.with_loss_scaling(inner, rule).update, **extra_args)
    jax.eval_shape(step, grads, state, params)


def frozen_but(inner):
    """Freezes the base, and trains the adapter."""
    groups = {"trained": inner, "frozen": optax.set_to_zero()}
    return optax.partition(groups, {"base": "frozen", "adapter": "trained"})


BASE = {"base": np.ones((4, 4), np.float16), "adapter": np.ones((4, 2), np.float32)}

TOO_NARROW = {
    # Small elements of narrow gradients are zero.
    "one gradient in float16": (dict(grads=HALF_W), NARROW),
    "gradients in float8": (dict(grads=FLOAT8), "are float8_e5m2 at"),
    "float16 gradients, bfloat16 parameters": (
        dict(grads=HALF, params=BFLOAT16),
        "is bfloat16",
    ),
    # float16 parameters lose small updates.
    "parameters and gradients in float16": (dict(grads=HALF, params=HALF), FLOAT16),
    "parameters in float16": (dict(params=HALF), FLOAT16),
    "state in float16": (dict(params=None, inner=MOMENTUM, of=HALF), ROUNDED),
}


@pytest.mark.parametrize("row", TOO_NARROW)
def test_update_warns_of_types_that_lose_small_numbers(row):
    arguments, words = TOO_NARROW[row]
    warns_here(words, update, **arguments)


TAKES_LOSS = optax.GradientTransformation(
    NONE.init, lambda updates, state, params=None, *, loss: (updates, state)
)
NO_W = {"w": optax.MaskedNode(), "b": GRADS["b"]}
HARMLESS = {
    "bfloat16 gradients": dict(grads=BFLOAT16),
    "float16 gradients, no parameters": dict(grads=HALF, params=None),
    "float16 gradients, no scale": dict(grads=HALF, rule=UNIT),
    "masked parameter": dict(grads=NO_W, params=NO_W),
    "masked gradient": dict(grads=NO_W),
    "overwrite": dict(grads={OVERWRITTEN: HALF}, params={OVERWRITTEN: PARAMS}),
    "integer parameter": dict(grads=[HALF["w"], None], params=[np.arange(8), None]),
    "frozen float16, adam": dict(grads=BASE, params=BASE, inner=frozen_but(ADAM)),
    "frozen float16, sgd": dict(grads=BASE, params=BASE, inner=frozen_but(SGD)),
    "master weights": dict(params=HALF, inner=COPIED),
    "float16 state": dict(grads=HALF, params=None, inner=MOMENTUM, of=HALF),
    "loss and value": dict(inner=SGD, loss=1.0, value=1.0),
    "loss and value, master weights": dict(inner=COPIED, loss=1.0, value=1.0),
    "two flags": dict(is_finite=YES, grads_finite=YES),
    "loss for the optimizer": dict(inner=TAKES_LOSS, loss=1.0),
}


@pytest.mark.parametrize("row", HARMLESS)
def test_harmless_update_does_not_warn(row):
    update(**HARMLESS[row])


LOSSES_AND_FLAGS = {
    "loss": "value=loss",
    "values": "value=values",
    "loss_value": "value=loss_value",
    "losses": "value=losses",
    "finite": "grads_finite=finite",
    "is_fin": "grads_finite=is_fin",
    "is_finite": "grads_finite=is_finite",
    "grads_are_finite": "grads_finite=grads_are_finite",
    "found_inf": "grads_finite=~found_inf",
}


@pytest.mark.parametrize("inner", [SGD, COPIED], ids=["sgd", "master weights"])
@pytest.mark.parametrize(("name", "advice"), LOSSES_AND_FLAGS.items())
def test_update_warns_of_a_loss_or_a_flag_under_another_name(name, advice, inner):
    warns_here(f"Pass `{advice}` if it should", update, inner=inner, **{name: YES})


def test_compiled_update_warns_once_of_narrow_gradients_and_an_eager_one_each_time():
    tx, params = ls.with_loss_scaling(NONE), np.ones(8, np.float32)
    args = params.astype(np.float16), tx.init(params), params
    compiled = jax.jit(tx.update)
    for step in (compiled, tx.update, tx.update):
        warns_here("The unscaled gradients are float16 at the root", step, *args)
    compiled(*args)


@pytest.mark.parametrize(
    ("params", "inner", "words"),
    [
        (HALF, ADAM, r"2 of 2 parameters are float16, the first one at \['b'\]"),
        ({**PARAMS, "b": HALF["b"]}, ADAM, r"1 of 2 parameters"),
        (cast(BASE, "float16"), frozen_but(ADAM), r"1 of 2 .* at \['adapter'\]"),
    ],
    ids=["all", "one", "not frozen"],
)
def test_init_warns_of_trained_float16_parameters(params, inner, words):
    warns_here(words, jax.eval_shape, ls.with_loss_scaling(inner).init, params)


@pytest.mark.parametrize("inner", [ADAM, frozen_but(ADAM)], ids=["all", "not frozen"])
def test_init_names_a_parameter_of_nnx_as_update_does(inner):
    params = jax.tree.map(nnx.Param, cast(BASE, "float16"))
    words = r"first one at \['adapter'\], and"
    warns_here(words, ls.with_loss_scaling(inner).init, params)


@pytest.mark.parametrize(
    ("params", "inner"),
    [(BASE, frozen_but(ADAM)), (HALF, COPIED), (BFLOAT16, ADAM), (PARAMS, ADAM)],
    ids=["frozen", "master weights", "bfloat16", "float32"],
)
def test_init_does_not_warn_of_wider_frozen_or_copied_parameters(params, inner):
    """Warnings are errors."""
    jax.eval_shape(ls.with_loss_scaling(inner).init, params)
