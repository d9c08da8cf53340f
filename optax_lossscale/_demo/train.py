"""Train one small network in float32, and in float16 with and without loss scales."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lossscale as ls

from . import task

FLOAT32 = functools.partial(task.network, dtype=jnp.float32)
WRAPPED = functools.partial(task.network, around=ls.scale_block)


class Way(NamedTuple):
    """One way to train: the network, the rule, and whether to poison a step."""

    name: str
    network: task.Network
    loss_scale: ls.LossScale
    poisoned: bool = False


# There are few steps, so the scale grows a hundred times as often as usual.
DYNAMIC = ls.DynamicLossScale(growth_interval=20)
WAYS = (
    Way("float32", FLOAT32, ls.FixedLossScale(1.0)),
    Way("float16, no scale", task.network, ls.FixedLossScale(1.0)),
    Way("float16, fixed scale", task.network, ls.FixedLossScale(2.0**13)),
    Way("float16, dynamic scale", task.network, DYNAMIC, poisoned=True),
    # The rule only skips.
    Way("float16, scale_block", WRAPPED, ls.FixedLossScale(1.0)),
)


class Result(NamedTuple):
    """The results of a run; lists have one entry per step."""

    held_out_loss: float
    held_out_f1: float
    words_predicted: float
    flushed_share: float
    final_scale: float
    skipped_steps: int
    poisoned_step: int | None
    losses: list[float]
    scales: list[float]
    skipped: list[bool]


def train(way: Way, positions: Any, steps: int, seed: int, watch: Any = iter) -> Result:
    """Train in one way; the same seed gives the same weights and the same batches.

    ``watch`` is called with the batches and returns them, one after the other.
    """
    train_on, held_out = positions
    loss_fn = functools.partial(task.loss_fn, network=way.network)
    tx = ls.with_loss_scaling(optax.adam(2e-2), way.loss_scale)
    params = task.init_params(seed)
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, batch)
        scale = ls.get_loss_scale(opt_state)
        if way.network is WRAPPED:
            scale = own_scale(params, batch[0])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, (loss, scale, ~ls.was_applied(opt_state))

    @jax.jit
    def flushed_share(params: Any, opt_state: Any, batch: Any) -> jax.Array:
        # The gradient by a bias for each position is the gradient by its logits.
        per_position = jnp.tile(params["bias"], (task.BATCH, 1))
        fun = ls.value_and_grad(loss_fn, opt_state)
        _, grads = fun({**params, "bias": per_position}, batch)
        return (grads["bias"] == 0).mean()

    poisoned_step = steps // 2 if way.poisoned else None
    history = []
    for batch in watch(task.batches(train_on, steps, seed, poisoned_step)):
        params, opt_state, record = train_step(params, opt_state, batch)
        history.append([x.item() for x in record])  # waits, so the progress is honest
    losses, scales, skipped = map(list, zip(*history, strict=True))
    figures = [*judge(params, held_out), flushed_share(params, opt_state, batch)]
    ends = scales[-1], sum(skipped), poisoned_step
    return Result._make([*map(float, figures), *ends, losses, scales, skipped])


@jax.jit
def judge(params: Any, positions: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the loss, the F1 score, and the number of words predicted per position."""
    logits, present = FLOAT32(params, positions), task.labels(positions)
    said = logits > 0
    f1 = 2 * jnp.sum(said & present) / (jnp.sum(said) + jnp.sum(present))
    words_predicted = jax.nn.sigmoid(logits).sum(axis=1).mean()
    return task.cross_entropy(logits, positions), f1, words_predicted


def own_scale(params: Any, positions: Any) -> jax.Array:
    """Return the scale of `scale_block`, which no state holds."""
    cotangent = jax.grad(task.cross_entropy)(task.network(params, positions), positions)
    sums = jnp.abs(cotangent).sum(axis=0)
    return ls.suggest_loss_scale(sums, headroom=6.0).loss_scale
