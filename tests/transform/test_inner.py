"""The wrapped transformation: the types of its state, and what is refused of it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same_types, transformation

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

PARAMS = {"w": jnp.linspace(-1, 1, 8), "b": jnp.ones(())}
GRADS = jax.tree.map(lambda p: 0.5 + p, PARAMS)
ADAM = optax.adam(5e-3)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


HALF = cast(PARAMS, jnp.float16)


WAYS_TO_INIT = {
    "eager": lambda tx: tx.init(HALF),
    "jit": lambda tx: jax.jit(tx.init)(HALF),
    "eval_shape": lambda tx: jax.eval_shape(tx.init, HALF),
    "abstract": lambda tx: tx.init(jax.eval_shape(lambda: HALF)),
    "vmap": lambda tx: jax.tree.map(
        lambda x: x[0], jax.vmap(tx.init)(jax.tree.map(lambda x: x[None], HALF))
    ),
}


@pytest.mark.parametrize("init", WAYS_TO_INIT.values(), ids=WAYS_TO_INIT)
def test_every_way_to_init_makes_float16_moments_float32(init):
    state = init(ls.with_loss_scaling(ADAM)).inner_state
    assert_same_types(state, ADAM.init(PARAMS))


def test_types_asked_for_are_kept():
    tx = ls.with_loss_scaling(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    moments = tx.init(HALF).inner_state[0]
    assert moments.mu["w"].dtype == jnp.bfloat16
    assert moments.nu["w"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_of_narrow_gradients_updates_are_as_narrow_and_moments_may_be(dtype):
    params = cast(PARAMS, dtype)
    tx = ls.with_loss_scaling(ADAM)
    narrow = tx.init(params)._replace(inner_state=ADAM.init(params))
    for state in (tx.init(params), narrow):
        updates, new_state = jax.eval_shape(tx.update, params, state, params)
        assert_same_types(updates, params)
        assert_same_types(new_state, state)
    wide, _ = jax.eval_shape(tx.update, GRADS, tx.init(HALF), HALF)
    assert_same_types(wide, GRADS)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_branches_of_the_optimizer_agree(dtype):
    """Of gradients as narrow as the parameters, and of float16's as they should be."""
    params = cast(PARAMS, dtype)
    inner = optax.conditionally_transform(ADAM, lambda step, **kwargs: step < 1)
    tx = ls.with_loss_scaling(optax.apply_if_finite(inner, 3), ls.FixedLossScale(1.0))
    for grads in (params, GRADS)[: 1 + (dtype == jnp.float16)]:
        updates, _ = jax.eval_shape(tx.update, grads, tx.init(params), params)
        assert_same_types(updates, grads)


WEAK = optax.GradientTransformation(
    lambda p: {"rate": jnp.asarray(0.3), "step": 0, "full": jnp.full(4, 0.3)},
    lambda u, s, p=None: (u, {**s, "step": s["step"] * 1, "rate": jnp.asarray(0.3)}),
)
SKIPS, NEVER_SKIPS = ls.DynamicLossScale(), ls.FixedLossScale(skip_nonfinite=False)


@pytest.mark.parametrize(
    "rule, inner, dtype",
    [
        (SKIPS, WEAK, "float16"),
        (NEVER_SKIPS, WEAK, "float32"),
        (NEVER_SKIPS, optax.adamw(1e-3), "float16"),
        (NEVER_SKIPS, optax.lion(1e-3), "bfloat16"),
    ],
)
def test_types_never_change_and_one_trace_serves_the_whole_run(rule, inner, dtype):
    """Of optax's own optimizers, masked, `test_optimizers` says the same."""
    tx, params = ls.with_loss_scaling(inner, rule), cast(PARAMS, dtype)
    grads = cast(GRADS, "bfloat16" if dtype == "bfloat16" else "float32")
    state, traces = tx.init(params), []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for factor in (1.0, jnp.nan, 1.0):
        new = step(params, state, jax.tree.map(lambda g, f=factor: g * f, grads))
        assert_same_types(new, (params, state))
        params, state = new
    assert len(traces) == 1


@pytest.mark.parametrize("rule", [SKIPS, NEVER_SKIPS], ids=["skips", "never skips"])
@pytest.mark.parametrize(
    "first, update",
    [
        (0, lambda s: 0.5 * s + 0.3),
        (0.0, lambda s: s + 0.5j),
        (False, lambda s: s + 1),
        (jnp.int32(0), lambda s: 0.5 * s + 0.3),
    ],
    ids=["int to float", "float to complex", "bool to int", "int32 to float"],
)
def test_a_state_that_becomes_another_kind_of_number_is_refused(first, update, rule):
    inner = transformation(lambda u, s: (u, (update(s),)), first)
    tx = ls.with_loss_scaling(inner, rule)
    match = r"must keep the types of its state, .* at \[0\].* Start with the wider type"
    for step in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=match):
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


NO_B = {"w": GRADS["w"]}
OTHERS = {
    "missing": (NO_B, PARAMS, r"no array at \['b'\], and `params` has .* shape \(\)"),
    "new": ({**GRADS, "new": 1.0}, PARAMS, r"\['new'\], and `params` has none"),
    "shape": ({**GRADS, "b": jnp.ones(4)}, PARAMS, r"shape \(4,\) at \['b'\].*\(\)"),
    "structure": (list(GRADS.values()), PARAMS, r"no array at \['b'\], and `params`"),
    "params": (GRADS, NO_B, r"shape \(\) at \['b'\], and `params` has none"),
    "state": ({**GRADS, "b": jnp.ones(4)}, None, r"\(4,\) at \['b'\], and `state` .*"),
    "both": ({**GRADS, "b": jnp.ones(4)}, {**PARAMS, "b": jnp.ones(4)}, "`state` has"),
    "none": ({**GRADS, "b": None}, PARAMS, r"no array at \['b'\].*zeros, not None"),
    "no params": ({**GRADS, "b": None}, None, r"no array at \['b'\], and `state` has"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("grads, params, message", OTHERS.values(), ids=OTHERS)
def test_gradients_parameters_and_state_of_several_models_are_refused(
    grads, params, message, jit
):
    """Whether the optimizer fails or broadcasts."""
    tx = ls.with_loss_scaling(ADAM if params is None else optax.adamw(0.1))
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError, match=f"must belong together, but .*{message}"):
        update(grads, tx.init(PARAMS), params)


@pytest.mark.parametrize(
    "inner, message",
    [
        (
            optax.GradientTransformation(
                lambda p: (), lambda u, s, p=None: (u, (jnp.ones(()),))
            ),
            r"`inner` must keep the structure and .* of its state.*`optax.monitor`",
        ),
        (
            transformation(lambda u, s: (u, (jnp.append(s, 1.0),)), jnp.zeros(1)),
            r"`inner` must keep .* the shapes of its state, but returns .*\(2,\) at ",
        ),
    ],
    ids=["structure", "shape"],
)
def test_a_state_that_changes_is_refused(inner, message):
    tx = ls.with_loss_scaling(inner)
    with pytest.raises(ValueError, match=message):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("jit", [False, True])
def test_an_error_of_the_inner_transformation_is_its_own_and_comes_at_once(jit):
    traces = []

    def update(updates, state, params=None):
        traces.append(1)
        raise ZeroDivisionError("its own")

    # Some of its moments have other shapes than the parameters.
    inner = optax.GradientTransformation(optax.adafactor(0.1).init, update)
    tx = ls.with_loss_scaling(inner)
    step = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ZeroDivisionError, match="its own"):
        step(GRADS, tx.init(PARAMS))
    assert len(traces) == 1
