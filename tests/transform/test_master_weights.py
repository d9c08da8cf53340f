"""Float32 copies of float16 parameters, in the state of the optimizer."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from book import code_blocks, page
from flax import nnx
from shared import slow_but
from training import float16_loss, normal

import optax_lossscale as ls

WEIGHTS = {"w": np.float16(0.3 * normal(8, 4)), "b": np.zeros(4, np.float16)}
HALF, FLOAT32 = WEIGHTS, jax.tree.map(np.float32, WEIGHTS)
GRADS = {"w": np.cos(100 * FLOAT32["w"]), "b": np.ones(4, np.float32)}
BATCHES = normal(30, 16, 8)
BATCHES[7, 3, 2] = np.inf


def as_half(tree):
    return jax.tree.map(lambda p: np.asarray(p, np.float16), tree)


def trained(inner, params):
    tx = ls.with_loss_scaling(inner)

    def step(carry, batch):
        params, state = carry
        value, grads = ls.value_and_grad(float16_loss, state)(params, batch)
        given = {"value_fn": lambda params: float16_loss(params, batch)}
        given |= {"value": value, "grad": grads}
        updates, state = tx.update(grads, state, params, **given)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params):
        return jax.lax.scan(step, (params, tx.init(params)), BATCHES)[0]

    return run(params)


@functools.partial(jax.jit, static_argnums=0)
def first_step(tx, grads, params, **extra_args):
    return tx.update(grads, tx.init(params), params, **extra_args)


ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
COPIED = ls.with_master_weights(SGD)
CLIP = optax.clip_by_global_norm(0.1)

# With copies made by ``m``, inside of wrappers and around them.
RUNS = {
    "clipped adamw": lambda m: m(optax.chain(CLIP, optax.adamw(0.01))),
    "line search": lambda m: m(optax.lbfgs()),
    "MultiSteps": lambda m: m(optax.MultiSteps(ADAM, 2)),
    "partition": lambda m: optax.partition(
        {"a": m(ADAM), "b": m(SGD)}, {"w": "a", "b": "b"}
    ),
    "schedule_free": lambda m: m(optax.contrib.schedule_free_adamw(0.01)),
}


@pytest.mark.parametrize("name", slow_but(("clipped adamw",), RUNS))
def test_master_weights_equal_float32_cast_in_the_loss(name):
    params, state = trained(RUNS[name](lambda inner: inner), FLOAT32)
    half, half_state = trained(RUNS[name](ls.with_master_weights), HALF)
    assert int(state.scale_state.skipped_steps) == 1
    if name == "line search":  # compiled with other fusions, it rounds otherwise
        # 2**-25 is half of the smallest float16.
        for x, y in zip(*map(jax.tree.leaves, (half, params)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-2, atol=2.0**-25)
        return
    assert_same_bits(half, as_half(params))
    assert_same_bits(half_state.scale_state, state.scale_state)
    if isinstance(half_state.inner_state, ls.MasterWeightsState):
        assert_same_bits(tuple(half_state.inner_state), (params, state.inner_state))


def test_strict_promotion_needs_the_line_of_the_page_on_float16_parameters():
    text = page("guides/float16_parameters")
    [line] = re.findall(r"`(with jax.numpy_dtype.*)`", text)
    tx = ls.with_loss_scaling(ls.with_master_weights(SGD))
    with jax.numpy_dtype_promotion("strict"):
        updates, _ = first_step(tx, GRADS, HALF)
        with pytest.raises(Exception, match="no available implicit dtype promotion"):
            optax.apply_updates(HALF, updates)
        names = {"jax": jax, "optax": optax, "params": HALF, "updates": updates}
        exec(line, names)
    assert_same_bits(names["params"], as_half(optax.apply_updates(HALF, updates)))


MIXED = {
    "half": np.ones(3, np.float16),
    "float": np.ones(3, np.float32),
    "bfloat16": np.ones((), jnp.bfloat16),
    "table": np.arange(3, dtype=np.int32),
    "none": None,
    "complex": np.ones(2, np.complex64),
}


def test_only_narrower_parameters_are_copied():
    inner = optax.masked(optax.sgd(1e-4), {k: k != "table" for k in MIXED})
    tx, grads = ls.with_master_weights(inner), jax.tree.map(np.ones_like, MIXED)
    copies = {**dict.fromkeys(MIXED, optax.MaskedNode()), "none": None}
    copies |= {k: np.float32(MIXED[k]) for k in ("half", "bfloat16")}
    assert_same_bits(tx.init(MIXED).master_weights, copies)
    updates, state = first_step(tx, grads, MIXED)
    for name in ("float", "complex"):
        assert_same_bits(updates[name], -1e-4 * grads[name])
    assert updates["table"].dtype == jnp.int32 and updates["none"] is None
    np.testing.assert_array_equal(updates["half"], np.float32(0))  # 0.9999 is 1
    np.testing.assert_allclose(state.master_weights["half"], 1 - 1e-4, rtol=1e-7)


def test_optimizer_without_extra_arguments_gets_none():
    plain = optax.GradientTransformation(SGD.init, lambda u, s, p: SGD.update(u, s, p))
    first_step(ls.with_master_weights(plain), GRADS, HALF, value=1.0)


# Each changes some elements of the parameters between two steps.
CHANGES = {
    "clipped": lambda p: np.clip(p, -0.2, 0.2),
    "decayed": lambda p: p * p.dtype.type(0.5),
    "loaded": lambda p: p[::-1].copy(),
    "pruned": lambda p: np.where(np.abs(p) < 0.2, 0, p).astype(p.dtype),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_parameter_replaces_its_master_weight(change):
    """An element that was not changed keeps all digits of its master weight."""
    updates, state = first_step(COPIED, GRADS["w"], HALF["w"])
    params = np.asarray(optax.apply_updates(HALF["w"], updates))
    changed = change(params)
    _, new_state = COPIED.update(np.zeros_like(FLOAT32["w"]), state, changed)
    is_changed = changed != params
    assert is_changed.any()
    expected = np.where(is_changed, np.float32(changed), state.master_weights)
    assert_same_bits(new_state.master_weights, expected)


def test_parameter_that_is_not_finite_never_replaces_its_master_weight():
    """A master weight above 65504 is no mistake, and no update leads away from NaN."""
    state = COPIED.init(np.ones(3, np.float16))
    masters = np.float32([7e4, 1.0001, 1.0])
    params = np.float16([np.inf, np.nan, 1])
    _, state = COPIED.update(
        np.zeros(3, np.float32), state._replace(master_weights=masters), params
    )
    assert_same_bits(state.master_weights, masters)


def test_none_gradients_leave_their_parameters_alone():
    updates, state = first_step(COPIED, {**GRADS, "b": None}, HALF)
    assert updates["b"] is None
    assert_same_bits(state.master_weights["b"], FLOAT32["b"])


def test_float16_gradients_for_a_line_search_become_float32():
    def update(updates, state, params, *, grad):
        assert grad["w"].dtype == updates["w"].dtype == jnp.float32
        return updates, state

    inner = optax.GradientTransformationExtraArgs(SGD.init, update)
    first_step(ls.with_master_weights(inner), HALF, HALF, grad=HALF)


def beside_a_count(masters):
    def update(grads, state, params):
        updates, inner_state = masters.update(grads, state[0], params)
        return updates, (inner_state, state[1] + 1)

    return optax.GradientTransformation(
        lambda params: (masters.init(params), np.int32(0)), update
    )


LABELS = {"w": "copied", "b": "not"}


@pytest.mark.parametrize(
    ("inner", "params"),
    [
        (optax.partition({"copied": COPIED, "not": ADAM}, LABELS), HALF),
        (beside_a_count(COPIED), HALF),
        # Of float32 parameters there are no copies, so a chain may go on.
        (optax.chain(COPIED, optax.scale(1.0)), FLOAT32),
    ],
    ids=["partition", "beside a count", "float32 in a chain"],
)
def test_step_of_partly_copied_parameters_is_that_of_float32(inner, params):
    """Moments that are not inside are made as for float32."""
    tx = ls.with_loss_scaling(inner)
    updates, state = first_step(tx, GRADS, params)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} <= {"float32"}
    expected = FLOAT32["w"] - 0.1 * GRADS["w"]
    new = params["w"] + np.asarray(updates["w"])
    np.testing.assert_allclose(new, expected, rtol=2e-3, atol=1e-6)


def of_linen():
    layer = nn.Dense(2, param_dtype=jnp.float16)
    params = layer.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    return params | {"bias": jnp.zeros(2)}


def of_nnx():
    layer = nnx.Linear(3, 2, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    layer.bias = nnx.Param(jnp.zeros(2))
    return nnx.state(layer, nnx.Param)


def of_equinox():
    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    layer = eqx.tree_at(lambda x: x.weight, layer, layer.weight.astype(jnp.float16))
    return eqx.filter(layer, eqx.is_inexact_array)


TREES = {
    "mixed": lambda: {"a": normal(3), "b": jnp.float16(normal(3)), "c": [jnp.ones(2)]},
    "Linen": of_linen,
    "NNX": of_nnx,
    "Equinox": of_equinox,
}


@pytest.mark.parametrize("name", slow_but(["NNX"], TREES))
def test_training_goes_on_without_the_wrappers_as_the_page_shows(name):
    tx, params = ls.skip_nonfinite(ls.with_master_weights(ADAM)), TREES[name]()
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 0.1), params)
    updates, state = tx.update(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    blocks = code_blocks(page("guides/float16_parameters"), "python")
    [program] = [x for x in blocks if "plain_state" in x]
    found = {"jax": jax, "optax": optax, "half_params": params, "half_state": state}
    exec(program, found)
    updates, _ = ADAM.update(grads, found["plain_state"], found["plain_params"])
    plain = optax.apply_updates(found["plain_params"], updates)
    assert {x.dtype.name for x in jax.tree.leaves(plain)} == {"float32"}
    _, state = tx.update(grads, state, params)
    masters = state.inner_state.master_weights
    assert jax.tree.leaves(masters)
    plain = dict(jax.tree.leaves_with_path(plain))
    for path, master in jax.tree.leaves_with_path(masters):
        np.testing.assert_array_equal(master, plain[path])
