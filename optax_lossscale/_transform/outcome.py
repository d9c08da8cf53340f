"""Is what the optimizer makes of finite gradients finite, too?"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._finite import is_nonfinite, none_is_true
from .._tree import dtype_of, is_inexact, same_structure, wide_dtype


def outcome_finite(
    new_updates: optax.Updates,
    new_state: optax.OptState,
    old_state: optax.OptState,
    params: optax.Params | None,
) -> jax.Array:
    """Return whether a step would put no NaN or infinity where none was before.

    It looks at the updates, at the state, and at the parameters that
    ``optax.apply_updates`` returns: float16 overflows where float32 updates do not.
    What an optimizer starts from, as a line search does from a loss of infinity, may
    stay as it is.
    """
    trees = new_updates, new_state, old_state, params
    # Functions and strings, as in the modules of Equinox, cannot be compiled.
    return _outcome_finite(*jax.tree.map(lambda x: x if is_inexact(x) else 0, trees))


@jax.jit
def _outcome_finite(
    new_updates: Any, new_state: Any, old_state: Any, params: Any
) -> jax.Array:
    applied = same_structure(new_updates, params)
    pairs = (new_updates, params if applied else new_updates)
    flags = (
        jax.tree.map(_bad_update, *pairs),
        jax.tree.map(_bad_change, new_state, old_state),
    )
    return none_is_true(_joined(*flags))


def _bad_change(new: Any, old: Any) -> Any:
    """Return where a leaf has become something that is not finite."""
    if not is_inexact(new):
        return None
    if jnp.iscomplexobj(new):
        return _bad_change(new.real, old.real) | _bad_change(new.imag, old.imag)
    # Of bits, since a NaN is not equal to itself.
    integer = np.dtype(f"uint{jnp.finfo(new.dtype).bits}")
    new_bits, old_bits = (
        jax.lax.bitcast_convert_type(x, integer) for x in (new, jnp.asarray(old))
    )
    return is_nonfinite(new) & (new_bits != old_bits)


def _bad_update(update: Any, param: Any) -> Any:
    """Return where an update, or the parameter that it makes, is not finite."""
    if not is_inexact(update):
        return None
    if jnp.iscomplexobj(update):
        param = param if is_inexact(param) else jnp.zeros_like(update)
        parts = (_bad_update(x(update), x(param)) for x in (jnp.real, jnp.imag))
        return functools.reduce(jnp.logical_or, parts)
    bad = is_nonfinite(jnp.asarray(update))
    if param is update or not is_inexact(param):
        return bad
    dtypes = (jnp.dtype(wide_dtype(dtype_of(x))) for x in (update, param))
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    new = jnp.asarray(param, wide) + jnp.asarray(update, wide)
    return bad | _bad_change(new.astype(dtype_of(param)), param)


def _joined(updates: Any, state: Any) -> list[jax.Array]:
    """Join the flags of each parameter: those of its update and of its moments.

    The update is made of the moments, which are then computed and read only once.
    """
    structure: Any = jax.tree.structure(updates)

    def is_like_params(tree: Any) -> bool:
        return bool(structure == jax.tree.structure(tree))

    joined, rest = jax.tree.leaves(updates), []
    for tree in jax.tree.leaves(state, is_leaf=is_like_params):
        flags = jax.tree.leaves(tree)
        if not is_like_params(tree):
            rest += flags
            continue
        for i, flag in enumerate(flags):
            if jax.typeof(flag) == jax.typeof(joined[i]):
                joined[i] |= flag
            else:
                rest.append(flag)
    return joined + rest
