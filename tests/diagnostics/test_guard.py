"""check_loss_scale, on the host and in compiled loops."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from every_rule import RULES
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh

import optax_lossscale as ls
from optax_lossscale import presets

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
    params = jnp.ones(2)
    opt_state = ls.with_loss_scaling(optax.adam(1e-3), RULE).init(params)
    ls.check_loss_scale(opt_state._replace(scale_state=skipped(100)))
    with pytest.raises(ls.LossScaleError, match="^The last 101 steps were all skipped"):
        ls.check_loss_scale(opt_state._replace(scale_state=skipped(101)))
    with jax.transfer_guard("disallow"):
        ls.check_loss_scale(opt_state, grads=params)


@pytest.mark.parametrize("scale", [jnp.nan, jnp.inf, 0.0])
def test_a_guard_raises_for_a_scale_that_is_no_positive_number(scale):
    message = r"^The loss scale is not a positive number.*\n.*\n1. The state was"
    with pytest.raises(ls.LossScaleError, match=message):
        ls.check_loss_scale(RULE.init()._replace(loss_scale=jnp.float32(scale)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_consecutive_skips", 0, "must be a whole number from 1"),
        ("state", optax.EmptyState(), "`state` must contain a LossScaleState"),
        ("every", 0, "`every` must be a whole number from 1"),
        ("grads", "gradients", "`grads` must hold only arrays"),
        ("value", jnp.ones(2), "`value` must be one real number of shape"),
        ("axis_name", "z", "must name an axis of the surrounding"),
        ("on_error", "print", "`on_error` must be a function"),
    ],
)
def test_an_argument_that_a_guard_cannot_use_is_refused(name, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ls.check_loss_scale(**{"state": RULE.init(), name: value})


def test_a_scale_at_its_ceiling_without_a_skip_is_of_no_use():
    """The second line is forgotten, or nothing is computed in float16."""

    def state(**numbers):
        numbers = {"loss_scale": 2.0**24, "growth_tracker": 500} | numbers
        return jax.tree.map(jnp.asarray, RULE.init()._replace(**numbers))

    with pytest.warns(UserWarning, match="1. The loss is not scaled") as seen:
        ls.check_loss_scale(state())
        ls.check_loss_scale(state(growth_tracker=501))
        # In a compiled loop only every 500 steps.
        run(lambda x: ls.check_loss_scale(x), state(growth_tracker=1000))
        run(lambda x: ls.check_loss_scale(x), state(growth_tracker=1001))
    assert len(seen) == 3 and seen[0].filename == __file__
    # One that has just arrived may overflow next; others have, or are lower.
    for number in ({"growth_tracker": 499}, {"skipped_steps": 1}, {"loss_scale": 8e6}):
        ls.check_loss_scale(state(**number))


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


def test_a_share_of_skips_is_told_once_for_each_of_them_in_a_compiled_loop():
    rule, told = ls.DynamicLossScale(min_scale=2.0), []

    def step(state, flag):
        state = rule.update(state, flag)
        ls.check_loss_scale(state, every=10, on_error=told.append)
        return state, None

    run(lambda: jax.lax.scan(step, rule.init(), jnp.arange(200) % 2 == 0))
    assert len(told) == len(set(map(str, told))) == 7  # above 1/4 from the 35th on


def test_only_what_is_due_calls_the_host_or_measures_the_gradients():
    def check(state, grads):
        ls.check_loss_scale(state, grads=grads)

    program = jax.make_jaxpr(check)(RULE.init(), {"w": jnp.ones(3)})
    rest = [str(eqn) for eqn in program.eqns if eqn.primitive.name != "cond"]
    assert "debug_callback" in str(program)
    assert not [eqn for eqn in rest if "callback" in eqn or "_measure_leaf" in eqn]


def test_a_compiled_loop_ends_with_the_text_of_the_error(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        run(lambda state: ls.check_loss_scale(state), skipped(101))
    message = "LossScaleError: The last 101 steps were all skipped, more than"
    # jax has no better way, and logs it besides.
    assert message in str(error.value) and message in caplog.text
    # And the next one runs as if nothing had been.
    run(lambda state: ls.check_loss_scale(state), skipped(100))


def test_only_the_first_device_along_the_axis_calls_the_host():
    errors = {None: [], "x": [], ("x", "y"): []}

    def check(x, state):
        for axis_name, told in errors.items():
            ls.check_loss_scale(
                state, grads=[x], on_error=told.append, axis_name=axis_name
            )
        return x

    mesh = make_mesh(x=4, y=2)
    mapped = on_mesh(check, (P("x"), P()), P("x"), mesh)
    run(mapped, jnp.ones((8, 1)), skipped(101))
    assert [len(told) for told in errors.values()] == [8, 2, 1]


def test_each_member_of_an_ensemble_has_its_own_message_under_vmap():
    errors = []
    check = functools.partial(
        ls.check_loss_scale, max_consecutive_skips=3, every=2, on_error=errors.append
    )
    run(jax.vmap(lambda steps: check(skipped(steps))), jnp.arange(8))
    assert skips(errors) == [4, 6]


def test_bad_batches_are_warned_of_when_the_scale_has_fallen_in_a_compiled_loop():
    def step(state, flag):
        state = RULE.update(state, flag)
        ls.check_loss_scale(state)
        return state, None

    flags = [False] * 15 + 30 * [*[True] * 9, False]
    message = "fallen to 1 or below, and more than 5 % .*\n1. Some batches hold NaN"
    with pytest.warns(UserWarning, match=message):
        run(lambda: jax.lax.scan(step, RULE.init(), jnp.array(flags)))


def test_rare_skips_and_a_start_from_a_high_scale_are_not_warned_of():
    state = RULE.init()._replace(loss_scale=jnp.float32(2.0**32))
    for flag in [False] * 19 + [True] * 200 + [*[True] * 24, False] * 14:
        state = RULE.update(state, flag)
        ls.check_loss_scale(state)
    assert state.loss_scale == 1.0


def test_a_scale_that_is_rightly_below_1_is_not_warned_of_but_bad_batches_are():
    rule = presets.torch_grad_scaler()

    def step(state, magnitude):
        finite = magnitude * state.loss_scale < 65504
        state = rule.update(state, finite)
        grads = [jnp.where(finite, magnitude, jnp.inf)]
        ls.check_loss_scale(state, grads=grads, value=jnp.float32(1.0))
        return state

    state = functools.reduce(step, 200 * [2.0**22], rule.init())
    assert state.loss_scale < 2.0**-5 and state.consecutive_skips == 0
    batches = 60 * [*9 * [2.0**22], jnp.nan]
    with pytest.warns(UserWarning, match="fallen to 1 or below, and more than 5 %"):
        functools.reduce(step, batches, state)


def loss_fn(params, batch):
    return jnp.sum(params * batch)


GOOD, BAD = jnp.ones(2), jnp.array([1.0, jnp.inf])
TX = ls.with_loss_scaling(optax.adam(1e-3))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_that_is_left_out_is_warned_of(compiled):
    """Steps that put the old state back look alike."""

    def watched(params, opt_state, batch):
        loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, batch)

        def update():
            updates, new_state = TX.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), new_state

        small = optax.tree.norm(grads) < 1e3
        params, opt_state = jax.lax.cond(small, update, lambda: (params, opt_state))
        ls.check_loss_scale(opt_state, grads=grads, value=loss)
        return params, opt_state

    run = jax.jit(watched) if compiled else watched
    params, opt_state = run(GOOD, TX.init(GOOD), GOOD)
    with pytest.warns(UserWarning, match="counts as applied.\n1. The step leaves `up"):
        run(params, opt_state, BAD)
        jax.effects_barrier()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_bad_batches_and_overflows_are_not_taken_for_a_lost_update(rule):
    """Warnings are errors. Rules that never skip apply them, as they say."""
    tx = ls.with_loss_scaling(optax.MultiSteps(optax.adam(1e-3), 2), rule)

    @jax.jit
    def step(opt_state, batch):
        loss, grads = ls.value_and_grad(loss_fn, opt_state)(GOOD, batch)
        return tx.update(grads, opt_state, GOOD, value=loss)[1], grads, loss

    opt_state = tx.init(GOOD)
    for i in range(12):
        opt_state, grads, loss = step(opt_state, BAD if i in (3, 8) else GOOD)
        ls.check_loss_scale(opt_state, grads=grads, value=loss)


def test_of_an_ensemble_one_member_may_skip():
    state = jax.vmap(TX.init)(jnp.ones((2, 2)))
    _, state = jax.vmap(TX.update)(jnp.stack([GOOD, BAD]), state)
    ls.check_loss_scale(state, grads=jnp.stack([GOOD, BAD]))


ZEROS = {"w": jnp.zeros(3), "b": jnp.zeros(2, jnp.float16), "count": jnp.ones((), int)}


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_all_zero_are_warned_of(compiled):
    def check(state, grads):
        ls.check_loss_scale(state, grads=grads, value=jnp.float32(1.0))

    run_check = functools.partial(run, check) if compiled else check
    # In a compiled loop only every 500 steps.
    first = RULE.init()._replace(growth_tracker=jnp.int32(520))
    message = r"^All gradients are exactly 0.\n1. The loss does not reach"
    with pytest.warns(UserWarning, match=message):
        run_check(first, ZEROS)
    for x in (2.0**-24, jnp.nan):
        not_zero = {**ZEROS, "b": ZEROS["b"].at[1].set(x)}
        run_check(RULE.update(first, bool(jnp.isfinite(x))), not_zero)
    for other in ({"w": jnp.ones(1)}, {"w": jnp.zeros((0, 3))}):
        run_check(first, {"count": ZEROS["count"], **other})
    ls.check_loss_scale(first, grads=ZEROS, value=jnp.float32(0.0))
