"""The wrapped transformation: the types of its state, and what is refused of it."""

import contextlib
import functools
import re

import equinox as eqx
import every_optimizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_types
from book import page
from every_optimizer import OPTIMIZERS, grads_for, make, params_for
from shared import slow_but
from training import transformation

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

ADAM = optax.adam(5e-3)


def cast(tree, dtype):
    return jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), tree))


PARAMS = cast({"w": np.linspace(-1, 1, 8), "b": 1.0}, jnp.float32)
GRADS = cast({"w": np.linspace(-0.5, 1.5, 8), "b": 1.5}, jnp.float32)
HALF = cast(PARAMS, jnp.float16)


def test_types_asked_for_are_kept():
    tx = ls.with_loss_scaling(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    moments = tx.init(HALF).inner_state[0]
    assert moments.mu["w"].dtype == jnp.bfloat16
    assert moments.nu["w"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_gradients_and_parameters_give_narrow_updates(dtype):
    params = cast(PARAMS, dtype)
    tx = ls.with_loss_scaling(ADAM)
    narrow = tx.init(params)._replace(inner_state=ADAM.init(params))
    for state in (tx.init(params), narrow):
        updates, new_state = jax.eval_shape(tx.update, params, state, params)
        assert_same_types(updates, params)
        assert_same_types(new_state, state)
    wide, _ = jax.eval_shape(tx.update, GRADS, tx.init(HALF), HALF)
    assert_same_types(wide, GRADS)


def test_branches_of_the_optimizer_agree():
    """Of gradients as narrow as the parameters, and as they should be."""
    inner = optax.conditionally_transform(ADAM, lambda step, **kwargs: step < 1)
    tx = ls.with_loss_scaling(optax.apply_if_finite(inner, 3), ls.FixedLossScale(1.0))
    for grads in (HALF, GRADS):
        updates, _ = jax.eval_shape(tx.update, grads, tx.init(HALF), HALF)
        assert_same_types(updates, grads)


FLOAT16 = r"The true gradients are float16 at \['w'\], but the parameter is float32"
ANY, UNIT = ls.DynamicLossScale(), ls.FixedLossScale(1.0)
MASKED = {**PARAMS, "w": optax.MaskedNode()}
OVERWRITTEN = "_overwrite_with_gradient"


@pytest.mark.parametrize(
    ("rule", "grads", "params", "told"),
    [
        (ANY, {**GRADS, "w": HALF["w"]}, PARAMS, FLOAT16),
        (ANY, cast(GRADS, jnp.float8_e5m2), PARAMS, "are float8_e5m2 at"),
        (ANY, HALF, cast(PARAMS, jnp.bfloat16), "parameter is bfloat16"),
        (ANY, cast(GRADS, jnp.bfloat16), PARAMS, None),
        (ANY, HALF, HALF, None),
        (ANY, GRADS, HALF, None),
        (ANY, HALF, None, None),
        (UNIT, HALF, PARAMS, None),
        (ANY, {**MASKED, "b": GRADS["b"]}, MASKED, None),
        (ANY, {**MASKED, "b": GRADS["b"]}, {**PARAMS, "w": MASKED["w"]}, None),
        (ANY, {OVERWRITTEN: HALF, **GRADS}, {OVERWRITTEN: PARAMS, **PARAMS}, None),
        (ANY, {"w": HALF["w"], "b": None}, {"w": np.arange(8), "b": None}, None),
    ],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_narrower_than_their_parameters_are_told(
    rule, grads, params, told, around
):
    tx = ls.with_loss_scaling(optax.identity(), rule)
    state = tx.init(params)
    with pytest.warns(UserWarning, match=told) if told else contextlib.nullcontext():
        around(tx.update)(grads, state, params)


@pytest.mark.filterwarnings("ignore:The true gradients are float16")
def test_narrow_gradients_are_squared_in_float32():
    """As those of a half-precision copy that was differentiated."""
    tx, grads = ls.with_loss_scaling(optax.adam(1e-3)), np.full(8, 1e-4, np.float16)
    updates, _ = tx.update(grads, tx.init(PARAMS["w"]), PARAMS["w"])
    assert updates.dtype == jnp.float32
    np.testing.assert_allclose(updates, np.full(8, -1e-3), rtol=1e-3)


# They divide 0 by 0 in float32, too.
NAN_OF_ZEROS = {"optax.contrib.dadapt_adamw", "optax.contrib.prodigy"}


@pytest.mark.parametrize("name", slow_but(["optax.adafactor"], OPTIMIZERS))
@pytest.mark.filterwarnings("ignore")
def test_every_optimizer_makes_finite_updates_of_float16_zeros(name):
    tx, params = ls.with_loss_scaling(make(name)), params_for(name, jnp.float16)
    zeros = optax.tree.zeros_like(grads_for(name, params), dtype=jnp.float16)
    step = jax.jit(functools.partial(every_optimizer.update, name, tx))
    updates, state = step(zeros, tx.init(params), params)
    updates, _ = step(zeros, state, params)
    assert ls.all_finite(updates) == (name not in NAN_OF_ZEROS)


def test_plain_optimizers_make_nan_of_zero_gradients_in_float16():
    text = page("guides/float16_parameters")
    names = re.findall(r"`(\w+)`", re.search("of NaN from (.+?) and others", text)[1])
    assert {"adam", "adamw"} <= {*names}
    for name in names:
        tx, params = make(f"optax.{name}"), HALF["w"]
        updates, _ = tx.update(np.zeros_like(params), tx.init(params), params)
        assert np.isnan(updates).all(), name


WEAK = optax.GradientTransformation(
    lambda p: {"rate": jnp.asarray(0.3), "step": 0, "full": jnp.full(4, 0.3)},
    lambda u, s, p=None: (u, {**s, "step": s["step"] * 1, "rate": jnp.asarray(0.3)}),
)
SKIPS, NEVER_SKIPS = ls.DynamicLossScale(), ls.FixedLossScale(skip_nonfinite=False)


@pytest.mark.parametrize("rule", [SKIPS, NEVER_SKIPS], ids=["skips", "never skips"])
def test_types_never_change_and_one_trace_serves_the_whole_run(rule):
    """Of optax's own optimizers `test_optimizers` says the same."""
    tx, traces = ls.with_loss_scaling(WEAK, rule), []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = HALF, tx.init(HALF)
    bad = jax.tree.map(lambda g: np.full_like(g, np.nan), GRADS)
    for grads in (GRADS, bad, GRADS):
        new = step(params, state, grads)
        assert_same_types(new, (params, state))
        params, state = new
    assert len(traces) == 1


@pytest.mark.parametrize("rule", [SKIPS, NEVER_SKIPS], ids=["skips", "never skips"])
@pytest.mark.parametrize(
    ("first", "new", "kept"),
    [
        (np.int32(0), 0.3, r"types of .* at \[0\]"),
        (0.0, 0.5j, r"types of .* at \[0\]"),
        (np.float32([0]), np.float32([1, 1]), "structure and"),
        (np.float32([0]), (), "structure and"),
    ],
)
def test_a_state_that_becomes_another_kind_is_refused(first, new, kept, rule):
    inner = transformation(lambda u, s: (u, (new,)), first)
    tx = ls.with_loss_scaling(inner, rule)
    for step in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=f"must keep the {kept}"):
            step(GRADS, tx.init(PARAMS), PARAMS)


def test_a_state_that_is_given_in_half_precision_is_warned_of():
    inner = optax.sgd(0.1, momentum=0.9)
    tx = ls.with_loss_scaling(inner)
    state = tx.init(HALF)._replace(inner_state=inner.init(HALF))
    message = r"\[0\].trace\['b'\], from float32 to fl"
    with pytest.warns(UserWarning, match=message) as record:
        _, new_state = tx.update(GRADS, state, HALF)
    assert record[0].filename == __file__
    assert_same_types(new_state, state)
    tx.update(HALF, state, HALF)  # gradients of the same type: warnings are errors


def test_a_loss_in_the_place_of_something_else_is_refused():
    tx = ls.with_loss_scaling(optax.adamw(0.1))
    state, loss = tx.init(PARAMS), np.float32(0.5)
    with pytest.raises(ValueError, match="returns the loss first: `loss, grads = "):
        tx.update(loss, state, PARAMS)
    with pytest.raises(TypeError, match="all else by name, got .*value=loss"):
        tx.update(GRADS, state, PARAMS, loss)
    with pytest.raises(ValueError, match="of one model and one optimizer"):
        tx.update(np.ones(8, np.float32), state, PARAMS)  # an array, but no loss


NO_B = {"w": GRADS["w"]}
LONG = {**GRADS, "b": np.ones(4, np.float32)}
OTHERS = {
    "missing": ("updates", NO_B, PARAMS),
    "shape": ("updates", LONG, PARAMS),
    "none": ("updates", {**GRADS, "b": None}, PARAMS),
    "params": ("updates", GRADS, NO_B),
    "state": ("state", LONG, {**PARAMS, "b": np.ones(4, np.float32)}),
}


@pytest.mark.parametrize(("name", "grads", "params"), OTHERS.values(), ids=OTHERS)
def test_gradients_or_state_of_another_model_are_refused(name, grads, params):
    """Whether the optimizer fails or broadcasts."""
    tx = ls.with_loss_scaling(optax.adamw(0.1))
    match = rf"`{name}` and `params` must belong together.*\['b'\].*keep the scale"
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=match):
            update(grads, tx.init(PARAMS), params)


def test_an_error_of_the_inner_transformation_is_its_own():
    def update(updates, state, params=None):
        raise ZeroDivisionError("its own")

    # Some of its moments have other shapes than the parameters.
    inner = optax.GradientTransformation(optax.adafactor(0.1).init, update)
    tx = ls.with_loss_scaling(inner)
    for step in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ZeroDivisionError, match="its own"):
            step(GRADS, tx.init(PARAMS))


def test_leaves_that_are_no_arrays_pass_through():
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    inner = optax.GradientTransformation(
        lambda params: ("name", model, np.zeros(2, np.float32)),
        lambda updates, state, params=None: (updates, (*state[:2], state[2] + updates)),
    )
    tx = ls.with_loss_scaling(inner)
    for update in (tx.update, eqx.filter_jit(tx.update)):
        for number, expected in ((1.0, 1.0), (np.nan, 0.0)):
            grads = np.full(2, number, np.float32)
            _, state = update(grads, tx.init(grads))
            name, kept, total = state.inner_state
            assert name == "name" and total.tolist() == [expected] * 2
            assert eqx.tree_equal(kept, model)
