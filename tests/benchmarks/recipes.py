"""One train step by each recipe: no loss scaling, this package, and its peers.

A recipe takes an optimizer and a loss, and returns ``init(params) -> (params, state)``,
where parameters may change their type, and ``step(params, state, batch) -> (params,
state, loss)``. Without a loss the batch is the true gradients, the third result is
None, and what is left of a recipe is its check, its update and its masks; a recipe that
is about the backward pass needs a loss. The peers' recipes are those of their own
documentation.
"""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jmp
import mpx
import optax
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ls

LossFn = Callable[[Any, Any], jax.Array] | None
# The peers' defaults, 2^16 and 2^15, cost all of them a skipped step or more.
INIT_SCALE = 2.0**10
DYNAMIC = ls.DynamicLossScale(init_scale=INIT_SCALE)


def plain(tx: optax.GradientTransformation, loss_fn: LossFn):
    def step(params, state, batch):
        loss, grads = None, batch
        if loss_fn:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return lambda params: (params, tx.init(params)), step


def lossscale(
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    rule: ls.LossScale = DYNAMIC,
    check_updates: bool = False,
):
    tx = ls.with_loss_scaling(tx, rule, check_updates=check_updates)

    def step(params, state, batch):
        loss, grads = None, batch
        if loss_fn:
            loss, grads = ls.value_and_grad(loss_fn, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return lambda params: (params, tx.init(params)), step


def master_weights(tx: optax.GradientTransformation, loss_fn: LossFn):
    """float16 parameters, of which the optimizer keeps float32 copies."""
    init, step = lossscale(ls.with_master_weights(tx), loss_fn)
    return lambda params: init(optax.tree.cast(params, jnp.float16)), step


def check_updates(tx: optax.GradientTransformation, loss_fn: LossFn):
    return lossscale(tx, loss_fn, check_updates=True)


def without_check(tx: optax.GradientTransformation, loss_fn: LossFn):
    """The masks of `lossscale` alone: their flag looks at one element."""
    init, scaled_step = lossscale(tx, loss_fn)

    def one_element(grads, axis_name=None):
        # As opaque to XLA's fusion as the whole check.
        element = jnp.ravel(jax.tree.leaves(grads)[0])[:1].astype(jnp.float32)
        return jnp.vdot(element, element) < jnp.inf

    def step(params, state, batch):
        with mock.patch(
            "optax_lossscale._transform.with_loss_scaling.all_finite", one_element
        ):
            return scaled_step(params, state, batch)

    return init, step


def headroom(tx: optax.GradientTransformation, loss_fn: LossFn):
    """With a rule that asks for the largest gradient, too."""
    return lossscale(tx, loss_fn, ls.HeadroomLossScale(init_scale=INIT_SCALE))


def scale_block(tx: optax.GradientTransformation, loss_fn: LossFn):
    """A scale for each block that the loss wraps, instead of one for the loss."""
    tx = ls.with_loss_scaling(tx, ls.FixedLossScale(1.0))
    return plain(tx, functools.partial(loss_fn, wrap=ls.scale_block))


def retries(tx: optax.GradientTransformation, loss_fn: LossFn):
    tx = ls.with_loss_scaling(tx, DYNAMIC)

    def step(params, state, batch):
        fun = ls.value_and_grad_with_retries(loss_fn, state)
        loss, grads, state = fun(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return lambda params: (params, tx.init(params)), step


def apply_if_finite(tx: optax.GradientTransformation, loss_fn: LossFn):
    init, plain_step = plain(
        optax.apply_if_finite(tx, max_consecutive_errors=5), loss_fn
    )

    def step(params, state, batch):
        if not loss_fn:
            # It refuses float16 gradients of float32 parameters.
            batch = jax.tree.map(lambda g, p: g.astype(p.dtype), batch, params)
        return plain_step(params, state, batch)

    return init, step


def jmp_recipe(tx: optax.GradientTransformation, loss_fn: LossFn):
    # jmp 0.0.4 validates whatever jax unflattens while lowering, and fails: the state
    # carries the leaves.
    leaves, structure = jax.tree.flatten(jmp.DynamicLossScale(jnp.float32(INIT_SCALE)))

    def init(params):
        return params, (tx.init(params), jax.tree.map(jnp.asarray, leaves))

    def step(params, state, batch):
        opt_state, loss_scale = state[0], jax.tree.unflatten(structure, state[1])
        loss, grads = None, batch
        if loss_fn:
            loss, grads = jax.value_and_grad(
                lambda p: loss_scale.scale(loss_fn(p, batch))
            )(params)
            loss, grads = loss_scale.unscale((loss, grads))
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jmp.select_tree(
            grads_finite, (new_params, new_opt_state), (params, opt_state)
        )
        return params, (opt_state, jax.tree.leaves(loss_scale)), loss

    return init, step


def flax_recipe(tx: optax.GradientTransformation, loss_fn: LossFn):
    def init(params):
        scale = jnp.float32(INIT_SCALE)
        dynamic_scale = DynamicScale(fin_steps=jnp.int32(0), scale=scale)
        return params, (tx.init(params), dynamic_scale)

    def step(params, state, batch):
        (opt_state, dynamic_scale), loss = state, None
        if loss_fn:
            dynamic_scale, is_fin, loss, grads = dynamic_scale.value_and_grad(loss_fn)(
                params, batch
            )
        else:
            # DynamicScale checks inside `value_and_grad` alone, in this way.
            grads = batch
            flags = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
            is_fin = functools.reduce(jnp.logical_and, flags)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_fin, new, old),
            (new_params, new_opt_state),
            (params, opt_state),
        )
        return params, (opt_state, dynamic_scale), loss

    return init, step


def mpx_recipe(tx: optax.GradientTransformation, loss_fn: LossFn):
    def init(params):
        scaling = mpx.DynamicLossScaling(jnp.float32(INIT_SCALE), jnp.float32(1.0))
        return params, (tx.init(params), jax.tree.map(jnp.asarray, scaling))

    def step(params, state, batch):
        (opt_state, scaling), loss = state, None
        if loss_fn:
            fun = mpx.filter_value_and_grad(loss_fn, scaling)
            loss, scaling, grads_finite, grads = fun(params, batch)
        else:
            grads, grads_finite = batch, mpx.all_finite(batch)
            scaling = scaling.adjust(grads_finite)
        params, opt_state = mpx.optimizer_update(
            params, tx, opt_state, grads, grads_finite
        )
        return params, (opt_state, scaling), loss

    return init, step


RECIPES = {
    "plain": plain,
    "optax_lossscale": lossscale,
    "its masks alone": without_check,
    "headroom rule": headroom,
    "master weights": master_weights,
    "check_updates": check_updates,
    "scale_block": scale_block,
    "retries": retries,
    "apply_if_finite": apply_if_finite,
    "jmp": jmp_recipe,
    "flax": flax_recipe,
    "mpx": mpx_recipe,
}
NEED_A_LOSS = {"scale_block", "retries"}


def plain_first(names: list[str]) -> list[str]:
    """Every other recipe is compared with the plain one."""
    return ["plain", *(name for name in names if name != "plain")]


def make_steps(
    names: list[str], tx: optax.GradientTransformation, loss_fn: LossFn = None
):
    """Make the steps of the named recipes, without a loss of those that need none."""
    return {
        name: RECIPES[name](tx, loss_fn)
        for name in names
        if loss_fn or name not in NEED_A_LOSS
    }
