"""check_loss_scale: when it speaks, on the host and in compiled loops, and when not."""

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
STOPPED = RULE.init()._replace(consecutive_skips=jnp.int32(101))
GOOD, BAD, ONE = np.float32([1, 1]), np.float32([1, np.inf]), np.float32(1)
ERRORS = []


OPTIONS = ("max_consecutive_skips", "every", "on_error", "axis_name")
compiled_check = jax.jit(ls.check_loss_scale, static_argnames=OPTIONS)


def told(function, *args, **kwargs):
    """The errors and warnings of a call. A page has the sentences of warnings."""
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


ROW, RATE, INVALID = "The last", "Recently, 26%", "The loss scale is not a positive"
HALF = "Recently, 25% of the steps of member 68"
OVER = "Recently, 45% of the steps of member 60"
HIGH = "The loss scale is 2**24 or more. None of the steps was skipped."
HIGH += "\nLikely causes: the step calls `jax.value_and_grad`"
OFTEN = "More than 5 % of the recent steps are skipped."
OFTEN += "\nLikely causes: some batches hold NaN"
UNDONE = "The gradients are not finite, but the step counts as applied."
UNDONE += "\nLikely causes: the step leaves `update` out"
ZERO = "All gradients are exactly 0.\nLikely causes: the loss does not"
ZEROS = {"w": np.zeros(3), "b": np.zeros(2, np.float16), "count": np.int32(1)}
TINY, NAN = ({**ZEROS, "b": np.float16([0, x])} for x in (2.0**-24, np.nan))
CEILING = {"loss_scale": 2.0**24, "growth_tracker": 500}
MANY, SEARCH = {"skip_rate": 0.06, "skipped_steps": 61}, {"consecutive_skips": 1}
# What differs from a first state; arguments; what is told at once; and what in a
# compiled loop, which sees every step and tells each thing once.
CASES = [
    ({}, {"grads": TINY, "value": ONE}, "", ""),
    ({"consecutive_skips": 100}, {}, "", ""),
    ({"consecutive_skips": 101}, {}, "The last 101 steps were all skipped", ROW),
    ({"consecutive_skips": 1}, {"max_consecutive_skips": 0}, "The last step was", ROW),
    ({"consecutive_skips": 102}, {"every": 3}, "", ""),
    ({"consecutive_skips": 104}, {"every": 3}, ROW, "The last 104 steps were all"),
    ({"consecutive_skips": 4}, {"max_consecutive_skips": 4, "every": 100}, "", ""),
    ({"consecutive_skips": 5}, {"max_consecutive_skips": 4, "every": 100}, ROW, ROW),
    ({"consecutive_skips": 6}, {"max_consecutive_skips": 4, "every": 100}, "", ""),
    ({"consecutive_skips": 2**31 - 1}, {"max_consecutive_skips": 2**31 - 1}, "", ""),
    ({"consecutive_skips": 101, "skip_rate": 0.26}, {}, ROW, ROW),
    # In a long row, the limit decides alone; afterwards, the rate of a fixed scale.
    ({"consecutive_skips": 26, "skip_rate": 0.26}, {}, "", ""),
    ({"consecutive_skips": 25, "skip_rate": 0.26}, {}, RATE, RATE),
    ({"skip_rate": 0.26, "skipped_steps": 60}, {}, RATE, ""),
    ({"skip_rate": 0.26, "skipped_steps": 9} | SEARCH, {"every": 3}, RATE, RATE),
    ({"skip_rate": 0.26, "skipped_steps": 8} | SEARCH, {"every": 3}, "", ""),
    ({"skip_rate": 0.25} | SEARCH, {}, "", ""),
    *(({"loss_scale": x}, {}, INVALID, INVALID) for x in (np.nan, np.inf, 0.0)),
    ({"loss_scale": 0.0, "consecutive_skips": 101}, {}, INVALID, INVALID),
    (CEILING, {}, HIGH, HIGH),
    (CEILING | {"growth_tracker": 501}, {}, HIGH, ""),
    (CEILING | {"growth_tracker": 1500}, {}, HIGH, HIGH),
    # One that has just arrived may overflow next; others have, or are lower.
    (CEILING | {"growth_tracker": 499}, {}, "", ""),
    (CEILING | {"skipped_steps": 1}, {}, "", ""),
    (CEILING | {"loss_scale": 2.0**23}, {}, "", ""),
    # Many skips, if no scale cures them.
    (MANY | {"loss_scale": 1.0}, {}, OFTEN, ""),
    (MANY | {"loss_scale": 1.0} | SEARCH, {}, OFTEN, OFTEN),
    (MANY | {"is_fixed": True} | SEARCH, {}, OFTEN, OFTEN),
    (MANY | {"skip_rate": 0.11} | SEARCH, {}, OFTEN, OFTEN),
    (MANY | {"growth_tracker": 3} | SEARCH, {}, OFTEN, OFTEN),
    (MANY | {"growth_tracker": 3} | SEARCH, {"every": 3}, OFTEN, ""),
    (MANY | {"skip_rate": 0.25} | SEARCH, {}, OFTEN, OFTEN),
    # The rule may be looking for its scale, its first one, or one after a jump.
    (MANY | {"growth_tracker": 3}, {}, "", ""),
    (MANY | SEARCH, {}, "", ""),
    (MANY | {"loss_scale": 1.0, "skipped_steps": 60} | SEARCH, {}, "", ""),
    (MANY | {"loss_scale": 1.0, "consecutive_skips": 2}, {}, "", ""),
    # A rule that grows every 20 steps has this rate after a skip.
    (MANY | {"loss_scale": 1.0, "skip_rate": 0.053} | SEARCH, {}, "", ""),
    ({}, {"grads": NAN}, UNDONE, UNDONE),
    ({"consecutive_skips": 1}, {"grads": NAN}, "", ""),
    # A rule of a fixed scale may be one that never skips.
    ({"is_fixed": True}, {"grads": NAN}, "", ""),
    ({"is_fixed": True, "skipped_steps": 1}, {"grads": NAN}, UNDONE, UNDONE),
    ({"growth_tracker": 1}, {"grads": ZEROS}, ZERO, ZERO),
    ({"growth_tracker": 1}, {"grads": ZEROS, "value": ONE}, ZERO, ZERO),
    ({"growth_tracker": 2}, {"grads": ZEROS}, ZERO, ""),
    ({"growth_tracker": 501}, {"grads": ZEROS}, ZERO, ZERO),
    ({"growth_tracker": 1}, {"grads": ZEROS, "value": 0 * ONE}, "", ""),
    ({"growth_tracker": 1, "consecutive_skips": 1}, {"grads": ZEROS}, "", ""),
    ({"growth_tracker": 1}, {"grads": TINY}, "", ""),
    ({"growth_tracker": 1}, {"grads": {"empty": np.zeros((0, 3))}}, "", ""),
]


