"""gradient_report, its table and suggest_loss_scale, beside NumPy and ml_dtypes."""

import collections
import functools
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AUTO, EXPLICIT, make_mesh, on_mesh
from shared import enable_x64

import optax_lossscale as ls

LARGEST = np.finfo(np.float32).max


def host(report):
    return jax.tree.map(lambda x: x.item(), jax.device_get(report))


def oracle(x, scale, dtype):
    """What numpy and ml_dtypes make of the scaled elements."""
    x = np.ravel(x).astype(np.complex128)
    with np.errstate(over="ignore"):
        rounded = (abs(x) * scale).astype(jnp.dtype(dtype)).astype(np.float64)
    finite = np.isfinite(x)
    flags = {
        "nan": np.isnan(x),
        "inf": np.isinf(x) & ~np.isnan(x),
        "zero": x == 0,
        "underflow": (rounded == 0) & (x != 0),
        "subnormal": (rounded > 0) & (rounded < float(jnp.finfo(dtype).tiny)),
        "overflow": finite & ~np.isfinite(rounded),
    }
    counts = {name: flag.sum().item() for name, flag in flags.items()}
    max_abs = min(abs(x[finite]).max(initial=0), np.finfo(np.float32).max)
    return {**counts, "max_abs": float(np.float32(max_abs)), "size": x.size}


NARROW = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float32"]


@pytest.mark.parametrize(
    ("dtype", "wide"), [*((x, np.float32) for x in NARROW), ("float16", np.float64)]
)
def test_report_counts_elements_at_the_limits_as_rounding_does(dtype, wide):
    scale, info = 8.0, jnp.finfo(dtype)
    least, tiny, largest = map(float, (info.smallest_subnormal, info.tiny, info.max))
    # The ties to zero, to the least normal number and to what lies beyond the largest.
    tie = largest + 2.0 ** (math.frexp(largest)[1] - 2 - info.nmant)
    limits = np.array([least / 2, least, tiny - least / 2, tiny, largest, tie])
    # XLA on CPU takes smaller ones for zero.
    limits = np.float32(limits[(limits > 2.0**-126) & (limits < LARGEST)])
    around = [np.nextafter(limits, np.float32(0)), np.nextafter(limits, LARGEST)]
    for x in np.concatenate([limits, *around, np.float32([0, np.nan, np.inf])]):
        with enable_x64(wide is np.float64), jax.numpy_dtype_promotion("strict"):
            grads = np.array([x, -x], wide) / wide(scale)
            report = host(ls.gradient_report(grads, loss_scale=scale, dtype=dtype))
        assert report._asdict() == oracle(grads, scale, dtype), x


COMPLEX = [3 + 4j, 1e-9 + 1e-9j, complex(3e38, -3e38), 7e4j, 0j, np.nan]
COMPLEX += [complex(np.inf, 0), complex(1, -np.inf), complex(np.inf, np.nan)]
LEAVES = {
    "w": np.float32([[1e-9, 1.0], [np.nan, -np.inf]]),
    "half": np.float16([3e-8, 2.0]),
    "number": 0.5,
    "float64": np.array([1e-300, 1, 1e300]),
    "complex64": np.array(COMPLEX, np.complex64),
    "complex128": np.array(COMPLEX),
    "empty": np.zeros((0, 3)),
}
KEY = jax.random.wrap_key_data(np.zeros(2, np.uint32))
UNCOUNTED = {"count": np.arange(3), "key": KEY}
UNCOUNTED["float0"] = np.zeros(2, jax.dtypes.float0)


def test_report_takes_gradients_of_a_class_whose_module_begins_like_the_package():
    kind = collections.namedtuple("Grads", "w", module="optax_lossscale_models")
    assert ls.gradient_report(kind(np.ones(2))).size.w == 2


