"""What the compiled step may not cost on a CPU: copies, memory, transfers, length."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import make

import optax_lossscale as ls

GUARDED = ("optax.sgd", "momentum", "optax.adamw", "clip + adamw", "optax.lion")
SHAPE = (64, 128)
guarded = pytest.mark.parametrize(
    "name",
    [
        n if n == "optax.adamw" else pytest.param(n, marks=pytest.mark.slow)
        for n in GUARDED
    ],
)


def compiled(tx, leaves, scanned=False, swapped=False):
    params = {f"p{i}": jnp.full(SHAPE, 0.5) for i in range(leaves)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (state, params) if swapped else (params, state)

    def epoch(params, state, batches):
        def body(carry, x):
            def loss(params):
                return sum(jnp.sum((x @ p) ** 2) for p in params.values())

            return step(*carry, jax.grad(loss)(carry[0])), None

        return jax.lax.scan(body, (params, state), batches)[0]

    batch = jnp.ones((3, 2, SHAPE[0])) if scanned else params
    function = jax.jit(epoch if scanned else step, donate_argnums=(0, 1))
    return function.lower(params, tx.init(params), batch).compile()


def full_size_copies(program):
    return len(re.findall(r"= f32\[64,128\]\S* copy\(", program.as_text()))


# Earlier versions of XLA CPU have no library for reductions, which keeps them from
# writing their operands out.
reductions_are_fused = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="needs a newer XLA"
)


# A scanned plain lion frees one gradient before it copies the next moment; whoever
# checks has to have all gradients first.
CASES = [
    pytest.param(n, s, marks=() if "adamw" in n and not s else pytest.mark.slow)
    for n in GUARDED
    for s in (False, True)
    if (n, s) != ("optax.lion", True)
]


@reductions_are_fused
@pytest.mark.parametrize("name, scanned", CASES)
def test_no_memory_beyond_the_plain_step(name, scanned):
    leaves = 16
    plain = compiled(make(name), leaves, scanned)
    masked = compiled(ls.with_loss_scaling(make(name)), leaves, scanned)
    extra = (
        masked.memory_analysis().temp_size_in_bytes
        - plain.memory_analysis().temp_size_in_bytes
    )
    assert extra <= 0.01 * leaves * 4 * np.prod(SHAPE)
    assert full_size_copies(masked) <= full_size_copies(plain)


@reductions_are_fused
def test_the_plain_layout_would_fail_the_guards(plain_layout):
    """So they do measure what they are for."""
    masked = plain_layout(compiled, ls.with_loss_scaling(make("optax.adamw")), 16)
    parameters = 16 * 4 * np.prod(SHAPE)
    assert masked.memory_analysis().temp_size_in_bytes > 0.5 * parameters


@pytest.mark.slow
@guarded
def test_the_program_grows_linearly_with_the_leaves(name):
    tx = ls.with_loss_scaling(make(name))
    small, large = (len(compiled(tx, n).as_text()) for n in (32, 128))
    assert large < 4.4 * small


@guarded
def test_a_step_never_leaves_the_device(name):
    text = compiled(ls.with_loss_scaling(make(name)), 4).as_text()
    assert not re.search(r"\b(infeed|outfeed|send|recv|callback)\b|S\(5\)", text)


@pytest.mark.parametrize("wrap", [ls.with_loss_scaling, lambda tx: tx])
def test_donating_in_another_order_costs_copies_with_and_without_scaling(wrap):
    tx = wrap(make("optax.adamw"))
    assert full_size_copies(compiled(tx, 4)) == 0
    assert full_size_copies(compiled(tx, 4, swapped=True)) >= 3 * 4


def test_no_check_and_no_mask_where_nothing_is_skipped():
    tx = make("optax.adamw")
    unchecked = ls.with_loss_scaling(tx, ls.FixedLossScale(8.0, skip_nonfinite=False))
    plain, masked = (
        compiled(t, 4).as_text().count("f32[64,128]") for t in (tx, unchecked)
    )
    assert masked == plain
