"""Trainers that differentiate the loss themselves, as the page on them says."""

import collections
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from book import PAGES, run_page
from flax import nnx
from training import normal

import optax_lossscale as ls

# Each compiles the steps of another trainer.
pytestmark = pytest.mark.slow
# Stand-ins for the trainers of tunix and Levanter: who calls whom, with what.
STAND_INS = sys.modules[__name__]
START = {"w": np.zeros((8, 1), np.float32), "b": np.zeros(1, np.float32)}


SAVED = {}  # instead of checkpoints, by folder


class TrainingConfig(types.SimpleNamespace):
    gradient_accumulation_steps = checkpoint_root_directory = None


class PeftTrainer:
    """As of tunix 0.1.7, for LoRA, without its metrics, meshes and evaluation."""

    def __init__(self, model, optimizer, training_config):
        self.model, self.config, self.train_steps = model, training_config, 0
        if (steps := self.config.gradient_accumulation_steps) is not None:
            optimizer = optax.MultiSteps(optimizer, steps)
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.LoRAParam)
        if (folder := training_config.checkpoint_root_directory) in SAVED:
            self.train_steps, state = SAVED[folder]
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
            SAVED[folder] = self.train_steps, state


State = collections.namedtuple("State", "model opt_state")


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


@pytest.fixture(scope="module")
def page():
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("tunix") is None:
            patch.setitem(sys.modules, "tunix.sft.peft_trainer", STAND_INS)
        patch.setitem(sys.modules, "levanter.trainer", STAND_INS)
        return run_page(PAGES / "guides" / "trainers.md")


def bad(batch):
    x, y = batch
    return x.at[0, 0].set(jnp.inf), y


def variables(trainer):
    return nnx.state((trainer.model, trainer.optimizer))


def test_peft_trainer_learns_and_resumes_with_the_same_bits(page, tmp_path):
    """The run of the page stops at step 60."""
    trainer, batches = page["trainer"], page["batches"]
    assert trainer.train_steps == 100
    assert page["nnx_loss"](trainer.model, **batches[0]) < 0.3
    whole = page["train"](str(tmp_path), 100, batches)
    assert_same_bits(*(jax.tree.leaves(variables(x)) for x in (trainer, whole)))


def test_peft_trainer_skips_a_bad_batch_and_counts_it(page, tmp_path):
    x, y = map(np.asarray, bad(page["batch"]))
    batches = [*page["batches"][:5], {"x": x, "y": y}, *page["batches"][:14]]
    trainer = page["train"](str(tmp_path), 20, batches)
    state = ls.get_loss_scale_state(trainer.optimizer)
    assert (float(state.loss_scale), int(state.skipped_steps)) == (2.0**14, 1)
    assert trainer.train_steps == 20
    # Pairs of micro-batches that were applied.
    assert int(optax.tree.get(variables(trainer), "gradient_step")[...]) == 9


def trained_at_loss_scale(page, loss_fn, **options):
    """The model after 20 steps of a trainer that somebody else has built."""
    config = page["TrainingConfig"](eval_every_n_steps=100, max_steps=20, **options)
    tx = ls.with_loss_scaling(optax.adamw(3e-2))
    trainer = page["PeftTrainer"](page["net"](), tx, config)
    page["at_loss_scale"](trainer.with_loss_fn(loss_fn))
    trainer.train(page["batches"])
    return trainer.model


def test_built_peft_trainer_trains_at_the_scale(page):
    def tiny_loss(model, x, y):  # without a scale, few gradients are not zero
        return 2.0**-20 * page["nnx_loss"](model, x, y)

    model = trained_at_loss_scale(page, tiny_loss)
    assert page["nnx_loss"](model, **page["batches"][0]) < 0.3


def test_peft_trainer_with_accumulation_of_its_own_is_refused(page):
    """Even of 1 step, the trainer puts `MultiSteps` around our optimizer."""
    with pytest.raises(ValueError, match="turn off its accumulation"):
        trained_at_loss_scale(page, page["nnx_loss"], gradient_accumulation_steps=1)


