"""check_loss_scale: what it raises and warns of, on the host and in compiled loops."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import normal

import optax_lossscale as ls
from optax_lossscale import presets

DEFAULT = ls.DynamicLossScale()
FIRST = DEFAULT.init()
STOPPED = FIRST._replace(consecutive_skips=jnp.int32(101))
ERRORS = []

OPTIONS = ("max_consecutive_skips", "every", "on_error", "axis_name")
compiled_check = jax.jit(ls.check_loss_scale, static_argnames=OPTIONS)


def reports(function, *args, **kwargs):
    """The errors and warnings of a call."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        jax.block_until_ready(function(*args, **kwargs))
        jax.effects_barrier()
    errors, ERRORS[:] = ERRORS[:], []
    assert all(isinstance(x, ls.LossScaleError) for x in errors)
    return [*map(str, errors), *(str(w.message) for w in warned)]


# How a report of each event begins.
LONG = "More than 50 steps in a row were skipped"
IN_A_ROW, RATE, INVALID = "The last ", "Recently, 26%", "The loss scale is not a pos"
TOP, OFTEN = "The loss scale is 2**24 or more. None", "More than 5% of the recent"
UNDONE, ZERO = "The gradients or the loss are not finite", "All gradients are exactly 0"

ZEROS = {"w": np.zeros(3), "b": np.zeros(2, np.float16), "count": np.int32(1)}
TINY, NANS = ({**ZEROS, "b": np.float16([0, x])} for x in (2.0**-24, np.nan))
EMPTY = {"empty": np.zeros((0, 3))}
NONE, ALL = ({"max_consecutive_skips": n} for n in (0, 2**31 - 1))
FOUR = {"max_consecutive_skips": 4, "every": 3}


def step(skips=0, rate=0.0, total=0, tracker=0, scale=8.0, is_fixed=False, **arguments):
    """The state after a step, and arguments, by default of a step without a fault."""
    state = ls.LossScaleState(scale, tracker, 1, is_fixed, total, skips, rate, ())
    return state, {"grads": TINY, "value": 1.0, "on_error": ERRORS.append} | arguments


