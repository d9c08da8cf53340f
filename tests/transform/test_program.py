"""What the compiled step may not cost on a CPU: copies, memory, transfers, length."""

import functools
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


NEVER_SKIPS = ls.FixedLossScale(8.0, skip_nonfinite=False)
WRAPPERS = {
    "plain": lambda tx: tx,
    "dynamic": ls.with_loss_scaling,
    "headroom": lambda tx: ls.with_loss_scaling(tx, ls.HeadroomLossScale()),
    "checked": lambda tx: ls.with_loss_scaling(tx, check_updates=True),
    "never skips": lambda tx: ls.with_loss_scaling(tx, NEVER_SKIPS),
}


@functools.cache
def compiled(name, wrapper, leaves=4, scanned=False):
    """A step of a wrapped optimizer, or three in a scan."""
    tx = WRAPPERS[wrapper](make(name))
    params = {f"p{i}": np.full(SHAPE, 0.5, np.float32) for i in range(leaves)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def loss_fn(params, x):
        return sum(jnp.sum((x @ p) ** 2) for p in params.values())

    def epoch(params, state, batches):
        def body(carry, x):
            return step(*carry, jax.grad(loss_fn)(carry[0], x)), None

        return jax.lax.scan(body, (params, state), batches)[0]

    batch = np.ones((3, 2, SHAPE[0]), np.float32) if scanned else params
    function = jax.jit(epoch if scanned else step, donate_argnums=(0, 1))
    return function.lower(params, jax.eval_shape(tx.init, params), batch).compile()


def temporary(*args):
    """Temporary memory, in arrays like one of four parameters."""
    return compiled(*args).memory_analysis().temp_size_in_bytes / BYTES


@reductions_are_fused
@pytest.mark.parametrize("scanned", slow_but((False,), (False, True)))
@guarded
@pytest.mark.parametrize("wrapper", ["dynamic", "headroom"])
def test_step_takes_no_memory_beyond_the_plain_one(name, scanned, wrapper):
    if scanned and name == "optax.lion":
        # Plain, it frees one gradient before it copies the next moment. The check needs
        # all gradients first.
        pytest.skip("needs memory for all gradients at once")
    plain = temporary(name, "plain", 4, scanned)
    assert temporary(name, wrapper, 4, scanned) <= plain + 0.04


@reductions_are_fused
def test_check_of_updates_holds_no_second_copy_of_the_moments():
    assert temporary("optax.adamw", "checked") < 1.2  # 2 if they waited for the check


def test_checked_step_computes_a_global_norm_once():
    """Its second run takes over the scalars of the first."""
    tx = WRAPPERS["checked"](make("clip + adamw"))
    update = jax.make_jaxpr(lambda g: tx.update(g, tx.init(g), g))
    assert len(re.findall(r"f32\[\] = sqrt", str(update(PARAMS["w"])))) == 1


SCOPES = ["check", "rule", "unscale", "update"]


def test_profile_names_the_parts_of_a_step():
    lowered = STEP.lower(PARAMS, jax.eval_shape(ADAM.init, PARAMS), X)
    names = re.findall(r'op_name="([^"]*)"', lowered.compile().as_text())
    found = {x for name in names for x in re.findall(r"optax_lossscale_(\w+)", name)}
    assert sorted(found) == SCOPES


@guarded
def test_program_grows_linearly_with_the_leaves(name):
    """Every mask reads one flag, and does not combine those of all leaves again."""
    programs = (compiled(name, "dynamic", n).as_text() for n in (4, 16))
    small, large = (text.count(" = ") for text in programs)
    assert large < 3.2 * small


@guarded
def test_compiled_step_calls_no_host(name):
    text = compiled(name, "dynamic").as_text()
    assert not re.search(r"\b(infeed|outfeed|send|recv)\b|callback|S\(5\)", text)


def test_rule_that_never_skips_costs_no_check_and_no_mask():
    programs = (compiled("optax.adamw", x) for x in ("plain", "never skips"))
    plain, wrapped = (x.cost_analysis()["bytes accessed"] for x in programs)
    assert wrapped < plain + BYTES


PARAMS = {"w": np.float32([[0.5, -1.0], [2.0, 0.25]]), "b": np.zeros(2, np.float32)}
X, ADAM = jax.device_put(normal(8, 2)), ls.with_loss_scaling(optax.adam(1e-2))
STEP = jax.jit(make_step(ADAM, float16_loss))


def test_parameters_and_state_are_donated_together():
    """Prodigy keeps copies of the first parameters in its state."""
    tx = ls.with_loss_scaling(ls.with_master_weights(optax.contrib.prodigy(1.0)))
    params = jax.device_put(jax.tree.map(np.float16, PARAMS))
    state = tx.init(params)
    step = jax.jit(make_step(tx, float16_loss), donate_argnums=(0, 1))
    _, new_state = step(params, state, X)
    used = jax.tree.leaves((params, state.inner_state))
    assert all(x.is_deleted() for x in used) and ls.was_applied(new_state)


CALLS = {
    "steps": lambda params, state: train(STEP, params, state, [X] * 3),
    "all_finite": lambda params, state: ls.all_finite(state),
    "max_magnitude": lambda params, state: ls.max_magnitude(state),
    "get_loss_scale": lambda params, state: ls.get_loss_scale(state),
    "was_applied": lambda params, state: ls.was_applied(state),
    "keep_if_applied": lambda _, state: ls.keep_if_applied(state, new=[X], old=[-X]),
    "autocast": lambda params, state: ls.autocast(lambda x: jnp.mean(2 * x), "float16")(
        X
    ),
}


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("call", CALLS)
def test_steps_and_readers_transfer_nothing(call):
    arguments = jax.device_put(PARAMS), jax.jit(ADAM.init)(PARAMS)
    with jax.transfer_guard("disallow"):
        CALLS[call](*arguments)
