"""with_loss_scaling: what it keeps, what it refuses, every kind of leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_no_update, assert_same_bits, assert_same_types, enable_x64

import optax_lossscale as ls

pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

PARAMS = {"w": jnp.arange(4.0), "b": jnp.ones(())}


GRADS = {"w": jnp.array([0.5, -1.0, 2.0, 0.25]), "b": jnp.float32(0.125)}


BAD_GRADS = {**GRADS, "w": GRADS["w"].at[2].set(jnp.nan)}


def apply(tx, grads, state, params=PARAMS, **extra_args):
    updates, state = tx.update(grads, state, params, **extra_args)
    return updates, state


def test_a_good_step_is_the_optimizers_own():
    plain, tx = optax.adam(1e-3), ls.with_loss_scaling(optax.adam(1e-3))
    updates, state = apply(tx, GRADS, tx.init(PARAMS))
    expected, plain_state = plain.update(GRADS, plain.init(PARAMS), PARAMS)
    assert_same_bits(updates, expected)
    assert_same_bits(state.inner_state, plain_state)
    assert bool(state.scale_state.grads_finite)


def test_a_bad_step_does_nothing_but_back_off():
    tx = ls.with_loss_scaling(optax.adam(1e-3))
    _, before = apply(tx, GRADS, tx.init(PARAMS))
    updates, after = apply(tx, BAD_GRADS, before)
    assert_no_update(updates)
    assert_same_bits(after.inner_state, before.inner_state)
    assert float(ls.get_loss_scale(after)) == float(ls.get_loss_scale(before)) / 2
    assert int(after.scale_state.skipped_steps) == 1


def test_true_gradients_go_in_and_are_not_divided():
    tx = ls.with_loss_scaling(optax.sgd(1.0), ls.FixedLossScale(1024.0))
    updates, _ = apply(tx, GRADS, tx.init(PARAMS))
    assert_same_bits(updates, jax.tree.map(jnp.negative, GRADS))


def test_without_skipping_nothing_is_checked_and_nothing_masked():
    rule = ls.FixedLossScale(128.0, skip_nonfinite=False)
    tx, plain = ls.with_loss_scaling(optax.adam(1e-3), rule), optax.adam(1e-3)
    updates, state = apply(tx, BAD_GRADS, tx.init(PARAMS))
    expected, expected_state = plain.update(BAD_GRADS, plain.init(PARAMS), PARAMS)
    assert_same_bits(updates, expected)
    assert_same_bits(state.inner_state, expected_state)
    assert bool(state.scale_state.grads_finite)

    def operations(tx):
        state = tx.init(PARAMS)
        return str(jax.make_jaxpr(tx.update)(GRADS, state, PARAMS)).count(" = ")

    # The flag True, and the call of an update that returns what it was given.
    assert operations(tx) <= operations(plain) + 2


def test_the_default_rule_and_the_state_are_as_documented():
    tx = ls.with_loss_scaling(optax.sgd(0.1))
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    state = tx.init(PARAMS)
    assert state._fields == ("scale_state", "inner_state")
    assert_same_bits(state.scale_state, ls.DynamicLossScale().init())


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (ls.DynamicLossScale(), r"got the rule DynamicLossScale\(.*optimizer comes fi"),
        (optax.adam, r"Call it first, as in `optax.adam\(1e-3\)`"),
        (optax.MultiSteps, "Call it first"),
        (None, r"got None. Pass an optimizer"),
        (1e-3, r"got 0.001. Pass an optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(inner, message):
    with pytest.raises(TypeError, match=f"`inner` must be an Optax .*{message}"):
        ls.with_loss_scaling(inner)


def test_two_wrappers_around_each_other_are_refused():
    tx = ls.with_loss_scaling(optax.chain(ls.with_loss_scaling(optax.sgd(0.1))))
    with pytest.raises(ValueError, match="`inner` must not scale losses itself"):
        tx.init(PARAMS)


@pytest.mark.parametrize("restore", [lambda s: s.inner_state, lambda s: s._asdict()])
def test_a_state_of_another_kind_is_refused(restore):
    tx = ls.with_loss_scaling(optax.adam(0.1))
    with pytest.raises(TypeError, match="`state` must be a WithLossScalingState"):
        tx.update(GRADS, restore(tx.init(PARAMS)), PARAMS)


@pytest.mark.parametrize("abstract", ["eval_shape", "structs"])
def test_init_takes_abstract_parameters(abstract):
    tx = ls.with_loss_scaling(optax.adam(1e-3))
    concrete = tx.init(PARAMS)
    shapes = jax.eval_shape(lambda: PARAMS)
    state = jax.eval_shape(tx.init, PARAMS) if abstract == "eval_shape" else None
    state = state or jax.eval_shape(tx.init, shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), concrete
    )
    assert_same_types(tx.init(shapes), concrete)


WEAK = optax.GradientTransformation(
    lambda p: {"rate": jnp.asarray(0.3), "step": 0, "full": jnp.full(4, 0.3)},
    lambda u, s, p=None: (u, {**s, "step": s["step"] * 1, "rate": jnp.asarray(0.3)}),
)


UNMASKED = ls.FixedLossScale(skip_nonfinite=False)


@pytest.mark.parametrize(
    "rule, inner, dtype",
    [
        (ls.DynamicLossScale(), WEAK, "float16"),
        (UNMASKED, WEAK, "float32"),
        (UNMASKED, optax.adamw(1e-3), "float16"),
        (UNMASKED, optax.lion(1e-3), "bfloat16"),
    ],
)
def test_types_never_change_and_one_trace_serves_the_whole_run(rule, inner, dtype):
    """Of optax's own optimizers, masked, `test_optimizers` says the same."""
    traces = []
    tx = ls.with_loss_scaling(inner, rule)
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grads in (GRADS, BAD_GRADS, GRADS):
        new_params, new_state = step(params, state, grads)
        assert_same_types(new_state, state)
        assert_same_types(new_params, params)
        params, state = new_params, new_state
    assert len(traces) == 1


