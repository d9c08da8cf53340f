"""What several test files share."""

from typing import Any

import jax
import numpy as np


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Assert equal structures, shapes, dtypes and bytes; NaN equals itself."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        a, e = _as_numpy(a), _as_numpy(e)
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (e.shape, e.dtype), where
        assert a.tobytes() == e.tobytes(), f"{where}: {a} is not {e}"


def assert_same_types(actual: Any, expected: Any) -> None:
    """Assert equal structures, shapes, dtypes and weak types."""

    def types(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.typeof(x).str_short(), tree), jax.tree.map(
            lambda x: bool(getattr(x, "weak_type", False)), tree
        )

    assert types(actual) == types(expected)


def _as_numpy(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
