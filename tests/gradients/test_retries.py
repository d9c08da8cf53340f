"""value_and_grad_with_retries, with arrays and with Flax NNX objects."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import EXPLICIT, make_mesh, on_mesh
from training import normal

import optax_lossscale as ls

W, X = np.ones(3, np.float32), normal(16, 8)
STATE = ls.DynamicLossScale().init()
MESH = make_mesh(data=8)
TX = ls.with_loss_scaling(optax.sgd(3e-2, 0.9))


def loss_fn(w, slope, shift=0.0):
    """Of a float16 layer, whose gradient is the slope."""
    y = jnp.asarray(slope, jnp.float16) * w.astype(jnp.float16)
    return jnp.sum(y.astype(jnp.float32)) + shift


def at_scale(scale):
    numbers = {"growth_tracker": np.int32(3), "hysteresis_tracker": np.int32(2)}
    return STATE._replace(loss_scale=np.float32(scale), **numbers)


@functools.partial(jax.jit, static_argnames=("max_retries", "backoff_factor"))
def attempt(state, slope, shift=0.0, **options):
    return ls.value_and_grad_with_retries(loss_fn, state, **options)(W, slope, shift)


@given(
    st.integers(-5, 24),
    st.floats(-60000, 60000, width=16),
    st.sampled_from([0.0, np.inf, np.nan]),
    st.sampled_from([{}, {"backoff_factor": 0.125}, {"max_retries": 0}]),
)
def test_retries_equal_a_loop_in_numpy(exponent, slope, shift, options):
    def gradient(scale):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.float32(np.float16(scale) * np.float16(slope))

    state, scale, retries = at_scale(2.0**exponent), 2.0**exponent, 0
    value, grads, new_state = attempt(state, slope, shift, **options)
    most = options.get("max_retries", 4) if np.isfinite(value) else 0
    while retries < most and not np.isfinite(gradient(scale)):
        scale, retries = scale * options.get("backoff_factor", 0.5), retries + 1
    np.testing.assert_array_equal(grads, gradient(scale) / np.float32(scale))
    np.testing.assert_array_equal(value, jax.jit(loss_fn)(W, slope, shift))
    tracker = np.int32(0) if retries else state.growth_tracker
    expected = {"loss_scale": np.float32(scale), "growth_tracker": tracker}
    assert_same_bits(new_state, state._replace(**expected))


def test_retries_lower_the_scale_no_further_than_to_the_smallest_number():
    retry = ls.value_and_grad_with_retries
    fun = retry(jnp.sqrt, at_scale(2.0**-120), backoff_factor=2.0**-100)
    value, grads, state = jax.jit(fun)(0.0)
    assert value == 0 and np.isinf(grads) and state.loss_scale == 2.0**-126


def test_nan_in_the_auxiliary_output_does_not_prevent_retries():
    def with_nan(w, slope):
        return loss_fn(w, slope), np.float32(np.nan)

    fun = ls.value_and_grad_with_retries(with_nan, at_scale(2.0**16), has_aux=True)
    assert jax.jit(fun)(W, 3.0)[-1].loss_scale == 2.0**14


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


SLOPES = np.float32([1, 1, 1, 1, 1, 3, 1, 1])


def on_devices(axis_name, check_vma=True):
    """The value, the gradients, and the scale of each device."""

    def local(state, slopes):
        def fun(w, slope):
            return jax.lax.pmean(loss_fn(w, slope[0]), "data")

        fun = ls.value_and_grad_with_retries(fun, state, axis_name=axis_name)
        value, grads, state = fun(W, slopes)
        grads = grads if check_vma else jax.lax.pmean(grads, "data")
        return value, grads, state.loss_scale[None]

    specs = (P(), P("data")), (P(), P(), P("data"))
    mapped = on_mesh(local, *specs, MESH, check_vma=check_vma)
    return mapped(at_scale(2.0**16), SLOPES)


# At 2**15 only one device overflows. With `check_vma`, it is the float16 mean over the
# devices that overflows, at 2**16.
@pytest.mark.parametrize(
    ("check_vma", "scale"), [(False, 2.0**14), (True, 2.0**15)], ids=["one", "mean"]
)
def test_devices_retry_together(check_vma, scale):
    value, grads, scales = on_devices(("data",), check_vma)
    np.testing.assert_array_equal(scales, np.full(8, scale))
    assert value == 3 * SLOPES.mean()
    np.testing.assert_allclose(grads, SLOPES.mean(), rtol=1e-3)


def test_devices_with_scales_of_their_own_may_share_an_argument():
    def local(scales, w, shared):
        def fun(w, shared):
            return jnp.sum(w * jnp.sin(shared))

        state = STATE._replace(loss_scale=scales[0])
        fun = ls.value_and_grad_with_retries(fun, state, axis_name="data")
        return fun(w, shared)[1]

    mapped = on_mesh(local, (P("data"), P("data"), P()), P("data"), MESH)
    grads = mapped(2 ** np.arange(8, dtype=np.float32), np.ones(24), W)
    np.testing.assert_allclose(grads, np.full(24, np.sin(1)), rtol=1e-6)


# Devices that decide alone would wait for each other forever.
ALONE = {
    "unknown": ("model", True, "`axis_name` must name an axis of the surrounding"),
    "missing": (None, False, "`axis_name` must name every mapped"),
}


@pytest.mark.parametrize(("name", "check_vma", "words"), ALONE.values(), ids=ALONE)
def test_wrong_or_missing_axis_name_is_refused(name, check_vma, words):
    with pytest.raises(ValueError, match=words):
        on_devices(name, check_vma)


def test_one_state_for_weights_that_differ_by_device_is_refused():
    def local(state, w):
        return ls.value_and_grad_with_retries(jnp.sum, state)(w)[1]

    mapped = on_mesh(local, (P(), P("data")), P("data"), MESH)
    with pytest.raises(ValueError, match="loss or gradients differ"):
        mapped(at_scale(2.0**15), np.ones(24))


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


def steep(x):
    """A loss whose gradients overflow at a scale of 2**10."""
    return 64.0 * jnp.sum(x.astype(jnp.float16)).astype(jnp.float32)


class Tied(nnx.Module):
    """It counts, draws and keeps statistics, and changes its structure."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        linear = nnx.Linear(8, 8, dtype=jnp.float16, use_bias=False, rngs=rngs)
        self.first = self.second = linear
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.old = nnx.Cache(jnp.zeros(3))

    def __call__(self, x):
        y = self.second(self.dropout(self.norm(self.first(x))))
        self.calls[...] += 1
        del self.old
        self.newest, self.new = nnx.Cache(x), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.eval()
        return y


