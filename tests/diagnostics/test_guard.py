"""check_loss_scale: what it raises and warns of, on the host and in compiled loops."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from book import page
from every_rule import every_rule
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import normal

import optax_lossscale as ls
from optax_lossscale import presets

RULE = ls.DynamicLossScale(init_scale=2.0**8)
FIRST = RULE.init()
STOPPED = FIRST._replace(consecutive_skips=jnp.int32(101))
GOOD, BAD = np.float32([1, 1]), np.float32([1, np.inf])
ERRORS = []

OPTIONS = ("max_consecutive_skips", "every", "on_error", "axis_name")
compiled_check = jax.jit(ls.check_loss_scale, static_argnames=OPTIONS)


def reports(function, *args, **kwargs):
    """The errors and warnings of a call. A page has the sentence of each warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "No loss has been scaled")
        jax.block_until_ready(function(*args, **kwargs))
        jax.effects_barrier()
    errors, ERRORS[:] = ERRORS[:], []
    assert all(isinstance(x, ls.LossScaleError) for x in errors)
    texts = [str(w.message) for w in warned]
    assert all(x.split("\n")[0] in page("troubleshooting") for x in texts)
    return [*map(str, errors), *texts]


ROW, RATE, INVALID = "The last ", "Recently, 26%", "The loss scale is not a positive"
TOP, OFTEN = "The loss scale is 2**24 or more. None", "More than 5 % of the recent"
UNDONE, ZERO = "The gradients are not finite, but", "All gradients are exactly 0"
# The numbers in the docstring of check_loss_scale. FREE skips in all are not reported.
# COUNTED skips in a row raise the rate, as the docstring of LossScaleState says.
LIMIT, LONG, FREE, TOP_SCALE, COUNTED = 100, 500, 60, 2.0**24, 25

ZEROS = {"w": np.zeros(3), "b": np.zeros(2, np.float16), "count": np.int32(1)}
TINY, NANS = ({**ZEROS, "b": np.float16([0, x])} for x in (2.0**-24, np.nan))
EMPTY, ONE = {"empty": np.zeros((0, 3))}, np.float32(1)
RIGHT = {"grads": TINY, "value": ONE, "on_error": ERRORS.append}
FOUR, ALL = {"max_consecutive_skips": 4, "every": 3}, 2**31 - 1


def step(skips=0, rate=0, total=0, tracker=0, scale=256, is_fixed=False, **arguments):
    """The state after a step, and arguments, by default of a step without a fault."""
    numbers = (scale, tracker, 1, is_fixed, total, skips, rate)
    fields = map(np.asarray, numbers, [x.dtype for x in FIRST[:-1]])
    return ls.LossScaleState(*fields), RIGHT | arguments


