"""Typical programs, for type checkers alone: mypy, and pyright, accept all of them.

The lint session runs ``mypy --strict`` on this file, which also reports a ``type:
ignore`` that hides no error. So the mistakes in such lines must be found.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ls

Params = dict[str, jax.Array]


def loss_fn(params: Params, x: jax.Array, *, rate: float = 0.0) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** 2) + rate


def loss_with_aux(params: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    return loss_fn(params, x), params


params: Params = {"w": jnp.ones((8, 8))}
x = jnp.ones((2, 8))
tx = ls.with_loss_scaling(optax.adam(1e-3), ls.DynamicLossScale(2.0**15))


# A train step.
@jax.jit
def train_step(
    params: Any, opt_state: optax.OptState, x: jax.Array
) -> tuple[Any, optax.OptState, jax.Array]:
    grad_fn = ls.value_and_grad(ls.autocast(loss_fn, jnp.float16), opt_state)
    loss, grads = grad_fn(params, x, rate=0.1)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state, loss


# As a decorator.
cast_loss = ls.autocast(dtype=jnp.float16)(loss_fn)
half_loss: jax.Array = cast_loss(params, x, rate=0.1)
cast_loss(params)  # type: ignore[call-arg]

# The loss misses its batch.
ls.value_and_grad(loss_fn, tx.init(params))(params)  # type: ignore[call-arg]
ls.grad(loss_fn, tx.init(params))(params)  # type: ignore[call-arg]

# Auxiliary outputs, and the gradients alone.
aux_fn = ls.value_and_grad(loss_with_aux, tx.init(params), has_aux=True)
output: tuple[jax.Array, Params] = aux_fn(params, x)[0]
grads = ls.grad(lambda p: loss_fn(p, x), tx.init(params))(params)

# Retries.
grad_fn = ls.value_and_grad_with_retries(loss_fn, tx.init(params), max_retries=2)
loss, grads, opt_state = grad_fn(params, x)

# A scaled loss and its gradients by hand. A tree keeps its type.
scaled = ls.scale_loss(loss_fn(params, x), opt_state)
unscaled: Params = ls.unscale_grads(params, opt_state)

# Values that the optimizer does not see.
kept: Params = ls.keep_if_applied(opt_state, new=params, old=params)
chosen: Params = ls.select(ls.all_finite(params), params, params)
wrong: list[int] = ls.keep_if_applied(opt_state, new=params, old=params)  # type: ignore[arg-type]

# The state, and another rule in its place.
state = tx.init(params)
restarted = state._replace(scale_state=ls.FixedLossScale(8.0).init())
scale: jax.Array = ls.get_loss_scale(state)
updates, new_state = tx.update(params, state, params)
inner: Any = new_state.inner_state

# The guard.
guarded = ls.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
guarded_state = guarded.init(params)._replace(inner_state=None)

# In a chain, and with master weights.
chained = optax.chain(tx, optax.scale(1.0))
masters = ls.with_loss_scaling(ls.with_master_weights(optax.adam(1e-3)))


# A rule, and one that measures the gradients.
@dataclasses.dataclass(frozen=True)
class Halving(ls.LossScale):
    init_scale: float = 1024.0

    def init(self) -> ls.LossScaleState:
        return ls.LossScaleState.create(self.init_scale)

    def update(
        self, state: ls.LossScaleState, grads_finite: jax.typing.ArrayLike
    ) -> ls.LossScaleState:
        scale = jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale
        return state._replace(loss_scale=scale)


@dataclasses.dataclass(frozen=True)
class Measuring(Halving):
    uses_max_magnitude = True

    def update(
        self,
        state: ls.LossScaleState,
        grads_finite: jax.typing.ArrayLike,
        max_magnitude: jax.typing.ArrayLike = 0.0,
    ) -> ls.LossScaleState:
        return state._replace(loss_scale=1.0 / jnp.asarray(max_magnitude))


rule: ls.LossScale = Measuring()
rules: list[ls.LossScale] = [Halving(), rule, ls.presets.torch_grad_scaler()]
same = ls.DynamicLossScale.from_config(ls.DynamicLossScale().get_config())
