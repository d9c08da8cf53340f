"""Trainers that differentiate the loss themselves, as the page on them says."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stand_ins
from flax import jax_utils, nnx
from flax.training.train_state import TrainState
from helpers import PAGES, assert_same_bits, run_page

import optax_lossscale as ls

# Each compiles the steps of another trainer.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.importable().items():
            patch.setitem(sys.modules, name, module)
        return run_page(PAGES / "guides" / "trainers.md")


def bad(batch):
    x, y = batch
    return x.at[0, 0].set(jnp.inf), y


def variables(trainer):
    return nnx.state((trainer.model, trainer.optimizer))


def inputs(batch):
    return {"x": np.asarray(batch[0]), "y": np.asarray(batch[1])}


def test_peft_trainer_learns_adapters_in_float16_and_resumes(page, tmp_path):
    trainer, batches = page["trainer"], page["batches"]
    assert trainer.train_steps == 100
    assert page["nnx_loss"](trainer.model, **batches[0]) < 0.3
    fresh = nnx.state(page["net"](), nnx.Not(nnx.LoRAParam))
    frozen = nnx.state(trainer.model, nnx.Not(nnx.LoRAParam))
    assert_same_bits(jax.tree.leaves(frozen), jax.tree.leaves(fresh))
    whole = page["train"](str(tmp_path), 100, batches)
    assert_same_bits(
        jax.tree.leaves(variables(trainer)), jax.tree.leaves(variables(whole))
    )


def test_peft_trainer_skips_a_bad_batch_and_counts_it(page, tmp_path):
    batch, good = page["batch"], page["batches"]
    batches = [inputs(bad(batch)) if i == 5 else x for i, x in enumerate(good[:20])]
    trainer = page["train"](str(tmp_path), 20, batches)
    state = ls.get_loss_scale_state(trainer.optimizer)
    assert (float(state.loss_scale), int(state.skipped_steps)) == (2.0**14, 1)
    assert trainer.train_steps == 20
    # Pairs of micro-batches that were applied.
    assert int(optax.tree.get(variables(trainer), "gradient_step")[...]) == 9


def test_a_step_that_is_replaced_scales_as_one_that_is_overridden(page):
    def tiny_loss(model, x, y):
        return 2.0**-20 * page["nnx_loss"](model, x, y)

    def run(replaced):
        kind = stand_ins.PeftTrainer if replaced else page["Float16Trainer"]
        tx = ls.with_loss_scaling(optax.adamw(3e-2))
        config = stand_ins.TrainingConfig(eval_every_n_steps=100, max_steps=10)
        trainer = kind(page["net"](), tx, config)
        trainer.with_loss_fn(tiny_loss)
        if replaced:
            page["at_loss_scale"](trainer)
        trainer.train(page["batches"])
        return jax.tree.leaves(variables(trainer))

    if issubclass(page["Float16Trainer"], stand_ins.PeftTrainer):
        assert_same_bits(run(replaced=True), run(replaced=False))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_trainers_own_accumulation_is_refused(page, steps):
    tx = ls.with_loss_scaling(optax.adamw(3e-2))
    trainer = page["Float16Trainer"](
        page["net"](),
        tx,
        page["TrainingConfig"](
            eval_every_n_steps=100, max_steps=3, gradient_accumulation_steps=steps
        ),
    )
    trainer.with_loss_fn(page["nnx_loss"])
    with pytest.raises(ValueError, match="turn off the trainer's accumulation"):
        trainer.train(page["batches"])


def levanter(page, tx, batches):
    if not issubclass(page["Float16Levanter"], stand_ins.Trainer):
        pytest.skip("Levanter itself is installed, and has other arguments")

    def loss_fn(half, x, y):
        logits = x.astype(jnp.float16) @ half["w"] + half["b"]
        losses = optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), y)
        return 2.0**-20 * losses.mean()

    trainer = page["Float16Levanter"](tx, loss_fn, microbatches=4)
    state = trainer.initial_state({"w": jnp.zeros((8, 1)), "b": jnp.zeros(1)})
    for batch in batches:
        state, _ = trainer.train_step(state, batch)
    return state


def test_levanter_trains_at_the_scale_in_its_scan_over_microbatches(page):
    tx = ls.with_loss_scaling(optax.adam(3e-2))
    state = levanter(page, tx, [page["batch"]] * 50)
    loss = page["loss_fn"](state.model, page["batch"])
    # Without the scale all its gradients are zero.
    assert (
        loss
        < 0.45
        < page["loss_fn"](jax.tree.map(jnp.zeros_like, state.model), page["batch"])
    )


@pytest.mark.parametrize("inside", [True, False])
def test_skip_bad_steps_belongs_inside(page, inside):
    """Outside, the rule does not hear of the overflow, and later steps are skipped."""
    sgd = optax.sgd(0.1)
    skipping = stand_ins.skip_bad_steps
    if inside:
        tx = ls.with_loss_scaling(skipping(sgd))
    else:
        tx = skipping(ls.with_loss_scaling(sgd))

    @jax.jit
    def step(grad, state):
        return tx.update(grad, state, grad, loss=jnp.float32(1.0))

    state, applied = tx.init(jnp.ones(2)), []
    for i in range(30):
        grad = jnp.array([1.0, jnp.inf if i == 10 else 100.0 if i == 12 else 1.0])
        updates, state = step(grad, state)
        applied.append(bool(jnp.any(updates != 0)))
    scale_state = ls.get_loss_scale_state(state)
    assert not applied[10] and not applied[12]
    assert applied[11] == inside and applied[-1]
    assert int(scale_state.skipped_steps) == inside


def test_a_closed_fit_trains_at_a_fixed_scale_and_skips(page):
    assert page["loss_fn"](page["fitted"], page["batch"]) < 0.3
    start = {"w": jnp.zeros((8, 1)), "b": jnp.zeros(1)}
    tiny = ls.scale_backward(lambda *args: 2.0**-22 * page["loss_fn"](*args), 2.0**22)
    batches = [page["batch"]] * 3 + [bad(page["batch"])]
    fitted, state = page["fit"](start, page["fit_tx"], tiny, batches)
    assert np.all(fitted["w"] != 0)
    assert int(ls.get_loss_scale_state(state).skipped_steps) == 1


@pytest.mark.parametrize("axis_name", [None, "batch"])
def test_pmap_keeps_synchronized_statistics_through_a_bad_batch(page, axis_name):
    def after(batches):
        tx = ls.with_loss_scaling(optax.adam(1e-2), axis_name=axis_name)
        net = page["Norm"]()
        variables = net.init(jax.random.key(0), batches[0][0])
        state = TrainState.create(apply_fn=net.apply, tx=tx, params=variables["params"])
        run = jax_utils.replicate((state, variables["batch_stats"]))
        for batch in batches:
            shards = jax.tree.map(lambda a: a.reshape(8, -1, *a.shape[1:]), batch)
            *run, _ = page["pmap_step"](*run, *shards)
        return run

    good = page["batch"]
    (ours, stats), (undisturbed, undisturbed_stats) = (
        after(batches) for batches in ([good, bad(good), good], [good, good])
    )
    assert not np.array_equal(stats["BatchNorm_0"]["mean"], np.zeros((8, 32)))
    assert_same_bits((ours.params, stats), (undisturbed.params, undisturbed_stats))
    assert np.all(ls.get_loss_scale_state(ours).loss_scale == 2.0**14)
