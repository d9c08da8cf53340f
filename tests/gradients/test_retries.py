"""value_and_grad_with_retries."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_rule import RULES
from helpers import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

RULE = ls.DynamicLossScale(growth_interval=5)
W = jnp.ones(3)


def loss_fn(w, slope, shift=0.0):
    """Of a float16 layer, whose gradient is the slope."""
    y = jnp.asarray(slope, jnp.float16) * w.astype(jnp.float16)
    return jnp.sum(y.astype(jnp.float32)) + shift


@functools.partial(jax.jit, static_argnames=("max_retries",))
def attempt(state, slope, shift=0.0, backoff_factor=0.5, max_retries=4):
    fun = ls.value_and_grad_with_retries(
        loss_fn, state, max_retries=max_retries, backoff_factor=backoff_factor
    )
    return fun(W, slope, shift)


def at_scale(scale, tracker=3):
    return RULE.init()._replace(
        loss_scale=jnp.float32(scale), growth_tracker=jnp.int32(tracker)
    )


@given(
    st.integers(-5, 24),
    st.floats(-60000, 60000, width=16),
    st.sampled_from([0.0, np.inf, np.nan]),
    st.sampled_from([0.5, 0.25, 0.125]),
)
def test_it_does_as_its_docstring_says(exponent, slope, shift, backoff_factor):
    def scaled_gradient(scale):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.float32(np.float16(scale) * np.float16(slope))

    state, scale, retries = at_scale(2.0**exponent), 2.0**exponent, 0
    value, grads, new_state = attempt(state, slope, shift, backoff_factor)
    while (
        retries < 4 and np.isfinite(value) and not np.isfinite(scaled_gradient(scale))
    ):
        scale, retries = scale * backoff_factor, retries + 1
    np.testing.assert_array_equal(grads, scaled_gradient(scale) / np.float32(scale))
    tracker = jnp.int32(0) if retries else state.growth_tracker
    expected_state = state._replace(
        loss_scale=jnp.float32(scale), growth_tracker=tracker
    )
    assert_same_bits(new_state, expected_state)
    np.testing.assert_array_equal(value, jax.jit(loss_fn)(W, slope, shift))


def test_without_an_overflow_it_is_value_and_grad_and_the_state_that_came_in():
    state = at_scale(2.0**10)._replace(hysteresis_tracker=jnp.int32(2))
    value, grads, new_state = attempt(state, 3.0)
    assert_same_bits((value, grads), ls.value_and_grad(loss_fn, state)(W, 3.0))
    assert_same_bits(new_state, state)


def test_the_hysteresis_counter_is_left_alone():
    state = at_scale(2.0**16)._replace(hysteresis_tracker=jnp.int32(2))
    new_state = attempt(state, 3.0)[2]
    assert new_state.hysteresis_tracker == 2 and new_state.loss_scale == 2.0**14
    assert new_state.skipped_steps == new_state.consecutive_skips == 0


def test_no_retries_are_none():
    state = at_scale(2.0**16)
    _, grads, new_state = attempt(state, 3.0, max_retries=0)
    assert not ls.all_finite(grads)
    assert_same_bits(new_state, state)


def test_the_scale_stays_a_normal_number():
    state = at_scale(2.0**-120)
    _, grads, new_state = attempt(state, np.inf, -np.inf, backoff_factor=2.0**-100)
    assert_same_bits(new_state, state)  # the value is not finite
    fun = ls.value_and_grad_with_retries(jnp.sqrt, state, backoff_factor=2.0**-100)
    value, grads, new_state = fun(0.0)
    assert value == 0 and np.isinf(grads) and new_state.loss_scale == 2.0**-126


retried = jax.jit(
    lambda state: ls.value_and_grad_with_retries(loss_fn, state, max_retries=40)(W, 6e4)
)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_goes_on_from_the_scale_that_was_found(rule):
    tx = ls.with_loss_scaling(optax.sgd(1e-9), rule)
    opt_state = tx.init(W)
    _, grads, found = retried(opt_state)
    np.testing.assert_array_equal(grads, np.float32(np.float16(6e4)))
    old, new = map(ls.get_loss_scale_state, (opt_state, found))
    assert new.loss_scale in (old.loss_scale, 1.0)
    untouched = {"loss_scale": old.loss_scale, "growth_tracker": old.growth_tracker}
    scale_state = found.scale_state._replace(**untouched)
    assert_same_bits(found._replace(scale_state=scale_state), opt_state)
    _, next_state = tx.update(grads, found, W)
    assert ls.was_applied(next_state)
    assert jax.tree.structure(next_state) == jax.tree.structure(opt_state)
    # As from any state: the rule has no memory of the scale that was tried first.
    args = (jnp.float32(6e4),) if rule.uses_max_magnitude else ()
    expected = rule.update(found.scale_state, True, *args)
    assert_same_bits(next_state.scale_state, expected)


@pytest.mark.parametrize(
    "kind",
    [jax.device_get, lambda state: jax.tree.map(lambda x: x.item(), state)],
    ids=["NumPy", "Python"],
)
def test_a_restored_state_is_one_like_any_other(kind):
    tx = ls.with_loss_scaling(optax.adam(1e-3), ls.FixedLossScale(2.0**12))
    opt_state = tx.init(W)
    scale_state = kind(opt_state.scale_state)
    expected = ls.value_and_grad(loss_fn, opt_state)(W, 60.0)
    for state in (scale_state, opt_state._replace(scale_state=scale_state)):
        *actual, found = ls.value_and_grad_with_retries(loss_fn, state)(W, 60.0)
        assert_same_bits(tuple(actual), (expected[0], jnp.full(3, 60.0)))
        assert ls.get_loss_scale(found) == 2.0**10


def run(retries, slopes, shifts):
    """Train on batches in turn; return the scales and the losses of skipped steps."""
    tx = ls.with_loss_scaling(optax.sgd(1e-6), RULE)

    def step(carry, batch):
        w, opt_state = carry
        if retries:
            fun = ls.value_and_grad_with_retries(loss_fn, opt_state)
            loss, grads, opt_state = fun(w, *batch)
        else:
            loss, grads = ls.value_and_grad(loss_fn, opt_state)(w, *batch)
        scale = ls.get_loss_scale(opt_state)
        updates, opt_state = tx.update(grads, opt_state, w, value=loss)
        carry = optax.apply_updates(w, updates), opt_state
        return carry, (scale, ls.was_applied(opt_state))

    return jax.lax.scan(step, (W, tx.init(W)), (slopes, shifts))[1]


def test_no_step_of_a_run_with_spikes_is_lost_but_the_one_with_a_nan():
    spikes = np.random.default_rng(0).random(300) < 0.1
    slopes = np.where(spikes, 20.0, 2.0).astype(np.float32)
    shifts = np.zeros(300, np.float32)
    shifts[200] = np.nan
    run_jitted = jax.jit(run, static_argnums=0)
    _, applied = run_jitted(False, slopes, shifts)
    assert 24 <= np.sum(~applied) - 1, "the control loses dozens"
    scales, applied = run_jitted(True, slopes, shifts)
    assert list(np.flatnonzero(~applied)) == [200]
    assert scales[200] == scales[201], "there was no search"
    assert min(scales) >= 2.0**11


def test_other_outputs_pass_through_the_loop():
    key = jax.random.key(5)

    def fun(params, n):
        aux = {"key": jax.random.split(key)[0], "name": "layer", "n": n, "f": jnp.sin}
        return loss_fn(params["w"], params["slope"]), [aux, params["w"]]

    params = {"w": W, "slope": 3.0, "steps": jnp.int32(2)}
    ours = ls.value_and_grad_with_retries(
        fun, at_scale(2.0**16), has_aux=True, allow_int=True
    )
    plain = ls.value_and_grad(fun, at_scale(2.0**13), has_aux=True, allow_int=True)
    (value, (aux, w)), grads, state = ours(params, n=7)
    (plain_value, (plain_aux, plain_w)), plain_grads = plain(params, n=7)
    assert aux.pop("f") is plain_aux.pop("f")
    assert aux.pop("name") == plain_aux.pop("name")
    assert_same_bits(
        (value, aux, w, grads), (plain_value, plain_aux, plain_w, plain_grads)
    )
    assert ls.get_loss_scale(state) == 2.0**14
    assert grads["steps"].dtype == jax.dtypes.float0


def test_argnums_and_complex_arguments():
    def fun(x, z):
        return jnp.abs(z) ** 2 * x

    expected = jax.value_and_grad(fun, (0, 1))(3.0, 1 + 2j)
    state = at_scale(4.0)
    actual = ls.value_and_grad_with_retries(fun, state, argnums=(0, 1))(3.0, 1 + 2j)
    assert_same_bits(actual[:2], expected)
    cube = ls.value_and_grad_with_retries(lambda z: z**3, state, holomorphic=True)
    expected = jax.value_and_grad(lambda z: z**3, holomorphic=True)(1 + 2j)
    assert_same_bits(cube(1 + 2j)[:2], expected)


def test_every_attempt_draws_the_same_numbers_and_effects_happen_in_each():
    seen = []

    def dropped(w, key):
        keep = jax.random.bernoulli(key, 0.5, w.shape)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), keep)
        return loss_fn(jnp.where(keep, w, 0.0), 3.0)

    w, key = jnp.ones(16), jax.random.key(3)
    value, grads, state = jax.jit(
        lambda s: ls.value_and_grad_with_retries(dropped, s)(w, key)
    )(at_scale(2.0**16))
    jax.effects_barrier()
    assert ls.get_loss_scale(state) == 2.0**14 and len(seen) == 3
    assert (np.array(seen) == seen[0]).all() and 0 < seen[0].sum() < 16
    np.testing.assert_array_equal(grads, 3.0 * seen[0])


def mlp_loss(ws, x):
    for w in ws:
        x = jnp.tanh(jnp.dot(x, w))
    return jnp.mean(x**2)


def with_retries(state, ws, x, axis_name=None):
    fun = ls.value_and_grad_with_retries(mlp_loss, state, axis_name=axis_name)
    return fun(ws, x)


def without_retries(state, ws, x):
    return *ls.value_and_grad(mlp_loss, state)(ws, x), state


def test_the_program_holds_the_function_once_and_needs_no_more_memory():
    args = at_scale(4.0), [jnp.ones((64, 64))] * 4, jnp.ones((128, 64))
    ours, plain = (jax.jit(f).lower(*args) for f in (with_retries, without_retries))
    tanh = " stablehlo.tanh "
    assert ours.as_text().count(tanh) == plain.as_text().count(tanh) == 4
    assert temporary_bytes(ours) < 1.01 * temporary_bytes(plain)


def temporary_bytes(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
SLOPES = jnp.ones(8).at[5].set(3.0)  # one device overflows twice more


def on_devices(axis_name, check_vma=True, average=True):
    def local(state, slopes):
        def fun(w, slope):
            loss = loss_fn(w, slope[0])
            return jax.lax.pmean(loss, "data") if average else loss

        fun = ls.value_and_grad_with_retries(fun, state, axis_name=axis_name)
        value, grads, state = fun(W, slopes)
        if not average:
            value = jax.lax.pmean(value, "data")
        if not check_vma:
            grads = jax.lax.pmean(grads, "data")
        return value, grads, state

    return jax.jit(
        jax.shard_map(
            local,
            mesh=MESH,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
    )(at_scale(2.0**16), SLOPES)


@pytest.mark.parametrize("axis_name", ["data", ("data",)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_repeat_together(axis_name, check_vma):
    value, grads, state = on_devices(axis_name, check_vma)
    assert value == 3 * SLOPES.mean() and ls.get_loss_scale(state) < 2.0**16
    np.testing.assert_allclose(grads, SLOPES.mean(), rtol=1e-3)


def test_devices_that_would_decide_alone_are_refused():
    with pytest.raises(
        ValueError, match=r"`axis_name` must name every.*\['data'\], got N"
    ):
        on_devices(None, average=False)
    with pytest.raises(
        ValueError, match="`axis_name` must name an axis of the surround"
    ):
        on_devices("model")
    # Devices that wait for each other would wait forever.
    with pytest.raises(ValueError, match="`axis_name` must name every mapped axis"):
        on_devices(None, check_vma=False)


def own_models(states, *varying):
    """A model and a batch on each device; a state, too, or one for all of them."""

    def local(state, w, slope):
        if varying:
            state = jax.tree.map(lambda x: x[0], state)
        fun = ls.value_and_grad_with_retries(loss_fn, state, max_retries=8)
        return jax.tree.map(lambda x: x[None], fun(w[0], slope[0]))

    specs = (P(*varying), P("data"), P("data"))
    mapped = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P("data"))
    return jax.jit(mapped)(states, jnp.ones((8, 3)), 2.0 ** jnp.arange(8))


def test_devices_with_models_of_their_own_repeat_alone():
    states = jax.tree.map(lambda x: jnp.stack([x] * 8), at_scale(2.0**15))
    _, grads, new_states = own_models(states, "data")
    slopes = 2.0 ** np.arange(8)
    np.testing.assert_array_equal(grads, slopes[:, None] * np.ones((8, 3)))
    np.testing.assert_array_equal(new_states.loss_scale, 2.0**15 / slopes)
    np.testing.assert_array_equal(new_states.growth_tracker, np.where(slopes > 1, 0, 3))
    with pytest.raises(ValueError, match="the loss or its gradients differ"):
        own_models(at_scale(2.0**15))


def test_parameters_cut_across_devices_need_no_more_memory():
    def lowered(fun):
        def step(state, ws, x):
            def loss_fn(ws):
                whole = [jax.lax.all_gather(w, "data", tiled=True) for w in ws]
                return mlp_loss(whole, x)

            return fun(loss_fn, state, ws)

        specs = (P(), P("data"), P("data"))
        out_specs = (P(), P("data"), P())
        mapped = jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=out_specs)
        args = at_scale(4.0), [jnp.ones((64, 64))] * 4, jnp.ones((1024, 64))
        return jax.jit(mapped).lower(*args)

    def with_retries(loss_fn, state, ws):
        fun = ls.value_and_grad_with_retries(loss_fn, state, axis_name="data")
        value, grads, state = fun(ws)
        return jax.lax.pmean(value, "data"), grads, state

    def without(loss_fn, state, ws):
        value, grads = ls.value_and_grad(loss_fn, state)(ws)
        return jax.lax.pmean(value, "data"), grads, state

    ours, plain = map(temporary_bytes, map(lowered, (with_retries, without)))
    assert ours < 1.01 * plain


def test_members_of_an_ensemble_repeat_alone_or_together():
    states = jax.vmap(lambda _: at_scale(2.0**14))(jnp.arange(3))
    slopes = jnp.array([3.0, 15.0, 60.0])

    def scales(axis_name):
        def member(state, slope):
            fun = ls.value_and_grad_with_retries(loss_fn, state, axis_name=axis_name)
            return fun(jnp.ones((2, 2)), slope)

        _, grads, new = jax.vmap(member, axis_name="model")(states, slopes)
        np.testing.assert_array_equal(grads, slopes[:, None, None] * np.ones((2, 2)))
        return new.loss_scale.tolist()

    assert scales(None) == [2.0**14, 2.0**12, 2.0**10]
    assert scales("model") == [2.0**10] * 3


def test_explicit_meshes_keep_their_shardings():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = jax.NamedSharding(mesh, P("data", None))
    w = jax.device_put(jnp.ones((8, 1)), sharding)

    def fun(w):
        return loss_fn(w, 3.0), w * 2

    run = jax.jit(lambda s, w: ls.value_and_grad_with_retries(fun, s, has_aux=True)(w))
    (value, aux), grads, state = run(at_scale(2.0**16), w)
    assert grads.sharding == aux.sharding == sharding
    assert value == 24 and (grads == 3).all() and state.loss_scale == 2.0**14


def test_states_of_other_kinds_keep_their_kind():
    from flax import nnx
    from flax.training import train_state

    tx = ls.with_loss_scaling(optax.adam(1e-3), RULE)
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    for state in (
        train_state.TrainState.create(apply_fn=None, params=W, tx=tx),
        nnx.Optimizer(model, tx, wrt=nnx.Param),
        {"mine": optax.chain(optax.clip(1.0), tx).init(W), "n": 1},
    ):
        scale = ls.get_loss_scale(state)
        new = ls.value_and_grad_with_retries(loss_fn, state)(W, 15.0)[2]
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert ls.get_loss_scale(new) < scale == RULE.init_scale


@pytest.mark.slow
def test_equinox_models_and_their_functions_may_be_returned():
    mlp = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_inexact_array)

    def fun(params):
        model = eqx.combine(params, static)
        return jnp.sum(model(W) ** 2), model

    ours = ls.value_and_grad_with_retries(fun, at_scale(4.0), has_aux=True)
    (value, model), grads, _ = ours(params)
    np.testing.assert_array_equal(model(W), mlp(W))
    assert_same_bits(grads, jax.grad(fun, has_aux=True)(params)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fun": 3}, TypeError, "`fun` must be a function .* got 3"),
        (
            {"max_retries": -1},
            ValueError,
            "`max_retries` must be a whole number from 0",
        ),
        ({"max_retries": 1.5}, ValueError, "`max_retries` must be .* got 1.5"),
        ({"backoff_factor": 1.0}, ValueError, r"`backoff_factor` must be .*, got 1.0"),
        ({"state": optax.adam(1.0).init(W)}, ValueError, "`state` must contain a Loss"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ls.value_and_grad_with_retries(
            **{"fun": loss_fn, "state": RULE.init(), **arguments}
        )


def test_bad_losses_and_constant_states_are_what_they_are_to_value_and_grad():
    with pytest.raises(TypeError, match=r"`fun` must return a pair \(loss, aux\)"):
        ls.value_and_grad_with_retries(loss_fn, RULE.init(), has_aux=True)(W, 1.0)
    with pytest.raises(TypeError, match="The loss must be a floating-point array"):
        ls.value_and_grad_with_retries(lambda w: 1, RULE.init())(W)
    with pytest.warns(UserWarning, match="The loss is float16") as record:
        ls.value_and_grad_with_retries(
            lambda w: jnp.sum(w.astype(jnp.float16)), at_scale(4.0)
        )(W)
    assert [w.filename for w in record] == [__file__]
    with pytest.warns(UserWarning, match="is a constant of the function") as record:
        jax.jit(ls.value_and_grad_with_retries(loss_fn, RULE.init()))(W, 1.0)
    assert len(record) == 1


def test_forward_mode_works_and_reverse_mode_is_refused_by_jax():
    def slope(w):
        return ls.value_and_grad_with_retries(jnp.sin, at_scale(4.0))(w)[1]

    out, tangent = jax.jvp(slope, (1.0,), (1.0,))
    np.testing.assert_allclose((out, tangent), (np.cos(1.0), -np.sin(1.0)), rtol=1e-6)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(slope)(1.0)


def test_no_tracer_outlives_its_trace():
    with jax.check_tracer_leaks():
        attempt(at_scale(1.0), 3.0, max_retries=1)
