"""The complete program of each framework: a bad batch, and a run that goes on."""

import re
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, kept, state_in
from book import PAGES, code_blocks, page, run_blocks, run_page

import optax_lossscale as ls

PAGE_OF = dict.fromkeys(["flax_linen", "flax_nnx"], "flax")
PAGE_OF |= {"plain_jax": "index", "equinox": "equinox", "haiku": "haiku"}
slow = pytest.mark.slow


def block(name, language):
    """The program of a framework, or how it differs from one without loss scaling."""
    if name == "haiku" and language == "diff":
        return block("plain_jax", "diff")
    blocks = code_blocks(page(f"frameworks/{PAGE_OF[name]}"), language)
    if language == "python" and PAGE_OF[name] == "flax":  # without recipes
        blocks = [x for x in blocks if "import optax_lossscale" in x]
    assert len(blocks) == [*PAGE_OF.values()].count(PAGE_OF[name])
    if name == "haiku":
        # It replaces two functions of plain JAX.
        start, replaced, end = re.split(
            r"^def init|(?=^def loss_fn)", block("plain_jax", "python"), flags=re.M
        )
        assert re.findall(r"^def (\w+)", f"def init{replaced}", re.M)[1:] == ["forward"]
        return f"{start}{blocks[0]}\n\n{end}"
    return blocks[name == "flax_nnx"]


@pytest.mark.parametrize("name", PAGE_OF)
def test_program_marks_its_three_places(name):
    places = re.findall(r"^(.*?)  # ([123])$", block(name, "python"), re.M)
    assert [number for _, number in places] == ["1", "2", "3"]
    assert places[0][0] == "tx = ls.with_loss_scaling(tx)"
    assert "ls.value_and_grad(" in places[1][0]
    assert re.search(r"(update|apply_gradients)\(", places[2][0])


@pytest.mark.parametrize("name", PAGE_OF)
def test_program_has_the_lines_that_its_diff_adds_and_none_that_it_removes(name):
    lines, change = {*block(name, "python").splitlines()}, block(name, "diff")
    added, removed = (re.findall(rf"^{x}(.+)$", change, re.M) for x in (r"\+", "-"))
    assert {*added} <= lines and removed and not lines.intersection(removed)
    assert re.findall("# ([123])", " ".join(added)) == ["1", "2", "3"]


@pytest.fixture(scope="module", params=PAGE_OF)
def framework(request):
    return run_blocks([block(request.param, "python")], request.param, {})


@slow
def test_program_learns_logs_and_skips_the_broken_batch(framework):
    line = r"step \d+: loss (0\.\d+), loss scale (\d+), (\d) skipped"
    losses, scales, skipped = np.float64(re.findall(line, framework["printed"])).T
    assert losses[-1] < 0.25 < 0.3 < losses[0]
    assert list(scales) == [2**15] * 6  # the loss is not finite, so the scale stays
    assert list(skipped) == [0] * 2 + [1] * 4
    assert float(framework["printed"].split()[-1]) > 0.9  # the accuracy


@pytest.fixture(scope="module")
def whole(framework, tmp_path_factory):
    """What a run of 300 batches without a stop ends with."""
    return framework["train"](tmp_path_factory.mktemp("whole"), 300)


@slow
def test_run_that_was_stopped_ends_with_the_same_bits(framework, whole, tmp_path):
    framework["train"](tmp_path, 120)
    resumed = framework["train"](tmp_path, 300)
    assert_same_bits(kept(resumed), kept(whole))
    assert_same_bits(*(ls.get_loss_scale_state(state_in(x)) for x in (resumed, whole)))


@slow
def test_accumulation_counts_pairs_of_good_batches(whole):
    # One of the 300 batches is broken.
    assert int(optax.tree.get(whole, "gradient_step")) == 299 // 2


def state_after_run(name, functions, tx, batches, folder, stops):
    """A program's run with another optimizer, other batches, and no casts.

    It saves each third step, ends at each of the stops, and goes on from there. The
    functions stand in for those of the package.
    """
    program = block(name, "python")
    definitions = re.split(r"^.*= train\(tempfile", program, flags=re.M)[0]
    assert "% 100 == 99" in definitions
    namespace = {}
    run_blocks([definitions.replace("% 100 == 99", "% 3 == 2")], name, namespace)
    library = types.SimpleNamespace(
        **vars(ls) | {"autocast": lambda f, dtype: f} | functions
    )
    namespace |= {"ls": library, "get_batch": batches.__getitem__}
    namespace["tx"] = library.with_loss_scaling(tx)
    return [namespace["train"](folder, stop) for stop in stops][-1]