by_nnx = functools.partial(
    ls.value_and_grad_with_retries, max_retries=20, value_and_grad=nnx.value_and_grad
)


def test_nnx_module_changes_once_and_equals_a_run_without_retries():
    def loss_fn(model, x):
        loss = 64.0 * jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1.0))
        return loss, model.first.kernel[0, 0]

    once = functools.partial(ls.value_and_grad, value_and_grad=nnx.value_and_grad)
    results = []
    for make, first_scale in ((by_nnx, 2.0**20), (once, 2.0**11)):
        model = Tied()
        kernel, graph = model.first.kernel, nnx.graphdef(model)
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        optimizer.opt_state.scale_state.loss_scale[...] = np.float32(first_scale)

        @nnx.jit
        def step(model, optimizer, x, make=make):
            output, grads, *state = make(loss_fn, optimizer, has_aux=True)(model, x=x)
            assert all(x is optimizer for x in state)
            optimizer.update(model, grads)
            return output, grads

        result = step(model, optimizer, X)
        assert int(model.calls[...]) == int(model.dropout.rngs.count[...]) == 1
        assert model.first.kernel is model.second.kernel is kernel
        assert ls.was_applied(optimizer) and np.array_equal(model.newest[...], X)
        assert float(ls.get_loss_scale(optimizer)) == 2.0**11
        results.append(jax.tree.leaves((result, nnx.state((model, optimizer)))))
        assert nnx.graphdef(model) != graph
    assert_same_bits(*results)


def test_nnx_arguments_may_share_variables_and_be_returned():
    models, weight = (Tied(), Tied()), nnx.Param(jnp.ones(3))
    counter = models[0].calls = models[1].calls

    def loss_fn(weight, modules, x):
        for module in modules:
            module.calls[...] += 1
        return steep(weight[...]), (modules[0], nnx.Param(x * weight[...]), "aux")

    fun = by_nnx(loss_fn, at_scale(2.0**20), has_aux=True)
    (_, (same, new, aux)), grad, _ = fun(weight, models, 2.0)
    assert same is models[0] and aux == "aux" and int(counter[...]) == 2
    assert counter is models[0].calls is models[1].calls
    assert np.array_equal(new[...], [2, 2, 2])
    assert np.array_equal(jax.tree.leaves(grad)[0], [64, 64, 64])
