"""What holds of every rule, and what the rules with a memory do."""

import dataclasses
import inspect
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, assert_same_types
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import PRESETS, RULES

import optax_lossscale as ls
from optax_lossscale import presets

SMALLEST, LARGEST = 2.0**-126, 2.0**126
INT32 = np.iinfo(np.int32)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
# Presets of a class that is tried without them differ in their numbers alone.
COMMON = (ls.FixedLossScale, ls.DynamicLossScale)
every_rule_at_length = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=pytest.mark.slow, id=name)
        if name in PRESETS and isinstance(rule, COMMON)
        else pytest.param(rule, id=name)
        for name, rule in RULES.items()
    ],
)


def advance(rule, state, grads_finite, magnitude):
    args = (magnitude,) if rule.uses_max_magnitude else ()
    return rule.update(state, grads_finite, *args)


def test_every_preset_is_here():
    functions = inspect.getmembers(presets, inspect.isfunction)
    assert PRESETS.keys() == {name for name, _ in functions}


floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
counts = st.integers(INT32.min, INT32.max)


@every_rule_at_length
@given(data=st.data())
@settings(max_examples=25)
def test_any_loaded_state_gives_a_sound_one_of_the_same_structure(rule, data):
    first = rule.init()
    draws = {
        np.dtype(np.float32): floats,
        np.dtype(np.int32): counts,
        np.dtype(bool): st.booleans(),
    }
    loaded = jax.tree.map(
        lambda x: jnp.asarray(data.draw(draws[x.dtype]), x.dtype), first
    )
    flags = data.draw(st.lists(st.booleans(), min_size=1, max_size=3))
    magnitude = jnp.float32(data.draw(floats))
    state = loaded
    for flag in flags:
        state = advance(rule, state, flag, magnitude)
        assert_same_types(state, first)
        if rule.skip_nonfinite:
            assert SMALLEST <= float(state.loss_scale) <= LARGEST
            assert ls.all_finite(state)
        else:
            assert_same_bits(state, loaded)  # costs nothing: nothing is looked at


@every_rule_at_length
@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0, 2.0**80, width=32)),
        min_size=20,
        max_size=40,
    )
)
@settings(max_examples=10)
def test_the_scale_stays_between_the_limits(rule, run):
    state, scale = rule.init(), None
    lowest = getattr(rule, "min_scale", 1.0)
    highest = getattr(rule, "max_scale", LARGEST)
    # Where other systems start outside of their limits, so do their rules.
    initial = float(state.loss_scale)
    lowest, highest = min(lowest, initial), max(highest, initial)
    for flag, magnitude in run:
        state = advance(rule, state, flag, magnitude)
        scale = float(state.loss_scale)
        assert lowest <= scale <= highest


@every_rule
def test_counters_saturate(rule):
    if not rule.skip_nonfinite:
        pytest.skip("nothing is counted")
    full = jax.tree.map(
        lambda x: jnp.full_like(x, INT32.max) if x.dtype == jnp.int32 else x,
        rule.init(),
    )
    for flag in (True, False):
        for leaf in jax.tree.leaves(advance(rule, full, flag, 1.0)):
            # DeepSpeed's count begins at -1.
            assert leaf.dtype != jnp.int32 or int(leaf) >= -1
    state = advance(rule, full, False, 1.0)
    assert int(state.skipped_steps) == int(state.consecutive_skips) == INT32.max


@every_rule
def test_a_configuration_goes_through_json_and_comes_back_equal(rule):
    config = json.loads(json.dumps(rule.get_config(), allow_nan=False))
    again = ls.LossScale.from_config(config)
    assert again == rule and hash(again) == hash(rule)
    assert type(rule).from_config(config) == rule
    assert repr(again) == repr(rule) and not callable(rule)


def test_rules_that_differ_are_not_equal():
    distinct = {repr(rule): rule for rule in RULES.values()}.values()
    assert len(set(distinct)) == len(distinct)


@every_rule_at_length
def test_a_run_is_traced_once(rule):
    params = {"w": jnp.ones(3)}
    tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
    traces = []

    @jax.jit
    def step(opt_state, grads):
        traces.append(1)
        return tx.update(grads, opt_state, params)

    first = opt_state = tx.init(params)
    bad = jnp.inf if rule.skip_nonfinite else 1.0
    for value in (1.0, 0.0, bad, 1e-6):
        updates, opt_state = step(opt_state, {"w": jnp.full(3, value)})
        assert ls.all_finite((updates, opt_state))
    assert len(traces) == 1
    assert_same_types(opt_state, first)
    assert int(opt_state.scale_state.skipped_steps) == int(rule.skip_nonfinite)


