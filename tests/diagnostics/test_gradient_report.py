"""gradient_report."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import vary
from helpers import assert_same_types, enable_x64
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from report_oracle import host, oracle

import optax_lossscale as ls
from optax_lossscale._diagnostics import counting

DTYPES = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float32"]


LARGEST_COUNT = 2**31 - 1
LARGEST = float(np.finfo(np.float32).max)


def around(x, wide):
    """The numbers of a type next to a limit, and it."""
    x = wide(x)
    return [np.nextafter(x, wide(0)), x, np.nextafter(x, wide(np.inf))]


def odd(x):
    """A float64 as a float32 that is rounded further as if it were the float64."""
    rounded = np.float32(x)
    if float(rounded) == x or rounded.view(np.int32) % 2:
        return rounded
    return np.nextafter(rounded, np.float32(np.inf if x > rounded else 0))


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_at_the_limits_are_counted_as_rounding_has_it(dtype, wide):
    info = jnp.finfo(dtype)
    largest, tiny = float(info.max), float(info.tiny)
    least = float(info.smallest_subnormal)
    # The ties to zero, to the least normal number and to what lies beyond the largest.
    ulp = 2.0 ** (math.frexp(largest)[1] - 1 - info.nmant)
    limits = [least / 2, least, tiny - least / 2, tiny, largest, largest + ulp / 2]
    top = float(np.finfo(wide).max) / 2
    elements = [y for x in limits if x < top for y in around(x, wide)]
    # Smaller ones XLA takes for zero on CPU, the type itself has them as subnormal.
    elements = [x for x in elements if x >= np.finfo(wide).tiny]
    for x in elements + [0.0, np.nan, np.inf, -np.inf]:
        with enable_x64(wide is np.float64):
            report = host(ls.gradient_report([np.array([x, -x], wide)], dtype=dtype))
        rounded = x if np.isnan(x) or dtype == "float32" else odd(x)
        expected = oracle(np.array([rounded, -rounded]), 1.0, dtype)
        del expected["max_abs"]
        assert {k: getattr(report, k)[0] for k in expected} == expected, x


@given(
    exponents=st.lists(st.floats(-60, 40, width=32), min_size=1, max_size=20),
    scale=st.integers(-20, 30).map(lambda e: 2.0**e),
    dtype=st.sampled_from(["float16", "float8_e5m2", "float8_e4m3fn"]),
)
def test_elements_anywhere_are_counted_as_rounding_has_it(exponents, scale, dtype):
    x = np.exp2(np.array(exponents, np.float32)) * np.resize([1, -1], len(exponents))
    x = np.resize(np.append(x, [0, np.nan, np.inf]), 23).astype(np.float32)
    report = host(ls.gradient_report([x], loss_scale=scale, dtype=dtype))
    expected = oracle(x, scale, dtype)
    assert {k: v[0] for k, v in report._asdict().items()} == expected


GRADS = {
    "w": jnp.array([[1e-9, 1.0], [jnp.nan, -jnp.inf]]),
    "half": jnp.array([3e-8, 2.0, jnp.inf], jnp.float16),
    "scalar": jnp.float32(-3.0),
    "empty": jnp.zeros((0, 3)),
    "complex": jnp.array([3 + 4j, complex(jnp.nan, jnp.inf), 0]),
    "count": jnp.arange(3),
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "none": None,
    "number": 0.5,
}


def test_a_tree_of_everything():
    report = ls.gradient_report(GRADS)
    for field in report:
        assert jax.tree.structure(field) == jax.tree.structure(GRADS)
        assert all(jnp.shape(x) == () for x in jax.tree.leaves(field))
    report = host(report)
    assert report.size == {
        **{"w": 4, "half": 3, "scalar": 1, "empty": 0, "complex": 3, "count": 0},
        **{"key": 0, "float0": 0, "none": None, "number": 1},
    }
    assert (report.nan["w"], report.inf["w"], report.underflow["w"]) == (1, 1, 1)
    assert (report.inf["half"], report.subnormal["half"]) == (1, 1)
    assert (report.nan["complex"], report.inf["complex"]) == (1, 0)
    assert (report.zero["complex"], report.max_abs["complex"]) == (1, 5.0)
    assert report.max_abs["scalar"] == 3.0
    assert all(field["count"] == field["key"] == 0 for field in report)


def test_compiled_and_not_it_is_the_same_and_counts_are_int32():
    report = ls.gradient_report(GRADS, loss_scale=8.0)
    compiled = jax.jit(lambda g, s: ls.gradient_report(g, loss_scale=s))(GRADS, 8.0)
    assert host(compiled) == host(report)
    assert_same_types(compiled, report)
    for name, field in report._asdict().items():
        dtype = jnp.float32 if name == "max_abs" else jnp.int32
        assert {x.dtype for x in jax.tree.leaves(field)} == {jnp.dtype(dtype)}, name
    assert {x.dtype.name for x in report.totals} == {"int32", "float32"}


def test_totals():
    totals = host(ls.gradient_report(GRADS).totals)
    assert totals == ls.GradientReport(
        nan=2, inf=2, zero=1, underflow=1, subnormal=1, overflow=0, max_abs=5.0, size=12
    )


@pytest.mark.parametrize("empty", [{}, None, (), {"a": None}])
def test_an_empty_tree_has_an_empty_report(empty):
    report = ls.gradient_report(empty)
    assert jax.tree.leaves(report) == [] and report.nan == empty
    assert set(host(report.totals)) == {0}
    suggested = host(ls.suggest_loss_scale(empty))
    assert suggested == ls.SuggestedLossScale(2.0**15, 0.0, 0.0, False)


def test_float64_is_measured_as_such():
    with enable_x64(True):
        x = np.array([1e-300, 1.0, 1e300])
        report = host(ls.gradient_report([x], loss_scale=2.0, dtype="float64"))
        assert report.underflow == report.overflow == report.subnormal == [0]
        assert report.max_abs == [LARGEST]
        report = host(ls.gradient_report([x]))
        assert report.underflow == report.overflow == [1]


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize(
    ("element", "count"),
    [
        *((complex(3e38, -3e38), "overflow"), (complex(0, 7e4), "overflow")),
        *((complex(3, 4), None), (complex(1e-9, 1e-9), "underflow"), (0j, "zero")),
        *((complex(np.inf, 0), "inf"), (complex(1, -np.inf), "inf")),
        *((complex(np.inf, np.nan), "nan"), (complex(np.nan, 1), "nan")),
    ],
)
def test_complex_elements_count_by_their_absolute_value(element, count, dtype):
    with enable_x64(dtype == "complex128"):
        report = host(ls.gradient_report([np.array([element, 0, 1], dtype)]))
    counts = {k: v[0] for k, v in report._asdict().items() if k != "max_abs"}
    expected = {**dict.fromkeys(counts, 0), "zero": 1, "size": 3}
    if count is not None:
        expected[count] += 1
    assert counts == expected
    finite = abs(element) if count not in ("nan", "inf") else 1
    assert report.max_abs == [pytest.approx(min(max(finite, 1), LARGEST), rel=1e-6)]


def test_counts_that_do_not_fit_stay_at_the_largest():
    def totals(*counts):
        tree = list(map(jnp.int32, counts))
        report = ls.GradientReport(*[tree] * 6, max_abs=[1.0], size=tree)
        return int(report.totals.nan)

    assert totals(LARGEST_COUNT - 1, 1) == LARGEST_COUNT
    assert totals(LARGEST_COUNT - 2, 1) == LARGEST_COUNT - 1
    for many in (2, 3, 4, 5, 9):
        assert totals(*[LARGEST_COUNT] * many) == LARGEST_COUNT
    assert totals(2**30, 2**30) == totals(*[2**30] * 4, 5) == LARGEST_COUNT


@pytest.mark.parametrize(("members", "fits"), [(2**16, True), (2**17, False)])
def test_sums_over_members_that_do_not_fit_stay_at_the_largest(members, fits):
    grads = jnp.full(2**15 - 1, jnp.nan)
    count = members * grads.size if fits else LARGEST_COUNT

    def report(_):
        return ls.gradient_report([grads], axis_name="m")

    summed = jax.vmap(report, axis_name="m")(jnp.zeros(members))
    assert set(np.asarray(summed.nan[0])) == set(np.asarray(summed.size[0])) == {count}


@pytest.mark.parametrize("shape", [(5, 6, 7), (43,), (160, 131)])
def test_arrays_that_do_not_fit_are_counted_digit_by_digit(shape, monkeypatch):
    # What is compiled for these shapes stays so, and right.
    monkeypatch.setattr(counting, "_fits", lambda number: number <= 10)
    x = np.resize(np.float32([1, np.nan, 0, np.inf, 1e-9, 1e9, 1e-6]), shape)
    expected = {**oracle(x, 1.0, "float16"), "max_abs": 1e9}
    if shape[0] % 8 == 0:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        x = jax.device_put(x, NamedSharding(mesh, P("x")))
    report = host(ls.gradient_report({"w": x}))
    assert {k: v["w"] for k, v in report._asdict().items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**16, 2**15 + 1), (2**17, 5, 2**14)])
def test_counts_of_an_array_that_do_not_fit_stay_at_the_largest(shape):
    @jax.jit
    def report(x):
        grads = jnp.broadcast_to(x, shape).at[0, :3].multiply(0.0)
        return ls.gradient_report([grads.astype(jnp.float8_e5m2)])

    counts = host(report(jnp.float32(jnp.inf)))
    assert counts.inf == counts.size == [LARGEST_COUNT]
    assert counts.nan == [3 * math.prod(shape[2:])] and counts.zero == [0]


def test_an_ensemble_has_a_report_for_each_member():
    members = jnp.array([[1.0, 2.0, 3.0], [jnp.nan, 0.0, 5.0]])
    report = jax.vmap(lambda g: ls.gradient_report({"w": g, "b": g[:1]}))
    report = jax.jit(report)(members)
    assert report.nan["w"].tolist() == [0, 1]
    assert report.totals.max_abs.tolist() == [3.0, 5.0]
    assert report.totals.nan.tolist() == [0, 2]


GLOBAL = np.ones((16, 8), np.float32)
GLOBAL[3, 3], GLOBAL[11], GLOBAL[15, 7] = np.nan, 1e-9, 9.0
GLOBAL = jnp.asarray(GLOBAL)


@pytest.mark.parametrize(
    "axis_type, spec",
    [
        *(("Auto", P("a")), ("Explicit", P("a", "b"))),
        *(
            pytest.param(axis_type, spec, marks=pytest.mark.slow)
            for axis_type, spec in (
                *(("Auto", P()), ("Explicit", P()), ("Explicit", P("a"))),
                ("Auto", P(None, ("a", "b"))),
                *(("Auto", P("a", "b")), ("Explicit", P(None, ("a", "b")))),
            )
        ),
    ],
)
def test_of_sharded_arrays_it_is_the_same(axis_type, spec):
    types = (getattr(jax.sharding.AxisType, axis_type),) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=types)
    sharded = jax.device_put({"w": GLOBAL}, NamedSharding(mesh, spec))
    assert host(ls.gradient_report(sharded)) == host(ls.gradient_report({"w": GLOBAL}))
    suggested = ls.suggest_loss_scale(sharded)
    assert host(suggested) == host(ls.suggest_loss_scale({"w": GLOBAL}))


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_counts_are_added_up(check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def report(x, bias):
        # The bias has a gradient on every device.
        return ls.gradient_report({"w": x, "b": vary(bias, "x")}, axis_name="x")

    per_device = jax.shard_map(
        report, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), check_vma=check_vma
    )
    actual = host(jax.jit(per_device)(GLOBAL, jnp.ones(3)))
    expected = {"w": GLOBAL, "b": jnp.ones(8 * 3)}
    assert actual == host(ls.gradient_report(expected))


def test_without_an_axis_every_device_has_its_own_report():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    each = jax.shard_map(
        lambda x: ls.gradient_report(x).nan[None],
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    assert jax.jit(each)(GLOBAL).tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_members_of_an_ensemble_may_be_added_up():
    counts = jnp.full((3, 2), jnp.nan)
    report = jax.vmap(lambda g: ls.gradient_report([g], axis_name="m"), axis_name="m")
    assert jax.jit(report)(counts).nan[0].tolist() == [6, 6, 6]


def test_nothing_waits_for_the_device():
    with jax.transfer_guard_device_to_host("disallow"):
        grads = {"w": jnp.ones(3)}
        ls.gradient_report(grads, loss_scale=jnp.float32(8.0)).totals  # noqa: B018
        ls.suggest_loss_scale(grads)


@pytest.mark.parametrize("function", [ls.gradient_report, ls.suggest_loss_scale])
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (1.5, "`grads` must be a tree of gradients, got one number: 1.5. Is it the"),
        (
            jnp.float32(2),
            r"got one number: an array of dtype float32 and shape \(\). Is it the",
        ),
        (True, "`grads` must be a tree of gradients, got one number: True. Is it"),
        (
            {"a": jnp.arange(3)},
            "must hold floating-point gradients, got none: int32 at",
        ),
        (np.arange(3), "must hold floating-point gradients, got none: int64 at its ro"),
        ({"a": [1.0, "b"]}, r"must hold only arrays, got 'b' at \['a'\]\[1\]. Leave"),
        (
            [jax.ShapeDtypeStruct((2,), float)],
            r"must hold only arrays, got a jax.ShapeD",
        ),
    ],
)
def test_what_is_no_tree_of_gradients_is_refused(function, grads, message):
    with pytest.raises(ValueError, match=message):
        function(grads)


@pytest.mark.parametrize("function", [ls.gradient_report, ls.suggest_loss_scale])
@pytest.mark.parametrize("dtype", [int, "int8", "float17", None, 3, jnp.complex64])
def test_a_type_that_is_not_floating_point_is_refused(function, dtype):
    with pytest.raises(ValueError, match="`dtype` must be a floating-point type or"):
        function({"w": jnp.ones(2)}, dtype=dtype)


def test_a_type_that_cannot_show_an_overflow_is_refused():
    for dtype in ("float4_e2m1fn", "float8_e8m0fnu"):
        with pytest.raises(ValueError, match="`dtype` must have a zero, and an infin"):
            ls.gradient_report({"w": jnp.ones(2)}, dtype=dtype)


@pytest.mark.parametrize(
    "scale",
    [0, -1.0, math.nan, math.inf, True, "1", None, jnp.ones(2), jnp.array(True)],
)
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match="`loss_scale` must be one number above 0"):
        ls.gradient_report({"w": jnp.ones(2)}, loss_scale=scale)


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="`axis_name` must name an axis"):
        ls.gradient_report({"w": jnp.ones(2)}, axis_name="data")