many = functools.partial(step, rate=0.06, total=FREE + 1)
# A compiled loop sees every step, and reports most events in some of them.
NOWHERE, AT_ONCE, ANYWHERE = [], ["at once"], ["at once", "in a loop"]
STATES = {
    "100 skips in a row": (step(skips=LIMIT), ROW, NOWHERE),
    "101 skips in a row": (step(skips=LIMIT + 1), ROW + "101 steps", ANYWHERE),
    "1 skip, 0 allowed": (
        step(skips=1, max_consecutive_skips=0),
        ROW + "step was",
        ANYWHERE,
    ),
    "5 skips, 4 allowed": (step(skips=5, **FOUR), ROW, ANYWHERE),
    "6 skips, 4 allowed": (step(skips=6, **FOUR), ROW, NOWHERE),
    "8 skips, 4 allowed": (step(skips=8, **FOUR), ROW + "8 steps", ANYWHERE),
    "largest limit": (step(skips=ALL, max_consecutive_skips=ALL), ROW, NOWHERE),
    "101 skips, high rate": (step(skips=LIMIT + 1, rate=0.26), ROW, ANYWHERE),
    "rate of 1/4": (step(skips=1, rate=0.25), RATE, NOWHERE),
    "above 1/4": (step(skips=1, rate=0.26), RATE, ANYWHERE),
    "above 1/4, 8th skip": (step(skips=1, rate=0.26, total=8, **FOUR), RATE, NOWHERE),
    # In a long row, the limit decides alone; afterwards, the rate of a fixed scale.
    "above 1/4, 25 in a row": (step(skips=COUNTED, rate=0.26), RATE, ANYWHERE),
    "above 1/4, 26 in a row": (step(skips=COUNTED + 1, rate=0.26), RATE, NOWHERE),
    "above 1/4, applied": (step(rate=0.26, total=60), RATE, AT_ONCE),
    **{f"scale {x}": (step(scale=x), INVALID, ANYWHERE) for x in (0, np.inf, np.nan)},
    "scale of 0, skips": (step(skips=LIMIT + 1, scale=0.0), INVALID, ANYWHERE),
    "top for 499": (step(tracker=LONG - 1, scale=TOP_SCALE), TOP, NOWHERE),
    "top for 500": (step(tracker=LONG, scale=TOP_SCALE), TOP, ANYWHERE),
    "top for 501": (step(tracker=LONG + 1, scale=TOP_SCALE), TOP, AT_ONCE),
    "top for 1500": (step(tracker=3 * LONG, scale=TOP_SCALE), TOP, ANYWHERE),
    "top, one skip": (step(tracker=LONG, total=1, scale=TOP_SCALE), TOP, NOWHERE),
    "below the top": (step(tracker=LONG, scale=TOP_SCALE / 2), TOP, NOWHERE),
    # Skips that no scale cures: at a low or fixed one, or if they keep the tracker.
    "often, low": (many(skips=1, scale=1.0), OFTEN, ANYWHERE),
    "often, fixed": (many(skips=1, is_fixed=True), OFTEN, ANYWHERE),
    "often, tracker": (many(skips=1, tracker=1), OFTEN, ANYWHERE),
    "often, no third skip": (many(skips=1, tracker=3, **FOUR), OFTEN, AT_ONCE),
    "often, applied": (many(scale=1.0), OFTEN, AT_ONCE),
    "above 10 %": (many(skips=1, rate=0.11), OFTEN, ANYWHERE),
    "often, 1/4": (many(skips=1, rate=0.25), OFTEN, ANYWHERE),
    # The rule may be looking for its scale, its first one, or one after a jump.
    "first of a search": (many(skips=1, scale=2), OFTEN, NOWHERE),
    "after a search": (many(tracker=3), OFTEN, NOWHERE),
    "in a search": (many(skips=2, scale=1.0), OFTEN, NOWHERE),
    "60th skip": (many(skips=1, scale=1.0, total=FREE), OFTEN, NOWHERE),
    # A rule that grows every 20 steps has this rate after a skip.
    "healthy": (many(skips=1, scale=1.0, rate=1 / 21 + 0.005), OFTEN, NOWHERE),
    "NaN, applied": (step(grads=NANS), UNDONE, ANYWHERE),
    "NaN, skipped": (step(skips=1, grads=NANS), UNDONE, NOWHERE),
    # A rule of a fixed scale may be one that never skips.
    "NaN, fixed": (step(grads=NANS, is_fixed=True), UNDONE, NOWHERE),
    "NaN, fixed, skip": (step(total=1, grads=NANS, is_fixed=True), UNDONE, ANYWHERE),
    "zeros": (step(tracker=1, grads=ZEROS), ZERO, ANYWHERE),
    "zeros, 2nd step": (step(tracker=2, grads=ZEROS), ZERO, AT_ONCE),
    "zeros, 501st step": (step(tracker=LONG + 1, grads=ZEROS), ZERO, ANYWHERE),
    "zeros, no loss": (step(tracker=1, grads=ZEROS, value=None), ZERO, ANYWHERE),
    "zeros, loss of 0": (step(tracker=1, grads=ZEROS, value=0 * ONE), ZERO, NOWHERE),
    "zeros, skipped": (step(skips=1, tracker=1, grads=ZEROS), ZERO, NOWHERE),
    "one is not 0": (step(tracker=1), ZERO, NOWHERE),
    "no elements": (step(tracker=1, grads=EMPTY), ZERO, NOWHERE),
}