often = functools.partial(step, rate=0.06, total=61)
# A compiled loop sees every step, and reports most events in some of them.
NOWHERE, EAGER, BOTH = [], ["eager"], ["eager", "compiled"]
EVENTS = {
    "100 skips in a row": (step(skips=100), LONG, EAGER),
    "51 skips in a row": (step(skips=51), LONG, BOTH),
    "50 skips in a row": (step(skips=50), LONG, NOWHERE),
    "51 skips, 50 allowed": (step(skips=51, max_consecutive_skips=50), IN_A_ROW, BOTH),
    "51 skips, fixed scale": (step(skips=51, is_fixed=True), LONG, NOWHERE),
    "101 skips in a row": (step(skips=101), "The last 101 steps", BOTH),
    "1 skip, 0 allowed": (step(skips=1, **NONE), "The last step was", BOTH),
    "5 skips, 4 allowed": (step(skips=5, **FOUR), IN_A_ROW, BOTH),
    "6 skips, every third": (step(skips=6, **FOUR), IN_A_ROW, NOWHERE),
    "8 skips, every third": (step(skips=8, **FOUR), "The last 8 steps", BOTH),
    "all skips allowed": (step(skips=2**31 - 1, **ALL), LONG, EAGER),
    "101 skips at a high rate": (step(skips=101, rate=0.26), IN_A_ROW, BOTH),
    "rate of 1/4": (step(skips=1, rate=0.25), RATE, NOWHERE),
    "rate above 1/4": (step(skips=1, rate=0.26), RATE, BOTH),
    "rate, no third skip": (step(skips=1, rate=0.26, total=8, **FOUR), RATE, NOWHERE),
    # In a long row of a dynamic scale, the limit decides alone.
    "rate, 25 in a row": (step(skips=25, rate=0.26), RATE, BOTH),
    "rate, 26 in a row": (step(skips=26, rate=0.26), RATE, NOWHERE),
    "rate, 60 in a row at a fixed scale": (
        step(skips=60, rate=0.26, is_fixed=True),
        *(RATE, BOTH),
    ),
    "rate, 101 in a row at a fixed scale": (
        step(skips=101, rate=0.26, is_fixed=True),
        *(IN_A_ROW, BOTH),
    ),
    "rate, applied": (step(rate=0.26, total=60), RATE, EAGER),
    "scale of 0": (step(scale=0.0), INVALID, BOTH),
    "infinite scale": (step(scale=np.inf), INVALID, BOTH),
    "scale of NaN": (step(scale=np.nan), INVALID, BOTH),
    "scale of 0, 101 skips": (step(skips=101, scale=0.0), INVALID, BOTH),
    "2**24 for 499 steps": (step(tracker=499, scale=2.0**24), TOP, NOWHERE),
    "2**24 for 500 steps": (step(tracker=500, scale=2.0**24), TOP, BOTH),
    "2**24 for 501 steps": (step(tracker=501, scale=2.0**24), TOP, EAGER),
    "2**24 for 1500 steps": (step(tracker=1500, scale=2.0**24), TOP, BOTH),
    "2**24, one skip": (step(tracker=500, total=1, scale=2.0**24), TOP, NOWHERE),
    "2**23 for 500 steps": (step(tracker=500, scale=2.0**23), TOP, NOWHERE),
    # Skips that no scale cures: at a low or fixed one, or if they keep the tracker.
    "often, scale of 1": (often(skips=1, scale=1.0), OFTEN, BOTH),
    "often, fixed scale": (often(skips=1, is_fixed=True), OFTEN, BOTH),
    "often, tracker kept": (often(skips=1, tracker=1), OFTEN, BOTH),
    "often, no third skip": (often(skips=1, tracker=3, **FOUR), OFTEN, EAGER),
    "often, applied": (often(scale=1.0), OFTEN, EAGER),
    "above 10%": (often(skips=1, rate=0.11), OFTEN, BOTH),
    "often, 1/4": (often(skips=1, rate=0.25), OFTEN, BOTH),
    # The rule may be looking for its scale, its first one, or one after a jump.
    "first skip of a search": (often(skips=1, scale=2.0), OFTEN, NOWHERE),
    "after a search": (often(tracker=3), OFTEN, NOWHERE),
    "long after a search": (often(tracker=500), OFTEN, EAGER),
    "in a search": (often(skips=2, scale=1.0), OFTEN, NOWHERE),
    "often, 60th skip": (often(skips=1, scale=1.0, total=60), OFTEN, NOWHERE),
    # A rule that grows every 20 steps has this rate after a skip.
    "1 of 21": (often(skips=1, scale=1.0, rate=1 / 21 + 0.005), OFTEN, NOWHERE),
    "NaN, applied": (step(grads=NANS), UNDONE, BOTH),
    "NaN, skipped": (step(skips=1, grads=NANS), UNDONE, NOWHERE),
    # A rule of a fixed scale may be one that never skips.
    "NaN, fixed scale": (step(grads=NANS, is_fixed=True), UNDONE, NOWHERE),
    "NaN after a skip": (step(total=1, grads=NANS, is_fixed=True), UNDONE, BOTH),
    "NaN loss, applied": (step(value=np.nan), UNDONE, BOTH),
    "NaN loss, fixed scale": (step(value=np.inf, is_fixed=True), UNDONE, BOTH),
    "NaN loss, skipped": (step(skips=1, value=np.nan), UNDONE, NOWHERE),
    "zeros, first step": (step(tracker=1, grads=ZEROS), ZERO, BOTH),
    "zeros, second step": (step(tracker=2, grads=ZEROS), ZERO, EAGER),
    "zeros, 501st step": (step(tracker=501, grads=ZEROS), ZERO, BOTH),
    "zeros, no loss": (step(tracker=1, grads=ZEROS, value=None), ZERO, BOTH),
    "zeros, loss of 0": (step(tracker=1, grads=ZEROS, value=0.0), ZERO, NOWHERE),
    "zeros, skipped": (step(skips=1, tracker=1, grads=ZEROS), ZERO, NOWHERE),
    "one is not 0": (step(tracker=1), ZERO, NOWHERE),
    "no elements": (step(tracker=1, grads=EMPTY), ZERO, NOWHERE),
}


