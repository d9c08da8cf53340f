"""all_finite, max_magnitude and select."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, enable_x64
from hypothesis import given
from hypothesis import strategies as st

import optax_lossscale as ls

FLOATS = ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"]


BAD = [np.nan, np.inf, -np.inf]


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


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_finite_values_are_finite(dtype):
    info = jnp.finfo(dtype)
    extremes = [info.max, info.min, info.tiny, info.smallest_subnormal, -0.0]
    x = jnp.tile(jnp.array(extremes, dtype), 100)
    result = jax.jit(ls.all_finite)(x)
    assert result and (result.shape, result.dtype) == ((), jnp.bool_)


def test_float64_and_complex128_under_x64():
    with enable_x64(True):
        assert ls.all_finite(jnp.full(3, np.finfo(np.float64).max))
        assert not ls.all_finite(jnp.array([1.0, np.nan]))
        assert not ls.all_finite(jnp.array([1.0, complex(1, np.inf)]))


@pytest.mark.parametrize("bad", [complex(np.nan, 0), complex(0, -np.inf), np.nan * 1j])
def test_both_parts_of_a_complex_number_count(bad):
    assert not ls.all_finite(jnp.array([1 + 1j, bad], jnp.complex64))
    assert ls.all_finite(jnp.array([1 + 1j], jnp.complex64))


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


def test_hundreds_of_leaves():
    tree = [jnp.ones(2) for _ in range(300)]
    check = jax.jit(ls.all_finite)
    assert check(tree)
    tree[217] = jnp.array([0.0, jnp.nan])
    assert not check(tree)


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


def test_an_unbound_axis_name_is_explained():
    with pytest.raises(ValueError, match="`axis_name` must name an axis .* got 'data'"):
        ls.all_finite(jnp.ones(2), "data")


@pytest.mark.parametrize("jit", [False, True])
def test_select_is_where_on_every_kind_of_leaf(jit):
    select = jax.jit(ls.select) if jit else ls.select

    def tree(n):
        return {
            "f16": jnp.full(2, n, jnp.float16),
            "int": jnp.int32(n),
            "key": jax.random.key(n),
            "none": None,
            "nested": (optax.MaskedNode(), [jnp.full((2, 2), n * 1j)]),
        }

    assert_same_bits(select(jnp.bool_(True), tree(1), tree(2)), tree(1))
    assert_same_bits(select(jnp.bool_(False), tree(1), tree(2)), tree(2))


def test_select_keeps_every_bit_of_what_it_keeps():
    odd = jnp.array([np.nan, -np.nan, np.inf, -0.0, 1e-45], jnp.float32)
    assert_same_bits(ls.select(False, jnp.zeros(5), odd), odd)


def test_the_derivative_of_select_is_that_of_the_chosen_tree():
    gradient = jax.grad(lambda x: ls.select(True, x**2, x**3))(3.0)
    chex.assert_trees_all_close(gradient, 6.0)


@pytest.mark.parametrize("pred", [1, None, jnp.ones(2, bool), jnp.float32(1), "yes"])
def test_select_refuses_what_is_not_one_boolean(pred):
    with pytest.raises(ValueError, match="`pred` must be one boolean"):
        ls.select(pred, 1.0, 2.0)


def test_select_refuses_trees_of_different_structure():
    with pytest.raises(ValueError, match="`on_true` and `on_false` must have the same"):
        ls.select(True, {"a": 1.0}, {"b": 1.0})
    with pytest.raises(ValueError, match="same structure"):
        ls.select(True, 1.0, (1.0, 2.0))


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
    with enable_x64(True):
        largest = np.finfo(np.float32).max
        assert float(ls.max_magnitude(jnp.array(1e300))) == largest
        assert float(ls.max_magnitude(jnp.array(-np.inf))) == np.inf


def test_an_axis_that_is_not_bound_is_refused():
    with pytest.raises(ValueError, match="`axis_name` must name an axis"):
        ls.max_magnitude(jnp.ones(3), "nowhere")
