"""The complete program of each framework: a bad batch, and a run that goes on."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    PAGES,
    assert_same_bits,
    code_blocks,
    run_page,
    without_keys,
)

import optax_lossscale as ls

FOLDER = PAGES / "frameworks"
PROGRAMS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
PPO, INDEX = PROGRAMS.pop("reinforcement_learning"), PROGRAMS.pop("index")
slow = pytest.mark.slow


@pytest.fixture(scope="module", params=PROGRAMS)
def page(request):
    namespace = run_page(FOLDER / f"{request.param}.md")
    return {**namespace, "name": request.param}


def final_run(page):
    """What `train` returned to the program."""
    if page["name"] == "equinox":
        return page["model"], page["opt_state"], page["kept"]
    if page["name"] == "flax_nnx":
        return page["model"], page["optimizer"], page["average"]
    return page["state"]


def parts(page, run):
    """The optimizer's state, and what no skipped step may change, copied."""
    if page["name"] == "equinox":
        model, opt_state, kept = run
        weights = eqx.filter(model, eqx.is_inexact_array)
    elif page["name"] == "flax_nnx":
        model, optimizer, average = run
        opt_state = optimizer.opt_state
        weights = nnx.state(model, nnx.Param)
        kept = nnx.state(model, nnx.Not(nnx.Param)), average
    elif page["name"] == "flax_linen":
        opt_state, weights, kept = run.opt_state, run.params, run.kept
    else:
        opt_state, weights, kept = run["opt_state"], run["params"], run["kept"]
    held = weights, kept, opt_state.inner_state
    return opt_state, jax.tree.map(jnp.copy, jax.tree.leaves(held))


def step(page, run, x, y):
    if page["name"] == "equinox":
        return page["train_step"](*run, x, y)[:3]
    if page["name"] == "flax_nnx":
        model, optimizer, average = run
        average, _ = page["train_step"](model, optimizer, average, x, y)
        return model, optimizer, average
    return page["train_step"](run, x, y)[0]


@slow
def test_it_learns_logs_and_skips_the_broken_batch(page):
    logged = re.findall(
        r"^step (\d+): loss (0\.\d+), loss scale (\d+), (\d) skipped$",
        page["printed"],
        re.M,
    )
    assert [int(step) for step, *_ in logged] == list(range(50, 301, 50))
    assert float(logged[-1][1]) < 0.25 < 0.3 < float(logged[0][1])
    assert [int(scale) for *_, scale, _ in logged] == [2**15] * 2 + [2**14] * 4
    assert [int(skipped) for *_, skipped in logged] == [0] * 2 + [1] * 4
    accuracy = re.search(r"^accuracy (\d\.\d+)$", page["printed"], re.M)
    assert float(accuracy[1]) > 0.9


@slow
def test_a_run_that_was_stopped_ends_with_the_same_bits(page, tmp_path):
    stopped = page["train"](tmp_path, 120)
    resumed_state, resumed = parts(page, page["train"](tmp_path, 300))
    state, whole = parts(page, final_run(page))
    assert_same_bits(resumed, whole)
    assert_same_bits(*map(jax.tree.leaves, (resumed_state, state)))
    assert int(optax.tree.get(parts(page, stopped)[0], "gradient_step")) == 60
    # Of 300 batches one is dropped: the schedule counts 149 pairs of the others.
    assert int(optax.tree.get(state, "gradient_step")) == 149


@slow
def test_a_bad_batch_changes_nothing_that_is_kept(page, tmp_path):
    run = page["train"](tmp_path, 2)
    x, y = page["get_batch"](0)
    for bad in (jnp.nan, 1e30):
        opt_state, before = parts(page, run)
        scale = float(ls.get_loss_scale(opt_state))
        run = step(page, run, x.at[0, 0].set(bad), y)
        opt_state, after = parts(page, run)
        assert_same_bits(after, before)
        assert not ls.was_applied(opt_state)
        assert ls.get_loss_scale(opt_state) == scale / 2
    for _ in range(3):  # one update, and half of the next
        run = step(page, run, x, y)
    opt_state, after = parts(page, run)
    scale_state = ls.get_loss_scale_state(opt_state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(scale_state))
    assert (scale_state.skipped_steps, scale_state.consecutive_skips) == (2, 0)
    pairs = zip(*map(without_keys, (after, before)), strict=True)
    same = [i for i, (a, b) in enumerate(pairs) if np.array_equal(a, b)]
    # The one key of NNX counts, and Equinox's BatchNorm has a flag for its first batch.
    constant = {"flax_nnx": ["key<fry>"], "equinox": ["bool"]}.get(page["name"], [])
    assert [str(after[i].dtype) for i in same] == constant


