"""Trainers with the structure of tunix's and Levanter's: who calls whom, with what."""

import dataclasses
import importlib.util
import pickle
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(kw_only=True)
class TrainingConfig:
    eval_every_n_steps: int
    max_steps: int
    gradient_accumulation_steps: int | None = None
    checkpoint_root_directory: str | None = None


class PeftTrainer:
    """As of tunix 0.1.7, without its metrics, hooks, meshes and evaluation."""

    def __init__(self, model, optimizer, training_config):
        self.model, self.config = model, training_config
        has_lora = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
        self.kind = nnx.LoRAParam if has_lora else nnx.Param
        if (steps := self.config.gradient_accumulation_steps) is not None:
            optimizer = optax.MultiSteps(optimizer, steps)
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=self.kind)
        self._train_steps = 0
        folder = training_config.checkpoint_root_directory
        self.checkpoint = Path(folder) / "state" if folder else None
        if self.checkpoint and self.checkpoint.exists():
            state = nnx.state((model, self.optimizer))
            self._train_steps, leaves = pickle.loads(self.checkpoint.read_bytes())
            restored = jax.tree.unflatten(jax.tree.structure(state), leaves)
            nnx.update((model, self.optimizer), restored)

    @property
    def train_steps(self):
        return self._train_steps

    def with_loss_fn(self, loss_fn):
        self.loss_fn = self.eval_loss_fn = loss_fn
        return self

    def _train_step(self, model, optimizer, inputs):
        argnums = nnx.DiffState(0, self.kind)
        loss, grads = nnx.value_and_grad(self.loss_fn, argnums=argnums)(model, **inputs)
        optimizer.update(model, grads)
        return loss

    def train(self, train_ds):
        jitted = nnx.jit(self._train_step, donate_argnames=("optimizer",))
        step = nnx.cached_partial(jitted, self.model, self.optimizer)
        for inputs in list(train_ds)[self._train_steps : self.config.max_steps]:
            step(inputs)
            self._train_steps += 1
        if self.checkpoint:
            leaves = jax.device_get(
                jax.tree.leaves(nnx.state((self.model, self.optimizer)))
            )
            self.checkpoint.write_bytes(pickle.dumps((self._train_steps, leaves)))


class State(NamedTuple):
    model: Any
    opt_state: Any


class Trainer:
    """As Levanter's: it casts, it differentiates, and it scans over micro-batches."""

    def __init__(self, optimizer, loss_fn, microbatches):
        self.optimizer, self._raw_loss_function = optimizer, loss_fn
        self.microbatches = microbatches
        self.train_step = eqx.filter_jit(self._train_step)

    def initial_state(self, model):
        return State(
            model, self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        )

    @property
    def loss_fn(self):
        def loss_fn(model, *batch):
            half = jax.tree.map(lambda x: x.astype(jnp.float16), model)
            return self._raw_loss_function(half, *batch)

        return loss_fn

    def _train_step(self, state, batch):
        loss, grads = self._compute_gradients_microbatched(
            self.loss_fn, state.model, *batch
        )
        updates, opt_state = self.optimizer.update(
            grads, state.opt_state, params=state.model, loss=loss
        )
        return State(eqx.apply_updates(state.model, updates), opt_state), loss

    def _compute_gradients_microbatched(self, loss_fn, model, *batch):
        grad_fn = eqx.filter_value_and_grad(loss_fn)
        count = self.microbatches
        batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)

        def add(total, batch):
            return jax.tree.map(jnp.add, total, grad_fn(model, *batch)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, model)
        total, _ = jax.lax.scan(add, zeros, batches)
        return jax.tree.map(lambda x: x / count, total)


class SkipBadStepsState(NamedTuple):
    inner_opt_state: Any
    losses: jax.Array
    norms: jax.Array
    count: jax.Array


def skip_bad_steps(inner, length=8, factor=6.0):
    """As Levanter 1.2's: skip a loss or norm far above the average of the last ones."""

    def init(params):
        seen = jnp.zeros(length)
        return SkipBadStepsState(inner.init(params), seen, seen, jnp.int32(0))

    def update(updates, state, params=None, *, loss, **extra_args):
        now = loss, optax.tree.norm(updates)
        histories = state.losses, state.norms
        usual = [
            x <= seen.mean() + factor * jnp.maximum(seen.std(), 1e-6)
            for x, seen in zip(now, histories, strict=True)
        ]
        applied = (state.count < length) | (usual[0] & usual[1])
        new_updates, new_state = inner.update(
            updates, state.inner_opt_state, params, **extra_args
        )
        at = state.count % length
        losses, norms = (
            seen.at[at].set(x) for x, seen in zip(now, histories, strict=True)
        )
        kept = jax.tree.map(
            lambda new, old: jnp.where(applied, new, old),
            new_state,
            state.inner_opt_state,
        )
        new_updates = jax.tree.map(lambda x: applied * x, new_updates)
        return new_updates, SkipBadStepsState(kept, losses, norms, state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


MODULES = {
    "tunix.sft.peft_trainer": (PeftTrainer, TrainingConfig),
    "levanter.trainer": (Trainer,),
}


def importable() -> dict[str, types.ModuleType]:
    """The modules of the stand-ins for trainers that are not installed."""
    modules = {}
    for path, classes in MODULES.items():
        root, *_ = names = path.split(".")
        if root not in sys.modules and importlib.util.find_spec(root) is None:
            for i in range(len(names)):
                name = ".".join(names[: i + 1])
                modules[name] = types.ModuleType(name)
            vars(modules[path]).update({x.__name__: x for x in classes})
    return modules
