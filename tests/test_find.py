"""get_loss_scale and get_loss_scale_state: which states have a scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from flax.training.train_state import TrainState

import optax_lossscale as ls

PARAMS = {"w": np.ones(2, np.float32)}
RULE, SCALED = ls.FixedLossScale(64.0), ls.with_loss_scaling
ADAM, CLIP = optax.adamw(1e-3), optax.clip(1.0)
TX = SCALED(ADAM, RULE)


@dataclasses.dataclass
class Trainer:
    """A user's own, which is no pytree."""

    opt_state: object


def opt_state(state):
    return state


def scale_state(state):
    return state.scale_state


def train_state(state):
    new = TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
    return new.replace(opt_state=state)


@pytest.mark.parametrize("hold", [opt_state, scale_state, train_state, Trainer])
def test_scale_is_found_in_a_state_or_in_an_attribute_opt_state(hold):
    state = hold(TX.init(PARAMS))
    assert_same_bits(ls.get_loss_scale_state(state), RULE.init())
    assert float(ls.get_loss_scale(state)) == 64.0


def test_retries_refuse_what_is_no_pytree():
    state = Trainer(ls.DynamicLossScale().init())
    with pytest.raises(TypeError, match="must be a pytree .* Pass its `opt_state`"):
        ls.value_and_grad_with_retries(jnp.sum, state)(1.0)


@pytest.mark.parametrize("number", [8, np.float64(8), jnp.bfloat16(8)], ids=type)
def test_scale_of_any_type_is_read_as_float32(number, around):
    state = optax.tree.set(TX.init(PARAMS), loss_scale=number)
    scale = around(ls.get_loss_scale)(state)
    assert_same_bits(scale, jnp.float32(8))
    assert not scale.weak_type


# Users of either wrapper know only its own name.
EITHER = "`with_loss_scaling` or `skip_nonfinite`"
NO_STATE = rf"^`state` must be what the `init\(params\)` of {EITHER} returned"
WRAP = f"ut {EITHER} around the whole"
# Beside or around the scale, even where the state is empty, updates might change.
OUTSIDE = {
    "chain": optax.chain(SCALED(CLIP), ADAM),
    "chain with identity": optax.chain(SCALED(ADAM), optax.identity()),
    "masked": optax.masked(SCALED(ADAM), {"w": True}),
    "MultiSteps": optax.MultiSteps(SCALED(ADAM), 2),
    "sam": optax.contrib.sam(SCALED(ADAM), optax.sgd(0.1)),
    "apply_if_finite": optax.apply_if_finite(SCALED(ADAM), 3),
    "hyperparameters": optax.inject_hyperparams(lambda a: SCALED(optax.adam(a)))(1e-3),
    "named chain": optax.named_chain(("a", SCALED(CLIP)), ("b", SCALED(ADAM))),
}


@pytest.mark.parametrize("tx", OUTSIDE.values(), ids=OUTSIDE)
def test_state_around_the_scale_is_refused(tx):
    words = f"{NO_STATE}.*of type .*{WRAP} .*`optax.MultiSteps`, turn off"
    with pytest.raises(ValueError, match=words):
        ls.get_loss_scale_state(tx.init(PARAMS))


RESTORE = r"pass `init\(params\)` to the checkpointer as the target"
UPDATED = f"of type tuple. If `update` returned it, pass the second .*p{WRAP}"
SAVED = {"scale_state": {"loss_scale": 1.0}, "inner_state": []}
UNWRAPPED = rf"{NO_STATE}.*{WRAP} .*use `init\(params\)._replace\(inner_state="
OTHERS = {
    "unwrapped": (ADAM.init, UNWRAPPED),
    "number": (lambda _: 1024.0, r"got 1024.0. .* is `FixedLossScale\(1024.0\).init"),
    "optimizer": (lambda _: TX, r"It is the optimizer: pass the result of its `init"),
    "rule": (lambda _: RULE, r"It is not a state yet: pass the result of its `init"),
    "tuple": (lambda _: (64.0, ()), f"{RESTORE}, so that it keeps .* Else p{WRAP}"),
    "restored": (lambda _: SAVED, RESTORE),
    "restored in a trainer": (lambda _: Trainer(SAVED), RESTORE),
    "results of update": (lambda x: (x, TX.init(x)), UPDATED),
    "abstract": (lambda x: jax.eval_shape(TX.init, x), "hold numbers, got a jax.Shape"),
}


@pytest.mark.parametrize(("make", "words"), OTHERS.values(), ids=OTHERS)
def test_error_says_what_to_pass_instead_of_another_state(make, words):
    with pytest.raises(ValueError, match=words):
        ls.get_loss_scale_state(make(PARAMS))


SCALE = {
    "grad": lambda state: ls.grad(jnp.sum, state)(1.0),
    "retries": lambda state: ls.value_and_grad_with_retries(jnp.sum, state)(1.0),
    "scale_loss": lambda state: ls.scale_loss(1.0, state),
    "unscale_grads": lambda state: ls.unscale_grads(1.0, state),
}
READ = {f.__name__: f for f in (ls.get_loss_scale, ls.was_applied, ls.check_loss_scale)}


@pytest.mark.parametrize("use", (READ | SCALE).values(), ids=READ | SCALE)
def test_readers_and_scalers_refuse_other_states(use):
    with pytest.raises(ValueError, match=NO_STATE):
        use(ADAM.init(PARAMS))


@pytest.mark.parametrize("scale", SCALE.values(), ids=SCALE)
def test_ensemble_has_scales_but_does_not_scale(scale):
    state = jax.vmap(lambda _: RULE.init())(np.arange(3))
    assert ls.get_loss_scale(state).shape == (3,)
    with pytest.raises(ValueError, match="of one run, got .*inside `jax.vmap`"):
        scale(state)
