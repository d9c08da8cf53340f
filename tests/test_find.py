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


def train_state(opt_state):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=TX)
    return state.replace(opt_state=opt_state)


HOLDERS = [lambda state: state, lambda state: state.scale_state, train_state]


@pytest.mark.parametrize("hold", [*HOLDERS, Trainer])
def test_scale_is_found_by_the_type_of_the_state(hold):
    state = hold(TX.init(PARAMS))
    assert_same_bits(ls.get_loss_scale_state(state), RULE.init())
    assert float(ls.get_loss_scale(state)) == 64.0


def retry(state):
    """The gradient overflows at a scale of 32, and not at 16."""

    def loss_fn(x):
        return 2.0**11 * x.astype("float16").astype("float32")

    return ls.value_and_grad_with_retries(loss_fn, state)(1.0)[-1]


@pytest.mark.parametrize("hold", HOLDERS)
def test_retries_lower_the_scale_in_a_pytree(hold):
    state = hold(TX.init(PARAMS))
    new = retry(state)
    assert type(new) is type(state) and float(ls.get_loss_scale(new)) == 16.0
    with pytest.raises(TypeError, match="must be a pytree .* Pass its `opt_state`"):
        retry(Trainer(TX.init(PARAMS)))


@pytest.mark.parametrize("number", [8, np.float64(8), jnp.bfloat16(8)])
def test_scale_of_any_type_is_read_as_float32(number):
    state = optax.tree.set(TX.init(PARAMS), loss_scale=number)
    for read in (ls.get_loss_scale, jax.jit(ls.get_loss_scale)):
        assert_same_bits(scale := read(state), jnp.float32(8))
        assert not scale.weak_type


SCALE = [
    lambda state: ls.grad(jnp.sum, state)(1.0),
    lambda state: ls.value_and_grad_with_retries(jnp.sum, state)(1.0),
    lambda state: ls.scale_loss(1.0, state),
    lambda state: ls.unscale_grads(1.0, state),
]
# Users of either wrapper know only its own name.
EITHER = "`with_loss_scaling` or `skip_nonfinite`"
NO_STATE = rf"be what the `init\(params\)` of {EITHER} returned"
WRAP = f"ut {EITHER} around the whole"
RESTORE = r"pass `init\(params\)` to the checkpointer as the target"
UPDATED = f"of type tuple. If `update` returned it, pass the second .*p{WRAP}"
RESTORED = {"scale_state": {"loss_scale": 1.0}, "inner_state": []}
# Beside or around the scale, even where the state is empty, updates might change.
OUTSIDE = [
    optax.chain(SCALED(CLIP), ADAM),
    optax.chain(SCALED(ADAM), optax.identity()),
    optax.masked(SCALED(ADAM), {"w": True}),
    optax.MultiSteps(SCALED(ADAM), 2),
    optax.contrib.sam(SCALED(ADAM), optax.sgd(0.1)),
    optax.apply_if_finite(SCALED(ADAM), 3),
    optax.inject_hyperparams(lambda a: SCALED(optax.adam(a)))(1e-3),
    optax.named_chain(("a", SCALED(CLIP)), ("b", SCALED(ADAM))),
]
REFUSED = [
    *((tx.init, f"{NO_STATE}.*of type .*{WRAP} .*`optax.Multi") for tx in OUTSIDE),
    (ADAM.init, rf"{NO_STATE}.*{WRAP} .*from `init\(params\)._replace\(inner_state="),
    (lambda _: 1024.0, r"got 1024.0. .* is `FixedLossScale\(1024.0\).init\(\)`"),
    (lambda _: TX, r"It is the optimizer: pass what its `init\(params\)` returns"),
    (lambda _: RULE, r"It is not a state yet: pass what its `init\(\)` returns"),
    (lambda _: None, f"got None. P{WRAP}"),
    (lambda _: (64.0, ()), f"{RESTORE}, so that it has its types. Else p{WRAP}"),
    (lambda _: RESTORED, RESTORE),
    (lambda _: Trainer(RESTORED), RESTORE),
    (lambda params: TX.update(params, TX.init(params), params), UPDATED),
    (lambda params: jax.eval_shape(TX.init, params), "hold numbers, got a jax.Shape"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
@pytest.mark.parametrize("use", [ls.get_loss_scale_state, ls.was_applied, *SCALE])
def test_readers_and_scalers_refuse_other_states(make, words, use):
    with pytest.raises(ValueError, match=f"^`state` must .*{words}"):
        use(make(PARAMS))


@pytest.mark.parametrize("use", SCALE)
def test_ensemble_has_scales_but_does_not_scale(use):
    state = jax.vmap(TX.init)({"w": np.ones((3, 2), np.float32)})
    assert ls.get_loss_scale(state).shape == (3,)
    with pytest.raises(ValueError, match="of one run, got .*inside `jax.vmap`"):
        use(state)
