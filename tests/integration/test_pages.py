"""Every block of every page runs, prints what stands there, and does what is said."""

import contextlib
import functools
import re
import sys
import unittest.mock
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from asserts import assert_same_bits, assert_same_types, kept
from book import PAGES, README, code_blocks, first_program, page, run_page
from shared import slow_but
from training import run_rule

import optax_lossscale as ls

# The programs of frameworks, trainers and migration guides have tests of their own.
ELSEWHERE = re.compile(r"frameworks/|guides/trainers|coming_from/")
NAMES = [
    name
    for path in sorted(PAGES.rglob("*.md"))
    if code_blocks(path.read_text(), "python")
    and not ELSEWHERE.match(name := path.relative_to(PAGES).as_posix()[: -len(".md")])
]
COSTLY = {"start/cast_recipes", "guides/nan_guard", "guides/sweeps", "troubleshooting"}


def spoiled(x, value):
    bad = np.array(x)
    bad[0, 0] = value
    return bad


@functools.cache
def run(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", unittest.mock.MagicMock())
        return first_program() if name == "index" else run_page(PAGES / f"{name}.md")


@pytest.mark.parametrize("name", slow_but({*NAMES} - COSTLY, NAMES))
def test_every_block_runs_and_prints_the_output_that_is_shown(name):
    printed = run(name)["printed"]
    assert [x for x in code_blocks(page(name), "text") if x not in printed] == []


@pytest.mark.parametrize(("passed", "scale"), [(True, 2.0**15), (False, 1.0)])
def test_value_keeps_the_scale_over_bad_batches(passed, scale):
    """README says so of 15 batches. Its own step passes the value."""
    program = run("index")
    start, tx, (x, y) = (program[name] for name in ("params", "tx", "batch"))

    @jax.jit
    def without_value(params, state, batch):
        grads = ls.grad(ls.autocast(program["loss_fn"], "float16"), state)(
            params, batch
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = program["train_step"] if passed else without_value
    params, state = start, tx.init(start)
    for _ in range(15):
        params, state, *_ = step(params, state, (spoiled(x, np.inf), y))
    assert ls.get_loss_scale(state) == scale
    assert_same_bits(params, start)
    assert re.search(rf"\b15 .*\b{scale:.0f}\b", README)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_program_skips_in_each_dtype_and_scales_only_in_float16(dtype):
    blocks = code_blocks(page("start/cast_recipes"), "python")
    (block,) = (x for x in blocks if "def any_step" in x)
    program = dict(run("index"))
    exec(block.replace("jnp.bfloat16  #", f"jnp.{dtype}  #"), program)
    params, state, (x, y) = (program[name] for name in ("params", "opt_state", "batch"))
    new, state, _ = program["any_step"](params, state, (x, spoiled(y, np.inf)))
    assert_same_bits(new, params)
    assert not ls.was_applied(state)
    assert ls.get_loss_scale(state) == (2.0**15 if dtype == "float16" else 1.0)
    computed = str(jax.make_jaxpr(program["cast_loss_fn"])(params, (x, y)))
    narrow = {"float32": set(), "bfloat16": {"bf16"}, "float16": {"f16"}}
    assert {*re.findall(r"\bb?f16\b", computed)} == narrow[dtype]


@pytest.mark.slow
def test_stopped_member_of_a_sweep_keeps_its_state_and_needs_no_error():
    guide = run("guides/sweeps")
    members, losses = guide["sweep_step"](guide["members"], np.arange(4) == 2)
    for x, y in zip(*map(jax.tree.leaves, (members, guide["members"])), strict=True):
        assert_same_bits(x[2], y[2])
    assert not np.array_equal(members[0]["w"][1], guide["members"][0]["w"][1])
    ls.check_loss_scale(members[1])
    assert np.isfinite(losses).all()


def test_checkpoint_is_restored_bit_for_bit_whole_or_split_over_a_mesh():
    guide = run("guides/checkpoints")
    saved = {"params": guide["params"], "opt_state": guide["opt_state"]}
    assert_same_bits(guide["restored"], saved)
    assert_same_types(guide["restored"], saved)
    assert_same_bits(guide["resharded"], saved)
    assert not guide["resharded"]["params"]["w"].sharding.is_fully_replicated


def test_checkpoint_made_without_loss_scaling_is_adopted():
    guide = dict(run("guides/checkpoints"))
    blocks = code_blocks(page("guides/checkpoints"), "python")
    (block,) = (x for x in blocks if "old_run" in x)
    # Of a run that has been trained, whose moments are not those of the start.
    trained = block.replace("plain.init(params)}", "opt_state.inner_state}", 1)
    assert trained != block
    exec(trained, guide)
    state = guide["adopted_state"]
    assert_same_bits(state.inner_state, guide["old_run"]["opt_state"])
    assert_same_types(state, guide["wrapped"].init(guide["params"]))
    new = {"params": guide["params"], "opt_state": state}
    abstract = jax.eval_shape(lambda: new)
    for target, words in ((new, "tree structures do not"), (abstract, "Structure mis")):
        refused = pytest.raises(ValueError, match=words)
        with ocp.StandardCheckpointer() as checkpointer, refused:
            checkpointer.restore(guide["old_path"], target)


def test_nnx_optimizer_adopts_one_without_loss_scaling():
    guide = run("guides/checkpoints")
    model, optimizer = guide["model"], guide["new_optimizer"]
    optimizer.update(model, guide["nnx"].state(model), value=1.0)
    assert ls.was_applied(optimizer)
    assert optimizer.step[...] == 1


@pytest.mark.slow
def test_run_of_weeks_goes_on_from_checkpoint_20_with_the_same_bits(
    tmp_path, monkeypatch
):
    guide = run("guides/nan_guard")
    train, state = guide["train"], guide["nnx"].state
    whole = state(train(tmp_path, 22))
    batches = {step: guide["get_batch"](step) for step in (20, 21)}
    monkeypatch.setitem(train.__globals__, "get_batch", batches.__getitem__)
    assert_same_bits(state(train(tmp_path, 22)), whole)


@pytest.mark.slow
def test_run_of_weeks_leaves_out_batches_after_it_has_rolled_back():
    """After 20 steps it takes batches 40 to 59, and leaves out 20 to 39."""
    assert run("guides/nan_guard")["run"][1].step[...] == 40


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_bad_micro_batch_changes_nothing_in_a_run_of_weeks(bad, micro_batch, tmp_path):
    guide = run("guides/nan_guard")
    trained = guide["train"](tmp_path, micro_batch + 2)
    before, (x, y) = kept(trained), guide["get_batch"](0)
    guide["train_step"](*trained, (spoiled(x, bad), y))
    assert not ls.was_applied(trained[1])
    assert_same_bits(kept(trained), before)


@pytest.fixture
def train_from(tmp_path, monkeypatch):
    """20 steps of a run of weeks, from other first weights; its newest checkpoint."""
    train = run("guides/nan_guard")["train"]

    def train_from(start, ends=None):
        monkeypatch.setitem(train.__globals__, "create", lambda: start)
        with ends or contextlib.nullcontext():
            train(tmp_path, 20)
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            return manager.latest_step()

    return train_from


@pytest.mark.slow
def test_run_of_weeks_never_saves_nan_in_statistics(train_from):
    start = run("guides/nan_guard")["create"]()
    start[0].norm.mean[...] *= np.nan
    error = pytest.raises(FloatingPointError, match=r"step 19: .*'norm'\]\['mean'")
    assert train_from(start, error) is None


@pytest.mark.slow
def test_run_of_weeks_never_saves_nan_in_weights(train_from):
    start = run("guides/nan_guard")["create"]()
    start[0].hidden.kernel[...] *= np.nan
    error = pytest.raises(ls.LossScaleError, match="The last 20 steps were all")
    assert train_from(start, error) is None


@pytest.mark.slow
def test_run_of_weeks_never_saves_an_infinite_moment(train_from):
    start = run("guides/nan_guard")["create"]()
    moments = start[1].opt_state.inner_state.inner_opt_state[1][0].nu
    moments.out.bias[...] += np.inf
    error = pytest.raises(FloatingPointError, match=r"step 19: .*'nu'\]\['out'\]")
    assert train_from(start, error) is None


@pytest.mark.parametrize("check_updates", [False, True])
def test_one_gradient_of_1e20_stops_adam_unless_updates_are_checked(check_updates):
    tx = ls.skip_nonfinite(optax.adam(1.0), check_updates=check_updates)
    update, ones = jax.jit(tx.update), np.ones(1, np.float32)
    _, state = update(1e20 * ones, tx.init(ones))
    updates, state = update(ones, state)
    assert (updates[0] == 0, np.isinf(optax.tree.get(state, "nu")[0])) == (
        (False, False) if check_updates else (True, True)
    )
    assert ls.get_loss_scale_state(state).skipped_steps == check_updates
    words = "a gradient above 1.8e19 made Adam's second moment infinite"
    assert words in page("troubleshooting")


def spike_step(**changes):
    """What the block of the page defines, before it trains, if some of it differs."""
    blocks = code_blocks(page("guides/nan_guard"), "python")
    (block,) = (x for x in blocks if "def spike_step" in x)
    definition, guide = block.partition("state, running =")[0], dict(run("index"))
    for ours, other in changes.items():
        assert ours in definition
        definition = definition.replace(ours, other)
    exec(definition, guide)
    return guide


def test_overflow_is_no_spike_and_lowers_the_scale():
    float16 = {"jax.value_and_grad": "ls.value_and_grad", "guarded": "tx"}
    guide = spike_step(**float16, **{"jnp.bfloat16)": "jnp.float16), state"})
    x, y = guide["batch"]
    start = guide["params"], guide["tx"].init(guide["params"])
    every_loss_is_a_spike = 20, np.zeros(2, np.float32), np.zeros(2, np.float32)
    for labels, scale in ((y, 2.0**15), (spoiled(y, 1e37), 2.0**14)):
        params, state, running, loss = guide["spike_step"](
            *start, every_loss_is_a_spike, (x, labels)
        )
        assert np.isfinite(loss) and ls.get_loss_scale(state) == scale
        assert not ls.was_applied(state)
        assert_same_bits((params, running[1:]), (start[0], every_loss_is_a_spike[1:]))


def test_loss_that_stays_high_ends_in_an_error():
    guide = spike_step()
    x, y = guide["batch"]
    params, running = guide["params"], (20, np.zeros(2), np.zeros(2))
    state = guide["guarded"].init(params)
    for _ in range(101):
        params, state, running, _ = guide["spike_step"](params, state, running, (x, y))
    with pytest.raises(ls.LossScaleError, match="The last 101 steps were all"):
        ls.check_loss_scale(state)


@pytest.mark.slow
def test_report_of_a_step_that_the_run_of_weeks_has_saved_names_the_batch():
    guide = run("guides/nan_guard")
    start = guide["create"]()
    nnx = guide["nnx"]
    target = ocp.args.StandardRestore((nnx.state(start), guide["get_batch"](0)))
    with ocp.CheckpointManager(f"{guide['directory']}/skipped") as skipped:
        state, batch = skipped.restore(10, args=target)
    nnx.update(start, state)
    assert ls.all_finite(state) and not ls.all_finite(batch)
    [row] = ls.nonfinite_report(guide["train_step"], *start, batch)
    assert (row.operation, row.line) == ("argument", "2, [0]")


def test_loggers_get_every_step_and_a_scan_prints_each_hundredth():
    guide = run("guides/logging")
    assert len(guide["wandb"].init().log.mock_calls) == 200
    lines = re.findall(r"^step (\d+): loss [\d.]+$", guide["printed"], re.M)
    assert lines == ["99", "199"]
    (events,) = Path(guide["writer"].logdir).iterdir()
    assert events.read_bytes().count(b"skipped") == 200


class ConfigDict:
    """As of ml_collections 1.1.0: it is no mapping."""

    def __init__(self, fields):
        self.keys, self.get = fields.keys, fields.get

    def __getitem__(self, name):
        return self.get(name)


def test_rule_comes_back_from_a_config_that_is_no_mapping():
    guide = run("guides/logging")
    rule, config = guide["rule"], ConfigDict(guide["config"]["loss_scale"])
    assert rule == ls.DynamicLossScale(growth_interval=500)
    assert ls.LossScale.from_config(config) == rule


def test_log_marks_a_skip_at_the_scale_that_overflowed():
    guide = run("guides/logging")
    x, y = guide["batch"]
    y = spoiled(y, 0.0)  # a wrong label: the loss is large, and the gradients overflow
    state, history = guide["tx"].init(guide["params"]), []
    for batch in ((x, y), (spoiled(x, 1e4), y), (x, y)):
        _, state, metrics = guide["logged_step"](guide["params"], state, batch)
        history.append((metrics["loss_scale"], metrics["skipped"]))
    assert history == [(2.0**15, False), (2.0**15, True), (2.0**14, False)]


def test_negative_label_in_range_gives_a_finite_loss():
    loss_fn = jax.jit(optax.softmax_cross_entropy_with_integer_labels)
    assert np.isfinite(loss_fn(np.arange(100.0), -100))
    assert loss_fn(np.arange(100.0), -100) == loss_fn(np.arange(100.0), 0)
    text = page("troubleshooting")
    words = "with 100 classes, -100 is class 0, and the loss is finite but wrong"
    assert "ignore label, -100" in text and words in text


@pytest.mark.parametrize(
    ("eps", "is_finite"), [(1e-6, False), (6e-5, False), (1e-3, True)]
)
def test_eps_of_a_float16_norm_must_be_large(eps, is_finite):
    def layer_norm(x):
        x = x.astype(jnp.float16) - x.mean().astype(jnp.float16)
        return (x / jnp.sqrt((x**2).mean() + jnp.float16(eps))).astype(jnp.float32)

    slope = jax.jit(jax.grad(lambda x: layer_norm(x) @ jnp.arange(8.0)))(jnp.ones(8))
    assert ls.all_finite(slope) == is_finite
    assert "a norm needs an `eps` of 1e-3" in page("troubleshooting")


def test_every_16th_batch_that_overflows_after_growth_is_always_skipped():
    """The scale grows again before the next one."""
    rule = ls.DynamicLossScale(growth_interval=10)

    def step(state, i):
        fits = (i % 16 < 15) | (state.loss_scale < 2.0**16)
        return rule.update(state, fits), fits

    _, fits = jax.lax.scan(step, rule.init(), jnp.arange(320))
    np.testing.assert_array_equal(fits, np.arange(320) % 16 < 15)
    words = "unless it is always the same kind of batch, which is [never learned]"
    assert words in page("guides/logging")


@pytest.mark.parametrize(
    ("rule", "rate"), [(ls.DynamicLossScale(), 22), (ls.FixedLossScale(1.0), 63)]
)
def test_skip_rate_after_a_hundred_skips_is_that_of_the_page(rule, rate):
    assert round(100 * run_rule(rule, 100 * [False]).skip_rate[-1]) == rate
    assert f" {rate}%" in page("guides/logging")


@pytest.mark.parametrize(
    ("step", "flag", "applied", "scale"),
    [
        ("gan_step", True, [True, False], 2.0**15),
        ("vjp_step", True, [True, False], 2.0**15),
        ("one_gradient_step", True, [False, False], 2.0**15),
        ("one_gradient_step", False, [True, False], 2.0**15),
    ],
    ids=["a scale for each", "one vjp", "one scale, one flag", "one scale"],
)
def test_bad_real_batch_skips_the_discriminator_alone_or_both(
    step, flag, applied, scale
):
    guide = dict(run("guides/several_losses"))
    if not flag:
        blocks = code_blocks(page("guides/several_losses"), "python")
        (block,) = (x for x in blocks if "def one_gradient_step" in x)
        assert block.count(", **flag") == 2
        exec(block.replace(", **flag", ""), guide)
    shared = step == "one_gradient_step"
    tx = guide["skips" if shared else "gan_tx"]
    networks = guide["generator"], guide["discriminator"]
    old = *networks, tuple(map(tx.init, networks))
    scale_state = [guide["rule"].init()] if shared else []
    batch = spoiled(guide["x"], np.nan), guide["noise"]
    new = guide[step](*old, *scale_state, *batch)
    assert [bool(ls.was_applied(state)) for state in new[2]] == applied
    for i in np.flatnonzero(np.invert(applied)):
        assert_same_bits(*((run[i], run[2][i].inner_state) for run in (new, old)))
    assert ls.get_loss_scale(*new[3:] or new[2][1:]) == scale
    assert ls.all_finite(new[:2])


@pytest.mark.slow
def test_one_vjp_takes_the_gradients_of_two_losses_each_at_its_scale():
    guide = run("guides/several_losses")
    networks, batch = (guide["generator"], guide["discriminator"]), (guide["x"],)
    tx, batch = guide["gan_tx"], (*batch, guide["noise"])
    g_state, d_state = map(tx.init, networks)
    d_state = optax.tree.set(d_state, loss_scale=jnp.float32(2.0**8))
    *_, states = guide["vjp_step"](*networks, (g_state, d_state), *batch)
    losses = guide["two_losses"]
    for i, state in enumerate(states):
        grads = jax.grad(lambda *x, i=i: losses(*x)[i], argnums=i)(*networks, *batch)
        moment = optax.tree.get(state, "mu")  # half of the first gradient
        for x, y in zip(*map(jax.tree.leaves, (moment, grads)), strict=True):
            np.testing.assert_allclose(2 * x, y, rtol=0.02, atol=1e-4)
    assert [float(ls.get_loss_scale(x)) for x in states] == [2.0**15, 2.0**8]


def test_two_losses_share_a_scale_that_an_overflow_of_either_lowers():
    guide = run("guides/several_losses")
    rule, skips = guide["rule"], guide["skips"]
    networks, noise = (guide["generator"], guide["discriminator"]), guide["noise"]

    @jax.jit
    def step(g_state, d_state, scale_state, real):
        generator, discriminator = networks
        fun = ls.grad(guide["discriminator_loss"], scale_state)
        d_grads = fun(discriminator, generator, real, noise)
        fun = ls.grad(guide["generator_loss"], scale_state)
        g_grads = fun(generator, discriminator, noise)
        _, g_state = skips.update(g_grads, g_state, generator)
        _, d_state = skips.update(d_grads, d_state, discriminator)
        scale_state = rule.update(scale_state, ls.all_finite((d_grads, g_grads)))
        return g_state, d_state, scale_state

    real = spoiled(guide["x"], np.nan)
    *states, scale_state = step(*map(skips.init, networks), rule.init(), real)
    assert [bool(ls.was_applied(state)) for state in states] == [True, False]
    assert scale_state.loss_scale == 2.0**14


def test_one_gradient_of_a_good_batch_is_applied_to_both():
    assert all(map(ls.was_applied, run("guides/several_losses")["one_gradient"][2]))


def test_each_network_of_a_gan_lowers_its_own_scale():
    guide = run("guides/several_losses")
    names = ("generator", "discriminator", "x", "noise")
    generator, discriminator, x, noise = (guide[name] for name in names)
    g_state, d_state = map(guide["gan_tx"].init, (generator, discriminator))
    d_state = optax.tree.set(d_state, loss_scale=jnp.float32(2.0**24))  # it overflows
    _, _, new = guide["gan_step"](
        generator, discriminator, (g_state, d_state), x, noise
    )
    assert [float(ls.get_loss_scale(state)) for state in new] == [2.0**15, 2.0**23]


def test_several_losses_have_a_scale_each_and_skip_together():
    guide = run("guides/several_losses")
    params, (x, y) = guide["params"], guide["batch"]
    start = params, guide["skip_only"].init(params)
    first = {name: guide["rule"].init() for name in guide["losses"]}
    # A scale at which the gradients of one loss overflow, and a loss of NaN.
    high = first | {"data": first["data"]._replace(loss_scale=jnp.float32(2.0**24))}
    for scales, batch in [(high, (1e35 * x, y)), (first, (spoiled(x, np.nan), y))]:
        params, state, new = guide["two_loss_step"](*start, scales, batch)
        assert_same_bits((params, state.inner_state), (start[0], start[1].inner_state))
        factors = {k: float(new[k].loss_scale / scales[k].loss_scale) for k in new}
        assert factors == {"data": 0.5 if scales is high else 1.0, "decay": 1.0}


@pytest.mark.parametrize("fix", ["hyperparam_dtype", "with_master_weights", ""])
def test_b2_of_bfloat16_parameters_is_below_1_only_with_a_fix(fix):
    """Otherwise it rounds to 1, and the first update is NaN."""
    guide = run("guides/wrappers")
    injected = optax.inject_hyperparams(optax.adamw)
    injected = guide["injected"] if fix == "hyperparam_dtype" else injected
    tx = injected(guide["schedule"])
    if fix == "with_master_weights":
        tx = ls.with_master_weights(tx)
    tx, params = ls.skip_nonfinite(tx), {"w": jnp.ones(4, jnp.bfloat16)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Every update rounds the state")
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert bool(ls.all_finite(updates)) == bool(fix)
    assert (optax.tree.get(state, "b2") < 1) == bool(fix)


@pytest.mark.parametrize("grad", [1, 0], ids=["gradient", "weight decay"])
@pytest.mark.parametrize(("copied", "moved"), [(False, 0), (True, 512)])
def test_small_updates_move_bfloat16_weights_that_have_master_weights(
    copied, moved, grad
):
    """Without them nothing moves, no second moment falls, and no warning says so."""
    tx, ones = optax.adamw(6e-4, weight_decay=1.0), np.ones(512, jnp.bfloat16)
    tx = ls.skip_nonfinite(ls.with_master_weights(tx) if copied else tx)

    @jax.jit
    def train():
        def step(run, _):
            updates, state = tx.update(grad * ones, run[1], run[0])
            return (optax.apply_updates(run[0], updates), state), None

        start = tx.init(ones)
        start = optax.tree.set(start, nu=jnp.ones_like(optax.tree.get(start, "nu")))
        return jax.lax.scan(step, (jnp.asarray(ones), start), length=20)[0]

    weights, state = train()
    assert np.sum(weights != 1) == moved
    assert np.all(optax.tree.get(state, "nu") < 1) == (copied and not grad)
    assert "6e-4 changes none of 512 weights" in page("guides/float16_parameters")


def test_average_of_bfloat16_weights_does_not_move():
    ones = np.ones(512, jnp.bfloat16)
    assert np.all(jax.jit(optax.incremental_update)(2 * ones, ones, 1e-3) == 1)
    words = "Weight decay and a weight average have no effect"
    assert words in page("guides/float16_parameters")


NAN = optax.stateless(lambda updates, _: optax.tree.scale(np.nan, updates))


@pytest.mark.parametrize(
    ("inner", "grads", "loss"),
    [
        (optax.sgd(1.0), [1.0, 1.0], np.nan),
        (NAN, [1.0, 1.0], 1.0),
        (optax.sgd(1.0), [1.0, np.nan], 1.0),
    ],
    ids=["NaN loss", "NaN of the optimizer", "NaN on one device"],
)
def test_skip_nonfinite_skips_what_apply_if_finite_applies(inner, grads, loss):
    """A NaN of the optimizer needs `check_updates`. Two members stand for devices."""

    def updates(tx, **extra_args):
        def update(grads):
            return tx.update(grads, tx.init(grads), grads, **extra_args)[0]

        return jax.jit(jax.vmap(update, axis_name="d"))(np.float32(grads))

    for check_updates in (False, True):
        ours = ls.skip_nonfinite(inner, axis_name="d", check_updates=check_updates)
        applied = np.any(updates(ours, value=np.float32(loss)))
        assert applied == (inner is NAN and not check_updates)
    words = "`check_updates=True` also skips steps in which the optimizer makes a NaN"
    assert words in README
    assert np.any(updates(optax.apply_if_finite(inner, 5)))


@pytest.mark.parametrize(
    ("inner", "applied"),
    [
        (optax.sgd(lambda count: jnp.where(count == 2, jnp.nan, 0.1)), [1, 1, 0, 0]),
        (optax.inject_hyperparams(optax.sgd)(0.1), [1, 1, 0, 1]),
        (optax.MultiSteps(optax.adam(0.1), 2), [1, 1, 1, 0]),
        (
            optax.MultiSteps(
                optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 2
            ),
            [1, 1, 1, 1],
        ),
    ],
    ids=["schedule", "rate set in each step", "MultiSteps", "clips inside"],
)
def test_cause_of_a_skip_that_is_in_the_optimizer_state_comes_back(inner, applied):
    """Step 2 has a huge gradient or a NaN rate. The last flag is repeated."""
    tx = ls.skip_nonfinite(inner, check_updates=True)
    params, flags = jnp.ones(2), []
    state, update = tx.init(params), jax.jit(tx.update)
    is_huge = isinstance(inner, optax.MultiSteps)
    for step in range(8):
        grads = jnp.full(2, 1e20 if is_huge and step == 2 else 1.0)
        if "learning_rate" in getattr(state.inner_state, "hyperparams", ()):
            rate = jnp.float32(np.nan if step == 2 else 0.1)
            state = optax.tree.set(state, learning_rate=rate)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        flags.append(int(ls.was_applied(state)))
    assert flags == applied + 4 * applied[-1:]
    text = page("start/guarantees")
    assert "so every later step is skipped" in text
    assert "schedule that is NaN at one count" in text
    assert "`optax.chain(optax.clip_by_global_norm(1.0), optimizer)`" in text