@pytest.mark.parametrize("place", BOTH)
@pytest.mark.parametrize(("after", "text", "places"), EVENTS.values(), ids=EVENTS)
def test_each_event_is_reported_only_where_it_is_due(after, text, places, place):
    check = compiled_check if place == "compiled" else ls.check_loss_scale
    state, arguments = after
    texts = reports(check, state, **arguments)
    assert [x[: len(text)] for x in texts] == ([text] if place in places else [])


STEPS = 1500  # of the longest run; the shorter ones share its programs


@functools.partial(jax.jit, static_argnums=0)
def run(rule, magnitudes):
    """The states and gradients of a run in float16."""
    tx = ls.with_loss_scaling(optax.identity(), rule)

    def step(opt_state, magnitude):
        is_finite = magnitude * ls.get_loss_scale(opt_state) < 65504
        grads = jnp.where(is_finite, magnitude, jnp.nan)
        opt_state = tx.update(grads, opt_state)[1]
        return opt_state, (opt_state.scale_state._replace(rule_state=()), grads)

    return jax.lax.scan(step, tx.init(0.0), magnitudes)[1]


@jax.jit
def check_each_step(states, grads, steps):
    def check(i, _):
        state, grad = jax.tree.map(lambda x: x[i], (states, grads))
        ls.check_loss_scale(state, grads=grad, on_error=ERRORS.append)

    jax.lax.fori_loop(0, steps, check, None)


def reports_of_run(rule, magnitudes):
    """The reports of a compiled loop, and then those on the host of all states."""
    steps = len(magnitudes)
    states, grads = jax.device_get(run(rule, np.resize(magnitudes, STEPS)))
    in_loop = reports(check_each_step, states, grads, steps)
    states = jax.tree.map(lambda x: np.resize(x[:steps], STEPS), states)
    return in_loop, reports(ls.check_loss_scale, states, on_error=ERRORS.append)


BAD, LARGE = np.inf, 2.0**22
DYNAMIC, TORCH = ls.DynamicLossScale, presets.torch_grad_scaler()
HEALTHY = {
    "grows every 20 steps": DYNAMIC(growth_interval=20),
    "grows every 200 steps": DYNAMIC(growth_interval=200),
    "begins at 2**24": DYNAMIC(2.0**24, growth_interval=20),
    "headroom from 2**24": ls.HeadroomLossScale(2.0**24),
    "Megatron": presets.megatron(min_scale=2.0**-14),
}


@pytest.mark.parametrize("size", [2.0**-4, 2.0**26])
@pytest.mark.parametrize("rule", HEALTHY.values(), ids=HEALTHY)
def test_guard_is_silent_in_a_healthy_run(rule, size):
    assert reports_of_run(rule, size * 2 ** (0.3 * normal(STEPS))) == ([], [])


def test_guard_is_silent_while_a_high_scale_falls():
    """The rate is 0.22 after 36 skips. Then 4% of the batches are bad."""
    magnitudes = 36 * [2.0**19] + 14 * (24 * [2.0**19] + [BAD])
    assert reports_of_run(DYNAMIC(2.0**32, max_scale=2.0**32), magnitudes) == ([], [])


