"""Trainers with the structure of tunix's and Levanter's: who calls whom, with what."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

_saved: dict[str, Any] = {}  # instead of checkpoints, by folder


@dataclasses.dataclass(kw_only=True)
class TrainingConfig:
    eval_every_n_steps: int
    max_steps: int
    gradient_accumulation_steps: int | None = None
    checkpoint_root_directory: str | None = None


class PeftTrainer:
    """As of tunix 0.1.7, for LoRA, without its metrics, meshes and evaluation."""

    def __init__(self, model, optimizer, training_config):
        self.model, self.config, self.train_steps = model, training_config, 0
        if (steps := self.config.gradient_accumulation_steps) is not None:
            optimizer = optax.MultiSteps(optimizer, steps)
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.LoRAParam)
        if (folder := training_config.checkpoint_root_directory) in _saved:
            self.train_steps, state = _saved[folder]
            nnx.update((model, self.optimizer), state)

    def with_loss_fn(self, loss_fn):
        self.loss_fn = self.eval_loss_fn = loss_fn
        return self

    def _train_step(self, model, optimizer, inputs):
        argnums = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(self.loss_fn, argnums=argnums)(model, **inputs)
        optimizer.update(model, grads)
        return loss

    def train(self, train_ds):
        jitted = nnx.jit(self._train_step, donate_argnames=("optimizer",))
        step = nnx.cached_partial(jitted, self.model, self.optimizer)
        for inputs in list(train_ds)[self.train_steps : self.config.max_steps]:
            step(inputs)
            self.train_steps += 1
        if folder := self.config.checkpoint_root_directory:
            state = jax.device_get(nnx.state((self.model, self.optimizer)))
            _saved[folder] = self.train_steps, state


class State(NamedTuple):
    model: Any
    opt_state: Any


class Trainer:
    """As Levanter's: it casts, it differentiates, and it scans over micro-batches."""

    def __init__(self, optimizer, loss_fn, microbatches):
        self.optimizer, self.microbatches = optimizer, microbatches
        self.loss_fn = lambda model, *batch: loss_fn(
            jax.tree.map(lambda x: x.astype(jnp.float16), model), *batch
        )
        self.train_step = jax.jit(self._train_step)

    def initial_state(self, model):
        return State(model, self.optimizer.init(model))

    def _train_step(self, state, batch):
        loss, grads = self._compute_gradients_microbatched(
            self.loss_fn, state.model, *batch
        )
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.model)
        return State(optax.apply_updates(state.model, updates), opt_state), loss

    def _compute_gradients_microbatched(self, loss_fn, model, *batch):
        count = self.microbatches
        batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

        def add(total, batch):
            loss_and_grads = jax.value_and_grad(loss_fn)(model, *batch)
            return jax.tree.map(jnp.add, total, loss_and_grads), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, model)
        total, _ = jax.lax.scan(add, zeros, batches)
        return jax.tree.map(lambda x: x / count, total)
