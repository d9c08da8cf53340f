"""check_loss_scale, on the host and in compiled loops."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_rule import every_rule
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import normal, run_rule

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
    texts = [str(error).replace("last step was", "last 1") for error in errors]
    return sorted(int(text.split()[2]) for text in texts)


def test_a_guard_raises_at_one_step_more_than_allowed():
    params = np.ones(2, np.float32)
    opt_state = ls.with_loss_scaling(optax.adam(1e-3), RULE).init(params)
    ls.check_loss_scale(opt_state._replace(scale_state=skipped(100)))
    with pytest.raises(ls.LossScaleError, match="^The last 101 steps were all skipped"):
        ls.check_loss_scale(opt_state._replace(scale_state=skipped(101)))
    grads = jnp.asarray(params)
    with jax.transfer_guard("disallow"):
        ls.check_loss_scale(opt_state, grads=grads)


@pytest.mark.parametrize("scale", [jnp.nan, jnp.inf, 0.0])
def test_a_guard_raises_for_a_scale_that_is_no_positive_number(scale):
    message = r"^The loss scale is not a positive number.*\n.*\nLikely causes: the st"
    with pytest.raises(ls.LossScaleError, match=message):
        ls.check_loss_scale(RULE.init()._replace(loss_scale=jnp.float32(scale)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_consecutive_skips", -1, "must be a whole number from 0"),
        ("state", optax.EmptyState(), "`state` must be what the `init"),
        ("every", 0, "`every` must be a whole number from 1"),
        ("grads", "gradients", "`grads` must hold only arrays"),
        ("value", np.ones(2), "`value` must be .* the unscaled loss, which `value_and"),
        ("axis_name", "z", "must name an axis of the surrounding"),
        ("on_error", "print", "`on_error` must be a function"),
    ],
)
def test_an_argument_that_a_guard_cannot_use_is_refused(name, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ls.check_loss_scale(**{"state": RULE.init(), name: value})


def test_a_scale_at_its_ceiling_without_a_skip_is_of_no_use():
    """The second line is forgotten, or nothing is computed in float16."""

    states = run_rule(ls.DynamicLossScale(2.0**24), [True] * 500)
    state = jax.tree.map(lambda x: x[-1], states)._replace
    with pytest.warns(UserWarning, match="causes: the step calls `jax.v") as seen:
        ls.check_loss_scale(state())
        ls.check_loss_scale(state(growth_tracker=501))
        # In a compiled loop only every 500 steps.
        run(ls.check_loss_scale, state(growth_tracker=1500))
    assert len(seen) == 3 and seen[0].filename == __file__
    run(ls.check_loss_scale, state(growth_tracker=1501))
    # One that has just arrived may overflow next; others have, or are lower.
    for number in (
        {"growth_tracker": 499},
        {"skipped_steps": 1},
        {"loss_scale": 2.0**23},
    ):
        ls.check_loss_scale(state(**number))


# Limits and intervals, and the skipped steps of which errors speak after 2 and then 5
# skipped steps in a row.
FLAGS = np.array([0, 0, 1, 1, 0, 0, 0, 0, 0, 1], bool)
WATCHED = {(5, 1): [], (4, 1): [5], (2, 1): [3, 4, 5], (2, 2): [3, 5]}
WATCHED |= {(1, 3): [2, 2, 5], (1, 100): [2, 2], (2**31 - 1, 2**31 - 1): []}
WATCHED |= {(0, 5): [1, 1]}


@pytest.mark.parametrize("compiled", [False, True])
def test_guard_errors_beyond_the_limit_and_then_every_few(compiled):
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


def test_guard_tells_a_share_once_for_each_skip_in_a_loop():
    rule, told = ls.DynamicLossScale(min_scale=2.0), []

    def step(state, flag):
        state = rule.update(state, flag)
        ls.check_loss_scale(state, every=10, on_error=told.append)
        return state, None

    run(lambda: jax.lax.scan(step, rule.init(), np.arange(200) % 2 == 0))
    assert len(told) == len(set(map(str, told))) == 7  # above 1/4 from the 35th on


def test_of_a_fixed_scale_the_guard_tells_a_long_row_when_it_is_over():
    """In the row, the limit decides alone."""
    states = run_rule(ls.FixedLossScale(1.0), [False] * 60 + [True] * 40)
    for i in (30, 59, 99):
        over = pytest.raises(ls.LossScaleError, match="^Recently, 30% of the steps")
        with over if i == 99 else contextlib.nullcontext():
            ls.check_loss_scale(jax.tree.map(lambda x, i=i: x[i], states))


def test_guard_calls_the_host_only_when_due():
    def check(state, grads):
        ls.check_loss_scale(state, grads=grads)

    program = jax.make_jaxpr(check)(RULE.init(), {"w": np.ones(3)})
    rest = [str(eqn) for eqn in program.eqns if eqn.primitive.name != "cond"]
    assert "debug_callback" in str(program)
    assert not [eqn for eqn in rest if "callback" in eqn or "_measure_leaf" in eqn]


def test_a_compiled_loop_ends_with_the_text_of_the_error(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        run(ls.check_loss_scale, skipped(101))
    message = "LossScaleError: The last 101 steps were all skipped, more than"
    # jax has no better way, and logs it besides.
    assert message in str(error.value) and message in caplog.text
    # And the next one runs as if nothing had been.
    run(ls.check_loss_scale, skipped(100))


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
    run(mapped, np.ones((8, 1), np.float32), skipped(101))
    assert [len(told) for told in errors.values()] == [8, 2, 1]


def test_guard_under_vmap_has_a_message_for_each_member():
    errors = []
    check = functools.partial(
        ls.check_loss_scale, max_consecutive_skips=3, every=2, on_error=errors.append
    )
    run(jax.vmap(lambda steps: check(skipped(steps))), np.arange(8))
    assert skips(errors) == [4, 6]


def test_guard_in_a_loop_warns_of_bad_batches():
    def step(state, flag):
        state = RULE.update(state, flag)
        ls.check_loss_scale(state)
        return state, None

    flags = [False] * 25 + 40 * [*[True] * 9, False]
    message = "^More than 5 % .*\nLikely causes: some batches hold NaN"
    with pytest.warns(UserWarning, match=message):
        run(lambda: jax.lax.scan(step, RULE.init(), np.array(flags)))


@pytest.mark.parametrize("compiled", [False, True])
def test_guard_tells_of_batches_that_overflow_in_the_forward_pass(compiled):
    """One in eight. The scale never falls."""

    def step(state, value):
        state = TX.update(GOOD, state, GOOD, value=value)[1]
        if compiled:
            ls.check_loss_scale(state)
        return state, state

    values = np.float32(100 * [*7 * [1], np.inf])
    message = r"^More than 5 % (.|\n)* in the forward pass of\n"
    with pytest.warns(UserWarning, match=message):
        run_scan = jax.jit(lambda: jax.lax.scan(step, TX.init(GOOD), values)[1])
        states = jax.block_until_ready(run_scan())
        jax.effects_barrier()
        if not compiled:
            ls.check_loss_scale(jax.tree.map(lambda x: x[-2], states))
    assert np.all(ls.get_loss_scale(states) == 2.0**15)


HEALTHY = {
    **{f"every {n}": ls.DynamicLossScale(growth_interval=n) for n in (20, 50, 200)},
    "far too high": ls.DynamicLossScale(2.0**24, growth_interval=20),
    "headroom": ls.HeadroomLossScale(2.0**24),
    "megatron": presets.megatron(min_scale=2.0**-14),
}


@pytest.mark.parametrize("largest", [2.0**-4, 2.0**26])
@pytest.mark.parametrize("rule", HEALTHY.values(), ids=HEALTHY)
def test_guard_says_nothing_of_a_healthy_rule(rule, largest):
    """Asked after any step. Warnings are errors."""

    def step(state, magnitude):
        finite = magnitude * state.loss_scale < 65504
        grads = jnp.where(finite, magnitude, jnp.nan)
        tx = ls.with_loss_scaling(optax.identity(), rule)
        _, (state, _) = tx.update(grads, ls.WithLossScalingState(state, ()))
        return state, state

    magnitudes = largest * 2 ** (0.3 * normal(1500))
    states = jax.jit(lambda: jax.lax.scan(step, rule.init(), magnitudes)[1])()
    often = jax.device_get(jax.tree.map(lambda x: x[states.skip_rate > 0.05], states))
    for i in range(0, len(often.skip_rate), 5):
        ls.check_loss_scale(jax.tree.map(lambda x, i=i: x[i], often))


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"loss_scale": 1.0}, True),
        ({"is_fixed": True}, True),
        ({"skip_rate": 0.11}, True),
        ({"consecutive_skips": 1, "growth_tracker": 3}, True),
        # The rule may be looking for its scale, its first one, or one after a jump.
        ({}, False),
        ({"consecutive_skips": 1}, False),
        ({"loss_scale": 1.0, "skipped_steps": 60}, False),
        ({"loss_scale": 1.0, "consecutive_skips": 2}, False),
        # A rule that grows every 20 steps has this rate after a skip.
        ({"loss_scale": 1.0, "skip_rate": 0.053}, False),
    ],
)
def test_guard_tells_of_many_skips_if_no_scale_cures_them(numbers, told):
    numbers = {"skip_rate": 0.06, "skipped_steps": 61} | numbers
    with pytest.warns(UserWarning, match="5 %") if told else contextlib.nullcontext():
        ls.check_loss_scale(RULE.init()._replace(**numbers))


def test_guard_allows_rare_skips_and_a_high_start():
    state = RULE.init()._replace(loss_scale=jnp.float32(2.0**32))
    for flag in [False] * 19 + [True] * 200 + [*[True] * 24, False] * 14:
        state = RULE.update(state, flag)
        ls.check_loss_scale(state)
    assert float(state.loss_scale) == 2.0**-9


def test_guard_allows_a_scale_below_1_but_no_bad_batches():
    rule = presets.torch_grad_scaler()

    def step(state, magnitude):
        finite = magnitude * float(state.loss_scale) < 65504
        state = rule.update(state, finite)
        grads = [np.float32(magnitude if finite else np.inf)]
        ls.check_loss_scale(state, grads=grads, value=np.float32(1.0))
        return state

    state = functools.reduce(step, 200 * [2.0**22], rule.init())
    assert float(state.loss_scale) < 2.0**-5 and int(state.consecutive_skips) == 0
    batches = 60 * [*9 * [2.0**22], np.nan]
    with pytest.warns(UserWarning, match="^More than 5 % of the recent steps"):
        functools.reduce(step, batches, state)


def loss_fn(params, batch):
    return jnp.sum(params * batch)


GOOD, BAD = np.float32([1, 1]), np.float32([1, np.inf])
TX = ls.with_loss_scaling(optax.adam(1e-3))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_that_is_left_out_is_warned_of(compiled):
    """Steps that put the old state back look alike."""

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = ls.value_and_grad(loss_fn, opt_state)(params, batch)

        def update():
            updates, new_state = TX.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), new_state

        small = optax.tree.norm(grads) < 1e3
        return jax.lax.cond(small, update, lambda: (params, opt_state)), grads, loss

    def watched(*args):
        (params, opt_state), grads, loss = step(*args)
        ls.check_loss_scale(opt_state, grads=grads, value=loss)
        return params, opt_state

    run = jax.jit(watched) if compiled else watched
    params, opt_state = run(GOOD, TX.init(GOOD), GOOD)
    with pytest.warns(UserWarning, match="counts as applied.\nLikely causes: the"):
        run(params, opt_state, BAD)
        jax.effects_barrier()


@every_rule
def test_guard_takes_no_bad_batch_for_a_lost_update(rule):
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
    grads = np.stack([GOOD, BAD])
    step = jax.jit(lambda g: jax.vmap(TX.update)(g, jax.vmap(TX.init)(g)))
    ls.check_loss_scale(step(grads)[1], grads=grads)
    # Of the member that was skipped, zeros say nothing.
    ls.check_loss_scale(step(grads)[1], grads=np.zeros_like(grads))


ZEROS = {"w": np.zeros(3), "b": np.zeros(2, np.float16), "count": np.int32(1)}


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_all_zero_are_warned_of(compiled):
    def check(state, grads):
        ls.check_loss_scale(state, grads=grads, value=np.float32(1.0))

    run_check = functools.partial(run, check) if compiled else check
    first = RULE.update(RULE.init(), True)
    message = r"^All gradients are exactly 0.\nLikely causes: the loss does not"
    with pytest.warns(UserWarning, match=message):
        run_check(first, ZEROS)
    # In a compiled loop only every 500 steps.
    run(check, RULE.update(first, True), ZEROS)
    for x in (2.0**-24, np.nan):
        not_zero = {**ZEROS, "b": np.float16([0, x])}
        run_check(RULE.update(RULE.init(), bool(np.isfinite(x))), not_zero)
    for other in ({"w": np.ones(1)}, {"w": np.zeros((0, 3))}):
        run_check(first, {"count": ZEROS["count"], **other})
    ls.check_loss_scale(first, grads=ZEROS, value=np.float32(0.0))
