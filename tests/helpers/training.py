"""Small pieces of a training run."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ls


def float16_loss(params: Any, x: jax.Array) -> jax.Array:
    """Of a linear layer that computes in float16."""
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    y = x.astype(jnp.float16) @ half["w"] + half["b"]
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1.0))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, of numpy: all test files are imported, and nothing compiled."""
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def make_step(tx: Any, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """One step of training, not yet compiled."""

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        _, grads = ls.value_and_grad(loss_fn, opt_state)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def train(step: Any, params: Any, opt_state: Any, batches: Any) -> tuple[Any, Any]:
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params, opt_state


def run_rule(
    rule: ls.LossScale, grads_finite: Any, magnitudes: Any = (), state: Any = None
) -> ls.LossScaleState:
    """Every state of a run, stacked, from ``rule.init()`` or the state given.

    They are those of compiled steps of ``with_loss_scaling``, which users run. Runs up
    to a length share one program.
    """
    steps = len(grads_finite)
    length = next(n for n in (32, 256, 512) if steps <= n)
    grads = np.zeros(length, np.float32)
    grads[: len(magnitudes)] = magnitudes
    grads[:steps][~np.asarray(grads_finite, bool)] = np.nan
    states = _run_rule(rule, grads, rule.init() if state is None else state)
    return jax.tree.map(lambda x: np.asarray(x)[:steps], states)


@functools.partial(jax.jit, static_argnums=0)
def _run_rule(rule: ls.LossScale, grads: jax.Array, state: Any) -> Any:
    tx = ls.with_loss_scaling(optax.identity(), rule)

    def step(opt_state: Any, grad: jax.Array) -> Any:
        _, opt_state = tx.update(grad, opt_state)
        return opt_state, opt_state.scale_state

    return jax.lax.scan(step, tx.init(0.0)._replace(scale_state=state), grads)[1]


def transformation(update: Any, *state: Any) -> optax.GradientTransformation:
    """A stateful transformation from a function of gradients and states."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        return update(updates, *state)

    return optax.GradientTransformation(lambda params: state, update_fn)
