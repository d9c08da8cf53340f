"""check_loss_scale and watch_loss_scale."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import make_mesh, on_mesh
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

RULE = ls.DynamicLossScale(init_scale=2.0**8)
GUARDS = [ls.check_loss_scale, ls.watch_loss_scale]


def skipped(steps):
    """A state, or those of an ensemble, after so many skipped steps in a row."""
    return RULE.init()._replace(consecutive_skips=jnp.int32(steps))


def run(function, *arguments):
    """Compile and run, until the last callback has come."""
    jax.block_until_ready(jax.jit(function)(*arguments))
    jax.effects_barrier()


def skips(errors):
    """How many skipped steps each error speaks of; they come in any order."""
    assert all(isinstance(error, ls.LossScaleError) for error in errors)
    return sorted(int(str(error).split()[2]) for error in errors)


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_raises_at_one_step_more_than_allowed(guard):
    opt_state = ls.with_loss_scaling(optax.adam(1e-3), RULE).init(jnp.ones(2))
    guard(opt_state._replace(scale_state=skipped(100)))
    with pytest.raises(ls.LossScaleError, match="^The last 101 steps were all skipped"):
        guard(opt_state._replace(scale_state=skipped(101)))


NO_COUNT = "`max_consecutive_skips` must be a whole"
NO_STATE = "`state` must contain a LossScaleState"
FOR_BOTH = [
    *(("max_consecutive_skips", x, NO_COUNT) for x in (0, -1, 1.5, True, None, "3")),
    ("state", optax.EmptyState(), NO_STATE),
]
NO_AXIS = "`axis_name` must name an axis of the surrounding"


@pytest.mark.parametrize(
    ("guard", "name", "value", "message"),
    [
        *((guard, *case) for guard in GUARDS for case in FOR_BOTH),
        (ls.check_loss_scale, "report", {}, "`report` must be a GradientReport"),
        (ls.watch_loss_scale, "every", 0, "`every` must be a whole number from 1"),
        (ls.watch_loss_scale, "on_error", "print", "`on_error` must be a function of"),
        (ls.watch_loss_scale, "grads", 1.0, "`grads` must be a tree of gradients"),
        *((ls.watch_loss_scale, "axis_name", x, NO_AXIS) for x in ("z", ("x", "z"), 0)),
    ],
)
def test_an_argument_that_a_guard_cannot_use_is_refused(guard, name, value, message):
    with pytest.raises(ValueError, match=message):
        guard(**{"state": RULE.init(), name: value})


def test_the_gradients_of_an_ensemble_are_refused_and_not_blamed_on_the_scale():
    states = jax.vmap(lambda _: RULE.init())(jnp.arange(3))
    ls.watch_loss_scale(states)
    with pytest.raises(ValueError, match="`grads` must be left out for the state"):
        ls.watch_loss_scale(states, grads={"w": jnp.ones((3, 2))})


def test_an_accumulator_around_the_scale_that_keeps_a_nan_is_an_error_at_once():
    def after(tx, *grads):
        state = tx.init(jnp.ones(2))
        for grad in grads:
            _, state = tx.update(jnp.full(2, grad), state)
        return state

    scaled = ls.with_loss_scaling(optax.sgd(0.1), RULE)
    ls.check_loss_scale(after(optax.MultiSteps(scaled, 4), 1.0))
    inside = ls.with_loss_scaling(optax.MultiSteps(optax.sgd(0.1), 4), RULE)
    ls.check_loss_scale(after(inside, 1.0, jnp.nan))
    with pytest.raises(ls.LossScaleError, match="^An accumulator holds NaN or inf"):
        ls.check_loss_scale(after(optax.MultiSteps(scaled, 4), 1.0, jnp.nan, 1.0))


def trained(rule, steps, differentiate):
    """The state after steps, the scale of each of which is watched, or not."""
    tx = ls.with_loss_scaling(optax.sgd(1e-3), rule)

    def loss(w):
        return jnp.sum((w.astype(jnp.float16) * 3).astype(jnp.float32)) ** 2

    def step(carry, _):
        w, state = carry
        grads = differentiate(loss, state)(w)
        updates, state = tx.update(grads, state, w)
        ls.watch_loss_scale(state)
        return (optax.apply_updates(w, updates), state), None

    w = jnp.ones(2)
    (_, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))(
        (w, tx.init(w))
    )
    jax.effects_barrier()
    return state


@pytest.mark.parametrize("interval", [1, 7])
def test_a_scale_that_reached_its_ceiling_without_a_skip_is_of_no_use(interval):
    """The second line is forgotten, or nothing is computed in float16."""
    rule = ls.DynamicLossScale(growth_interval=interval)
    steps = 10 * interval  # to the ceiling, and one interval there
    with pytest.warns(UserWarning, match="has grown to 2") as warned:
        state = trained(rule, steps, lambda loss, state: jax.grad(loss))
    text = " ".join(str(warned[0].message).split())
    for cause in ("the step calls `jax.value_and_grad`", "`FixedLossScale(1.0)` suff"):
        assert cause in text
    assert max(map(len, str(warned[0].message).splitlines())) <= 80
    with pytest.warns(UserWarning, match="1. The loss is not scaled") as checked:
        ls.check_loss_scale(state)
    assert checked[0].filename == __file__
    assert ls.get_loss_scale(trained(rule, steps, ls.grad)) < 2.0**15
    # One that has just arrived may overflow next.
    trained(rule, steps - interval, lambda loss, state: jax.grad(loss))


def test_inside_of_a_compiled_function_check_refers_to_watch():
    with pytest.raises(ValueError, match="or `watch_loss_scale` inside"):
        jax.jit(ls.check_loss_scale)(RULE.init())


@pytest.mark.parametrize("compiled", [False, True])
def test_the_error_shows_the_report_at_the_scale_of_the_state(compiled):
    # At the scale of the state, the second overflows.
    grads = {"w": jnp.array([1.0, jnp.nan, jnp.nan]), "b": jnp.full(2, 3e4)}
    report = ls.gradient_report(grads, loss_scale=RULE.init_scale)
    with pytest.raises(ls.LossScaleError) as checked:
        ls.check_loss_scale(skipped(101), report=report)
    errors = []

    def watch(state, grads):
        ls.watch_loss_scale(state, grads=grads, on_error=errors.append)

    run(watch, skipped(101), grads) if compiled else watch(skipped(101), grads)
    assert str(errors[0]) == str(checked.value)
    assert str(errors[0]).endswith(f"The last gradients:\n{ls.format_report(report)}")


# Limits and intervals, and the skipped steps of which errors speak after 2 and then 5
# skipped steps in a row.
FLAGS = jnp.array([0, 0, 1, 1, 0, 0, 0, 0, 0, 1], bool)
WATCHED = {(5, 1): [], (4, 1): [5], (2, 1): [3, 4, 5], (2, 2): [3, 5]}
WATCHED |= {(1, 3): [2, 2, 5], (1, 100): [2, 2], (2**31 - 1, 2**31 - 1): []}


@pytest.mark.parametrize("compiled", [False, True])
def test_errors_come_at_the_first_skip_beyond_the_limit_and_then_every_few(compiled):
    errors = {key: [] for key in WATCHED}

    def step(state, flag):
        state = RULE.update(state, flag)
        for (limit, every), told in errors.items():
            ls.watch_loss_scale(
                state, max_consecutive_skips=limit, every=every, on_error=told.append
            )
        return state, None

    if compiled:
        run(lambda: jax.lax.scan(step, RULE.init(), FLAGS))
    else:
        functools.reduce(lambda state, flag: step(state, flag)[0], FLAGS, RULE.init())
    assert {key: skips(told) for key, told in errors.items()} == WATCHED


def test_only_an_error_calls_the_host_or_measures_the_gradients():
    def watch(state, grads):
        ls.watch_loss_scale(state, grads=grads)

    program = jax.make_jaxpr(watch)(RULE.init(), {"w": jnp.ones(3)})
    [branches] = [eqn for eqn in program.eqns if eqn.primitive.name == "cond"]
    rest = "".join(str(eqn) for eqn in program.eqns if eqn is not branches)
    for operation in ("debug_callback", "= abs"):
        assert operation in str(branches) and operation not in rest


def test_a_compiled_loop_ends_with_the_text_of_the_error(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        run(lambda state: ls.watch_loss_scale(state), skipped(101))
    message = "LossScaleError: The last 101 steps were all skipped, more than"
    # jax has no better way, and logs it besides.
    assert message in str(error.value) and message in caplog.text
    # And the next one runs as if nothing had been.
    run(lambda state: ls.watch_loss_scale(state), skipped(100))


def test_without_compiling_nothing_is_compiled_or_moved_that_is_forbidden(caplog):
    state, grads = RULE.init(), [jnp.ones(3)]
    ls.watch_loss_scale(state, grads=grads)
    with jax.log_compiles(), jax.transfer_guard("disallow"):
        ls.watch_loss_scale(state, grads=grads)
        ls.check_loss_scale(state)
    assert not caplog.records
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1)
    assert caplog.records


@pytest.mark.parametrize(
    ("mapped", "expected"),
    [
        (
            lambda f: on_mesh(f, (P("x"), P()), P("x"), make_mesh(x=4, y=2)),
            {None: 8, "x": 2, ("x", "y"): 1},
        ),
        (lambda f: jax.pmap(f, "x", in_axes=(0, None)), {None: 8, "x": 1}),
        (lambda f: jax.jit(jax.vmap(f, (0, None), axis_name="x")), {None: 8, "x": 1}),
    ],
    ids=["shard_map", "pmap", "vmap"],
)
def test_of_one_state_on_all_devices_the_first_along_the_axis_speaks(mapped, expected):
    errors = {axis_name: [] for axis_name in expected}

    def watch(x, state):
        for axis_name, told in errors.items():
            ls.watch_loss_scale(
                state, grads=[x], on_error=told.append, axis_name=axis_name
            )
        return x

    jax.block_until_ready(mapped(watch)(jnp.ones((8, 1)), skipped(101)))
    jax.effects_barrier()
    assert {axis_name: len(told) for axis_name, told in errors.items()} == expected


def test_members_of_an_ensemble_each_speak_for_themselves_under_vmap():
    errors = []
    watch = functools.partial(
        ls.watch_loss_scale, max_consecutive_skips=3, every=2, on_error=errors.append
    )
    run(jax.vmap(lambda steps: watch(skipped(steps))), jnp.arange(8))
    assert skips(errors) == [4, 6]
