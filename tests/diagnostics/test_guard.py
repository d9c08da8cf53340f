"""check_loss_scale, on the host and in compiled loops."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import make_mesh, on_mesh
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

RULE = ls.DynamicLossScale(init_scale=2.0**8)


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


def test_a_guard_raises_at_one_step_more_than_allowed():
    opt_state = ls.with_loss_scaling(optax.adam(1e-3), RULE).init(jnp.ones(2))
    ls.check_loss_scale(opt_state._replace(scale_state=skipped(100)))
    with pytest.raises(ls.LossScaleError, match="^The last 101 steps were all skipped"):
        ls.check_loss_scale(opt_state._replace(scale_state=skipped(101)))


@pytest.mark.parametrize("scale", [jnp.nan, jnp.inf, 0.0, -1.0])
def test_a_guard_raises_for_a_scale_that_is_no_positive_number(scale):
    states = jax.vmap(lambda x: RULE.init()._replace(loss_scale=x))
    many = states(jnp.array([1.0, scale]))
    for state, member in ((jax.tree.map(lambda x: x[1], many), ""), (many, " of mem")):
        message = f"^The loss scale{member}.* is not a positive number"
        with pytest.raises(ls.LossScaleError, match=message):
            ls.check_loss_scale(state)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("max_consecutive_skips", x, "must be a whole") for x in (0, 1.5, "3")),
        ("state", optax.EmptyState(), "`state` must contain a LossScaleState"),
        ("every", 0, "`every` must be a whole number from 1"),
        ("on_error", "print", "`on_error` must be a function of"),
        ("grads", 1.0, "`grads` must be a tree of gradients"),
        *(("axis_name", x, "must name an axis of the surr") for x in ("z", ("x", 0))),
    ],
)
def test_an_argument_that_a_guard_cannot_use_is_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        ls.check_loss_scale(**{"state": RULE.init(), name: value})


def test_the_gradients_of_an_ensemble_are_refused_and_not_blamed_on_the_scale():
    states = jax.vmap(lambda _: RULE.init())(jnp.arange(3))
    ls.check_loss_scale(states)
    with pytest.raises(ValueError, match="`grads` must be left out for the state"):
        ls.check_loss_scale(states, grads={"w": jnp.ones((3, 2))})


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
        ls.check_loss_scale(state)
        return (optax.apply_updates(w, updates), state), None

    w = jnp.ones(2)
    (_, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))(
        (w, tx.init(w))
    )
    jax.effects_barrier()
    return state


def test_a_scale_at_its_ceiling_without_a_skip_is_of_no_use():
    """The second line is forgotten, or nothing is computed in float16."""
    rule = ls.DynamicLossScale(init_scale=2.0**23, growth_interval=501)
    with pytest.warns(UserWarning, match="2..24 or more, and has been for 500") as seen:
        state = trained(rule, 1001, lambda loss, state: jax.grad(loss))
    text = " ".join(str(seen[0].message).split())
    for cause in ("the step calls `jax.value_and_grad`", "`FixedLossScale(1.0)` suff"):
        assert cause in text
    assert len(seen) == 1 and max(map(len, str(seen[0].message).splitlines())) <= 80
    with pytest.warns(UserWarning, match="1. The loss is not scaled") as checked:
        ls.check_loss_scale(state)
    assert checked[0].filename == __file__
    # One that has just arrived may overflow next, and this one does.
    trained(rule, 1000, lambda loss, state: jax.grad(loss))
    assert ls.get_loss_scale(trained(rule, 1001, ls.grad)) < 2.0**15


@pytest.mark.parametrize("compiled", [False, True])
def test_the_error_shows_the_report_at_the_scale_of_the_state(compiled):
    # At the scale of the state, the second overflows.
    grads = {"w": jnp.array([1.0, jnp.nan, jnp.nan]), "b": jnp.full(2, 3e4)}
    report = ls.gradient_report(grads, loss_scale=RULE.init_scale)
    errors = []

    def check(state, grads):
        ls.check_loss_scale(state, grads=grads, on_error=errors.append)

    run(check, skipped(101), grads) if compiled else check(skipped(101), grads)
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
            ls.check_loss_scale(
                state, max_consecutive_skips=limit, every=every, on_error=told.append
            )
        return state, None

    if compiled:
        run(lambda: jax.lax.scan(step, RULE.init(), FLAGS))
    else:
        functools.reduce(lambda state, flag: step(state, flag)[0], FLAGS, RULE.init())
    assert {key: skips(told) for key, told in errors.items()} == WATCHED


def test_only_an_error_calls_the_host_or_measures_the_gradients():
    def check(state, grads):
        ls.check_loss_scale(state, grads=grads)

    program = jax.make_jaxpr(check)(RULE.init(), {"w": jnp.ones(3)})
    [branches] = [eqn for eqn in program.eqns if eqn.primitive.name == "cond"]
    rest = "".join(str(eqn) for eqn in program.eqns if eqn is not branches)
    for operation in ("debug_callback", "= abs"):
        assert operation in str(branches) and operation not in rest


def test_a_compiled_loop_ends_with_the_text_of_the_error(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        run(lambda state: ls.check_loss_scale(state), skipped(101))
    message = "LossScaleError: The last 101 steps were all skipped, more than"
    # jax has no better way, and logs it besides.
    assert message in str(error.value) and message in caplog.text
    # And the next one runs as if nothing had been.
    run(lambda state: ls.check_loss_scale(state), skipped(100))


def test_without_compiling_nothing_is_compiled_or_moved_that_is_forbidden(caplog):
    state, grads = RULE.init(), [jnp.ones(3)]
    ls.check_loss_scale(state, grads=grads)
    with jax.log_compiles(), jax.transfer_guard("disallow"):
        ls.check_loss_scale(state, grads=grads)
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

    def check(x, state):
        for axis_name, told in errors.items():
            ls.check_loss_scale(
                state, grads=[x], on_error=told.append, axis_name=axis_name
            )
        return x

    jax.block_until_ready(mapped(check)(jnp.ones((8, 1)), skipped(101)))
    jax.effects_barrier()
    assert {axis_name: len(told) for axis_name, told in errors.items()} == expected


def test_members_of_an_ensemble_each_speak_for_themselves_under_vmap():
    errors = []
    check = functools.partial(
        ls.check_loss_scale, max_consecutive_skips=3, every=2, on_error=errors.append
    )
    run(jax.vmap(lambda steps: check(skipped(steps))), jnp.arange(8))
    assert skips(errors) == [4, 6]
