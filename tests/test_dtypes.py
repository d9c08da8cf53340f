"""Types: their limits, which lose range, and how leaves are cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import enable_x64

from optax_lossscale import _dtypes

FLOAT8 = [
    x
    for x in ("float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz")
    if hasattr(jnp, x)
]
NARROW = ["float16", "bfloat16", *FLOAT8]


def rounded(x, name):
    with np.errstate(over="ignore"):
        return float(np.float64(x).astype(jnp.dtype(name)))


@pytest.mark.parametrize("name", NARROW)
def test_limits_are_where_rounding_changes(name):
    """Just below and just above each limit, as ml_dtypes rounds."""
    limits, info = _dtypes.limits_of(name), jnp.finfo(name)
    above, below = ([x * (1 + sign * 2.0**-13) for x in limits] for sign in (1, -1))
    assert rounded(limits.zero, name) == 0 < rounded(above[0], name)
    assert rounded(below[1], name) < float(info.tiny) == rounded(limits.normal, name)
    assert rounded(below[2], name) == float(info.max)
    assert not np.isfinite(rounded(above[2], name))
    tie = float(np.float32(limits.overflow))
    assert (tie < limits.overflow) == np.isfinite(rounded(tie, name))


@pytest.mark.parametrize("name", [*NARROW, "float32", "complex64", "int32"])
def test_true_gradients_are_float32_where_they_would_lose_range(name):
    x = np.ones(2, jnp.dtype(name))
    loses = name == "float16" or name in FLOAT8
    assert _dtypes.loses_range(x) == loses
    assert not _dtypes.loses_range(None) and not _dtypes.loses_range("text")
    [wide, other] = _dtypes.widen([x, 1])
    assert wide.dtype == (jnp.float32 if loses else x.dtype) and other == 1
    if name != "int32":
        assert _dtypes.wide_dtype(x.dtype) == (
            jnp.float32 if name in NARROW else x.dtype
        )


def test_the_dtype_of_a_leaf_is_the_one_that_jax_gives_it():
    leaves = [1.0, 1, True, 1j, np.float64(1), np.ones(2), np.int64(1), np.float16(1)]
    for x64 in (False, True):
        with enable_x64(x64):
            for x in leaves:
                expected = jax.eval_shape(lambda x=x: jnp.asarray(x)).dtype
                assert _dtypes.dtype_of(x) == expected
            # JAX converts no array of its own.
            wide = np.zeros((), jax.dtypes.float0)
            assert _dtypes.dtype_of(wide) == jax.dtypes.float0
    assert [_dtypes.is_inexact(x) for x in leaves] == [1, 0, 0, 1, 1, 1, 0, 1]
    abstract = _dtypes.as_type(jax.ShapeDtypeStruct((2,), jnp.float16), jnp.float32)
    assert (abstract.shape, abstract.dtype) == ((2,), jnp.float32)


def test_powers_of_two_are_exact():
    exponents = np.arange(-126, 127, dtype=np.int32)
    powers = np.asarray(jax.jit(_dtypes.exact_power)(exponents))
    np.testing.assert_array_equal(powers, 2.0 ** np.arange(-126.0, 127.0))
    ends = _dtypes.SMALLEST_SCALE, _dtypes.LARGEST_SCALE
    assert ends == (float(powers[0]), float(powers[-1]))