class Tolerant:
    """fairseq's and metaseq's rule, one Python statement each."""

    def __init__(self, rule):
        self.rule, self.scale, self.window = rule, rule.init_scale, rule.growth_interval
        self.step, self.last_overflow, self.last_change, self.overflows = 0, -1, -1, 0

    def __call__(self, grads_finite):
        rule = self.rule
        if grads_finite:
            if (self.step - self.last_overflow) % self.window == 0:
                self.scale = min(self.scale * rule.growth_factor, rule.max_scale)
                self.last_change = self.step
                if rule.interval_follows_scale:
                    self.window *= int(rule.growth_factor)
        else:
            self.last_overflow = self.step
            self.overflows += 1
            if self.overflows / (self.step - self.last_change) >= rule.tolerance:
                self.scale = max(self.scale * rule.backoff_factor, rule.min_scale)
                self.last_change, self.overflows = self.step, 0
                if rule.interval_follows_scale:
                    self.window = max(int(self.window / rule.growth_factor), 1)
        self.step += 1
        return self.scale


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("overflow_share", [0.05, 0.3, 0.7])
def test_the_tolerant_rule_equals_its_oracle(follows, tolerance, overflow_share):
    rule = presets.TolerantLossScale(
        growth_interval=3,
        tolerance=tolerance,
        interval_follows_scale=follows,
        min_scale=2.0**-5,
    )
    flags = np.random.default_rng(0).random(400) >= overflow_share
    _, scales = jax.lax.scan(
        lambda s, flag: (new := rule.update(s, flag), new.loss_scale),
        rule.init(),
        jnp.asarray(flags),
    )
    oracle = Tolerant(rule)
    np.testing.assert_array_equal(scales, [oracle(flag) for flag in flags])
    assert len(set(scales.tolist())) > 3, "meta-test: the scale moves"


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_fairseqs_floor_is_the_last_scale_above_its_minimum(tolerance):
    """Where fairseq raises FloatingPointError and restores the scale it had."""
    for minimum, floor in ((1e-4, 2.0**-13), (2.0**-5, 2.0**-4)):
        rule = presets.fairseq(min_loss_scale=minimum, tolerance=tolerance)
        assert rule.min_scale == floor
    assert presets.fairseq(min_loss_scale=0, tolerance=tolerance).min_scale == SMALLEST
    assert presets.metaseq(min_loss_scale=2.0**-5).min_scale == 2.0**-5
    assert presets.metaseq(min_loss_scale=5.0, init_scale=4.0).min_scale == 4.0
    assert presets.fairseq(threshold=3.0, tolerance=tolerance).min_scale == 3.0


@given(st.floats(1.01, 16), st.floats(1e-20, 1e4), st.booleans())
def test_fairseqs_floor_is_where_its_loop_ends(factor, minimum, strict):
    make = presets.fairseq if strict else presets.metaseq
    factor = factor if strict else float(math.ceil(factor))
    rule = make(2.0**15, scale_factor=factor, min_loss_scale=minimum)
    scale = 2.0**15
    while scale / factor > minimum or (not strict and scale / factor == minimum):
        scale /= factor
    assert rule.min_scale == pytest.approx(scale, rel=1e-9)


def log_max(magnitudes, finite, nonfinite_log, log_max=16.0):
    """The log-normal rule in float64, averages as sums."""
    x = np.where(finite, np.log2(magnitudes), nonfinite_log)
    for steps in range(1, len(x) + 1):
        age = np.arange(steps)[::-1]
        fast, slow = 0.99**age, 0.999**age
        mean = np.average(x[:steps], weights=fast)
        slow_mean = np.average(x[:steps], weights=slow)
        variance = np.average((x[:steps] - slow_mean) ** 2, weights=slow)
        yield 2 ** (log_max - mean - 3.09 * math.sqrt(variance))


