"""What the compiled step may not cost on a CPU: copies, memory, transfers, length."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import make
from shared import slow_but
from training import float16_loss, make_step, normal, train

import optax_lossscale as ls

GUARDED = ("optax.sgd", "momentum", "optax.adamw", "clip + adamw", "optax.lion")
SHAPE = (64, 128)
BYTES = 4 * np.prod(SHAPE)
guarded = pytest.mark.parametrize("name", slow_but(("optax.adamw",), GUARDED))
# Earlier versions of XLA CPU have no library for reductions, which keeps them from
# writing their operands out.
reductions_are_fused = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="needs a newer XLA"
)


def compiled(tx, leaves, scanned=False):
    params = {f"p{i}": jnp.full(SHAPE, 0.5) for i in range(leaves)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def loss_fn(params, x):
        return sum(jnp.sum((x @ p) ** 2) for p in params.values())

    def epoch(params, state, batches):
        def body(carry, x):
            return step(*carry, jax.grad(loss_fn)(carry[0], x)), None

        return jax.lax.scan(body, (params, state), batches)[0]

    batch = jnp.ones((3, 2, SHAPE[0])) if scanned else params
    function = jax.jit(epoch if scanned else step, donate_argnums=(0, 1))
    return function.lower(params, tx.init(params), batch).compile()


def temporary(*args):
    return compiled(*args).memory_analysis().temp_size_in_bytes / BYTES


@reductions_are_fused
@pytest.mark.parametrize("scanned", slow_but((False,), (False, True)))
@guarded
@pytest.mark.parametrize("rule", [ls.DynamicLossScale(), ls.HeadroomLossScale()])
def test_step_takes_no_memory_beyond_the_plain_one(name, scanned, rule):
    if scanned and name == "optax.lion":
        # Plain, it frees one gradient before it copies the next moment. Whoever checks
        # has to have all gradients first.
        pytest.skip("needs memory for all gradients at once")
    plain, masked = make(name), ls.with_loss_scaling(make(name), rule)
    more = temporary(masked, 16, scanned) - temporary(plain, 16, scanned)
    assert more <= 0.01 * 16


@reductions_are_fused
def test_checked_updates_keep_no_state_waiting():
    checked = ls.with_loss_scaling(make("optax.adamw"), check_updates=True)
    assert temporary(checked, 16) < 0.3 * 16  # of arrays like a parameter; else 0.5


@guarded
def test_program_grows_linearly_with_the_leaves(name):
    """Every mask reads one flag, and does not combine those of all leaves again."""
    tx = ls.with_loss_scaling(make(name))
    small, large = (compiled(tx, n).as_text().count(" = ") for n in (8, 32))
    assert large < 4.2 * small


@guarded
def test_step_never_leaves_the_device(name):
    text = compiled(ls.with_loss_scaling(make(name)), 4).as_text()
    assert not re.search(r"\b(infeed|outfeed|send|recv|callback)\b|S\(5\)", text)


def test_rule_that_never_skips_costs_no_check_and_no_mask():
    tx = make("optax.adamw")
    unchecked = ls.with_loss_scaling(tx, ls.FixedLossScale(8.0, skip_nonfinite=False))
    plain, masked = (compiled(t, 4).cost_analysis() for t in (tx, unchecked))
    assert masked["bytes accessed"] < plain["bytes accessed"] + BYTES


PARAMS = {"w": np.float32([[0.5, -1.0], [2.0, 0.25]]), "b": np.zeros(2, np.float32)}
X, ADAM = jax.device_put(normal(8, 2)), ls.with_loss_scaling(optax.adam(1e-2))
STEP = make_step(ADAM, float16_loss)


@jax.jit
def start():
    return jax.tree.map(jnp.asarray, PARAMS), ADAM.init(PARAMS)


# It keeps the first parameters in its state.
PRODIGY = ls.with_master_weights(optax.contrib.prodigy(1.0))


@pytest.mark.parametrize("inner", [optax.adam(1e-2), PRODIGY], ids=["adam", "prodigy"])
def test_step_uses_a_donated_state(inner):
    tx, dtype = (
        ls.with_loss_scaling(inner),
        "float16" if inner is PRODIGY else "float32",
    )
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)
    state = tx.init(params)
    step = jax.jit(make_step(tx, float16_loss), donate_argnums=(0, 1))
    _, new_state = step(params, state, X)
    used = jax.tree.leaves((params, state.inner_state))
    assert all(x.is_deleted() for x in used) and ls.was_applied(new_state)


@pytest.mark.parametrize(
    "call",
    [
        lambda params, state: train(jax.jit(STEP), params, state, [X] * 3),
        lambda params, state: ls.all_finite(state),
        lambda params, state: ls.max_magnitude(state),
        lambda params, state: ls.get_loss_scale(state),
        lambda params, state: ls.was_applied(state),
        lambda params, state: ls.check_loss_scale(state, grads=[X]),
        lambda params, state: ls.keep_if_applied(state, {"mean": X}, {"mean": -X}),
        lambda *_: ls.autocast(lambda x: jnp.mean(2 * x))(X),
    ],
)
def test_steps_and_questions_transfer_nothing(call):
    arguments = start()
    with jax.transfer_guard("disallow"):
        call(*arguments)