def test_levanter_trains_at_the_scale_in_its_scan_over_microbatches(page):
    def tiny_loss(half, x, y):  # without a scale all gradients are zero
        return 2.0**-20 * jnp.float32(page["loss_fn"](half, (jnp.float16(x), y)))

    tx = ls.with_loss_scaling(optax.adam(3e-2))
    trainer = page["Float16Levanter"](tx, tiny_loss, microbatches=4)
    state = trainer.initial_state(START)
    for _ in range(50):
        state, _ = trainer.train_step(state, page["batch"])
    assert page["loss_fn"](state.model, page["batch"]) < 0.45


def test_trainer_that_takes_only_an_optimizer_and_a_loss_trains_and_skips(page):
    """At the fixed scale of the page."""
    assert page["loss_fn"](page["fitted"], page["batch"]) < 0.3
    batches = [page["batch"]] * 3 + [bad(page["batch"])]
    params, state = page["fit"](START, page["fit_tx"], page["fit_loss"], batches)
    assert int(ls.get_loss_scale_state(state).skipped_steps) == 1
    assert ls.all_finite(params)


NAN_ROW, NAN_LOSS = "of the fifth device", "of its loss alone"
NAMED, ALL, NONE = {"axis_name": "b"}, [*range(8)], []
# What the devices do: who keeps its scale, who skips, and how many weights they have.
PMAPS = {
    "scales apart: NaN row": ({"nan": NAN_ROW}, [5], ALL, 1),
    "together: loss averaged": ({"nan": NAN_ROW, "average": "both"}, ALL, ALL, 1),
    "together: NaN row, axis named": ({"nan": NAN_ROW, **NAMED}, ALL, ALL, 1),
    "weights apart: NaN loss": ({"nan": NAN_LOSS}, ALL, [5], 2),
    "together: NaN loss, axis named": ({"nan": NAN_LOSS, **NAMED}, ALL, ALL, 1),
    "together: axis named": (NAMED, ALL, NONE, 1),
    "weights apart: no average": ({"average": "loss", **NAMED}, ALL, NONE, 8),
}


@pytest.mark.parametrize("row", PMAPS)
def test_devices_under_pmap_stay_together_or_drift_apart(row):
    """The page advises to average gradients and loss, and to name the axis."""
    options, kept, skipped, different = PMAPS[row]
    nan, average = options.get("nan"), options.get("average", "gradients")
    tx = ls.with_loss_scaling(optax.sgd(0.1), axis_name=options.get("axis_name"))

    def mean(x, *where):
        return jax.lax.pmean(x, "b") if average in where else x

    def step(w, opt_state, x):
        def loss_fn(w):
            return mean(jnp.mean((x @ w) ** 2), "loss")

        loss, grads = ls.value_and_grad(loss_fn, opt_state)(w)
        is_bad = (jax.lax.axis_index("b") == 5) & (nan == NAN_LOSS)
        value = mean(jnp.where(is_bad, jnp.nan, loss), "both")
        grads = mean(grads, "gradients", "both")
        updates, opt_state = tx.update(grads, opt_state, w, value=value)
        return optax.apply_updates(w, updates), ls.get_loss_scale(opt_state)

    w, batch = np.ones(2, np.float32), normal(8, 4, 2)
    batch[5, 0, 0] = np.nan if nan == NAN_ROW else 1.0
    mapped = jax.pmap(step, axis_name="b", in_axes=(None, None, 0))
    weights, scales = map(np.asarray, mapped(w, tx.init(w), batch))
    assert np.flatnonzero(scales == 2.0**15).tolist() == kept
    assert np.flatnonzero(np.all(weights == 1, axis=1)).tolist() == skipped
    assert len(np.unique(weights, axis=0)) == different
