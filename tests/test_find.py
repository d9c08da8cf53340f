"""get_loss_scale and get_loss_scale_state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax.training.train_state import TrainState

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


@dataclasses.dataclass
class Trainer:
    """A user's own, which is no pytree."""

    opt_state: object


@jax.tree_util.register_static
@dataclasses.dataclass
class Hiding:
    """A pytree that does not show what it holds."""

    opt_state: object


def test_the_scale_is_found_by_the_type_of_the_state():
    state = TX.init(PARAMS)
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
    for x in (state, state.scale_state, train_state, Trainer(state)):
        assert float(ls.get_loss_scale(x)) == 64.0
    assert float(jax.jit(ls.get_loss_scale)(state)) == 64.0
    assert_same_bits(ls.get_loss_scale_state(state), ls.FixedLossScale(64.0).init())


def test_retries_lower_the_scale_of_what_they_are_given():
    params = {"w": jnp.ones(2)}
    start = TX.init(params)

    def retry(state):
        *_, new = ls.value_and_grad_with_retries(loss_in_float16, state)(params)
        return new

    def loss_in_float16(params):
        return 2.0**11 * jnp.sum(params["w"].astype("float16")).astype("float32")

    train_state = TrainState.create(apply_fn=None, params=params, tx=TX)
    for state in (start, start.scale_state, train_state):
        new = retry(state)
        assert type(new) is type(state) and float(ls.get_loss_scale(new)) == 16.0
    for state in (Trainer(start), Hiding(start)):
        with pytest.raises(TypeError, match="must be a pytree .* Pass its `opt_state`"):
            retry(state)


RESTORED = {"scale_state": {"loss_scale": 1.0}, "inner_state": []}


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        (optax.adam(1e-3).init(PARAMS), "`with_loss_scaling` around the whole"),
        (TX, r"It is the optimizer: pass what its `init\(params\)` returns"),
        (ls.DynamicLossScale(), r"It is not a state yet: pass what its `init\(\)`"),
        (None, "`with_loss_scaling`"),
        ((64.0, ()), "as the target, so that it has its types. Else put"),
        (RESTORED, r"pass `init\(params\)` to the checkpointer as the target"),
        (Trainer(RESTORED), r"pass `init\(params\)` to the checkpointer as the target"),
        ((PARAMS, TX.init(PARAMS)), "got an object of type tuple. Put"),
    ],
)
@pytest.mark.parametrize("use", [*READ, *SCALE])
def test_what_is_no_state_is_refused(state, advice, use):
    message = r"`state` must be what the `init\(params\)` of `with_loss_scaling` ret"
    with pytest.raises(ValueError, match=f"{message}.*{advice}"):
        use(state)


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
    "identity": optax.chain(optax.identity(), SCALED(ADAM)),
    "masked": optax.masked(SCALED(ADAM), {"w": True}),
    "MultiSteps": optax.MultiSteps(SCALED(ADAM), 2),
    "apply_if_finite": optax.apply_if_finite(SCALED(ADAM), 3),
    "injected": optax.inject_hyperparams(lambda a: SCALED(optax.adam(a)))(1e-3),
    "named": optax.named_chain(("clip", CLIP), ("adam", SCALED(ADAM))),
    "two": optax.named_chain(("a", SCALED(CLIP)), ("b", SCALED(ADAM))),
    # Of a user, whose state is empty: it would move the weights of a skipped step.
    "own decay": optax.chain(
        SCALED(ADAM), optax.stateless(lambda g, p: jax.tree.map(jnp.add, g, p))
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("use", [*READ, *SCALE])
def test_nothing_can_be_around_the_scale_or_beside_it(name, use):
    state = OUTSIDE[name].init(PARAMS)
    with pytest.raises(ValueError, match="ut `with_loss_scaling` around the"):
        use(state)


def test_all_may_be_inside():
    state = SCALED(optax.chain(CLIP, ADAM, optax.identity())).init(PARAMS)
    jax.eval_shape(ls.grad(lambda params: jnp.sum(params["w"] ** 2), state), PARAMS)
