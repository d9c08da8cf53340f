"""Leaves whose new value replaces their gradient, such as Flax's float8 scales."""

from typing import Any

import jax
import jax.numpy as jnp


def is_overwritten(path: Any) -> bool:
    """Return whether the new value of a leaf takes the place of its gradient.

    Flax puts the scales and histories of its float8 operations below this key:
    https://github.com/google/flax/pull/3435
    """
    return "['_overwrite_with_gradient']" in jax.tree_util.keystr(path)


def with_finite_overwrites(tree: Any) -> Any:
    """Return the tree, with leaves that are overwritten only by finite values.

    If the new value is not finite, the leaf keeps its old value. A skipped step does
    not protect these leaves.
    """
    if not any(is_overwritten(path) for path, _ in jax.tree.leaves_with_path(tree)):
        return tree  # NNX objects would be copied
    return jax.tree_util.tree_map_with_path(
        lambda path, x: finite_overwrite(x) if is_overwritten(path) else x, tree
    )


@jax.custom_vjp
def finite_overwrite(x: Any) -> Any:
    return x


finite_overwrite.defvjp(
    lambda x: (x, x), lambda x, new: (jnp.where(jnp.isfinite(new), new, x),)
)