@pytest.mark.parametrize("in_loop", [False, True], ids=["at once", "in a loop"])
def test_guard_tells_of_each_state(in_loop):
    check, first = compiled_check if in_loop else ls.check_loss_scale, RULE.init()
    for numbers, arguments, *expected in CASES:
        new = {k: jnp.full_like(getattr(first, k), x) for k, x in numbers.items()}
        arguments = {"on_error": ERRORS.append} | arguments
        texts = told(check, first._replace(**new), **arguments)
        case = (numbers, arguments, texts)
        assert len(texts) == bool(expected[in_loop]), case
        assert "".join(texts).startswith(expected[in_loop]), case


@functools.partial(jax.jit, static_argnums=0)
def course(rule, magnitudes):
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


def told_in_course(rule, magnitudes):
    """What is told in the loop, and then on the host of any of its states."""
    magnitudes, states = np.float32(magnitudes), []
    texts = told(lambda: states.append(course(rule, magnitudes)))
    check = functools.partial(ls.check_loss_scale, on_error=ERRORS.append)
    return texts, told(check, states[0])


@every_rule
def test_guard_takes_no_bad_batch_for_a_lost_update(rule):
    assert told_in_course(rule, np.resize([1, 1, 1, np.nan, 1, 1, 1], 12)) == ([], [])


def every(n, bad, good=1.0):
    """Magnitudes of ``n`` steps, of which the last is bad."""
    return [*[good] * (n - 1), bad]


