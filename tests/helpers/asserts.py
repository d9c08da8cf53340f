"""Assertions on trees, to the last bit and type: chex ignores -0.0 and weak types."""

import contextlib
import re

import jax
import numpy as np

import optax_lossscale as ls


def kept(run):
    """Copies of what a skipped step keeps: all but the scale, and Flax's ``step``."""
    leaves = jax.tree_util.tree_leaves_with_path(
        run, is_leaf=lambda x: isinstance(x, ls.LossScaleState)
    )
    arrays = [(jax.tree_util.keystr(k), x) for k, x in leaves if hasattr(x, "dtype")]
    chosen = [x for name, x in arrays if not re.search(r"\Wstep\b", name)]
    return [np.array(x) for x in without_keys(chosen)]


def state_in(run):
    """The only state of `with_loss_scaling` in a run, which is a tree of any kind."""
    if hasattr(run, "opt_state"):
        return run
    kind = ls.WithLossScalingState
    leaves = jax.tree.leaves(run, is_leaf=lambda x: isinstance(x, kind))
    [state] = [x for x in leaves if isinstance(x, kind)]
    return state


def assert_same_bits(actual, expected):
    """Assert equal structures, shapes, dtypes and bytes; NaN equals itself."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(without_keys(actual)),
        jax.tree.leaves(without_keys(expected)),
        strict=True,
    ):
        a, e = np.asarray(a), np.asarray(e)
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (e.shape, e.dtype), where
        assert a.tobytes() == e.tobytes(), f"{where}: {a} is not {e}"


def assert_no_update(updates):
    """Assert that every update is -0.0, which added to 0.0 or -0.0 changes neither."""
    zeros = jax.tree.map(lambda x: -np.zeros_like(x), updates)
    assert_same_bits(updates, zeros)


def assert_same_types(actual, expected):
    """Assert equal structures, shapes, dtypes and weak types."""

    def types(tree):
        leaves, structure = jax.tree.flatten(tree)
        of_leaves = [(x.shape, x.dtype, getattr(x, "weak_type", None)) for x in leaves]
        return of_leaves, structure

    assert types(actual) == types(expected)


def without_keys(tree):
    """Replace typed PRNG keys by their data."""

    def leaf(x):
        dtype = getattr(x, "dtype", np.dtype(object))
        is_key = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(leaf, tree)


@contextlib.contextmanager
def noted(*notes):
    """Say, where an error is shown, in what it happened: pytest prints its notes."""
    try:
        yield
    except Exception as error:
        error.add_note(", ".join(map(str, notes)))
        raise


def assert_close_in_float16(x, y):
    """Up to a rounding of the largest number."""
    np.testing.assert_allclose(x, y, atol=2.0**-10 * np.max(np.abs(y), initial=0))