@slow
@pytest.mark.parametrize("page", ["flax_linen"], indirect=True)
def test_a_train_state_counts_skipped_steps_and_takes_a_loss_by_hand(page, tmp_path):
    state, (x, y) = page["train"](tmp_path, 2), page["get_batch"](0)
    with pytest.raises(TypeError, match="value"):
        state.apply_gradients(grads=state.params, value=1.0)
    state = step(page, state, x.at[0, 0].set(jnp.nan), y)
    assert int(state.step) == 3 and int(ls.applied_steps(state, state.step)) == 2

    updates, opt_state = state.tx.update(
        state.params, state.opt_state, state.params, value=jnp.float32(jnp.nan)
    )
    state = state.replace(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
    )
    assert not ls.was_applied(state)
    assert int(state.step) == 4 and int(ls.applied_steps(state, state.step)) == 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_statements_are_changed_and_the_page_marks_them(name):
    (program,) = code_blocks(PROGRAMS[name], "python")
    first, second = re.findall(
        r"^.*# changed$|# changed, from .*\n(?s:.*?)\n(?=    \S)", program, re.M
    )
    assert first == "tx = ls.with_loss_scaling(tx)  # changed"
    before, after = re.fullmatch(
        r"# changed, from (.*?)\n    fun = (.*)", second, re.S
    ).groups()
    differentiate = before[: before.index("(")]
    assert after.startswith("ls.value_and_grad(")
    assert ("value_and_grad=" in after) == (not differentiate.startswith("jax."))
    assert f"value_and_grad={differentiate}" in after or differentiate.startswith("jax")
    kept = len(re.findall(r"# kept$", program, re.M))
    assert kept == (5 if "so it takes five more lines, marked" in PROGRAMS[name] else 1)
    others = {"keep_if_applied", "get_loss_scale_state", "check_loss_scale"}
    used = re.findall(r"\bls\.(\w+)", program)
    assert sorted(used) == sorted({"with_loss_scaling", "value_and_grad", *others})


@pytest.fixture(scope="module")
def ppo():
    return run_page(FOLDER / "reinforcement_learning.md")


def run_ppo_with(*changes):
    (program,) = code_blocks(PPO, "python")
    for old, new in changes:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    namespace = {}
    exec(compile(program, "reinforcement_learning.md", "exec"), namespace)
    return namespace


@slow
def test_ppo_learns_and_loses_no_step(ppo):
    lengths = ppo["lengths"]
    assert lengths[0] < 40 and np.mean(np.asarray(lengths[-40:])) > 400
    assert int(ppo["scale_state"].skipped_steps) == 0
    assert ls.all_finite(ppo["params"])
    program = jax.make_jaxpr(ppo["network"])(ppo["params"], jnp.ones(4))
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    assert [e.outvars[0].aval.dtype for e in products] == [jnp.float16] * 2


@slow
def test_without_retries_ppo_skips_some_of_its_steps():
    skipping = run_ppo_with(
        ("ls.value_and_grad_with_retries(", "ls.value_and_grad("),
        ("loss, grads, opt_state = fun(", "loss, grads = fun("),
    )
    assert 0 < int(skipping["scale_state"].skipped_steps) < 200
    assert skipping["UPDATES"] * skipping["EPOCHS"] == 800


@slow
def test_the_guard_ends_a_run_that_has_stopped_training():
    with pytest.raises(jax.errors.JaxRuntimeError, match="LossScaleError"):
        run_ppo_with(("jnp.mean(0.001", "jnp.nan * jnp.mean(0.001"))


def test_the_table_names_every_program_with_its_line():
    assert "(reinforcement_learning.md)" in INDEX
    for name, text in PROGRAMS.items():
        (line,) = re.findall(
            rf"^\| [^|]+ \| `(ls\.[^`]+)` \| \[[\w ]+\]\({name}.md\) \|$", INDEX, re.M
        )
        words = set(re.findall(r"[\w.=]+", line))
        assert words <= set(re.findall(r"[\w.=]+", text)), line
