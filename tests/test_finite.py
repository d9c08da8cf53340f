"""all_finite and max_magnitude."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import WARNINGS_ARE_ERRORS, enable_x64, worker_environment
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls
from optax_lossscale import _finite

FLOATS = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]


BAD = [np.nan, np.inf, -np.inf]


@pytest.fixture(params=["sums", "bits"])
def compiler(request, monkeypatch):
    """Of a compiler that takes x - x for 0, sums show nothing and bits do."""
    monkeypatch.setattr(_finite, "_sums_show_nan", lambda: request.param == "sums")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_element_is_found_wherever_it_is(dtype, bad, jit):
    check = jax.jit(ls.all_finite) if jit else ls.all_finite
    ones = np.ones((3, 17), jnp.dtype(dtype))
    for place in ((0, 0), (1, 8), (2, 16)):
        x = ones.copy()
        x[place] = bad  # float8_e4m3fn has no infinity: it holds a NaN instead
        assert not check({"a": jnp.asarray(ones), "b": [jnp.asarray(x)]})
    assert check({"a": jnp.asarray(ones)})


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_finite_values_are_finite(dtype):
    info = jnp.finfo(dtype)
    extremes = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0]
    x = jnp.tile(jnp.array(extremes, dtype), 100)
    result = jax.jit(ls.all_finite)(x)
    assert result and (result.shape, result.dtype) == ((), jnp.bool_)


@pytest.mark.usefixtures("compiler")
def test_float64_and_complex128_under_x64():
    with enable_x64(True):
        assert ls.all_finite(jnp.full(3, np.finfo(np.float64).max))
        assert not ls.all_finite(jnp.array([1.0, np.nan]))
        assert not ls.all_finite(jnp.array([1.0, complex(1, np.inf)]))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("bad", [complex(np.nan, 0), complex(0, -np.inf), np.nan * 1j])
def test_both_parts_of_a_complex_number_count(bad):
    assert not ls.all_finite(jnp.array([1 + 1j, bad], jnp.complex64))
    assert ls.all_finite(jnp.array([1 + 1j], jnp.complex64))


@pytest.mark.usefixtures("compiler")
def test_leaves_that_cannot_hold_a_nan_are_finite():
    tree = {
        "int": jnp.int32(1),
        "bool": jnp.bool_(False),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
        "int4": jnp.ones(2, jnp.int4),
        "python": 1,
        "function": jax.nn.relu,
        "string": "relu",
    }
    assert ls.all_finite(tree)
    assert not ls.all_finite({**tree, "python": float("nan")})
    assert not ls.all_finite({**tree, "numpy": np.float32(np.inf)})


SHAPES = [[(3, 17)], [(0, 3), (), (40,)], [(2, 3, 5), (0,)], [(64,), (1, 1), (7,)]]


@given(
    shapes=st.sampled_from(SHAPES),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    nonfinite=st.booleans(),
    data=st.data(),
)
def test_it_is_numpys_isfinite_also_of_extreme_values(shapes, dtype, nonfinite, data):
    info = jnp.finfo(dtype)
    extremes = [info.max, info.min, info.smallest_subnormal, -0.0, 1.0]
    numbers = st.floats(width=16, allow_nan=nonfinite, allow_infinity=nonfinite)
    draw = st.sampled_from(extremes + BAD * nonfinite) | numbers
    # Most of a leaf repeats what the first few draws say.
    few = [data.draw(st.lists(draw, min_size=1, max_size=5)) for _ in shapes]
    tree = [
        np.resize(np.array(values, jnp.dtype(dtype)), shape)
        for values, shape in zip(few, shapes, strict=True)
    ]
    expected = all(np.isfinite(x.astype(np.float64)).all() for x in tree)
    assert ls.all_finite(tree) == expected


@pytest.mark.slow
def test_one_bad_leaf_among_thousands_is_found():
    tree = [np.full(2, 3e38, np.float32) for _ in range(3000)]
    assert ls.all_finite(tree)
    for bad in (0, 1234, 2999):
        spoilt = tree.copy()
        spoilt[bad] = np.array([1.0, -np.inf], np.float32)
        assert not ls.all_finite(spoilt)


@pytest.mark.parametrize("tree", [{}, (), None, [], {"a": None}, optax.MaskedNode()])
def test_an_empty_tree_is_finite(tree):
    assert ls.all_finite(tree) and jax.jit(ls.all_finite)(tree)


def test_it_moves_nothing_that_is_forbidden():
    x = jnp.ones(3)
    _finite._sums_show_nan.cache_clear()
    with jax.transfer_guard("disallow_explicit"):
        compiled = jax.jit(ls.all_finite)(x)
    _finite._sums_show_nan.cache_clear()
    with jax.transfer_guard("disallow"):
        flag = ls.all_finite(x)
    assert flag and compiled


def test_hundreds_of_leaves():
    tree = [jnp.ones(2) for _ in range(300)]
    check = jax.jit(ls.all_finite)
    assert check(tree)
    tree[217] = jnp.array([0.0, jnp.nan])
    assert not check(tree)


@pytest.mark.usefixtures("compiler")
def test_with_an_axis_name_every_member_gets_the_same_answer():
    x = jnp.array([1.0, jnp.nan, 1.0])
    apart = jax.vmap(ls.all_finite)(x)
    together = jax.vmap(lambda x: ls.all_finite(x, "i"), axis_name="i")(x)
    assert apart.tolist() == [True, False, True]
    assert together.tolist() == [False] * 3


def test_two_axis_names():
    x = jnp.ones((2, 3)).at[1, 2].set(jnp.inf)
    inner = jax.vmap(lambda x: ls.all_finite(x, ("i", "j")), axis_name="j")
    assert not jax.vmap(inner, axis_name="i")(x).any()
    assert jax.vmap(inner, axis_name="i")(jnp.ones((2, 3))).all()


@pytest.mark.parametrize("axis_name", ["data", 0, -1, 1.5, ("i", "data"), ("i", 0)])
@pytest.mark.parametrize("check", [ls.all_finite, ls.max_magnitude])
def test_an_unbound_axis_name_is_explained(check, axis_name):
    message = "`axis_name` must name an axis .* got " + re.escape(repr(axis_name))
    with pytest.raises(ValueError, match=message):
        check(jnp.ones(2), axis_name)
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda x: check(x, axis_name), axis_name="i")(jnp.ones(2))


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=8, max_size=8),
    st.sampled_from(FLOATS),
)
def test_it_is_numpys_maximum_of_absolute_values(values, dtype):
    with np.errstate(over="ignore"):
        x = np.array(values, np.float32).astype(jnp.dtype(dtype))
    largest = ls.max_magnitude({"a": x, "b": [np.ones((), x.dtype)]})
    finite = np.abs(np.asarray(x, np.float32))
    assert (largest.shape, largest.dtype) == ((), jnp.float32)
    if not np.isnan(finite).any():  # float8_e4m3fn has NaN for infinity
        assert float(largest) == max([1.0, *finite.tolist()])


def test_what_cannot_overflow_does_not_count():
    tree = {
        "int": jnp.int32(100),
        "bool": jnp.bool_(True),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
        "number": -0.5,
    }
    assert float(ls.max_magnitude(tree)) == 0.5
    assert float(ls.max_magnitude({})) == 0.0


def test_complex_and_wide_numbers():
    assert float(ls.max_magnitude(jnp.array([3 + 4j], jnp.complex64))) == 5.0
    largest = float(np.finfo(np.float32).max)
    beyond = jnp.array([1, 3e38 + 3e38j], jnp.complex64)
    assert float(ls.max_magnitude(beyond)) == largest and ls.all_finite(beyond)
    assert float(ls.max_magnitude(beyond.at[0].set(np.inf))) == np.inf
    with enable_x64(True):
        assert float(ls.max_magnitude(jnp.array(1e300))) == largest
        assert float(ls.max_magnitude(jnp.array(-np.inf))) == np.inf


@pytest.mark.usefixtures("compiler")
def test_it_is_the_same_over_sharded_arrays_and_to_derivatives():
    mesh = jax.make_mesh((8,), ("data",))  # axes are explicit by default
    for dtype in (jnp.float32, jnp.float16):
        good = jnp.ones((16, 4), dtype)
        for x in (good, good.at[11, 2].set(jnp.nan)):
            expected = bool(np.isfinite(x).all())
            sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
            assert bool(jax.jit(ls.all_finite)(sharded)) == expected
            apart = jax.jit(
                jax.shard_map(
                    lambda x: ls.all_finite(x, "data"),
                    mesh=mesh,
                    in_specs=P("data"),
                    out_specs=P(),
                )
            )
            assert bool(apart(sharded)) == expected
    gradient = jax.jit(jax.grad(lambda x: jnp.where(ls.all_finite(x), x, 0.0) ** 2))
    assert float(gradient(3.0)) == 6.0


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
import optax_lossscale as ls
good = jnp.ones(100)
assert ls.all_finite(good)
for dtype in ("float32", "float16", "bfloat16", "float8_e5m2"):
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones(100, jnp.dtype(dtype))
        x[57] = bad
        print(jax.jit(ls.all_finite)([good, x]))
tx = ls.with_loss_scaling(optax.sgd(0.1))
x = np.array([1, np.nan], np.float32)
print(jax.jit(tx.update)(x, tx.init(x))[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("honored", [True, False])
def test_no_flag_of_the_compiler_hides_a_nan(honored):
    """With such flags XLA takes x - x for 0, or comparisons with NaN for False."""
    flags = "--xla_cpu_enable_fast_math=true"
    if not honored:
        flags += " --xla_cpu_fast_math_honor_nans=false"
        flags += " --xla_cpu_fast_math_honor_infs=false"
    result = subprocess.run(
        [sys.executable, *WARNINGS_ARE_ERRORS, "-c", PROGRAM],
        env=worker_environment(XLA_FLAGS=flags),
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == ["False"] * 12 + ["[-0.", "-0.]"], result
