"""check_loss_scale and watch_loss_scale."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls


@functools.cache
def compiled(rule):
    tx = ls.with_loss_scaling(optax.adam(1e-3), rule)
    return tx.init, jax.jit(tx.update)


def after(skips, rule=ls.DynamicLossScale(init_scale=2.0**8)):  # noqa: B008
    init, update = compiled(rule)
    params = jnp.ones(2)
    opt_state = init(params)
    for _ in range(skips):
        _, opt_state = update(jnp.nan * params, opt_state, params)
    return opt_state


def test_it_raises_at_one_step_more_than_allowed():
    opt_state = after(3)
    ls.check_loss_scale(opt_state, max_consecutive_skips=3)
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(opt_state, max_consecutive_skips=2)
    assert str(error.value).startswith("The last 3 steps were all skipped, more than ")


def test_the_default_lets_the_scale_come_down_from_anywhere():
    ls.check_loss_scale(after(100))
    with pytest.raises(ls.LossScaleError, match="The last 101 steps"):
        ls.check_loss_scale(after(101))


def test_steps_that_were_skipped_apart_do_not_add_up():
    rule = ls.FixedLossScale()
    state = rule.init()
    for flag in (False, False, True, False, False):
        state = rule.update(state, flag)
        ls.check_loss_scale(state, max_consecutive_skips=2)


def test_a_rule_that_never_skips_never_raises():
    ls.check_loss_scale(after(3, ls.FixedLossScale(skip_nonfinite=False)))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3"])
def test_a_limit_that_is_no_count_is_refused(value):
    with pytest.raises(ValueError, match="`max_consecutive_skips` must be a whole"):
        ls.check_loss_scale(after(0), max_consecutive_skips=value)


def test_a_state_without_a_scale_is_refused():
    with pytest.raises(ValueError, match="`state` must contain a LossScaleState"):
        ls.check_loss_scale(optax.adam(1e-3).init(jnp.ones(2)))


@functools.cache
def report_and_table():
    """Not when the file is imported, which every process does."""
    report = ls.gradient_report({"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)})
    return report, ls.format_report(report)


def test_the_error_shows_the_last_report():
    report, table = report_and_table()
    with pytest.raises(ls.LossScaleError) as error:
        ls.check_loss_scale(after(3), max_consecutive_skips=2, report=report)
    assert str(error.value).endswith(f"\nThe last gradients:\n{table}")
    ls.check_loss_scale(after(3), max_consecutive_skips=3, report=report)
    with pytest.raises(ValueError, match="`report` must be a GradientReport"):
        ls.check_loss_scale(after(0), report={"w": 1})


def test_of_an_ensemble_the_worst_member_counts():
    rule = ls.DynamicLossScale()
    state = jax.vmap(lambda _: rule.init())(jnp.arange(3))
    for _ in range(4):
        state = jax.vmap(rule.update)(state, jnp.array([True, False, True]))
    ls.check_loss_scale(state, max_consecutive_skips=4)
    with pytest.raises(ls.LossScaleError, match="^The last 4 steps of member 1 were"):
        ls.check_loss_scale(state, max_consecutive_skips=3)


def test_inside_of_a_compiled_function_it_refers_to_the_other():
    with pytest.raises(ValueError, match="or `watch_loss_scale` inside"):
        jax.jit(ls.check_loss_scale)(ls.DynamicLossScale().init())


# Steps in a row that are skipped: 2, then 5.
FLAGS = jnp.array([0, 0, 1, 1, 0, 0, 0, 0, 0, 1], bool)


RULE = ls.DynamicLossScale(init_scale=2.0**8)


def run(function, *arguments):
    """Compile and run, until the last callback has come."""
    result = jax.block_until_ready(jax.jit(function)(*arguments))
    jax.effects_barrier()
    return result


def skips(errors):
    """How many skipped steps each error speaks of; they come in any order."""
    return sorted(int(str(error).split()[2]) for error in errors)


def scan(flags, **arguments):
    def step(state, flag):
        state = RULE.update(state, flag)
        grads = {"w": jnp.where(flag, 1.0, jnp.nan) * jnp.ones(3), "b": jnp.ones(2)}
        ls.watch_loss_scale(
            state,
            **{k: grads if k == "grads" else v for k, v in arguments.items()},
        )
        return state, state.loss_scale

    return run(lambda: jax.lax.scan(step, RULE.init(), flags))


# Limits and intervals, and the skipped steps of which errors speak.
WATCHED = {
    (5, 1): [],
    (4, 1): [5],
    (2, 1): [3, 4, 5],
    (2, 2): [3, 5],
    (1, 3): [2, 2, 5],
    (1, 100): [2, 2],
    (2**31 - 1, 2**31 - 1): [],
}


def test_a_compiled_loop_calls_the_host_beyond_the_limit_alone():
    errors = {key: [] for key in WATCHED}

    def step(state, flag):
        state = RULE.update(state, flag)
        for (limit, every), told in errors.items():
            ls.watch_loss_scale(
                state, max_consecutive_skips=limit, every=every, on_error=told.append
            )
        return state, None

    state, _ = run(lambda: jax.lax.scan(step, RULE.init(), FLAGS))
    for key, told in errors.items():
        assert all(isinstance(error, ls.LossScaleError) for error in told)
        assert skips(told) == WATCHED[key], key
    assert int(state.skipped_steps) == 7


def test_between_nested_scans_it_looks_once_in_many_steps():
    errors = []

    def some_steps(state, flags):
        state, _ = jax.lax.scan(lambda s, f: (RULE.update(s, f), None), state, flags)
        ls.watch_loss_scale(state, max_consecutive_skips=4, on_error=errors.append)
        return state, None

    flags = jnp.zeros((4, 3), bool)
    run(lambda: jax.lax.scan(some_steps, RULE.init(), flags))
    assert skips(errors) == [6, 9, 12]


def test_an_ensemble_is_watched_as_a_whole():
    errors = []

    def step(states, flags):
        states = jax.vmap(RULE.update)(states, flags)
        ls.watch_loss_scale(states, max_consecutive_skips=2, on_error=errors.append)
        return states, None

    states = jax.vmap(lambda _: RULE.init())(jnp.arange(3))
    flags = jnp.array([[True, False, True]] * 3)
    run(lambda: jax.lax.scan(step, states, flags))
    [error] = errors
    assert str(error).startswith("The last 3 steps of member 1 were all skipped")


def test_while_training_goes_on_the_host_is_not_called(monkeypatch):
    calls = []
    callback = jax.debug.callback
    monkeypatch.setattr(
        "jax.debug.callback",
        lambda tell, *args: callback(lambda *args: calls.append(args), *args),
    )
    scan(FLAGS, max_consecutive_skips=5)
    assert calls == []
    scan(FLAGS, max_consecutive_skips=4)
    assert len(calls) == 1


def test_a_compiled_loop_ends_with_the_text_of_the_error(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        scan(FLAGS, max_consecutive_skips=3, grads=True)
    message = str(error.value)
    assert "LossScaleError: The last 4 steps were all skipped, more than" in message
    assert "['w']     3  3 100%" in message
    # jax has no better way, and logs it besides.
    assert error.value.__cause__ is None is error.value.__context__
    assert "LossScaleError: The last 4 steps were all skipped" in caplog.text
    # And the next one runs as if nothing had been.
    scan(FLAGS, max_consecutive_skips=5)


def test_the_report_in_a_compiled_loop_is_of_that_step_and_scale():
    errors = []
    scan(FLAGS, max_consecutive_skips=4, grads=True, on_error=errors.append)
    report = ls.gradient_report({"w": jnp.full(3, jnp.nan), "b": jnp.ones(2)})
    assert str(errors[0]).endswith(ls.format_report(report))


def test_the_report_is_computed_only_when_there_is_an_error():
    def step(state, grads):
        ls.watch_loss_scale(state, grads=grads)

    jaxpr = jax.make_jaxpr(step)(RULE.init(), {"w": jnp.ones(3)})
    [cond] = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert "measure" in str(cond)
    assert not any("measure" in str(e) for e in jaxpr.eqns if e is not cond)


def test_without_compiling_it_raises_the_error_itself():
    for skips, error in ((3, ls.LossScaleError), (1, None)):
        state = RULE.init()._replace(consecutive_skips=jnp.int32(skips))
        grads = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)}
        with pytest.raises(error) if error else contextlib.nullcontext() as caught:
            ls.watch_loss_scale(state, max_consecutive_skips=2, grads=grads)
        assert not error or str(caught.value).endswith(report_and_table()[1])


def test_without_compiling_every_and_on_error_keep_their_meaning():
    errors, state = [], RULE.init()
    for _ in range(7):
        state = RULE.update(state, False)
        ls.watch_loss_scale(
            state, max_consecutive_skips=2, every=2, on_error=errors.append
        )
    assert skips(errors) == [3, 5, 7]


def test_without_compiling_nothing_is_compiled(caplog):
    state, grads = RULE.init(), [jnp.ones(3)]
    ls.watch_loss_scale(state, grads=grads)
    with jax.log_compiles():
        ls.watch_loss_scale(state, grads=grads)
        assert not caplog.records
        jax.jit(lambda x: x + 1)(1)
        assert caplog.records


def test_an_ensemble_and_devices_each_speak_for_themselves():
    errors = []
    state = RULE.init()._replace(consecutive_skips=jnp.int32(7))
    states = jax.tree.map(lambda x: jnp.stack([x] * 8), state)
    states = states._replace(consecutive_skips=jnp.arange(8))

    def watch(state):
        ls.watch_loss_scale(state, max_consecutive_skips=4, on_error=errors.append)
        return state

    run(jax.vmap(watch), states)
    assert skips(errors) == [5, 6, 7]

    errors.clear()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.sharding.PartitionSpec("x")

    def per_device(states):
        watch(jax.tree.map(lambda x: x[0], states))
        return states

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=specs)
    run(sharded, states)
    assert skips(errors) == [5, 6, 7]


STOPPED = RULE.init()._replace(consecutive_skips=jnp.int32(7))


def watch_mapped(map_over_devices, *axis_names):
    """How many errors there are of one state on all devices, by the axis named."""
    errors = {axis_name: [] for axis_name in axis_names}

    def watch(x, state):
        for axis_name, told in errors.items():
            ls.watch_loss_scale(
                state,
                max_consecutive_skips=4,
                grads=[x],
                on_error=told.append,
                axis_name=axis_name,
            )
        return x

    jax.block_until_ready(map_over_devices(watch)(jnp.ones(8), STOPPED))
    jax.effects_barrier()
    return {axis_name: len(told) for axis_name, told in errors.items()}


def shard_map(watch):
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    return jax.jit(
        jax.shard_map(watch, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    )


def pmap(watch):
    return jax.pmap(watch, axis_name="x", in_axes=(0, None))


def vmap(watch):
    return jax.jit(jax.vmap(watch, axis_name="x", in_axes=(0, None)))


@pytest.mark.parametrize(
    ("map_over_devices", "expected"),
    [
        (shard_map, {None: 8, "x": 2, ("x", "y"): 1}),
        *((pmap, {None: 8, "x": 1}), (vmap, {"x": 1})),
    ],
)
def test_of_one_state_on_all_devices_the_first_speaks(map_over_devices, expected):
    assert watch_mapped(map_over_devices, *expected) == expected


@pytest.mark.parametrize("axis_name", ["z", ("x", "z"), 0])
def test_an_axis_that_is_not_there_is_refused(axis_name):
    message = "`axis_name` must name an axis of the surrounding"
    with pytest.raises(ValueError, match=message):
        watch_mapped(shard_map, axis_name)
    with pytest.raises(ValueError, match=message):
        ls.watch_loss_scale(STOPPED, axis_name=axis_name)


def test_members_that_are_not_due_are_silent_under_vmap():
    errors = []
    states = jax.tree.map(lambda x: jnp.stack([x] * 4), STOPPED)
    states = states._replace(consecutive_skips=jnp.arange(3, 7))

    def watch(state):
        ls.watch_loss_scale(
            state, max_consecutive_skips=3, every=2, on_error=errors.append
        )
        return state

    run(jax.vmap(watch), states)
    assert skips(errors) == [4, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_consecutive_skips": 0},
            "`max_consecutive_skips` must be a whole number",
        ),
        ({"every": 0}, "`every` must be a whole number from 1"),
        ({"every": 1.5}, "`every` must be a whole number from 1"),
        ({"on_error": "print"}, "`on_error` must be a function of one LossScaleError"),
        ({"grads": 1.0}, "`grads` must be a tree of gradients"),
    ],
)
def test_what_a_compiled_loop_cannot_use_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ls.watch_loss_scale(RULE.init(), **arguments)
    with pytest.raises(ValueError, match="`state` must contain a LossScaleState"):
        ls.watch_loss_scale(optax.adam(1e-3).init(jnp.ones(2)))
