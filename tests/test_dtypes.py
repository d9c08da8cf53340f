"""Types: their limits, which lose range, and how leaves are cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared import enable_x64

from optax_lossscale import _dtypes

FLOAT8 = ["float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz"]
LOSE_RANGE = ["float16", *(x for x in FLOAT8 if hasattr(jnp, x))]


@pytest.mark.parametrize("name", [*LOSE_RANGE, "bfloat16"])
@np.errstate(over="ignore")
def test_limits_are_where_rounding_changes(name):
    """Just below and just above each limit, as ml_dtypes rounds."""
    limits, info = _dtypes.limits_of(name), jnp.finfo(name)
    shares = np.float64([1 - 2.0**-13, 1, 1 + 2.0**-13])
    zero, normal, overflow = (np.float64(x * shares).astype(name) for x in limits)
    assert list(zero == 0) == [True, True, False]
    assert list(normal == info.tiny) == [False, True, True]
    assert overflow[0] == info.max and not np.isfinite(overflow[2])
    # It is the smallest float64 that overflows. Of a tie, types differ.
    tie = np.float64(np.float32(limits.overflow))
    assert (tie < limits.overflow) == np.isfinite(tie.astype(name))


KEPT = ["bfloat16", "float32", "complex64", "int32"]


@pytest.mark.parametrize("name", [*LOSE_RANGE, *KEPT])
def test_only_leaves_that_lose_range_are_widened(name):
    x, loses = np.ones(2, name), name in LOSE_RANGE
    [wide, other] = _dtypes.widen([x, 1])
    assert wide.dtype == ("float32" if loses else name) and other == 1
    assert [_dtypes.loses_range(y) for y in (x, None, "text")] == [loses, False, False]


LEAVES = [1.0, 1, True, 1j, np.float64(1), np.ones(2), np.int64(1), np.float16(1)]


@pytest.mark.parametrize("x64", [False, True])
def test_leaf_has_the_dtype_that_jax_gives_it(x64):
    with enable_x64(x64):
        for x in LEAVES:
            expected = jax.eval_shape(lambda x=x: jnp.asarray(x)).dtype
            assert _dtypes.dtype_of(x) == expected
        # JAX converts no array of its own.
        zero = np.zeros((), jax.dtypes.float0)
        assert _dtypes.dtype_of(zero) == jax.dtypes.float0


def test_floats_and_complex_numbers_are_inexact():
    assert [_dtypes.is_inexact(x) for x in LEAVES] == [1, 0, 0, 1, 1, 1, 0, 1]


def test_abstract_leaf_is_cast_with_its_sharding():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x = jax.ShapeDtypeStruct((2,), jnp.float16, sharding=sharding)
    expected = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)
    assert _dtypes.as_type(x, jnp.float32) == expected


def test_powers_of_two_are_exact():
    exponents = np.arange(-126.0, 127.0)
    # A magnitude just above a power of two has the next lower one.
    for step, toward in enumerate((0, np.inf)):
        magnitudes = np.nextafter(np.float32(2.0**-exponents), np.float32(toward))
        powers = jax.jit(_dtypes.largest_power, static_argnums=1)(magnitudes, 1.0)
        np.testing.assert_array_equal(powers, 2.0 ** np.maximum(exponents - step, -126))