@pytest.mark.parametrize("place", ANYWHERE)
@pytest.mark.parametrize(("after", "text", "places"), STATES.values(), ids=STATES)
def test_guard_reports_an_event(after, text, places, place):
    check = compiled_check if place == "in a loop" else ls.check_loss_scale
    state, arguments = after
    texts = reports(check, state, **arguments)
    assert [x[: len(text)] for x in texts] == ([text] if place in places else [])


@functools.partial(jax.jit, static_argnums=0)
def run(rule, magnitudes):
    """The states of a run in float16. The loss is infinite where the magnitude is."""
    tx = ls.with_loss_scaling(optax.MultiSteps(optax.sgd(1e-3), 2), rule)

    def step(opt_state, magnitude):
        is_finite = magnitude * ls.get_loss_scale(opt_state) < 65504
        grads = GOOD * jnp.where(is_finite, magnitude, jnp.nan)
        value = jnp.where(magnitude == jnp.inf, magnitude, 1)
        opt_state = tx.update(grads, opt_state, GOOD, value=value)[1]
        ls.check_loss_scale(opt_state, grads=grads, value=value, on_error=ERRORS.append)
        return opt_state, ls.get_loss_scale_state(opt_state)

    return jax.lax.scan(step, tx.init(GOOD), magnitudes)[1]


def reports_of_run(rule, magnitudes):
    """The reports of the loop, and then those on the host of all its states."""
    magnitudes, states = np.float32(magnitudes), []
    in_loop = reports(lambda: states.append(run(rule, magnitudes)))
    return in_loop, reports(ls.check_loss_scale, states[0], on_error=ERRORS.append)


INF, NAN, LARGE = np.inf, np.nan, 2.0**22
WAVES, TORCH = 2 ** (0.3 * normal(1500)), presets.torch_grad_scaler()
DYNAMIC, FIXED = ls.DynamicLossScale, ls.FixedLossScale(1.0)
HEALTHY = [DYNAMIC(growth_interval=n) for n in (20, 200)]
HEALTHY += [DYNAMIC(2.0**24, growth_interval=20), ls.HeadroomLossScale(2.0**24)]
HEALTHY += [presets.megatron(min_scale=2.0**-14)]
# The rate is 0.22 after 36 skips. Then 4 % of the batches are bad.
HIGH_START = 19 * [INF] + 200 * [1] + 14 * (24 * [1] + [INF])
SILENT = [
    *((rule, size * WAVES) for rule in HEALTHY for size in (2.0**-4, 2.0**26)),
    (DYNAMIC(2.0**32, max_scale=2.0**32), HIGH_START),
    (TORCH, 200 * [LARGE]),  # its scale is below 1
]


@pytest.mark.parametrize(("rule", "magnitudes"), SILENT)
def test_guard_is_silent_in_a_healthy_run(rule, magnitudes):
    assert reports_of_run(rule, magnitudes) == ([], [])


@every_rule
def test_guard_takes_no_bad_batch_for_a_lost_update(rule):
    assert reports_of_run(rule, np.resize([1, 1, 1, NAN, 1, 1, 1], 12)) == ([], [])


# If every second step is skipped, this is the rate after n skips.
HIGH = sum((1 - 0.99 ** (2 * n)) / 1.99 > 1 / 4 for n in range(1, 101))
EIGHTH, TENTH = 7 * [1] + [INF], 9 * [1] + [NAN]
# The scale first falls from 2**16 to 2**-7: 2**22 times 2**-6 still overflows.
LARGE_TENTH = 200 * [LARGE] + 60 * (9 * [LARGE] + [NAN])
RUNS = {
    "25 bad, then each tenth": (RULE, 25 * [NAN] + 40 * TENTH, OFTEN, 25 + 40 - FREE),
    "each eighth loss infinite": (DYNAMIC(), 100 * EIGHTH, OFTEN, 100 - FREE),
    "each tenth bad, scale below 1": (TORCH, LARGE_TENTH, OFTEN, 16 + 7 + 60 - FREE),
    "all bad": (RULE, [1, 1, 1] + 105 * [NAN], ROW, 105 - LIMIT),
    "each second bad": (DYNAMIC(), 100 * [NAN, 1], "Recently, 25%", HIGH),
    # In a row, the limit decides alone. The host sees its share when it is over.
    "60 of 100 bad": (FIXED, 60 * [NAN] + 40 * [1], "Recently, 45%", 0),
}


