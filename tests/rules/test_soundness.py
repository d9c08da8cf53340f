"""States in, states out: whatever was loaded or injected, the range of scales holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_rule import RULES
from helpers import assert_same_bits, assert_same_types, enable_x64

import optax_lossscale as ls

SMALLEST, LARGEST = 2.0**-126, 2.0**126

# One of every class, in the forms that differ in more than numbers.
KINDS = {
    name: RULES[name]
    for name in ("fixed", "dynamic", "headroom", "log-normal", "metaseq", "deepspeed")
} | {
    "not skipping": ls.FixedLossScale(skip_nonfinite=False),
    "jmp in float16": RULES["jmp in float16"],
    "mpx": RULES["mpx_dynamic"],
    "not a power of two": ls.LogNormalLossScale(power_of_two=False),
}
QUICK = ("dynamic", "headroom", "metaseq", "jmp in float16")
every_kind = pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=() if name in QUICK else pytest.mark.slow, id=name)
        for name, rule in KINDS.items()
    ],
)

INJECTED = [np.nan, np.inf, -np.inf, 0.0, -1.0, 2.0**31, 1e-45]
FLAGS = np.arange(16) % 5 != 3
MAGNITUDES = np.float32([2.0**-10, 0, np.inf, np.nan] * 4)


def in_parts(rule):
    """The numbers of a rule, and a function that makes it of others."""
    fields = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    numbers = {name: x for name, x in fields.items() if type(x) in (int, float)}
    rest = {name: x for name, x in fields.items() if name not in numbers}
    return numbers, functools.partial(type(rule), **rest)


def magnitude_args(rule, magnitude):
    return (magnitude,) if rule.uses_max_magnitude else ()


def assert_sound(states):
    scale = np.asarray(states.loss_scale)
    assert np.all((scale >= SMALLEST) & (scale <= LARGEST)), scale
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(states.rule_state))


@every_kind
def test_the_range_holds_whatever_is_injected(rule):
    """``optax.inject_hyperparams`` traces what a schedule or a user puts there."""
    numbers, make = in_parts(rule)
    cases = [{**numbers, name: x} for name in numbers for x in INJECTED]
    cases += [dict.fromkeys(numbers, x) for x in INJECTED]

    @jax.jit
    @jax.vmap
    def run(numbers):
        injected = make(**numbers)

        def step(state, x):
            state = injected.update(state, x[0], *magnitude_args(injected, x[1]))
            return state, state

        first = injected.init()
        lost = first._replace(loss_scale=jnp.float32(jnp.nan))
        starts = [first, rule.init()] + [lost] * rule.skip_nonfinite
        starts = jax.tree.map(lambda *x: jnp.stack(x), *starts)
        runs = jax.vmap(lambda s: jax.lax.scan(step, s, (FLAGS, MAGNITUDES))[1])
        return first, runs(starts)

    stacked = {name: np.float32([case[name] for case in cases]) for name in numbers}
    for states in run(stacked):
        assert_sound(states)


@every_kind
def test_numbers_of_any_width_keep_the_types_of_the_state(rule):
    numbers, make = in_parts(rule)
    with enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for real, whole in (
            (np.float64, np.int64),
            (np.float32, np.int32),
            (np.float32, np.float32),
        ):
            types = {int: whole, float: real}
            others = {name: types[type(x)](x) for name, x in numbers.items()}

            def step(numbers, state):
                injected = make(**numbers)
                return injected.update(state, True, *magnitude_args(injected, 1.0))

            new_state = jax.eval_shape(step, others, rule.init())
            assert_same_types(new_state, rule.init())


def recovered(rule, state):
    return rule.update(state, True, *magnitude_args(rule, 2.0**-10))


LOST = [0, -1, np.float16(np.inf), np.nan, np.float32(np.nan), jnp.float16(jnp.inf)]


@every_kind
def test_numbers_of_other_types_are_converted_and_a_lost_scale_recovers(rule):
    first = rule.init()
    expected = recovered(rule, first)
    for value in [*LOST, 8, 8.0, np.float64(8), jnp.bfloat16(8), np.float32(8)]:
        state = recovered(rule, optax.tree.set(first, loss_scale=value))
        assert_same_types(state, expected)
        if rule.skip_nonfinite:
            assert_sound(state)
    counted = first._replace(skipped_steps=7, growth_tracker=np.int64(1))
    assert_same_types(recovered(rule, counted), expected)
    if rule.skip_nonfinite:
        assert int(recovered(rule, counted).skipped_steps) == 7


@every_kind
def test_a_state_that_was_cast_as_a_whole_comes_back_in_its_own_types(rule):
    state = recovered(rule, rule.init())
    half = jax.tree.map(lambda x: x.astype(jnp.float16), state)
    again = recovered(rule, half)
    assert_same_types(again, state)
    if rule.skip_nonfinite:
        assert_sound(again)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), state)
    assert_same_bits(recovered(rule, single), recovered(rule, state))


HEADROOM = ls.HeadroomLossScale()
STATE = HEADROOM.init()
SEVERAL = jax.tree.map(lambda x: jnp.stack([x, x]), STATE)
NOT_STATES = {
    "None": (None, TypeError, "be a LossScaleState, .* got None"),
    "a rule": (HEADROOM, TypeError, "got a HeadroomLossScale"),
    "an optimizer state": (
        ls.with_loss_scaling(optax.sgd(0.1)).init(jnp.zeros(2)),
        TypeError,
        "`get_loss_scale_state` returns",
    ),
    "a tuple": (tuple(STATE), TypeError, "be a LossScaleState"),
    "of an ensemble": (SEVERAL, ValueError, "of one run, .* inside `jax.vmap`"),
    "no numbers": (
        STATE._replace(growth_tracker=None),
        ValueError,
        "hold numbers, got None for `growth_tracker`",
    ),
    "only its types": (
        jax.eval_shape(HEADROOM.init),
        ValueError,
        "hold numbers, .*for `loss_scale`",
    ),
    "of another rule": (
        ls.DynamicLossScale().init(),
        ValueError,
        r"memory of a HeadroomLossScale, .* `rule.init\(\)`",
    ),
    "a memory of an ensemble": (
        STATE._replace(rule_state=SEVERAL.rule_state),
        ValueError,
        r"memory of a HeadroomLossScale, .* of shapes \[\(\)\], got",
    ),
}


@pytest.mark.parametrize("case", NOT_STATES.values(), ids=NOT_STATES)
def test_what_is_no_state_of_one_run_is_refused(case):
    state, error, message = case
    with pytest.raises(error, match=f"^`state` must .*{message}"):
        HEADROOM.update(state, True)


def test_a_rule_that_remembers_nothing_leaves_what_another_remembered():
    state = HEADROOM.update(STATE, True, 0.25)

    def update(max_scale):
        return ls.DynamicLossScale(max_scale=max_scale).update(state, True)

    for new_state in (update(2.0**24), jax.jit(update)(2.0**24)):
        assert_same_bits(new_state.rule_state, state.rule_state)


def test_inside_vmap_each_member_has_a_scale_of_its_own():
    flags, magnitudes = jnp.array([True, False]), jnp.ones(2)
    state = jax.vmap(HEADROOM.update)(SEVERAL, flags, magnitudes)
    assert state.loss_scale.tolist() == [2.0**12, 2.0**13]