def test_updates_have_the_type_that_the_inner_transformation_gave():
    params = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
    plain = optax.adam(1e-3)
    expected, _ = plain.update(GRADS, plain.init(params), params)
    tx = ls.with_loss_scaling(plain)
    for grads in (GRADS, BAD_GRADS):
        updates, _ = tx.update(grads, tx.init(params), params)
        assert_same_types(updates, expected)


def test_zero_updates_are_made_of_the_output_of_the_inner_transformation():
    """Lookahead takes one tree of gradients and returns updates for two."""
    params = optax.LookaheadParams.init_synced(PARAMS)
    tx = ls.with_loss_scaling(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    updates, _ = tx.update(BAD_GRADS, tx.init(params), params)
    assert_no_update(updates)


def test_complex_parameters():
    params = jnp.array([1 + 1j, 2.0], jnp.complex64)
    tx = ls.with_loss_scaling(optax.adam(0.1))
    state = tx.init(params)
    for bad in (complex(0, np.nan), complex(np.inf, 0)):
        grads = jnp.array([1j, bad], jnp.complex64)
        updates, new_state = tx.update(grads, state, params)
        assert_no_update(updates)
        assert_same_bits(new_state.inner_state, state.inner_state)
    updates, _ = tx.update(params, state, params)
    assert updates.dtype == jnp.complex64 and np.isfinite(updates).all()


def test_float64_under_x64():
    with enable_x64(True):
        params = jnp.arange(3.0)
        tx = ls.with_loss_scaling(optax.adam(0.1))
        state = tx.init(params)
        _, grads = ls.value_and_grad(lambda p: jnp.sum(p**2), state)(params)
        updates, new_state = tx.update(grads, state, params)
        assert updates.dtype == jnp.float64
        assert_same_types(new_state, state)
        assert new_state.scale_state.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("jit", [False, True])
def test_integer_leaves_with_allow_int(jit):
    params = {"w": jnp.ones(2), "table": jnp.arange(3)}
    mask = {"w": True, "table": False}
    tx = ls.with_loss_scaling(
        optax.chain(
            optax.masked(optax.adam(0.1), mask),
            optax.masked(optax.set_to_zero(), {"w": False, "table": False}),
        )
    )
    state = tx.init(params)

    def loss_fn(params):
        return jnp.sum(params["w"] ** 2) * params["table"][1]

    def step(params, state, factor):
        fun = ls.value_and_grad(lambda p: factor * loss_fn(p), state, allow_int=True)
        _, grads = fun(params)
        updates, state = tx.update(grads, state, params)
        assert grads["table"].dtype == updates["table"].dtype == jax.dtypes.float0
        return updates["w"], state

    step = jax.jit(step) if jit else step
    for factor in (1.0, jnp.nan):
        update, state = step(params, state, factor)
    assert_no_update(update)
    assert int(state.scale_state.skipped_steps) == 1


def test_none_leaves_are_left_alone():
    params = {"w": jnp.ones(2), "frozen": None}
    tx = ls.with_loss_scaling(optax.adam(0.1))
    state = tx.init(params)
    for grad in (jnp.ones(2), jnp.full(2, jnp.inf)):
        updates, state = tx.update({"w": grad, "frozen": None}, state, params)
        assert updates["frozen"] is None
    assert int(state.scale_state.skipped_steps) == 1


@pytest.mark.parametrize("tree", [{}, (), None])
def test_an_empty_tree_is_a_step_like_any_other(tree):
    tx = ls.with_loss_scaling(optax.adam(0.1))
    updates, state = tx.update(tree, tx.init(tree), tree)
    assert updates == tree
    assert bool(state.scale_state.grads_finite)


def test_a_typed_prng_key_in_the_state_is_kept_when_a_step_is_skipped():
    def update(updates, state, params=None):
        return updates, {"key": jax.random.split(state["key"], 1)[0]}

    inner = optax.GradientTransformation(lambda p: {"key": jax.random.key(0)}, update)
    tx = ls.with_loss_scaling(inner)
    state = tx.init(PARAMS)
    _, skipped = tx.update(BAD_GRADS, state, PARAMS)
    assert_same_bits(skipped.inner_state, state.inner_state)
    _, applied = tx.update(GRADS, state, PARAMS)
    assert (
        jax.random.key_data(applied.inner_state["key"]).tolist()
        != jax.random.key_data(state.inner_state["key"]).tolist()
    )