RULES = {
    "dynamic": DEFAULT,
    "headroom": HEALTHY["headroom from 2**24"],
    "fixed": ls.FixedLossScale(),
    "fixed, never skips": ls.FixedLossScale(skip_nonfinite=False),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_guard_is_silent_about_a_bad_batch(rule):
    assert reports_of_run(rule, [1, 1, 1, BAD, 1, 1]) == ([], [])


# If every second step is skipped, this is the rate after n skips.
HIGH = sum((1 - 0.99 ** (2 * n)) / 1.99 > 1 / 4 for n in range(1, 101))
# The warning leaves out the first 60 skips, the error 100 in a row.
EIGHTH, TENTH = 7 * [1] + [BAD], 9 * [1] + [BAD]
# The scale first falls from 2**16 to 2**-7: 2**22 times 2**-6 still overflows.
LARGE_TENTH = 200 * [LARGE] + 60 * (9 * [LARGE] + [BAD])
RUNS = {
    "25 bad, each tenth": (DEFAULT, 25 * [BAD] + 40 * TENTH, {OFTEN: 25 + 40 - 60}),
    "each eighth bad": (DEFAULT, 100 * EIGHTH, {OFTEN: 100 - 60}),
    "each tenth bad, scale below 1": (TORCH, LARGE_TENTH, {OFTEN: 16 + 7 + 60 - 60}),
    "all bad": (DEFAULT, [1, 1, 1] + 105 * [BAD], {IN_A_ROW: 105 - 100, LONG: 1}),
    "each second bad": (DEFAULT, 100 * [BAD, 1], {"Recently, 25%": HIGH}),
}


@pytest.mark.parametrize(("rule", "magnitudes", "counts"), RUNS.values(), ids=RUNS)
def test_compiled_guard_reports_n_skips_and_the_eager_one_once(
    rule, magnitudes, counts
):
    in_loop, on_host = reports_of_run(rule, magnitudes)
    assert [x[:9] for x in in_loop] == [
        x[:9] for x, n in counts.items() for _ in range(n)
    ]
    for found, text in zip(on_host, counts, strict=True):
        assert found.startswith(text)


WITHIN = {
    "jit": lambda f: jax.jit(f)(),
    "scan": lambda f: jax.lax.scan(lambda c, _: (f(), None), 0.0, length=1),
    "cond": lambda f: jax.jit(lambda x: jax.lax.cond(x > 0, f, lambda: x))(1.0),
}


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_concrete_state_is_checked_within_a_compiled_function(within):
    def check():
        ls.check_loss_scale(STOPPED, on_error=ERRORS.append)
        return 0.0

    [text] = reports(within, check)
    assert text.startswith(IN_A_ROW)


def test_error_ends_a_compiled_program(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        reports(compiled_check, STOPPED)
    # jax has no better way, and logs it besides.
    message = "LossScaleError: The last 101 steps were all skipped, more than"
    assert message in str(error.value) and message in caplog.text
    reports(compiled_check, FIRST)  # as if nothing had been


def test_guard_calls_the_host_only_inside_of_a_condition():
    """Outside of it, an array adds few lines."""

    def lines(arrays):
        check = functools.partial(ls.check_loss_scale, FIRST)
        program = jax.make_jaxpr(lambda x: check(grads=[x] * arrays))(np.ones(2))
        rest = [str(eqn) for eqn in program.eqns if eqn.primitive.name != "cond"]
        assert "debug_callback" in str(program) and "callback" not in "".join(rest)
        return len("\n".join(rest).splitlines())

    assert lines(21) - lines(1) < 20 * 20, "a report takes 70 for each array"


def test_eager_guard_copies_nothing_to_the_device():
    """On a CPU, the guard of jax does not see what the host reads."""
    grads, value = jnp.asarray(np.ones(2)), jnp.asarray(1.0)
    with jax.transfer_guard("disallow"):
        ls.check_loss_scale(FIRST, grads=grads, value=value)


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


NUMBERS = np.arange(8, dtype=np.int32).reshape(2, 4)
MEMBERS = jax.tree.map(lambda x: np.full((2, 4), x), FIRST)
MEMBERS = MEMBERS._replace(consecutive_skips=NUMBERS, loss_scale=2.0**NUMBERS)
check_members = functools.partial(
    ls.check_loss_scale, max_consecutive_skips=3, every=2, on_error=ERRORS.append
)


def test_compiled_guard_reports_each_member_whose_error_is_due():
    texts = reports(jax.jit(jax.vmap(jax.vmap(check_members))), MEMBERS)
    assert sorted(x[:16] for x in texts) == ["The last 4 steps", "The last 6 steps"]


def test_eager_guard_reports_the_first_member_over_the_limit():
    [text] = reports(check_members, MEMBERS)
    assert text.startswith("The last 4 steps of member 1, 0 were all skipped")
    assert "\nLoss scale: 16. " in text


@pytest.mark.parametrize("number", [np.nan, 0.0])
def test_guard_is_silent_about_gradients_if_a_member_skips(number):
    """Its gradients may be NaN, and zeros say nothing of them."""
    grads = np.full((2, 4, 2), number)
    assert reports(ls.check_loss_scale, MEMBERS, grads=grads) == []