@pytest.mark.parametrize("overflow", [None, 90])
def test_the_log_normal_rule_equals_its_oracle(overflow):
    rng = np.random.default_rng(0)
    magnitudes = np.exp2(rng.normal(-5, 2, 120)).astype(np.float32)
    finite = np.arange(120) != overflow
    rule = presets.openseq2seq_logmax(scale_min=0.0, scale_max=math.inf)
    _, scales = jax.lax.scan(
        lambda s, x: (new := rule.update(s, *x), new.loss_scale),
        rule.init(),
        (jnp.asarray(finite), jnp.asarray(magnitudes)),
    )
    expected = np.clip(list(log_max(magnitudes, finite, 2.0**16)), SMALLEST, LARGEST)
    # The variance is a difference in float32.
    np.testing.assert_allclose(scales[10:], expected[10:], rtol=1e-2)


def test_the_log_normal_scale_is_rounded_down_to_a_power_of_two():
    rule = ls.LogNormalLossScale()
    exact = presets.openseq2seq_logmax()
    states = [rule.init(), exact.init()]
    for magnitude in (0.3, 0.7, 0.1, 0.4):
        states = [
            r.update(s, True, magnitude)
            for r, s in zip((rule, exact), states, strict=True)
        ]
        rounded, scale = (float(state.loss_scale) for state in states)
        assert rounded == 2.0 ** math.floor(math.log2(scale))


def test_all_zero_gradients_leave_the_log_normal_rule_alone():
    """In OpenSeq2Seq the scale is NaN from the first one on."""
    rule = ls.LogNormalLossScale()
    state = rule.update(rule.init(), True, 0.0)
    assert float(state.loss_scale) == rule.init_scale
    state = rule.update(state, True, 0.5)
    again = rule.update(state, True, 0.0)
    assert float(again.loss_scale) == float(state.loss_scale) != rule.init_scale
    assert again.memory == state.memory


def test_one_overflow_does_not_paralyse_the_log_normal_rule():
    """OpenSeq2Seq counts it as 2**65536 and stays at its floor."""
    after = {}
    for rule in (ls.LogNormalLossScale(), presets.openseq2seq_logmax()):
        state = rule.init()
        for step in range(400):
            state = rule.update(state, step != 100, 2.0**-10)
        after[rule.power_of_two] = float(state.loss_scale)
    assert after == {True: pytest.approx(2.0**20, rel=7), False: 1.0}
    assert after[True] > 2.0**16


@given(
    st.integers(-140, 100),
    st.floats(0.5, 1, exclude_max=True, width=32),
    st.integers(0, 6),
    st.sampled_from(["float16", "float8_e5m2", "bfloat16", "float32"]),
)
def test_the_headroom_is_kept_and_no_more(exponent, mantissa, headroom, dtype):
    rule = ls.HeadroomLossScale(
        headroom=headroom, dtype=dtype, min_scale=SMALLEST, max_scale=LARGEST
    )
    magnitude = float(np.float32(math.ldexp(mantissa, exponent)))
    state = rule.update(rule.init(), True, magnitude)
    scale = float(state.loss_scale)
    assert math.frexp(scale)[0] == 0.5
    top = float(jnp.finfo(dtype).max) / 2.0**headroom
    if magnitude < SMALLEST:
        assert scale == rule.init_scale or scale == LARGEST
    else:
        assert scale * magnitude <= top or scale == SMALLEST
        assert 2 * scale * magnitude > top or scale == LARGEST


def test_the_headroom_rule_follows_at_once_and_forgets_slowly():
    rule = ls.HeadroomLossScale(half_life=100, headroom=4, max_scale=2.0**40)
    state = rule.update(rule.init(), True, 0.99 * 2.0**-20)
    assert float(state.loss_scale) == 2.0**32
    state = rule.update(state, True, 0.99 * 2.0**-10)
    assert float(state.loss_scale) == 2.0**22
    for _ in range(98):
        state = rule.update(state, True, 2.0**-20)
        assert float(state.loss_scale) == 2.0**22
    for _ in range(2):
        state = rule.update(state, True, 2.0**-20)
    assert float(state.loss_scale) == 2.0**23


def test_an_overflow_of_what_the_headroom_rule_cannot_see_is_remembered():
    rule = ls.HeadroomLossScale(half_life=100)
    state = rule.update(rule.init(), True, 2.0**-10)
    before = float(state.loss_scale)
    state = rule.update(state, False, 2.0**-10)
    assert float(state.loss_scale) == before / 4
    for _ in range(90):
        state = rule.update(state, True, 2.0**-10)
        assert float(state.loss_scale) == before / 4
    for _ in range(120):
        state = rule.update(state, True, 2.0**-10)
    assert float(state.loss_scale) == before


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_without_headroom_the_largest_gradient_does_not_overflow(dtype):
    rule = ls.HeadroomLossScale(headroom=0, dtype=dtype, max_scale=LARGEST)
    for magnitude in np.linspace(1e-3, 2e-3, 50, dtype=np.float32):
        scale = rule.update(rule.init(), True, magnitude).loss_scale
        assert jnp.isfinite((scale * magnitude).astype(dtype))


