"""get_loss_scale and get_loss_scale_state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest
from asserts import assert_same_bits

import optax_lossscale as ls

PARAMS = {"w": jnp.ones(2)}
TX = ls.with_loss_scaling(optax.adam(1e-3), ls.FixedLossScale(64.0))
READ = (ls.get_loss_scale_state, ls.was_applied)
SCALE = (
    lambda state: ls.grad(jnp.sum, state)(1.0),
    lambda state: ls.value_and_grad_with_retries(jnp.sum, state)(1.0),
    lambda state: ls.scale_loss(1.0, state),
    lambda state: ls.unscale_grads(1.0, state),
)


def loss_fn(params):
    return jnp.sum(params["w"] ** 2)


@pytest.mark.parametrize(
    "tx", [TX, optax.chain(optax.clip(1.0), TX), optax.masked(TX, {"w": True})]
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
        (None, "`with_loss_scaling`"),
    ],
)
@pytest.mark.parametrize("use", [*READ, *SCALE])
def test_a_state_without_a_scale_is_refused(state, advice, use):
    message = f"`state` must contain a LossScaleState, got .*{advice}"
    with pytest.raises(ValueError, match=message):
        use(state)


def test_a_state_with_two_scales_is_refused_with_their_paths():
    tx = optax.named_chain(("a", TX), ("b", TX))
    message = r"only one LossScaleState, got 2, .*\['a'\].*\['b'\].*wrap the whole"
    with pytest.raises(ValueError, match=message):
        ls.get_loss_scale(tx.init(PARAMS))


@pytest.mark.parametrize("number", [8, np.float64(8), jnp.bfloat16(8)])
def test_a_scale_of_any_type_is_read_as_float32(number):
    state = optax.tree.set(TX.init(PARAMS), loss_scale=number)
    scale = ls.get_loss_scale(state)
    assert (float(scale), scale.dtype, scale.weak_type) == (8.0, jnp.float32, False)


@pytest.mark.parametrize("use", SCALE)
def test_states_of_no_run_and_of_many_do_not_scale(use):
    abstract = jax.eval_shape(TX.init, PARAMS)
    with pytest.raises(ValueError, match="`state` must hold numbers, got a jax.Shape"):
        use(abstract)
    ensemble = jax.vmap(TX.init)({"w": jnp.ones((3, 2))})
    assert ls.get_loss_scale(ensemble).shape == (3,)
    with pytest.raises(ValueError, match="of one run, got .*inside `jax.vmap`"):
        use(ensemble)


SCALED, ADAM, CLIP = ls.with_loss_scaling, optax.adamw(1e-3), optax.clip(1.0)
OUTSIDE = {
    "after": optax.chain(SCALED(CLIP), ADAM),
    "before": optax.chain(optax.trace(0.9), SCALED(CLIP)),
    "beside moments inside": optax.chain(SCALED(ADAM), optax.ema(0.9)),
    "injected": optax.chain(SCALED(CLIP), optax.inject_hyperparams(optax.adam)(1e-3)),
    "master weights": optax.chain(SCALED(CLIP), ls.with_master_weights(ADAM)),
    # Of states without arrays.
    "clipping before": optax.chain(CLIP, SCALED(ADAM)),
    "weight decay after": optax.chain(SCALED(ADAM), optax.add_decayed_weights(0.1)),
    "named": optax.named_chain(("clip", CLIP), ("adam", SCALED(ADAM))),
    "schedules": optax.chain(SCALED(CLIP), optax.sgd(lambda count: 0.1)),
    "noise": optax.chain(SCALED(ADAM), optax.add_noise(0.1, 0.5, 0)),
    "reduce on plateau": optax.chain(SCALED(ADAM), contrib.reduce_on_plateau()),
}
HARMLESS = {
    "all inside": SCALED(optax.chain(CLIP, ADAM)),
}
if hasattr(optax, "snapshot"):  # not in optax 0.2.5
    HARMLESS["monitors"] = optax.chain(
        optax.snapshot("before", lambda updates: updates),
        optax.monitor({"before, too": lambda updates: updates}),
        SCALED(ADAM),
    )


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("use", SCALE)
def test_an_optimizer_around_the_scale_or_chained_with_it_is_refused(name, use):
    state = OUTSIDE[name].init(PARAMS)
    assert float(ls.get_loss_scale(state)) == 2.0**15  # read anywhere
    with pytest.raises(ValueError, match="Put `with_loss_scaling` around the"):
        use(state)


@pytest.mark.parametrize("tx", HARMLESS.values(), ids=HARMLESS)
def test_what_may_be_around_the_scale_or_beside_it(tx):
    state = tx.init(PARAMS)
    ls.grad(loss_fn, state)(PARAMS)
    ls.grad(loss_fn, (PARAMS, state))(PARAMS)
    ls.grad(loss_fn, (state, {"mean": jnp.zeros(3)}, jnp.int32(0)))(PARAMS)
    ls.grad(loss_fn, [state, ADAM.init(PARAMS)])(PARAMS)
    ls.grad(loss_fn, [PARAMS, {"opt_state": state, "ema": PARAMS}])(PARAMS)
