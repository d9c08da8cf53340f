"""What cannot be cast or measured is refused, and the words name a way out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import new_ref

import optax_lossscale as ls

X = np.ones((8, 8), np.float32)
CALLS = new_ref(np.float32(0))


def counts(x):
    CALLS[...] += 1.0
    return jnp.sum(x)


def changed(change):
    """Cast a function that changes its argument."""

    def fun(tree, x):
        change(tree)
        return jnp.sum(x)

    ls.autocast(fun)({"w": jnp.asarray(X), "list": [X]}, x=X)


def traced(call):
    """Call it with what is being traced."""
    jax.eval_shape(call, X)


report = ls.autocast_report
CONTEXT = "must be a function, got None.* It is not a context .*functools.partial"
TYPE_ERRORS = [
    ("`fun` must be a function, got 1", lambda: ls.autocast(1)),
    (CONTEXT, lambda: ls.autocast()),
    (CONTEXT, lambda: ls.autocast(dtype=jnp.bfloat16)),
    ("must be free of effects .*`jax.Ref`", lambda: ls.autocast(counts)(X)),
    ("`fun` must be a function, .*`autocast_report", lambda: report(X)),
]
NO_TYPE = "`dtype` must be a floating-point type"
CHANGE = r"must not change its arguments.*kwargs\)\[0\]\[0\]\['{}'\].*Return new".format
VALUE_ERRORS = [
    ("be float16 or bfloat16, got float32", lambda: ls.autocast(jnp.sum, jnp.float32)),
    ("float8 needs a scale for each", lambda: ls.autocast(jnp.sum, "float8_e4m3fn")),
    (NO_TYPE, lambda: ls.autocast(jnp.sum, jnp.int8)),
    (NO_TYPE, lambda: ls.autocast(jnp.sum, None)),
    ('such as "bfloat16", got .bf16', lambda: ls.autocast(jnp.sum, "bf16")),
    (CHANGE("w"), lambda: changed(lambda tree: tree.update(w=2 * tree["w"]))),
    (CHANGE("new"), lambda: changed(lambda tree: tree.update(new=tree["w"]))),
    (CHANGE("w"), lambda: changed(lambda tree: tree.pop("w"))),
    (CHANGE("list"), lambda: changed(lambda tree: tree["list"].append(tree["w"]))),
    ("`args` must hold concrete", lambda: traced(lambda x: report(jnp.sum, x))),
    ("`fun` must hold concrete", lambda: traced(lambda x: report(lambda: x @ x))),
]
REFUSED = [(TypeError, *row) for row in TYPE_ERRORS]
REFUSED += [(ValueError, *row) for row in VALUE_ERRORS]


@pytest.mark.parametrize(("error", "words", "call"), REFUSED)
def test_autocast_or_report_is_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()
    assert CALLS[...] == 0
