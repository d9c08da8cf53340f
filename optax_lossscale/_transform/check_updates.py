"""Check that the results of the optimizer are finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._axes import AxisName, all_along
from .._dtypes import Leaf, dtype_of, is_inexact, wide_dtype
from .._finite import is_nonfinite, none_is_true
from .._tree import at_paths_of


def results_finite(
    new_updates: optax.Updates,
    new_state: optax.OptState,
    old_state: optax.OptState,
    params: optax.Params | None,
    axis_name: AxisName | None,
) -> jax.Array:
    """Return whether a step puts no new NaN or inf into its results, on all devices.

    It checks the updates, the state, and the parameters that ``optax.apply_updates``
    returns: float16 parameters can overflow when the updates are finite. A NaN or inf
    that a step does not change may stay: a line search starts from an infinite loss.
    """
    params = at_paths_of(new_updates, params)
    trees = new_updates, new_state, old_state, params
    # ``jax.jit`` takes no functions or strings, which Equinox modules contain.
    arrays = jax.tree.map(lambda x: x if is_inexact(x) else 0, trees)
    return all_along(_outcome_finite(*arrays), axis_name)


@jax.jit
def _outcome_finite(
    new_updates: Any, new_state: Any, old_state: Any, params: Any
) -> jax.Array:
    bad_updates = jax.tree.map(_bad_update, new_updates, params)
    bad_state = jax.tree.map(_bad_change, new_state, old_state)
    return none_is_true(_join(bad_updates, bad_state))


def _bad_change(new: Leaf, old: Leaf) -> Any:
    """Return where a leaf changed to a non-finite value."""
    if not is_inexact(new):
        return None
    if jnp.iscomplexobj(new):
        return _bad_change(new.real, old.real) | _bad_change(new.imag, old.imag)
    # Compare bits: a NaN is not equal to itself.
    integer = np.dtype(f"uint{jnp.finfo(new.dtype).bits}")
    new_bits, old_bits = (
        jax.lax.bitcast_convert_type(x, integer) for x in (new, jnp.asarray(old))
    )
    return is_nonfinite(new) & (new_bits != old_bits)


def _bad_update(update: Leaf, param: Leaf) -> Any:
    """Return where an update, or the updated parameter, is not finite."""
    if not is_inexact(update):
        return None
    if jnp.iscomplexobj(update):
        param = param if is_inexact(param) else jnp.zeros_like(update)
        real = _bad_update(jnp.real(update), jnp.real(param))
        return real | _bad_update(jnp.imag(update), jnp.imag(param))
    bad = is_nonfinite(jnp.asarray(update))
    if not is_inexact(param):
        return bad
    dtypes = (jnp.dtype(wide_dtype(dtype_of(x))) for x in (update, param))
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    new = jnp.asarray(param, wide) + jnp.asarray(update, wide)
    return bad | _bad_change(new.astype(dtype_of(param)), param)


def _join(updates: optax.Updates, state: optax.OptState) -> list[jax.Array]:
    """Combine the flags of each parameter: of its update and of its moments.

    The update depends on the moments, which are then computed and read only once.
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