@pytest.mark.parametrize(("rule", "magnitudes", "text", "n"), RUNS.values(), ids=RUNS)
def test_guard_reports_each_skip_that_is_too_many(rule, magnitudes, text, n):
    in_loop, on_host = reports_of_run(rule, magnitudes)
    assert [x[:9] for x in in_loop] == [text[:9]] * n
    assert [x[: len(text)] for x in on_host] == [text]


def test_errors_raise_and_end_a_compiled_program(caplog):
    with pytest.raises(ls.LossScaleError, match="^The last 101 steps were all skipped"):
        ls.check_loss_scale(STOPPED)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        reports(compiled_check, STOPPED)
    # jax has no better way, and logs it besides.
    message = "LossScaleError: The last 101 steps were all skipped, more than"
    assert message in str(error.value) and message in caplog.text
    reports(compiled_check, FIRST)  # as if nothing had been


def test_warnings_point_at_the_line_of_the_user():
    with pytest.warns(
        UserWarning, match=r"2\*\*24 (.|\n)*`jax.value_and_grad`"
    ) as seen:
        ls.check_loss_scale(FIRST._replace(loss_scale=TOP_SCALE, growth_tracker=LONG))
    assert seen[0].filename == __file__


def test_guard_calls_the_host_only_when_due():
    def lines(arrays):
        check = functools.partial(ls.check_loss_scale, FIRST)
        program = jax.make_jaxpr(lambda x: check(grads=[x] * arrays))(GOOD)
        rest = [str(eqn) for eqn in program.eqns if eqn.primitive.name != "cond"]
        assert "debug_callback" in str(program) and "callback" not in "".join(rest)
        return len("\n".join(rest).splitlines())

    assert lines(21) - lines(1) < 20 * 20, "a report takes 70 for each array"
    state, grads, value = FIRST, jnp.asarray(GOOD), jnp.asarray(ONE)
    with jax.transfer_guard("disallow"):
        ls.check_loss_scale(state, grads=grads, value=value)


def test_one_device_along_the_axis_calls_the_host():
    errors = {None: [], "x": [], ("x", "y"): []}

    def check(x, state):
        for axis_name, found in errors.items():
            options = {"on_error": found.append, "axis_name": axis_name}
            ls.check_loss_scale(state, grads=[x], **options)
        return x

    mapped = on_mesh(check, (P("x"), P()), P("x"), make_mesh(x=4, y=2))
    reports(mapped, np.ones((8, 1), np.float32), STOPPED)
    assert [len(found) for found in errors.values()] == [8, 2, 1]


def test_report_names_the_member_of_an_ensemble():
    options = {"max_consecutive_skips": 3, "every": 2, "on_error": ERRORS.append}
    check = functools.partial(ls.check_loss_scale, **options)
    states = jax.vmap(lambda n: STOPPED._replace(consecutive_skips=n))(np.arange(8))
    texts = reports(jax.jit(jax.vmap(check)), states)
    assert sorted(x[:16] for x in texts) == ["The last 4 steps", "The last 6 steps"]
    [text] = reports(check, states)
    assert text.startswith("The last 4 steps of member 4 were all skipped")
    # If a member skips, its gradients may be NaN, and zeros say nothing of them.
    states = jax.tree.map(lambda x: x[:2], states)
    for grads in (np.stack([GOOD, BAD]), np.zeros((2, 2), np.float32)):
        assert reports(check, states, grads=grads) == []