INF, NANS, LOW = np.inf, [np.nan], 2.0**22
WAVES = 2 ** (0.3 * normal(1500))
TORCH, FIXED = presets.torch_grad_scaler(), ls.FixedLossScale(1.0)
HEALTHY = [ls.DynamicLossScale(growth_interval=n) for n in (20, 50, 200)]
HEALTHY += [ls.DynamicLossScale(2.0**24, growth_interval=20)]
HEALTHY += [ls.HeadroomLossScale(2.0**24), presets.megatron(min_scale=2.0**-14)]
HIGH_START = 19 * [INF] + 200 * [1] + 14 * every(25, INF)
# A rule; magnitudes; how often something is told in the loop, what, and at once.
COURSES = [
    *((x, y * WAVES, 0, "", "") for x in HEALTHY for y in (2.0**-4, 2.0**26)),
    (ls.DynamicLossScale(2.0**32, max_scale=2.0**32), HIGH_START, 0, "", ""),
    (RULE, 25 * NANS + 40 * every(10, np.nan), 5, OFTEN, OFTEN),
    # In the forward pass. The scale never falls.
    (ls.DynamicLossScale(), 100 * every(8, INF), 40, OFTEN, OFTEN),
    # A scale below 1 is no fault, but bad batches are.
    (TORCH, 200 * [LOW], 0, "", ""),
    (TORCH, 200 * [LOW] + 60 * every(10, np.nan, LOW), 23, OFTEN, OFTEN),
    (RULE, [1, 1, 1] + 105 * NANS, 5, ROW, "The last 101 steps of member 103"),
    # The 35th skip is above 1/4.
    (ls.DynamicLossScale(min_scale=2.0), 100 * [*NANS, 1], 66, "Recently, ", HALF),
    # In a row, the limit decides alone. Its share is told when it is over.
    (FIXED, 60 * NANS + 40 * [1], 0, "", OVER),
]


@pytest.mark.parametrize(("rule", "magnitudes", "number", "word", "at_once"), COURSES)
def test_guard_tells_of_runs_that_skip(rule, magnitudes, number, word, at_once):
    in_loop, others = told_in_course(rule, magnitudes)
    assert len(in_loop) == number and all(x.startswith(word) for x in in_loop)
    assert len(others) == bool(at_once) and "".join(others).startswith(at_once)


def test_errors_raise_and_end_a_compiled_program(caplog):
    with pytest.raises(ls.LossScaleError, match="^The last 101 steps were all skipped"):
        ls.check_loss_scale(STOPPED)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        told(compiled_check, STOPPED)
    # jax has no better way, and logs it besides.
    message = "LossScaleError: The last 101 steps were all skipped, more than"
    assert message in str(error.value) and message in caplog.text
    told(compiled_check, RULE.init())  # as if nothing had been


def test_warnings_point_at_the_line_of_the_user():
    with pytest.warns(UserWarning, match="2\\*\\*24 or more") as seen:
        ls.check_loss_scale(RULE.init()._replace(**CEILING))
    assert seen[0].filename == __file__


def test_guard_calls_the_host_only_when_due():
    def lines(arrays):
        check = functools.partial(ls.check_loss_scale, RULE.init())
        program = jax.make_jaxpr(lambda x: check(grads=[x] * arrays))(GOOD)
        rest = [str(eqn) for eqn in program.eqns if eqn.primitive.name != "cond"]
        assert "debug_callback" in str(program) and "callback" not in "".join(rest)
        return len("\n".join(rest).splitlines())

    assert lines(21) - lines(1) < 20 * 20, "a report takes 70 for each array"
    state, grads, value = RULE.init(), jnp.asarray(GOOD), jnp.asarray(ONE)
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
    told(mapped, np.ones((8, 1), np.float32), STOPPED)
    assert [len(found) for found in errors.values()] == [8, 2, 1]


def test_members_of_an_ensemble_are_told_apart():
    options = {"max_consecutive_skips": 3, "every": 2, "on_error": ERRORS.append}
    check = functools.partial(ls.check_loss_scale, **options)
    states = jax.vmap(lambda n: STOPPED._replace(consecutive_skips=n))(np.arange(8))
    texts = told(jax.jit(jax.vmap(check)), states)
    assert sorted(x[:16] for x in texts) == ["The last 4 steps", "The last 6 steps"]
    [text] = told(check, states)
    assert text.startswith("The last 4 steps of member 4 were all skipped")
    # One member may skip, and of that one zeros say nothing.
    states = jax.tree.map(lambda x: x[:2], states)
    for grads in (np.stack([GOOD, BAD]), np.zeros((2, 2), np.float32)):
        assert told(check, states, grads=grads) == []
