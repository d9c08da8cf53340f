"""value_and_grad_with_retries."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import EXPLICIT, make_mesh, on_mesh

import optax_lossscale as ls

RULE = ls.DynamicLossScale(growth_interval=5)
W = np.ones(3, np.float32)
KEY = jax.random.wrap_key_data(np.uint32([0, 5]))
MESH = make_mesh(data=8)


def loss_fn(w, slope, shift=0.0):
    """Of a float16 layer, whose gradient is the slope."""
    y = jnp.asarray(slope, jnp.float16) * w.astype(jnp.float16)
    return jnp.sum(y.astype(jnp.float32)) + shift


def at_scale(scale):
    trackers = {"growth_tracker": jnp.int32(3), "hysteresis_tracker": jnp.int32(2)}
    return RULE.init()._replace(loss_scale=jnp.float32(scale), **trackers)


@functools.partial(jax.jit, static_argnames=("max_retries", "backoff_factor"))
def attempt(state, slope, shift=0.0, **options):
    return ls.value_and_grad_with_retries(loss_fn, state, **options)(W, slope, shift)


@given(
    st.integers(-5, 24),
    st.floats(-60000, 60000, width=16),
    st.sampled_from([0.0, np.inf, np.nan]),
    st.sampled_from([{}, {"backoff_factor": 0.125}, {"max_retries": 0}]),
)
def test_retries_do_as_the_docstring_says(exponent, slope, shift, options):
    def scaled_gradient(scale):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.float32(np.float16(scale) * np.float16(slope))

    state, scale, retries = at_scale(2.0**exponent), 2.0**exponent, 0
    value, grads, new_state = attempt(state, slope, shift, **options)
    while (
        retries < options.get("max_retries", 4)
        and np.isfinite(value)
        and not np.isfinite(scaled_gradient(scale))
    ):
        scale, retries = scale * options.get("backoff_factor", 0.5), retries + 1
    np.testing.assert_array_equal(grads, scaled_gradient(scale) / np.float32(scale))
    tracker = jnp.int32(0) if retries else state.growth_tracker
    expected = {"loss_scale": jnp.float32(scale), "growth_tracker": tracker}
    assert_same_bits(new_state, state._replace(**expected))
    np.testing.assert_array_equal(value, jax.jit(loss_fn)(W, slope, shift))


def test_scale_stays_a_normal_number_and_a_train_state_one():
    state = TrainState(0, None, W, None, at_scale(2.0**-120))
    fun = ls.value_and_grad_with_retries(jnp.sqrt, state, backoff_factor=2.0**-100)
    value, grads, new = fun(0.0)
    assert float(value) == 0 and np.isinf(grads) and isinstance(new, TrainState)
    assert float(ls.get_loss_scale(new)) == 2.0**-126


def test_every_attempt_draws_the_same_numbers_and_looks_at_no_aux():
    def dropped(params, n):
        keep = jax.random.bernoulli(KEY, 0.5, W.shape)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), keep)
        aux = [KEY, n, jnp.sin, "name", params["w"], jnp.float32(np.nan)]
        return loss_fn(jnp.where(keep, params["w"], 0.0), params["slope"]), aux

    seen, params, options = [], {"w": W, "slope": 3.0}, {"has_aux": True}
    fun = ls.value_and_grad_with_retries(dropped, at_scale(2.0**16), **options)
    *result, state = fun(params, n=7)
    jax.effects_barrier()
    assert float(ls.get_loss_scale(state)) == 2.0**14 and len(seen) == 3
    assert (np.array(seen) == seen[0]).all() and 0 < seen[0].sum() < 3
    expected = ls.value_and_grad(dropped, state, **options)(params, n=7)
    assert_same_bits(tuple(result), expected)


def test_program_holds_the_function_once_and_costs_no_memory():
    def mlp_loss(ws, x):
        for w in ws:
            x = jnp.tanh(jnp.dot(x, w))
        return jnp.mean(x**2)

    def compiled(make):
        step = jax.jit(lambda state, *args: make(mlp_loss, state)(*args))
        args = [np.ones((64, 64))] * 4, np.ones((1024, 64))
        return step.lower(at_scale(4.0), *args).compile()

    ours, plain = map(compiled, (ls.value_and_grad_with_retries, ls.value_and_grad))
    assert ours.cost_analysis()["flops"] < 1.01 * plain.cost_analysis()["flops"]
    memory = [x.memory_analysis().temp_size_in_bytes for x in (ours, plain)]
    assert memory[0] < 1.01 * memory[1]


SLOPES = np.float32([1, 1, 1, 1, 1, 3, 1, 1])  # one device overflows twice more


def on_devices(axis_name, check_vma=True):
    def local(state, slopes):
        def fun(w, slope):
            return jax.lax.pmean(loss_fn(w, slope[0]), "data")

        fun = ls.value_and_grad_with_retries(fun, state, axis_name=axis_name)
        value, grads, state = fun(W, slopes)
        return value, grads if check_vma else jax.lax.pmean(grads, "data"), state

    mapped = on_mesh(local, (P(), P("data")), P(), MESH, check_vma=check_vma)
    return mapped(at_scale(2.0**16), SLOPES)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_retry_together(check_vma):
    value, grads, state = on_devices(("data",), check_vma)
    assert float(value) == 3 * SLOPES.mean()
    assert float(ls.get_loss_scale(state)) < 2.0**16
    np.testing.assert_allclose(grads, SLOPES.mean(), rtol=1e-3)


# Devices that decide alone would wait for each other forever.
ALONE = [
    ({"axis_name": "model"}, "`axis_name` must name an axis of the surrounding"),
    ({"axis_name": None, "check_vma": False}, "`axis_name` must name every mapped"),
]


@pytest.mark.parametrize(("options", "words"), ALONE)
def test_devices_that_decide_alone_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        on_devices(**options)


def test_one_state_for_different_models_is_refused():
    def local(state, w, slope):
        return ls.value_and_grad_with_retries(loss_fn, state)(w, slope)[1]

    mapped = on_mesh(local, (P(), P("data"), P()), P("data"), MESH)
    with pytest.raises(ValueError, match="loss or gradients differ"):
        mapped(at_scale(2.0**15), np.ones(24), 2.0)


def test_explicit_meshes_keep_their_shardings():
    sharding = NamedSharding(make_mesh(EXPLICIT, data=8), P("data", None))
    w = jax.device_put(np.ones((8, 1), np.float32), sharding)

    def fun(w):
        return loss_fn(w, 3.0), w * 2

    run = jax.jit(lambda s, w: ls.value_and_grad_with_retries(fun, s, has_aux=True)(w))
    (value, aux), grads, state = run(at_scale(2.0**16), w)
    assert grads.sharding == aux.sharding == sharding
    value, grads, scale = jax.device_get((value, grads, state.loss_scale))
    assert value == 24 and (grads == 3).all() and scale == 2.0**14


def test_step_can_be_exported_for_all_platforms():
    args = at_scale(2.0**16), jnp.float32(3.0)
    exported = jax.export.export(attempt, platforms=("cpu", "cuda", "tpu"))(*args)
    assert_same_bits(exported.call(*args), attempt(*args))