@pytest.mark.parametrize("name", ["headroom", "log-normal", "metaseq", "deepspeed"])
def test_numbers_that_are_traced_act_as_pythons_own(name):
    """As ``optax.inject_hyperparams`` has them."""
    rule = RULES[name]
    fields = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    numbers = {n: x for n, x in fields.items() if type(x) in (int, float)}
    rest = {n: x for n, x in fields.items() if n not in numbers}
    run = (jnp.arange(12) % 5 != 3, 2.0 ** -jnp.arange(12.0))

    @jax.jit
    def states(numbers):
        traced = type(rule)(**rest, **numbers)
        return jax.lax.scan(
            lambda s, x: (new := advance(traced, s, *x), new), traced.init(), run
        )[1]

    arrays = jax.tree.map(jnp.float32, numbers)
    for traced, state in zip(
        jax.tree.leaves(states(arrays)), jax.tree.leaves(states(numbers)), strict=True
    ):
        np.testing.assert_allclose(traced, state, rtol=1e-4)


@pytest.mark.parametrize("value", ["1", None, jnp.ones(2), True, 1j, [1.0]])
def test_a_magnitude_that_is_no_number_is_refused(value):
    for rule in (ls.HeadroomLossScale(), ls.LogNormalLossScale()):
        with pytest.raises(ValueError, match="`max_magnitude` must be one real number"):
            rule.update(rule.init(), True, value)


@given(
    st.integers(-20, 60),
    st.floats(0, 6, width=32),
    st.sampled_from([0.5, 0.25, 0.125]),
    st.sampled_from(["float16", "bfloat16", "float8_e4m3fn"]),
)
def test_an_overflow_lowers_the_headroom_scale_by_its_factor_and_no_more(
    exponent, headroom, factor, dtype
):
    rule = ls.HeadroomLossScale(
        headroom=headroom,
        dtype=dtype,
        backoff_factor=factor,
        min_scale=2.0**-30,
        max_scale=2.0**70,
    )
    state = rule.init()._replace(loss_scale=jnp.float32(2.0**exponent))
    state = rule.update(state, False, jnp.inf)
    assert float(state.loss_scale) == factor * 2.0**exponent
    if exponent >= 6:  # below, what would overflow bfloat16 is no float32
        after = rule.update(state, True, 2.0**-126)
        assert float(after.loss_scale) == float(state.loss_scale)


def test_an_overflow_never_raises_a_scale_from_below_the_limits():
    rule = ls.HeadroomLossScale(min_scale=1.0)
    state = rule.init()._replace(loss_scale=jnp.float32(0.25))
    assert float(rule.update(state, False).loss_scale) == 0.25
    assert float(rule.update(state, True, 1.0).loss_scale) == 2.0**12


@pytest.mark.parametrize("name", ["headroom", "log-normal"])
def test_a_magnitude_that_is_nan_says_nothing(name):
    """A maximum may be NaN where the flag is False, or in a state that was loaded."""
    rule = RULES[name]
    state = rule.update(rule.init(), True, 2.0**-10)
    for flag in (True, False):
        assert_same_bits(
            rule.update(state, flag, jnp.nan), rule.update(state, flag, 0.0)
        )
    lost = state._replace(memory=jax.tree.map(lambda x: x * jnp.nan, state.memory))
    fresh = rule.update(rule.init(), True, 2.0**-12)
    assert_same_bits(rule.update(lost, True, 2.0**-12), fresh)


def test_the_headroom_rule_learns_nothing_of_zero_gradients():
    rule = ls.HeadroomLossScale()
    state = rule.update(rule.init(), True, 0.0)
    assert float(state.loss_scale) == rule.init_scale
    assert float(rule.update(state, True).loss_scale) == rule.init_scale


