"""Extra arguments that know more than the gradients: a flag, and the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_no_update, assert_same_bits

import optax_lossscale as ls

RULE = ls.DynamicLossScale(growth_interval=3, hysteresis=2, init_scale=2.0**10)
PARAMS = {"w": np.arange(4, dtype=np.float32), "b": np.float32(1.0)}
GRADS = {"w": np.array([0.5, -1.0, 2.0, 0.25], np.float32), "b": np.float32(0.125)}
BAD_GRADS = {**GRADS, "w": np.array([0.5, -1.0, np.nan, 0.25], np.float32)}
TX = ls.with_loss_scaling(optax.adam(0.1), RULE)


@pytest.mark.parametrize(
    ("name", "rule", "values"),
    [
        ("grads_finite", "boolean", [1.0, "yes", np.ones(2, bool)]),
        ("value", "real number", [np.float32([1, 1]), True, 1j]),
    ],
)
def test_what_is_no_flag_or_no_loss_is_refused(name, rule, values):
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` must be one {rule}"):
            TX.update(GRADS, TX.init(PARAMS), PARAMS, **{name: value})


def test_a_rule_that_never_skips_ignores_the_flag_and_the_loss():
    rule, inner = ls.FixedLossScale(8.0, skip_nonfinite=False), optax.adam(1.0)
    tx = ls.with_loss_scaling(inner, rule)
    given = {"grads_finite": False, "value": jnp.nan}
    updates, state = jax.jit(tx.update)(BAD_GRADS, tx.init(PARAMS), PARAMS, **given)
    expected = jax.jit(inner.update)(BAD_GRADS, inner.init(PARAMS), PARAMS)
    assert_same_bits((updates, state.inner_state), expected)
    assert_same_bits(state.scale_state, rule.init())


SEEN = {}


def takes_all(updates, state, params=None, **extra_args):
    SEEN.update(extra_args)
    return updates, state


def takes_value(updates, state, params=None, value=None):
    SEEN.update(value=value)
    return updates, state


def takes_the_flag(updates, state, params=None, *, grads_finite, **extra_args):
    SEEN.update(extra_args, grads_finite=grads_finite)
    return updates, state


def inner_of(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize(
    ("takes", "taken"),
    [
        # The flag is meant for us: a line search would hand it to the loss.
        (takes_all, ["value", "value_fn"]),
        (takes_value, ["value"]),
        (takes_the_flag, ["grads_finite", "value", "value_fn"]),
    ],
)
def test_a_transformation_is_given_what_it_takes(takes, taken):
    given = {"grads_finite": True, "value": np.float32(3.0), "value_fn": len}
    tx = ls.with_loss_scaling(inner_of(takes))
    SEEN.clear()
    tx.update(GRADS, tx.init(PARAMS), PARAMS, **given)
    assert SEEN.keys() == set(taken)


SGD = optax.sgd(0.1)
SAM = optax.contrib.sam(SGD, SGD)
PLAIN_SAM = optax.GradientTransformation(SAM.init, SAM.update)


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: optax.chain(optax.clip(1.0), tx), lambda tx: optax.MultiSteps(tx, 2)],
    ids=["chain", "MultiSteps"],
)
def test_value_decides_beside_an_optimizer_without_it(wrap):
    tx = ls.with_loss_scaling(wrap(PLAIN_SAM))
    state = tx.init(PARAMS)
    for step in (tx.update, jax.jit(tx.update)):
        assert_same_bits(
            step(GRADS, state, PARAMS, value=3.0), step(GRADS, state, PARAMS)
        )
        _, skipped = step(GRADS, state, PARAMS, value=jnp.nan)
        assert not ls.was_applied(skipped)
    refusing = ls.with_loss_scaling(wrap(SAM))
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        refusing.update(GRADS, refusing.init(PARAMS), PARAMS, value=3.0)


def test_an_error_of_the_optimizers_own_reaches_the_user():
    def update(updates, state, params=None):
        return dict(updates, missing=len(value=3))

    tx = ls.with_loss_scaling(inner_of(update))
    for given in ({}, {"value": 3.0}):
        with pytest.raises(TypeError, match=r"len\(\) takes no keyword arguments"):
            tx.update(GRADS, tx.init(PARAMS), PARAMS, **given)


@jax.jit
def steep_loss(params, steepness):
    """Its gradients overflow in float16 at a scale of 2**16 / ``steepness``."""
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    total = sum(jnp.sum(x * jnp.float16(steepness)) for x in jax.tree.leaves(half))
    return total.astype(jnp.float32)


@pytest.mark.parametrize("check_updates", [False, True])
@pytest.mark.parametrize("around", [jax.jit, lambda step: step], ids=["jit", "eager"])
def test_a_gradient_that_the_optimizer_takes_itself_may_overflow(around, check_updates):
    """The gradients are finite, but those at the adversarial parameters are not."""
    sgd = optax.GradientTransformation(SGD.init, jax.jit(SGD.update))
    sam = optax.contrib.sam(sgd, sgd, opaque_mode=True)
    tx = ls.with_loss_scaling(sam, check_updates=check_updates)

    def step(params, state):
        grads = ls.grad(steep_loss, state)(params, 1.0)
        scaled = ls.scale_backward(lambda params, _: steep_loss(params, 16.0), state)
        updates, state = tx.update(grads, state, params, grad_fn=jax.grad(scaled))
        return optax.apply_updates(params, updates), state

    params, state, step = PARAMS, tx.init(PARAMS), around(step)
    scales = []
    for _ in range(6):
        old = params, state.inner_state
        params, state = step(params, state)
        scales.append(float(ls.get_loss_scale(state)))
        if not ls.was_applied(state):
            assert_same_bits((params, state.inner_state), old)
    assert scales == [2.0**14, 2.0**13, 2.0**12, 2.0**11, 2.0**11, 2.0**11]
    assert ls.all_finite((params, state.inner_state)) and ls.was_applied(state)


def test_a_loss_that_an_optimizer_evaluates_is_scaled_as_well():
    """Line searches and Sophia take the function: `scale_backward` scales it."""
    tiny = 2.0**-30
    solvers = {
        "value_fn": optax.lbfgs(),
        "obj_fn": optax.contrib.sophia(0.1, update_interval=1),
    }
    for name, inner in solvers.items():
        tx = ls.with_loss_scaling(inner)

        @functools.partial(jax.jit, static_argnums=0)
        def step(loss, params, state, name=name, tx=tx):
            fun = lambda p: tiny * loss(p, 1.0)  # noqa: E731
            value, grads = ls.value_and_grad(fun, state)(params)
            given = {name: ls.scale_backward(fun, state), "value": value}
            given |= {"grad": grads} if name == "value_fn" else {}
            return tx.update(grads, state, params, **given)[0]

        wide_loss = lambda p, s: s * sum(map(jnp.sum, p.values()))  # noqa: E731
        results = [step(f, PARAMS, tx.init(PARAMS)) for f in (steep_loss, wide_loss)]
        assert all(map(np.any, jax.tree.leaves(jax.device_get(results))))
        assert_same_bits(*results)


def test_with_an_axis_name_one_member_decides_for_all():
    tx = ls.with_loss_scaling(optax.sgd(0.1), RULE, axis_name="member")

    def member(grads):
        return tx.update(grads, tx.init(grads))

    grads = np.float32([[1.0, 1.0, 1.0], [1.0, 1.0, np.inf]])
    updates, state = jax.jit(jax.vmap(member, axis_name="member"))(grads)
    assert_no_update(updates)
    assert state.scale_state.hysteresis_tracker.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("loss", "value=loss"),
        ("values", "value=values"),
        *((x, f"grads_finite={x}") for x in ("is_fin", "is_finite")),
        ("grads_are_finite", "grads_finite=grads_are_finite"),
        ("found_inf", "grads_finite=~found_inf"),
    ],
)
def test_argument_like_one_that_decides_is_warned_of(name, advice):
    given = {name: np.bool_(True) if "grads_finite" in advice else 1.0}
    deciding = {advice.partition("=")[0]: given[name]}
    for inner in (SGD, ls.with_master_weights(SGD)):
        tx = ls.with_loss_scaling(inner)
        state = tx.init(PARAMS)
        with pytest.warns(UserWarning, match=f"Pass `{advice}` if it should") as seen:
            tx.update(GRADS, state, PARAMS, **given)
        assert sum("does not decide" in str(warning.message) for warning in seen) == 1
        tx.update(GRADS, state, PARAMS, **deciding, **given)

    def update(updates, state, params=None, *, loss, values):
        return updates, state

    tx = ls.with_loss_scaling(inner_of(update))
    tx.update(GRADS, tx.init(PARAMS), loss=1.0, values=2.0)


def test_closures_hold_nothing_that_cannot_be_hashed():
    """optimistix makes pytrees of them, which are compared."""
    internal = pytest.importorskip("equinox.internal")
    tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(0.1)))
    for function in (tx.init, tx.update):
        for leaf in jax.tree.leaves(internal.closure_to_pytree(function)):
            hash(leaf)
