"""What warns, with the way out, once and at the user's line, and what does not."""

import functools
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ls


def cast(tree, dtype):
    return jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), tree))


PARAMS = cast({"w": np.linspace(-1, 1, 8), "b": 1.0}, jnp.float32)
GRADS = cast({"w": np.linspace(-0.5, 1.5, 8), "b": 1.5}, jnp.float32)
HALF, BFLOAT16 = cast(PARAMS, jnp.float16), cast(PARAMS, jnp.bfloat16)
ADAM, SGD, MOMENTUM = optax.adam(5e-3), optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)
NONE, UNIT = optax.identity(), ls.FixedLossScale(1.0)
MASKED = {**PARAMS, "w": optax.MaskedNode()}
OVERWRITTEN = "_overwrite_with_gradient"
NARROW = r"The true gradients are float16 at \['w'\], but the parameter is float32"
ROUNDED = (
    r"rounds the state .* at \[0\].trace\['b'\], from float32 to float16.*cast the"
)
FLOAT16 = "2 of 2 parameters are float16, .*put `with_master_weights` directly around"


def takes_all(updates, state, params=None, *, loss, values):
    return updates, state


TAKES_ALL = optax.GradientTransformationExtraArgs(lambda params: (), takes_all)


def frozen_but(inner):
    """Freezes the base, and trains the adapter."""
    groups = {"trained": inner, "frozen": optax.set_to_zero()}
    return optax.partition(groups, {"base": "frozen", "adapter": "trained"})


BASE = {"base": np.ones((4, 4), np.float16), "adapter": np.ones((4, 2), np.float32)}
HALF_BASE = cast(BASE, np.float16)
NO_W, INTEGERS = {**MASKED, "b": GRADS["b"]}, {"w": np.arange(8), "b": None}
HALF_W, SOME = {**GRADS, "w": HALF["w"]}, {"w": HALF["w"], "b": None}
COPIED = ls.with_master_weights(SGD)
YES = np.bool_(True)
NARROW_STATE = {"params": None, "start": PARAMS, "inner": MOMENTUM, "state": HALF}
# Arguments that sound as if they decided whether the step is applied.
DECIDING = {"loss": (1.0, "value=loss"), "values": (1.0, "value=values")}
DECIDING["found_inf"] = ~YES, "grads_finite=~found_inf"
for name in ("is_fin", "is_finite", "grads_are_finite"):
    DECIDING[name] = YES, f"grads_finite={name}"
# The arguments of one update, and its warning, if there is one.
UPDATES = {
    # Gradients narrower than their parameters, whose small elements are zero.
    "one gradient in float16": (dict(grads=HALF_W), NARROW),
    "float8": (dict(grads=cast(GRADS, jnp.float8_e5m2)), "are float8_e5m2 at"),
    "parameters in bfloat16": (dict(grads=HALF, params=BFLOAT16), "is bfloat16"),
    "bfloat16": (dict(grads=BFLOAT16), None),
    "float16, no parameters": (dict(grads=HALF, params=None), None),
    "float16, no scale": (dict(grads=HALF, rule=UNIT), None),
    "masked parameter": (dict(grads=NO_W, params=MASKED), None),
    "masked gradient": (dict(grads=NO_W), None),
    "overwrite": (dict(grads={OVERWRITTEN: HALF}, params={OVERWRITTEN: PARAMS}), None),
    "integer parameters": (dict(grads=SOME, params=INTEGERS), None),
    # float16 parameters, which lose small updates, unless they are frozen.
    "all in float16": (dict(grads=HALF, params=HALF, start=PARAMS), FLOAT16),
    "weights in float16": (dict(grads=GRADS, params=HALF, start=PARAMS), FLOAT16),
    "frozen, adam": (dict(grads=BASE, params=BASE, inner=frozen_but(ADAM)), None),
    "frozen, sgd": (dict(grads=BASE, params=BASE, inner=frozen_but(SGD)), None),
    "master weights": (dict(params=HALF, inner=COPIED), None),
    # A state of half precision, which is as wide as gradients of half precision.
    "state in float16": (NARROW_STATE, ROUNDED),
    "state and gradients in float16": ({**NARROW_STATE, "grads": HALF}, None),
    **{
        name: ({"inner": SGD, name: value}, f"Pass `{way}` if it should")
        for name, (value, way) in DECIDING.items()
    },
    "copied, loss": (dict(inner=COPIED, loss=1.0), "Pass `value=loss` if it should"),
    "loss and value": (dict(inner=SGD, loss=1.0, value=1.0), None),
    "copied, loss and value": (dict(inner=COPIED, loss=1.0, value=1.0), None),
    "two flags": (dict(is_finite=YES, grads_finite=YES), None),
    "optimizer that takes a loss": (dict(inner=TAKES_ALL, loss=1.0, values=2.0), None),
}


def warns_here(words, call, *args):
    """Call a function, which warns in these words at this line, or not at all."""
    with pytest.warns(UserWarning, match=words) if words else nullcontext([]) as seen:
        call(*args)
    where = [x.filename for x in seen if re.search(words, str(x.message))]
    assert where == [__file__] * bool(words)


@pytest.mark.parametrize("row", UPDATES)
def test_update_warns_once_of_harm_to_training(row, around):
    """A second call of a compiled one is silent."""
    arguments, words = UPDATES[row]
    options = {"grads": GRADS, "params": PARAMS, "inner": NONE, **arguments}
    grads, params, inner = (options.pop(x) for x in ("grads", "params", "inner"))
    tx = ls.with_loss_scaling(inner, options.pop("rule", ls.DynamicLossScale()))
    state = tx.init(options.pop("start", params))
    if narrow := options.pop("state", None):
        state = state._replace(inner_state=inner.init(narrow))
    update = around(functools.partial(tx.update, **options))
    warns_here(words, update, grads, state, params)
    warns_here(words if around is not jax.jit else None, update, grads, state, params)


@pytest.mark.parametrize(
    ("params", "inner", "words"),
    [
        (HALF, ADAM, r"2 of 2 parameters are float16, the first one at \['b'\]"),
        ({**PARAMS, "b": HALF["b"]}, ADAM, r"1 of 2 parameters"),
        (HALF_BASE, frozen_but(ADAM), r"1 of 2 .* at \['adapter'\]"),
        (BASE, frozen_but(ADAM), None),
        (HALF, ls.with_master_weights(ADAM), None),
        (BFLOAT16, ADAM, None),
        (PARAMS, ADAM, None),
    ],
)
def test_init_warns_once_of_trained_float16_parameters(params, inner, words):
    warns_here(words, ls.with_loss_scaling(inner).init, params)