BAD = [
    (ls.HeadroomLossScale, "headroom", -1),
    (ls.HeadroomLossScale, "headroom", math.nan),
    (ls.HeadroomLossScale, "half_life", 0),
    (ls.HeadroomLossScale, "dtype", "int8"),
    (ls.HeadroomLossScale, "dtype", "half a float"),
    (ls.HeadroomLossScale, "dtype", None),
    (ls.HeadroomLossScale, "backoff_factor", 1.0),
    (ls.LogNormalLossScale, "beta1", 1.0),
    (ls.LogNormalLossScale, "beta2", 0),
    (ls.LogNormalLossScale, "log_max", math.inf),
    (ls.LogNormalLossScale, "overflow_std_dev", -1),
    (ls.LogNormalLossScale, "nonfinite_log", "16"),
    (ls.LogNormalLossScale, "power_of_two", 1),
    (presets.TolerantLossScale, "tolerance", 1.5),
    (presets.TolerantLossScale, "tolerance", True),
    (presets.TolerantLossScale, "interval_follows_scale", None),
    (presets.VerbatimLossScale, "first_growth_late", 1),
    (presets.VerbatimLossScale, "clips_every_step", "no"),
    (presets.VerbatimLossScale, "scale_dtype", "float64"),
    (presets.apex_amp, "scale_window", 0),
    (presets.apex_amp, "max_loss_scale", -1),
    (presets.apex_amp, "loss_scale", 0.5),
    (presets.deepspeed, "scale_factor", 1),
    (presets.deepspeed, "delayed_shift", 0),
    (presets.deepspeed, "consecutive_hysteresis", 1),
    (presets.deepspeed_fp16, "initial_scale_power", 200),
    (presets.deepspeed_fp16, "initial_scale_power", "16"),
    (presets.deepspeed_fp16, "loss_scale_window", 0),
    (presets.deepspeed_fp16, "hysteresis", 0),
    (presets.fairseq, "scale_factor", 1.0),
    (presets.fairseq, "tolerance", -0.1),
    (presets.fairseq, "min_loss_scale", math.nan),
    (presets.fairseq, "scale_window", 0),
    (presets.flax_dynamic_scale, "scale", 0),
    (presets.flax_dynamic_scale, "growth_interval", 0),
    (presets.flax_dynamic_scale, "minimum_scale", -1),
    (presets.jmp_dynamic, "loss_scale", jnp.float32(0)),
    (presets.keras_loss_scale, "initial_scale", math.inf),
    (presets.keras_loss_scale, "dynamic_growth_steps", 1.5),
    (presets.megatron, "initial_scale", 0),
    (presets.metaseq, "min_loss_scale", -1),
    (presets.mindspore_dynamic, "init_loss_scale", 0),
    (presets.mindspore_dynamic, "scale_factor", 0.5),
    (presets.mindspore_fixed, "drop_overflow_update", 1),
    (presets.mpx_dynamic, "loss_scaling", -1),
    (presets.openseq2seq_backoff, "scale_max", math.nan),
    (presets.openseq2seq_logmax, "log_max", 17),
    (presets.tf_dynamic_loss_scale, "multiplier", 1),
    (presets.tf_dynamic_loss_scale, "increment_period", 0),
    (presets.tf_fixed_loss_scale, "loss_scale_value", 0.5),
    (presets.tf_keras_loss_scale, "dynamic", 128),
    (presets.tf_keras_loss_scale, "initial_scale", -1),
    (presets.torch_grad_scaler, "enabled", None),
    (presets.torch_grad_scaler, "backoff_factor", 1.5),
]


def test_a_floor_above_the_ceiling_is_refused_by_both_names():
    with pytest.raises(ValueError, match="`min_loss_scale` must not exceed `max_loss"):
        presets.apex_amp(min_loss_scale=8.0, max_loss_scale=4.0)
    with pytest.raises(ValueError, match="`min_scale` must not exceed `max_scale`"):
        presets.VerbatimLossScale(min_scale=8.0, max_scale=4.0)


@pytest.mark.parametrize(("make", "name", "value"), BAD)
def test_a_bad_argument_is_refused_by_the_name_that_the_user_gave(make, name, value):
    required = {presets.jmp_dynamic, presets.mpx_dynamic, presets.tf_fixed_loss_scale}
    assert make not in required or name in inspect.signature(make).parameters
    with pytest.raises(ValueError, match=rf"^`{name}` must .*got ") as error:
        make(**{name: value})
    assert str(error.value).endswith("."), "a sentence with the way out"
