"""The complete program of each framework: a bad batch, and a run that goes on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    PAGES,
    assert_same_bits,
    code_blocks,
    kept,
    run_blocks,
    run_page,
    without_keys,
)

import optax_lossscale as ls

FOLDER = PAGES / "frameworks"
# By page and heading, as in a link.
PROGRAMS = {
    "plain_jax": "#plain-jax",
    "flax_linen": "flax.md#flax-linen",
    "flax_nnx": "flax.md#flax-nnx",
    "equinox": "equinox.md",
    "haiku": "haiku.md",
}
# What a program trains; that of the others is `state`.
TRAINED = {
    "equinox": ("model", "opt_state", "kept"),
    "flax_nnx": ("model", "optimizer", "average"),
}
slow = pytest.mark.slow


def program_of(name):
    file, _, heading = PROGRAMS[name].partition("#")
    text = (FOLDER / (file or "index.md")).read_text()
    sections = re.split("^## ", text, flags=re.M)
    titles = [section.partition("\n")[0].lower() for section in sections]
    if heading:
        text = sections[titles.index(heading.replace("-", " "))]
    (program,) = code_blocks(text, "python")
    return program


@pytest.fixture(scope="module", params=PROGRAMS)
def page(request):
    namespace = run_blocks([program_of(request.param)], request.param, {})
    return {**namespace, "name": request.param}


def train(page, folder, steps):
    run = page["train"](folder, steps)
    return tuple(run) if page["name"] in TRAINED else (run,)


def step(page, run, x, y):
    returned = page["train_step"](*run, x, y)
    if page["name"] == "flax_nnx":  # in place, except for the average
        return (*run[:2], returned[0])
    return returned[:-1]


@slow
def test_a_program_learns_logs_and_skips_the_broken_batch(page):
    line = r"^step (\d+): loss (0\.\d+), loss scale (\d+), (\d) skipped$"
    logged = np.array(re.findall(line, page["printed"], re.M), float)
    steps, losses, scales, skipped = logged.T
    assert list(steps) == list(range(50, 301, 50))
    assert losses[-1] < 0.25 < 0.3 < losses[0]
    assert list(scales) == [2**15] * 2 + [2**14] * 4
    assert list(skipped) == [0] * 2 + [1] * 4
    accuracy = re.search(r"^accuracy (\d\.\d+)$", page["printed"], re.M)
    assert float(accuracy[1]) > 0.9


@slow
def test_a_run_that_was_stopped_ends_with_the_same_bits(page, tmp_path):
    whole = tuple(page[name] for name in TRAINED.get(page["name"], ("state",)))
    train(page, tmp_path, 120)
    resumed = train(page, tmp_path, 300)
    assert_same_bits(kept(resumed), kept(whole))
    assert_same_bits(*(ls.get_loss_scale_state(run) for run in (resumed, whole)))
    # Of 300 batches one is dropped: the schedule counts 149 pairs of the others.
    assert int(optax.tree.get(resumed, "gradient_step")) == 149


@slow
def test_a_bad_batch_changes_nothing_that_is_kept(page, tmp_path):
    run = train(page, tmp_path, 2)
    x, y = page["get_batch"](0)
    before = kept(run)
    for i, bad in enumerate((jnp.nan, 1e30), start=1):
        run = step(page, run, x.at[0, 0].set(bad), y)
        assert_same_bits(kept(run), before)
        assert not ls.was_applied(run)
        assert ls.get_loss_scale(run) == 2.0 ** (15 - i)
    for _ in range(3):  # one update, and half of the next
        run = step(page, run, x, y)
    scale_state = ls.get_loss_scale_state(run)
    assert (scale_state.skipped_steps, scale_state.consecutive_skips) == (2, 0)
    pairs = zip(without_keys(kept(run)), without_keys(before), strict=True)
    same = [str(a.dtype) for a, b in pairs if np.array_equal(a, b)]
    # The one key of NNX counts, and Equinox's BatchNorm has a flag for its first batch.
    assert same == {"flax_nnx": ["uint32"], "equinox": ["bool"]}.get(page["name"], [])


@slow
@pytest.mark.parametrize("page", ["flax_linen"], indirect=True)
def test_a_train_state_counts_skipped_steps_and_takes_a_loss_by_hand(page, tmp_path):
    (state,), (x, y) = train(page, tmp_path, 2), page["get_batch"](0)
    with pytest.raises(TypeError, match="value"):
        state.apply_gradients(grads=state.params, value=1.0)
    (state,) = step(page, (state,), x.at[0, 0].set(jnp.nan), y)
    skipped = ls.get_loss_scale_state(state).skipped_steps
    assert int(state.step) == 3 and int(skipped) == 1
    _, opt_state = state.tx.update(
        state.params, state.opt_state, state.params, value=jnp.float32(jnp.nan)
    )
    assert not ls.was_applied(opt_state)
    assert int(ls.get_loss_scale_state(opt_state).skipped_steps) == 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_statements_are_changed_and_the_page_marks_them(name):
    program = program_of(name)
    first, second = re.findall(r"^.*# changed.*$", program, re.M)
    assert first == "tx = ls.with_loss_scaling(tx)  # changed"
    differentiate = re.search(r"# changed, from ([\w.]+)\(", second)[1]
    passed = re.findall(r"value_and_grad=([\w.]+)", program)
    assert passed == [differentiate] * (not differentiate.startswith("jax."))
    others = {"keep_if_applied", "get_loss_scale_state", "check_loss_scale"}
    used = re.findall(r"\bls\.(\w+)", program)
    assert sorted(used) == sorted({"with_loss_scaling", "value_and_grad", *others})


@slow
def test_ppo_learns_and_loses_no_step():
    ppo = run_page(FOLDER / "reinforcement_learning.md")
    lengths = ppo["lengths"]
    assert lengths[0] < 40 and np.mean(np.asarray(lengths[-40:])) > 400
    assert int(ppo["scale_state"].skipped_steps) == 0
    assert ls.all_finite(ppo["params"])
    program = jax.make_jaxpr(ppo["network"])(ppo["params"], jnp.ones(4))
    products = [e for e in program.eqns if e.primitive.name == "dot_general"]
    assert [e.outvars[0].aval.dtype for e in products] == [jnp.float16] * 2


@slow
def test_without_retries_ppo_skips_some_of_its_steps(monkeypatch):
    def without_retries(fun, state):
        differentiated = ls.value_and_grad(fun, state)
        return lambda *args: (*differentiated(*args), state)

    monkeypatch.setattr(ls, "value_and_grad_with_retries", without_retries)
    skipping = run_page(FOLDER / "reinforcement_learning.md")
    assert 0 < int(skipping["scale_state"].skipped_steps) < 200
    assert skipping["UPDATES"] * skipping["EPOCHS"] == 800


@slow
def test_the_guard_ends_a_run_that_has_stopped_training(monkeypatch):
    with_retries = ls.value_and_grad_with_retries

    def of_nan(fun, state):
        return with_retries(lambda *args: jnp.nan * fun(*args), state)

    monkeypatch.setattr(ls, "value_and_grad_with_retries", of_nan)
    with pytest.raises(jax.errors.JaxRuntimeError, match="LossScaleError"):
        run_page(FOLDER / "reinforcement_learning.md")


def test_the_table_names_every_program_with_its_line():
    index = (FOLDER / "index.md").read_text()
    assert "(reinforcement_learning.md)" in index
    assert len(PROGRAMS) == sum(
        len(code_blocks(path.read_text(), "python")) for path in FOLDER.glob("[!r]*.md")
    )
    for name, address in PROGRAMS.items():
        row = rf"^\| [^|]+ \| `(ls\.[^`]+)` \| \[[\w ]+\]\({address}\) \|$"
        (line,) = re.findall(row, index, re.M)
        program = {*re.findall(r"[\w.=]+", program_of(name))}
        assert {*re.findall(r"[\w.=]+", line)} <= program, line