def test_report_counts_the_elements_of_each_leaf():
    with enable_x64(True):
        report = jax.jit(ls.gradient_report)({**LEAVES, **UNCOUNTED, "none": None})
    types = {(x.shape, x.dtype.name, x.weak_type) for x in jax.tree.leaves(report)}
    assert types == {((), "float32", False)}
    expected = {name: oracle(leaf, 1.0, "float16") for name, leaf in LEAVES.items()}
    expected |= {name: oracle([], 1.0, "float16") for name in UNCOUNTED}
    for field, values in host(report)._asdict().items():
        assert values.pop("none") is None
        assert values == {name: counts[field] for name, counts in expected.items()}


# With these options, XLA takes no number for NaN or infinite.
FAST = {"xla_cpu_enable_fast_math": True, "xla_backend_optimization_level": 3}
FAST |= {f"xla_cpu_fast_math_honor_{x}": False for x in ("nans", "infs", "functions")}
FAST["xla_llvm_disable_expensive_passes"] = False
# Newer ones know no such flag.
if "fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
    FAST["xla_cpu_use_fusion_emitters"] = True


@pytest.mark.slow
def test_fast_math_changes_no_count():
    def results(grads):
        report = ls.gradient_report(grads, dtype="float8_e4m3fn")
        return report, report.totals, ls.suggest_loss_scale(grads)

    elements = [1.0, 0.0, -3.0, 2.0**-14, 2.0**14, 2.0**-16, np.nan, np.inf, -np.inf]
    types = (np.float32, np.float16, jnp.float8_e5m2, np.complex64)
    grads = [np.resize(elements, 64).astype(x) for x in types]
    if jax.jit(jnp.isnan, compiler_options=FAST)(grads[0]).any():
        pytest.skip("this XLA takes these options from the environment alone")
    fast, expected = (jax.jit(results, compiler_options=x)(grads) for x in (FAST, None))
    assert [*map(host, fast)] == [*map(host, expected)]
    nan, inf, zero, underflow, _, overflow, *_ = host(expected[1])
    assert min(nan, inf, zero, underflow, overflow) > 0