def unscaled_value_and_grad(fun, _, value_and_grad=jax.value_and_grad, **options):
    return value_and_grad(fun, **options)


# The state has its type, but the scale is 1.0, and no step is skipped.
NEVER_SKIPS = ls.FixedLossScale(1.0, skip_nonfinite=False)
UNSCALED = {
    "with_loss_scaling": lambda tx: ls.with_loss_scaling(tx, NEVER_SKIPS),
    "keep_if_applied": lambda state, new, old: new,
    "value_and_grad": unscaled_value_and_grad,
}


@slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PAGE_OF)
def test_drawn_run_equals_the_unscaled_run_of_its_good_batches(name, seed, tmp_path):
    """Ours stops and goes on; the other has the good batches alone, and no scale.

    Both accumulate and mask.
    """
    draw = np.random.default_rng(seed)
    masked = optax.masked(
        optax.scale(draw.choice([0.0, 0.5])),
        lambda params: jax.tree.map(lambda p: jnp.ndim(p) > 1, params),
    )
    tx = optax.chain(masked, optax.sgd(0.1, momentum=0.9))
    tx = optax.MultiSteps(tx, int(draw.integers(1, 4)))
    x = draw.normal(size=(12, 64, 8)).astype(np.float32)
    y = (x[..., 0] > 0).astype(np.float32)
    good = [*zip(x, y, strict=True)]
    # The last one overflows only in the scaled gradients.
    bad = [(x[0] * np.nan, y[0]), (x[0] * np.inf, y[0]), (x[0], y[0] * 1e37)]
    batches = [*good]
    for batch in bad:
        batches.insert(int(draw.integers(len(batches))), batch)
    stops = [3 * int(draw.integers(1, 5)), len(batches)]
    ours = state_after_run(name, {}, tx, batches, tmp_path / "drawn", stops)
    unscaled = state_after_run(
        name, UNSCALED, tx, good, tmp_path / "unscaled", [len(good)]
    )
    chex.assert_trees_all_close(kept(ours), kept(unscaled), rtol=1e-4, atol=1e-6)
    assert ls.get_loss_scale_state(state_in(ours)).skipped_steps == len(bad)


@pytest.fixture(scope="module")
def ppo():
    return run_page(PAGES / "frameworks/reinforcement_learning.md")


@slow
def test_ppo_learns_and_skips_no_step(ppo):
    lengths = np.asarray(ppo["lengths"])
    assert lengths[0] < 40 and np.mean(lengths[-40:]) > 400
    assert int(ppo["scale_state"].skipped_steps) == 0
    assert ls.all_finite(ppo["params"])


@slow
def test_program_for_llms_prints_the_output_that_is_shown(ppo):
    (shown,) = code_blocks(page("frameworks/reinforcement_learning"), "text")
    assert shown in ppo["printed"]


def changed_step(ppo, old, new):
    """The step for LLMs after a change of its program, compiled."""
    block = code_blocks(page("frameworks/reinforcement_learning"), "python")[1]
    assert block.count(old) == 1
    functions = block.replace(old, new).split("all_rewards = ")[0]
    return jax.jit(run_blocks([functions], "LLMs", dict(ppo))["grpo_step"])


@slow
def test_scale_that_grows_as_seldom_as_by_default_applies_every_signal(ppo):
    step = changed_step(ppo, "growth_interval=20", "")
    run = ppo["start"], ppo["tx"].init(ppo["start"])
    _, applied = jax.lax.scan(step, run, ppo["all_rewards"])
    assert np.all(applied)


@slow
def test_ratio_that_is_clipped_only_after_exp_is_nan_in_the_gradient(ppo):
    step = changed_step(ppo, "jnp.clip(log_ratio, -10, 10)", "log_ratio")
    run = ppo["start"], ppo["tx"].init(ppo["start"])
    assert step(run, ppo["signal"])[1]
    assert not step(run, ppo["signal"], old=ppo["far"])[1]
