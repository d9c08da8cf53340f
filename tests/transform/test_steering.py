"""Which variables of a jaxpr steer it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax_lossscale._transform.steering import may_be_repeated, steering


def loop(x):
    return jax.lax.while_loop(lambda y: y < 9.0, lambda y: y + x, 0.0)


def called(x):
    return jax.pure_callback(np.abs, jax.ShapeDtypeStruct((), x.dtype), x)


# What steers, of x and y.
PROGRAMS = {
    "arithmetic": ("", lambda x, y: x + y),
    "loop": ("y", lambda x, y: x * loop(y)),
    "limit of a loop": (
        "x",
        lambda x, y: y * jax.lax.while_loop(lambda z: z < x, lambda z: z + 1, 0.0),
    ),
    "nested loop": ("y", lambda x, y: x * jax.jit(loop)(y)),
    "repetition": (
        "",
        lambda x, y: jax.lax.scan(lambda c, _: (c * x + y, None), x, length=3)[0],
    ),
    "repeated loop": (
        "y",
        lambda x, y: x * jax.lax.scan(lambda c, _: (loop(c), None), y, length=3)[0],
    ),
    "branch": ("x", lambda x, y: jax.lax.cond(x > 0, lambda: y, lambda: 2 * y)),
    "loop in a branch": (
        "xy",
        lambda x, y: jax.lax.cond(x > 0, lambda: loop(y), lambda: 2 * y),
    ),
    "callback": ("x", lambda x, y: called(x) * y),
    "debugging callback": ("x", lambda x, y: (jax.debug.print("{}", x), y)),
    "iterative algorithm": (
        "x",
        lambda x, y: jnp.linalg.eigvalsh(x * jnp.ones((2, 2))) * y,
    ),
    "on the way": ("x", lambda x, y: jnp.sin(jax.jit(loop)(x + 1)) * y),
    "vector": ("", lambda x, y: jnp.linalg.norm(x * jnp.arange(3.0)) > y),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_steers_is_found(name):
    expected, program = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(program)(1.0, 2.0).jaxpr
    found = steering(jaxpr)
    named = zip("xy", jaxpr.invars, strict=True)
    assert "".join(letter for letter, var in named if var in found) == expected


# What a mask may be computed of anew, and what not.
CHEAP = {
    "arithmetic": lambda x: 2 * x + 1,
    "selection": lambda x: jnp.where(x > 0, x, 0),
    "broadcast": lambda x: jnp.broadcast_to(x, (2, *x.shape)),
    "nested": jax.jit(lambda x: jnp.sqrt(x) / 3),
    "softplus": jax.nn.softplus,
}
COSTLY = {
    "sum": jnp.sum,
    "product of matrices": lambda x: x @ x,
    "nested": jax.jit(lambda x: jnp.sin(x) @ x),
    "loop": lambda x: jax.jit(loop)(x[0, 0]) + jnp.ones((3, 3)),
    "callback": lambda x: called(x[0, 0]) * jnp.ones((3, 3)),
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x),
    "sort": lambda x: jnp.sort(x),
}


def test_what_may_be_repeated():
    def all_may(program):
        jaxpr = jax.make_jaxpr(program)(jnp.ones((3, 3))).jaxpr
        return all(map(may_be_repeated, jaxpr.eqns))

    assert {name for name, f in CHEAP.items() if all_may(f)} == CHEAP.keys()
    assert not {name for name, f in COSTLY.items() if all_may(f)}
