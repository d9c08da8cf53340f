"""What the forward pass decided on floats is not decided again in the backward pass.

Computed again, a number may round otherwise. Then the largest element of a row is no
longer equal to the maximum that was kept. At level 0, XLA rounds alike everywhere, so
these programs are optimized.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float32_losses import by_hand
from jax import lax, nn
from shared import slow_but
from training import normal

import optax_lossscale as ls

LAYERS, ROWS, WIDTH = 3, 16, 64
still = lax.stop_gradient
# Undo what `conftest.py` sets, and round where the program says so.
OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_allow_excess_precision": False,
}

# What is compared: a mix of a product and what is carried, rounded by XLA's choice.
MIXES = {
    "residual": lambda y, h: y + h,
    "weighted": lambda y, h: 1.1 * y + 0.3 * h,
    "leaky": lambda y, h: 0.9 * h + 0.1 * jnp.tanh(y),
    "gated": lambda y, h: nn.sigmoid(h) * y + h,
    "norm": lambda y, h: y * lax.rsqrt(jnp.mean(y**2, 1, keepdims=True) + 1e-6) + h,
}
# What it is compared with: an element of each row.
ELEMENTS = {
    "top_k": lambda z: lax.top_k(z, 8)[0][:, -1:],
    "sort": lambda z: jnp.sort(z, 1)[:, 20:21],
    "max": lambda z: jnp.max(z, 1, keepdims=True),
    "min": lambda z: jnp.min(z, 1, keepdims=True),
    "argmax": lambda z: jnp.take_along_axis(z, jnp.argmax(z, 1)[:, None], 1),
    "slice": lambda z: z[:, 3:4],
    "gather": lambda z: z[:, jnp.array([5])],
    "one-hot": lambda z: jnp.sum(z * nn.one_hot(jnp.argmin(z, 1), WIDTH), 1)[:, None],
    "quantile": lambda z: jnp.quantile(z, 0.75, axis=1, keepdims=True, method="lower"),
    "max of a window": lambda z: lax.reduce_window(
        z, -jnp.inf, lax.max, (1, 8), (1, 8), "VALID"
    )[:, :1],
    "argsort": lambda z: jnp.take_along_axis(z, jnp.argsort(z, 1)[:, 9:10], 1),
    "segments": lambda z: jax.ops.segment_max(z.T, jnp.arange(WIDTH) // 32, 2)[:1].T,
}
# How they are compared.
DECISIONS = {
    "ge": lambda z, t: z >= t,
    "gt": lambda z, t: z > t,
    "eq": lambda z, t: z == t,
    "ne": lambda z, t: z != t,
    "lt": lambda z, t: z < t,
    "between": lambda z, t: (z >= t) & (z < t + 1),
    "floor": lambda z, t: jnp.floor(z - t),
    "ceil": lambda z, t: jnp.ceil(z - t),
    "round": lambda z, t: jnp.round(z - t + 0.5),
    "sign": lambda z, t: jnp.sign(z - t),
    "remainder": lambda z, t: jnp.mod(z - t, 1.0),
    "integer": lambda z, t: (z - t + 8).astype(jnp.int32) - 8,
    "bits": lambda z, t: lax.bitcast_convert_type(z - t, jnp.int32) >> 31,
    "rank": lambda z, t: jnp.sum(z[:, :, None] >= z[:, None, :], -1) / WIDTH,
    "root": lambda z, t: jnp.sqrt(jnp.where(z <= t, t - z, 1.0)),
    "small power": lambda z, t: jnp.abs(z - t) ** 0.01,
    "logarithm": lambda z, t: jnp.tanh(jnp.log(jnp.abs(z - t))),
    "angle": lambda z, t: jnp.sin(jnp.arctan2(z - t, -1.0) / 2),
    "arccosine": lambda z, t: jnp.arccos(z / jnp.max(jnp.abs(z), 1, keepdims=True)),
    "bin": lambda z, t: jnp.digitize(z, jnp.sort(z[0])) / WIDTH,
}
# What is done with the result.
USES = {
    "select": lambda z, d: jnp.where(still(d) > 0, z, 0.1 * z),
    "factor": lambda z, d: z * still(d),
    "straight through": lambda z, d: z + still(d - z),
}


TABLES = MIXES, ELEMENTS, DECISIONS, USES


def drawn(decision):
    """A decision among other parts of a body that are drawn."""
    rng = random.Random(decision)
    mix, element, _, use = (rng.choice([*table]) for table in TABLES)
    return mix, element, decision, use


WRONG_WITHOUT_THE_RULE = [
    ("weighted", "top_k", "ge", "select"),
    ("weighted", "gather", "root", "factor"),
    ("weighted", "gather", "floor", "factor"),
]
BODIES = [*WRONG_WITHOUT_THE_RULE, *map(drawn, DECISIONS)]


@pytest.mark.parametrize("dtype", slow_but(["float16"], ["float16", "bfloat16"]))
@pytest.mark.parametrize(
    "names", slow_but(WRONG_WITHOUT_THE_RULE, BODIES), ids=", ".join
)
def test_gradient_of_a_body_that_decides_is_that_of_casts_by_hand(names, dtype):
    mix, element, decision, use = map(dict.get, TABLES, names)
    stack, x = normal(LAYERS, WIDTH, WIDTH, seed=1) / 8, normal(ROWS, WIDTH)

    def loss(product, stack):
        def body(h, w):
            z = mix(product(h, w), h)
            decided = decision(z, element(z)).astype(jnp.float32)
            return jnp.tanh(use(z, decided) + 0.1 * z), None

        return 2.0**14 * jnp.mean(lax.scan(body, x, stack)[0] ** 2)

    by_autocast = ls.autocast(functools.partial(loss, jnp.matmul), dtype)
    cast_by_hand = functools.partial(loss, by_hand(jnp.matmul, dtype))
    ours, theirs = (
        np.asarray(jax.jit(jax.grad(f), compiler_options=OPTIMIZED)(stack))
        for f in (by_autocast, cast_by_hand)
    )
    assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs)
