"""Small pieces of a training run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ls


def float16_loss(params, x):
    """Of a linear layer that computes in float16."""
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    y = x.astype(jnp.float16) @ half["w"] + half["b"]
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1.0))


def normal(*shape, seed=0):
    """Normal numbers, of numpy: all test files are imported, and nothing compiled."""
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def make_step(tx, loss_fn):
    """One step of training, not yet compiled."""

    def step(params, opt_state, batch):
        _, grads = ls.value_and_grad(loss_fn, opt_state)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def train(step, params, opt_state, batches):
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params, opt_state


def run_rule(rule, grads_finite, magnitudes=(), state=None):
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
def _run_rule(rule, grads, state):
    tx = ls.with_loss_scaling(optax.identity(), rule)

    def step(opt_state, grad):
        _, opt_state = tx.update(grad, opt_state)
        return opt_state, opt_state.scale_state

    return jax.lax.scan(step, tx.init(0.0)._replace(scale_state=state), grads)[1]


def transformation(update, *state):
    """A stateful transformation from a function of gradients and states."""

    def update_fn(updates, state, params=None):
        return update(updates, *state)

    return optax.GradientTransformation(lambda params: state, update_fn)
