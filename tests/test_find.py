"""get_loss_scale and get_loss_scale_state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

import optax_lossscale as ls

PARAMS = {"w": jnp.ones(2)}
TX = ls.with_loss_scaling(optax.adam(1e-3), ls.FixedLossScale(64.0))
READ = (ls.get_loss_scale_state, ls.get_loss_scale, ls.was_applied)
SCALE = (
    lambda state: ls.value_and_grad(jnp.sum, state),
    lambda state: ls.grad(jnp.sum, state),
    lambda state: ls.value_and_grad_with_retries(jnp.sum, state),
    lambda state: ls.scale_loss(1.0, state),
    lambda state: ls.unscale_grads(1.0, state),
)


@pytest.mark.parametrize(
    "tx",
    [
        TX,
        optax.chain(optax.clip(1.0), TX),
        optax.masked(TX, {"w": True}),
        optax.inject_hyperparams(lambda lr: TX)(lr=0.1),
    ],
)
def test_the_scale_is_found_anywhere(tx):
    state = tx.init(PARAMS)
    for found in (state, {"step": 3, "opt": state}, ls.get_loss_scale_state(state)):
        assert float(ls.get_loss_scale(found)) == 64.0
        assert float(jax.jit(ls.get_loss_scale)(found)) == 64.0
    assert_same_bits(ls.get_loss_scale_state(state), ls.FixedLossScale(64.0).init())


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        (optax.adam(1e-3).init(PARAMS), "wrapped with `with_loss_scaling`"),
        (TX, r"It is the optimizer: pass what its `init\(params\)` returns"),
        (ls.DynamicLossScale(), r"It is not a state yet: pass what its `init\(\)`"),
        *((state, "`with_loss_scaling`") for state in ({}, None, 128.0)),
    ],
)
@pytest.mark.parametrize("use", [*READ, *SCALE, lambda s: ls.applied_steps(s, 1)])
def test_a_state_without_a_scale_is_refused(state, advice, use):
    message = f"`state` must contain a LossScaleState, got a .*{advice}"
    with pytest.raises(ValueError, match=message):
        use(state)


def test_a_state_with_two_scales_is_refused_with_their_paths():
    tx = optax.named_chain(("a", TX), ("b", TX))
    message = r"only one LossScaleState, got 2, .*\['a'\].*\['b'\].*wrap the whole"
    with pytest.raises(ValueError, match=message):
        ls.get_loss_scale(tx.init(PARAMS))


@pytest.mark.parametrize(
    "number", [8.0, 8, np.float16(8), np.float64(8), jnp.int32(8), jnp.bfloat16(8)]
)
def test_a_scale_of_any_type_is_read_as_float32(number):
    state = optax.tree.set(TX.init(PARAMS), loss_scale=number)
    scale = ls.get_loss_scale(state)
    assert (float(scale), scale.dtype, scale.weak_type) == (8.0, jnp.float32, False)


@pytest.mark.parametrize("use", SCALE)
def test_states_of_no_run_and_of_many_are_read_but_do_not_scale(use):
    abstract = jax.eval_shape(TX.init, PARAMS)
    assert ls.get_loss_scale(abstract).dtype == jnp.float32
    with pytest.raises(ValueError, match="`state` must hold numbers, got a jax.Shape"):
        use(abstract)
    ensemble = jax.vmap(TX.init)({"w": jnp.ones((3, 2))})
    assert ls.get_loss_scale(ensemble).shape == (3,)
    with pytest.raises(ValueError, match="of one run, got .*inside `jax.vmap`"):
        use(ensemble)