SHAPES = {"12 million": (3, 2**22 + 1), "2 billion": (2**16 + 1, 2**15 + 3)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_counts_are_exact_to_2_to_the_24_and_within_1e_6_beyond(shape):
    def report(x, y):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
        return ls.gradient_report(jnp.where(index % 7 == 0, x, y))

    # Optimized, the program never writes the array out.
    options = {"xla_backend_optimization_level": 3}
    found = host(jax.jit(report, compiler_options=options)(np.nan, 1e-9))
    *rows, length = shape
    nan, size = math.prod(rows) * -(-length // 7), math.prod(shape)
    for name, number in {"nan": nan, "underflow": size - nan, "size": size}.items():
        expected = pytest.approx(number, rel=1e-6 if number > 2**24 else 0)
        assert getattr(found, name) == expected, name


def test_totals_are_sums_and_the_largest_maximum():
    totals = ls.GradientReport(*([10.0, n] for n in range(8))).totals
    sums = totals._replace(max_abs=0)
    assert [*map(float, sums)] == [10, 11, 12, 13, 14, 15, 0, 17]
    assert totals.max_abs == 10


def test_totals_are_within_1e_6():
    """One after the other, the ones would all be lost."""
    numbers = [2.0**24, *[1.0] * 40]
    totals = ls.GradientReport(*[numbers] * 8).totals
    assert float(totals.size) == pytest.approx(sum(numbers), rel=1e-6)


GLOBAL = np.ones((16, 8), np.float32)
GLOBAL[3, 3], GLOBAL[11], GLOBAL[15, 7] = np.nan, 1e-9, 9.0


def summed(x):
    return ls.gradient_report({"w": x}, axis_name="d")


@pytest.mark.parametrize("check_vma", [True, False])
def test_report_sums_along_the_axis_of_devices(check_vma):
    of_devices = on_mesh(summed, P("d"), P(), check_vma=check_vma)
    assert host(of_devices(GLOBAL)) == host(ls.gradient_report({"w": GLOBAL}))


def test_report_sums_along_the_axis_of_members():
    of_members = jax.jit(jax.vmap(summed, out_axes=None, axis_name="d"))
    expected = host(ls.gradient_report({"w": GLOBAL}))
    assert host(of_members(GLOBAL.reshape(8, 2, 8))) == expected


def test_report_without_an_axis_is_of_each_device_or_member():
    def nan(x):
        return ls.gradient_report({"w": x}).nan["w"][None]

    expected = [0, 1, 0, 0, 0, 0, 0, 0]
    assert on_mesh(nan, P("d"), P("d"))(GLOBAL).tolist() == expected
    members = jax.jit(jax.vmap(nan))(GLOBAL.reshape(8, 2, 8))
    assert np.ravel(members).tolist() == expected


def both(grads):
    return ls.gradient_report(grads), ls.suggest_loss_scale(grads)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_sharded_arrays_are_measured_as_whole_ones(axis_type):
    mesh = make_mesh(axis_type, a=4, b=2)
    sharded = jax.device_put([GLOBAL], NamedSharding(mesh, P("a", "b")))
    assert [*map(host, jax.jit(both)(sharded))] == [*map(host, both([GLOBAL]))]


@pytest.mark.usefixtures("unread")
def test_report_and_suggestion_do_not_wait_for_the_device():
    grads = [jnp.asarray(GLOBAL)]
    ls.gradient_report(grads, loss_scale=jnp.float32(8.0)).totals  # noqa: B018
    ls.suggest_loss_scale(grads)


def test_arrays_of_one_shape_share_a_program(caplog):
    """XLA compiles one program of many arrays in quadratic time."""
    counts = []
    for grads in ([np.ones((3, 2, 7))], [np.ones((3, 2, 7))] * 50):
        caplog.clear()
        with jax.log_compiles():
            ls.gradient_report(grads)
        counts.append(sum(x.startswith("Compiling") for x in caplog.messages))
    assert counts[0] > 0 == counts[1]


KINDS = [("float16", 2.5), ("bfloat16", 20.0), ("float8_e5m2", 0.0)]


@pytest.mark.parametrize(("dtype", "headroom"), KINDS)
def test_suggestion_is_the_largest_scale_within_headroom_and_its_shares(
    dtype, headroom
):
    """Those that are rescued and lost, by rounding each element."""
    draw = np.random.default_rng(0).uniform
    x = np.exp2(draw(-100, 100, (99, 1)) + draw(-20, 0, (99, 9))).astype(np.float32)
    uncounted = np.tile(np.float32([0, np.nan, -np.inf]), (99, 1))
    options = {"min_scale": 2.0**-126, "max_scale": 2.0**126, "headroom": headroom}
    suggest = functools.partial(ls.suggest_loss_scale, dtype=dtype, **options)
    suggested = jax.device_get(jax.jit(jax.vmap(suggest))(np.hstack([x, uncounted])))
    bound = float(jnp.finfo(dtype).max) / 2.0**headroom
    for row, scale, rescued, lost, informative in zip(x, *suggested, strict=True):
        assert informative and math.frexp(scale)[0] == 0.5
        if 2.0**-126 < scale < 2.0**126:
            largest = float(row.max()) * float(scale)
            assert 0.4999 * bound < largest < 1.0001 * bound
        before, after = (oracle(row, s, dtype)["underflow"] / 9 for s in (1.0, scale))
        expected = (max(before - after, 0), after)
        assert (rescued, lost) == pytest.approx(expected, abs=1e-6)


# The scale, the shares that are rescued and lost, and whether any element counts.
SUGGESTED = {
    "smallest, at the default maximum": ([2e-38], {}, (2.0**24, 0, 1, True)),
    "largest, at the default minimum": ([3e38], {}, (2.0**-14, 0, 0, True)),
    "at the minimum": ([1e6], {"min_scale": 2.0**20}, (2.0**20, 0, 0, True)),
    "lost at the maximum": ([1e-9], {"max_scale": 1.0}, (1.0, 0, 1, True)),
    "inf and zero beside one": ([1e-9, np.inf, 0.0], {}, (2.0**24, 1, 0, True)),
    "scale below 1": ([2e-6, 1e8], {}, (2.0**-14, 0, 0.5, True)),
}


@pytest.mark.parametrize(
    ("numbers", "bounds", "expected"), SUGGESTED.values(), ids=SUGGESTED
)
def test_suggestion_is_clipped_to_its_bounds_and_has_its_shares(
    numbers, bounds, expected
):
    grads = np.resize(np.float32(numbers), 6)
    assert tuple(host(ls.suggest_loss_scale(grads, **bounds))) == expected


NOTHING_COUNTS = {
    "no elements": ([], {}, 2.0**15),
    "no arrays": ({}, {}, 2.0**15),
    "zeros": (np.zeros(6), {}, 2.0**15),
    "NaN and inf": ([np.nan, np.inf], {}, 2.0**15),
    "subnormal in float32": ([1e-45], {}, 2.0**15),
    "below the maximum": (np.zeros(6), {"max_scale": 8.0}, 8.0),
    "above the minimum": (np.zeros(6), {"min_scale": 2.0**20}, 2.0**20),
}


@pytest.mark.parametrize(
    ("numbers", "bounds", "scale"), NOTHING_COUNTS.values(), ids=NOTHING_COUNTS
)
def test_suggestion_of_nothing_that_counts_is_the_default_and_says_so(
    numbers, bounds, scale
):
    grads = numbers if isinstance(numbers, dict) else np.float32(numbers)
    suggested = host(ls.suggest_loss_scale(grads, **bounds))
    assert tuple(suggested) == (scale, 0, 0, False)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_suggestion_is_a_scale_that_rules_accept(size):
    scale = float(ls.suggest_loss_scale(np.full(2, size, np.float32)).loss_scale)
    assert ls.DynamicLossScale(scale).init_scale == scale


def test_suggestion_is_of_all_batches_together():
    batches = [{"w": np.float32(x)} for x in ([1e-9, 1e-6], [1e-6, 1e-3], [0, 0])]
    assert tuple(host(ls.suggest_loss_scale(batches))) == (2.0**22, 0.25, 0, True)


def test_suggestion_shows_a_table():
    shown = repr(ls.suggest_loss_scale(np.float32([0.0, 2e-5, 2e-2, 1e-9, 2e-6, 2e-3])))
    assert shown.startswith("loss_scale   2**18\nrescued      0.2\nlost ")
    shown = repr(ls.SuggestedLossScale(np.float32(100), 0, 0, True))
    assert shown.startswith("loss_scale   100.0\n")


def test_suggestion_that_is_traced_or_of_an_ensemble_shows_no_power_of_2():
    many, shown = ls.SuggestedLossScale(*np.ones((4, 2))), []
    jax.eval_shape(lambda x: shown.append(repr(x)), many._replace(loss_scale=1.0))
    shown.append(repr(many))
    assert all(x.startswith("loss_scale") and "2**" not in x for x in shown), shown


FIRST = {"w": np.full((30, 30), 1e-9), "b": np.ones(30)}
SECOND = {"w": np.repeat([1.0, np.nan, 1.0], 4), "b": np.full(2, np.inf)}
GRADS = {"layers": [FIRST, SECOND], "o": np.array([1.0] + [1e-6] * 1999)}
GRADS = jax.tree.map(np.float32, GRADS)
TABLE = """\
5 arrays, 2 with NaN or inf, 3 with overflow
                     size    NaN     inf  zero  underflow  subnormal  overflow  max |g|
['layers'][1]['b']      2      -  2 100%     -          -          -         -        0
['layers'][1]['w']     12  4 33%       -     -          -          -     8 67%        1
['layers'][0]['b']     30      -       -     -          -          -   30 100%        1
['o']               2,000      -       -     -          -          -     1 <1%        1
['layers'][0]['w']    900      -       -     -          -          -         -    1e-09
all                 2,944  4 <1%   2 <1%     -          -          -     39 1%        1"""  # noqa: E501


@pytest.fixture(scope="module")
def report():
    return jax.jit(lambda g: ls.gradient_report(g, loss_scale=2.0**17))(GRADS)


def test_repr_of_a_report_and_of_its_text_is_the_table(report):
    text = ls.format_report(report)
    assert text == repr(text) == repr(report) == str(report) == TABLE
    assert repr(jax.device_get(report)) == TABLE


def test_limit_leaves_out_the_best(report):
    shown, lines = ls.format_report(report, limit=2).split("\n"), TABLE.split("\n")
    expected = [*lines[:4], "... and 3 more, none of them worse", lines[-1]]
    # Columns are as wide as what is shown.
    assert [line.split() for line in shown] == [line.split() for line in expected]
    assert ls.format_report(report, limit=5) == TABLE


def test_report_without_a_table_shows_its_fields():
    shown = []
    jax.jit(lambda g: shown.append(repr(ls.gradient_report(g))))([np.ones(2)])
    shown.append(repr(jax.eval_shape(ls.gradient_report, [np.ones(2)])))
    shown.append(repr(jax.vmap(lambda x: ls.gradient_report([x]))(np.ones((2, 3)))))
    assert all(x.startswith("GradientReport(nan=") for x in shown)


def test_table_begins_with_the_worst():
    whole = {"a": 1, "b": 0, "c": 1e-6, "d": 1e-9, "e": 1e6, "f": 2}
    grads = {name: np.full(4, x, np.float32) for name, x in whole.items()}
    grads["g"] = np.float32([1, 1, 1, np.nan])
    grads["h"] = np.float32([np.inf, 1, 1, np.nan])
    grads["i"] = np.float32([*[1e6] * 8, 1])  # a lesser share of more elements
    table = ls.format_report(ls.gradient_report(grads))
    assert re.findall(r"^\['(.)'\]", table, re.M) == list("hgeidcbfa")


SHARES = {5: "<1%", 6: "1%", 494: "49%", 994: "99%", 995: ">99%", 1000: "100%"}


@pytest.mark.parametrize(("number", "share"), SHARES.items())
def test_table_shows_no_0_and_no_100_percent_unless_exact(number, share):
    grads = np.repeat(np.float32([np.nan, 1]), [number, 1000 - number])
    table = ls.format_report(ls.gradient_report(grads))
    assert f"\n(root)  1,000  {number:,} {share} " in table


SUMMARIES = {
    "1 array, 1 with NaN or inf": [[np.nan, 1.0]],
    "1 array, 1 with underflow": [[1e-9, 1.0]],
    "2 arrays, none with NaN, inf, overflow or underflow": [[1.0, 1.0]] * 2,
    "The tree of gradients holds no arrays.": [],
}


@pytest.mark.parametrize(("summary", "arrays"), SUMMARIES.items(), ids=SUMMARIES)
def test_first_line_counts_arrays_with_nan_inf_overflow_or_underflow(summary, arrays):
    report = ls.gradient_report([np.float32(x) for x in arrays])
    assert ls.format_report(report).split("\n")[0] == summary


def test_diagnostics_are_constants_to_derivatives():
    errors, skipped = [], {"consecutive_skips": jnp.int32(7)}
    options = {"max_consecutive_skips": 4, "on_error": errors.append}

    def loss(x):
        grads = {"w": x * jnp.array([1.0, 2.0]), "complex": jax.lax.complex(x, x)}
        state = ls.FixedLossScale().init()._replace(loss_scale=x, **skipped)
        ls.check_loss_scale(state, grads=grads, value=x, **options)
        report = ls.gradient_report(grads, loss_scale=x)
        suggested = ls.suggest_loss_scale(grads)
        constants = report.max_abs["w"] * suggested.loss_scale * suggested.rescued
        return (1 + constants) * x**2

    second_derivative = jax.jit(jax.hessian(jax.checkpoint(loss)))
    assert float(second_derivative(2.0**-26)) == 2 * (1 + 2.0**-25 * 2.0**24)
    jax.effects_barrier()
    assert str(errors[0]).startswith("The last 7 steps were")
