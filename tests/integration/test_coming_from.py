"""The migration guides: their form, and what their programs are said to do."""

import ast
import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.dynamic_scale import DynamicScale
from helpers import PAGES, assert_same_bits, code_blocks, run_page
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls

PATHS = sorted(PAGES.glob("coming_from/*.md"))
GUIDES = {path.stem: path for path in PATHS if path.stem != "index"}
every_guide = pytest.mark.parametrize("guide", GUIDES)

PARTS = re.compile(
    r"^```(?P<fence>.*)\n(?P<code>(?s:.*?))^```$"
    r"|^(?P<level>#+) (?P<title>.+)$"
    r"|^(?P<table>(?:\|.*\n)+)"
    r"|^(?P<bullets>(?:- .*\n)+)"
    r"|^\*\*(?P<label>.+?):\*\*.*$"
    r"|^(?P<prose>.+)$",
    re.M,
)
FENCES = {"python theirs": "theirs", "bash theirs": "theirs", "python": "ours"}


def parts(guide):
    """The kind and the text of each part of a page, from top to bottom."""
    for match in PARTS.finditer(GUIDES[guide].read_text()):
        kind = match.lastgroup
        yield FENCES[match["fence"]] if kind == "code" else kind, match[kind]


def pairs(guide):
    """For each table of a page their program, ours, and the rows."""
    last = {}
    for kind, text in parts(guide):
        last[kind] = text
        if kind == "table":
            rows = [row.strip("|").split(" | ") for row in text.splitlines()[2:]]
            yield last["theirs"], last["ours"], rows


def snippets(cell):
    return [squeeze(code) for code in re.findall(r"`([^`]+)`", cell)]


def squeeze(code):
    """Without white space, and without the comma that ends a broken line."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s", "", code))


@every_guide
def test_a_guide_has_the_form_of_all(guide):
    found = list(parts(guide))
    kinds = " ".join(kind for kind, _ in found)
    pair = r"(title )?(prose )?label theirs label ours table "
    assert re.fullmatch(rf"title prose ({pair})+title bullets label ours", kinds)
    titles = [text for kind, text in found if kind == "title"]
    assert titles[0].startswith("Coming from ") and titles[-1] == "What differs"


@every_guide
def test_each_block_says_whose_it_is_and_the_table_says_the_same(guide):
    label = theirs = None
    for kind, text in parts(guide):
        if kind == "label":
            label = text
        elif kind == "theirs":
            theirs = label
        elif kind == "ours":
            assert label == "optax_lossscale"
        elif kind == "table":
            assert text.startswith(f"| {theirs} | optax_lossscale |\n")


def test_the_table_of_systems_and_the_contents_name_every_guide():
    text = (PAGES / "coming_from" / "index.md").read_text()
    contents = text.split("```{toctree}\n:hidden:\n\n")[1].split("\n```")[0]
    assert sorted(contents.splitlines()) == sorted(GUIDES)
    systems = text.split("| system |")[1].split("\n\n")[0]
    assert set(re.findall(r"\]\((\w+)\.md\)", systems)) == set(GUIDES)


@every_guide
def test_what_a_table_quotes_stands_in_the_programs(guide):
    for theirs, ours, rows in pairs(guide):
        for left, right in rows:
            assert snippets(left), left
            for cell, program in ((left, theirs), (right, ours)):
                for snippet in snippets(cell):
                    assert snippet in squeeze(program), snippet


@every_guide
def test_a_table_leaves_out_nothing_that_they_do_about_the_scale(guide):
    for theirs, _, rows in pairs(guide):
        if theirs in code_blocks(GUIDES[guide].read_text(), "bash theirs"):
            words = {word for left, _ in rows for word in re.split(r"[` ]", left)}
            flags = re.findall(r"--\S*(?:scale|fp16|hysteresis)\S*", theirs)
            assert words.issuperset(flags)
            continue
        quoted = [snippet for left, _ in rows for snippet in snippets(left)]
        simple = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
        for node in ast.walk(ast.parse(theirs)):
            if isinstance(node, simple):
                code = squeeze(ast.get_source_segment(theirs, node))
                if re.search("[sS]cale", code) and not code.startswith("print"):
                    assert any(q in code or code in q for q in quoted), code


@functools.cache
def run(guide):
    # Apex's page says that `O3` makes a warning.
    warned = pytest.warns(UserWarning, match="keeps no float32 copies of them")
    with warned if guide == "apex" else contextlib.nullcontext():
        return run_page(GUIDES[guide])


@dataclasses.dataclass
class Training:
    """A step of a guide, and what its system does to the scale after an overflow."""

    guide: str
    step: str = "train_step"
    state: tuple[str, ...] = ("params", "opt_state")
    batch: tuple[str, ...] = ("x", "y")
    backoff: float = 0.5

    def start(self) -> Any:
        """The state at the end of the page."""
        return tuple(run(self.guide)[name] for name in self.state)

    def data(self, bad: bool = False) -> Any:
        """A batch, or one that overflows, in PyTorch's in one micro-batch."""
        page, index = run(self.guide), slice(64) if self.guide == "keras" else 0
        first, *labels = (jnp.asarray(page[name][index]) for name in self.batch)
        x = np.array(first)
        if bad:
            x.reshape(-1)[-1] = 1e6  # too much for float16 alone
        like = page["shards"] if "parallel_state" in self.state else first
        x = jax.device_put(x, like.sharding)
        return ((x, *labels),) if self.guide == "pytorch" else (x, *labels)

    def run(self, state: Any, data: Any) -> Any:
        return run(self.guide)[self.step](*state, *data)[:-1]


TRAININGS = {
    "pytorch": Training("pytorch"),
    "keras": Training("keras"),
    "tensorflow": Training("tensorflow"),
    "tensorflow graph": Training(
        "tensorflow", "graph_step", ("graph_params", "graph_state")
    ),
    "mindspore": Training("mindspore"),
    "mindspore fixed": Training(
        "mindspore", "fixed_step", ("fixed_params", "fixed_state"), backoff=1.0
    ),
    "flax_dynamic_scale": Training(
        "flax_dynamic_scale", state=("state",), batch=("x",)
    ),
    "flax parallel": Training(
        "flax_dynamic_scale", state=("parallel_state",), batch=("x",)
    ),
    "jmp": Training("jmp", batch=("x",)),
    "apex": Training("apex"),
    "apex O2": Training("apex", "half_step", ("half_params", "half_state")),
    "apex O3": Training(
        "apex", "unscaled_step", ("unscaled_params", "unscaled_state"), backoff=1.0
    ),
    "megatron_lm": Training("megatron_lm", backoff=1.0),
    "deepspeed": Training("deepspeed", backoff=1.0),
    "deepspeed ZeRO": Training(
        "deepspeed",
        "zero_step",
        ("zero_params", "zero_state"),
        ("shards", "y"),
        backoff=1.0,
    ),
    "fairseq": Training("fairseq"),
    "metaseq": Training("fairseq", "metaseq_step", ("metaseq_params", "metaseq_state")),
    "mpx": Training("mpx", state=("model", "opt_state"), batch=("x",)),
}
every_training = pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)


def params_and_opt_state(state):
    return state if len(state) == 2 else (state[0].params, state[0].opt_state)


def kept(state):
    """What a skipped step leaves as it was: neither the scale nor Flax's `step`."""
    params, opt_state = params_and_opt_state(state)
    return params, opt_state.inner_state


def counts(state):
    """How many steps Adam and the schedule have counted."""
    found = optax.tree.get_all_with_path(kept(state), "count")
    return [int(count) for _, count in found]


@pytest.mark.slow
@every_training
def test_every_program_trains(training):
    page = run(training.guide)
    losses = np.array(page["losses"])
    assert losses[-1] < 0.05 * losses[0]
    shown = losses.mean() if training.guide == "keras" else losses[-1]
    assert f"loss {shown:.4f}" in page["printed"]
    assert ls.all_finite(training.start())


@pytest.mark.slow
@every_training
def test_a_bad_batch_changes_the_scale_alone(training):
    before = training.start()
    after = training.run(before, training.data(bad=True))
    assert_same_bits(kept(after), kept(before))
    old, new = ls.get_loss_scale_state(before), ls.get_loss_scale_state(after)
    assert new.loss_scale == training.backoff * old.loss_scale
    assert new.skipped_steps == old.skipped_steps + 1
    assert not ls.was_applied(after)


@pytest.mark.slow
@every_training
def test_a_good_batch_is_counted_by_optimizer_and_schedule(training):
    before = training.start()
    after = training.run(before, training.data())
    assert ls.was_applied(after)
    assert counts(after) == [count + 1 for count in counts(before)]
    assert len(counts(after)) == (1 if training.guide == "apex" else 2)


@pytest.mark.slow
@every_guide
def test_what_was_saved_is_what_was_trained(guide):
    page = run(guide)
    params, opt_state = params_and_opt_state(TRAININGS[guide].start())
    whole = {"params": params, "opt_state": opt_state}
    if guide in ("pytorch", "apex", "deepspeed"):
        assert_same_bits(page["checkpoint"], whole)
    elif guide == "keras":
        assert_same_bits(page["restored"], whole)
    elif guide == "mpx":
        assert_same_bits(page["restored"], (params, opt_state))
    elif guide == "flax_dynamic_scale":
        restored = serialization.from_bytes(page["state"], page["checkpoint"])
        assert_same_bits(restored.opt_state, opt_state)
    else:
        target = whole if guide == "tensorflow" else opt_state
        saved = serialization.to_bytes(target)
        assert "path" not in page or page["path"].read_bytes() == saved
        assert_same_bits(serialization.from_bytes(target, saved), target)


CONVERTED = {"pytorch": "torch", "keras": "keras", "jmp": "jmp"}
CONVERTED |= {"flax_dynamic_scale": "flax", "megatron_lm": "megatron"}


@pytest.mark.slow
@every_guide
def test_a_run_begun_there_goes_on_here(guide):
    """With the scale and the counter: the next finite step is one that grows.

    fairseq saves no counter.
    """
    page = run(guide)
    state, rule = page["resumed_state"], page["rule"]
    assert ls.get_loss_scale(state) == 16384.0
    grown = 16384.0 if guide == "fairseq" else 32768.0
    assert rule.update(state.scale_state, True).loss_scale == grown
    assert_same_bits(state.inner_state, page.get("old_opt_state", state.inner_state))
    if guide in CONVERTED:
        back = getattr(ls.presets, f"to_{CONVERTED[guide]}_state_dict")
        assert back(state, rule) == page["saved"]


def scales(rule, flags, state=None):
    """In units of the first one."""
    found, state = [], rule.init() if state is None else state
    for flag in flags:
        state = rule.update(state, flag)
        found.append(float(state.loss_scale) / rule.init_scale)
    return found


@pytest.mark.slow
def test_the_limits_and_intervals_are_those_named():
    least, largest = 2.0**-126, 2.0**126
    for guide, floor in (
        ("pytorch", least),
        ("keras", least),
        ("tensorflow", 1.0),
        ("mindspore", 1.0),
        ("jmp", 1.0),
        ("megatron_lm", 1.0),
        ("deepspeed", 1.0),
        ("fairseq", 2.0**-13),
    ):
        rule = run(guide)["rule"]
        assert (rule.min_scale, rule.max_scale) == (floor, largest)
    apex, mpx = run("apex")["rule"], run("mpx")["rule"]
    assert (apex.min_scale, apex.max_scale) == (least, 2.0**24)
    assert apex.growth_interval == 2000
    assert (mpx.min_scale, mpx.max_scale) == (1.0, 65504.0)
    assert run("flax_dynamic_scale")["rule"].max_scale == largest

    torch = run("pytorch")["rule"]
    ahead = torch.init()._replace(growth_tracker=jnp.int32(60))  # the interval is 50
    assert scales(torch, [True], ahead) == [2.0]
    contrib = run("tensorflow")["rule"]
    assert scales(contrib, [False, True, False]) == pytest.approx([1.0, 1.0, 0.8])
    assert run("mindspore")["dynamic"] == run("mindspore")["rule"]


@pytest.mark.slow
def test_the_fixed_rules_skip_or_apply_as_said():
    params = {"w": jnp.ones(2)}
    bad = {"w": jnp.array([1.0, jnp.nan])}
    for rule, applies in (
        (ls.presets.tf_fixed_loss_scale(128.0), True),
        (ls.presets.tf_keras_loss_scale(dynamic=False, initial_scale=128.0), True),
        (run("mindspore")["unchecked"], True),
        (run("mindspore")["fixed"], False),
        (run("tensorflow")["fixed"], False),
        (ls.FixedLossScale(1024.0), False),
        (ls.presets.jmp_static(2**15), False),
        (ls.presets.apex_amp(loss_scale=128.0), True),
        (ls.presets.deepspeed_fp16(loss_scale=128.0), False),
        (ls.presets.deepspeed_fp16(enabled=False), False),
    ):
        tx = ls.with_loss_scaling(optax.sgd(0.1), rule)
        updates, _ = tx.update(bad, tx.init(params), params)
        assert bool(jnp.isnan(updates["w"][1])) is applies


@pytest.mark.slow
def test_pytorchs_window_is_accumulated():
    """The mean over micro-batches is the gradient of the whole window."""
    page = run("pytorch")
    [code] = re.findall(
        r"^@jax.jit\ndef train_step.*?\n\n\n",
        GUIDES["pytorch"].read_text(),
        re.M | re.S,
    )
    keep_grads = optax.GradientTransformation(
        lambda params: params, lambda grads, state, params=None: (grads, grads)
    )
    tx = ls.with_loss_scaling(keep_grads, ls.FixedLossScale(64.0))
    namespace = {**page, "tx": tx}
    exec(code, namespace)
    params = jax.tree.map(jnp.ones_like, page["params"])
    ((x, y),) = TRAININGS["pytorch"].data()
    _, opt_state, loss = namespace["train_step"](params, tx.init(params), (x, y))
    assert ls.was_applied(opt_state)

    window = (x.reshape(-1, 8), y.reshape(-1, 1))
    # The loss of a micro-batch is divided by their number.
    value_and_grad = jax.value_and_grad(lambda *args: 4 * page["loss_fn"](*args))
    expected = jax.jit(value_and_grad)(params, window)
    close = functools.partial(np.testing.assert_allclose, rtol=0.01)
    jax.tree.map(close, (loss, opt_state.inner_state), expected)


@functools.cache
def run_theirs(guide, programs=1):
    """What the first of their programs define, or more of them."""
    namespace: dict[str, Any] = {}
    for code in code_blocks(GUIDES[guide].read_text(), "python theirs")[:programs]:
        exec(compile(code, f"{guide}, theirs", "exec"), namespace)
    return namespace


def batches(x):
    """Good ones, one that is infinite, and one that overflows in float16."""
    x = np.array(x)
    x[3], x[5] = np.inf, 2e4 * x[5]
    return [jnp.asarray(batch) for batch in x]


def assert_close(ours, theirs):
    """Compiled they differ in the last bits: XLA fuses and rounds differently."""
    close = functools.partial(np.testing.assert_allclose, atol=2e-3)
    jax.tree.map(close, ours, theirs)


def new_state(page, **fields):
    """The state that the loop of Flax's page begins with, there or here."""
    state, model = page["state"], page["MLP"]()
    params = model.init(jax.random.key(0), page["x"][0])
    return type(state).create(
        apply_fn=model.apply, params=params, tx=state.tx, **fields
    )


def flax_course(steps):
    """States and losses there and here, which goes on from the state of step 2."""
    theirs, ours = run_theirs("flax_dynamic_scale"), run("flax_dynamic_scale")
    scale = DynamicScale(growth_interval=50)
    flax_state = new_state(theirs, dynamic_scale=scale)
    state = None
    for i, x in enumerate(batches(ours["x"])[:steps]):
        if i == 2:
            saved = serialization.to_state_dict(flax_state.dynamic_scale)
            scale_state, rule = ls.presets.from_flax_state_dict(
                saved, growth_interval=50
            )
            assert rule == ours["rule"]
            opt_state = ours["state"].opt_state._replace(
                inner_state=flax_state.opt_state, scale_state=scale_state
            )
            state = ours["state"].replace(
                step=flax_state.step, params=flax_state.params, opt_state=opt_state
            )
        flax_state, flax_loss = theirs["train_step"](flax_state, x)
        if state is not None:
            state, loss = ours["train_step"](state, x)
            yield (flax_state, flax_loss), (state, loss)


@pytest.mark.slow
def test_flax_and_ours_take_the_same_course():
    course = list(flax_course(60))
    flax_scales = [float(state.dynamic_scale.scale) for (state, _), _ in course]
    assert flax_scales == [float(ls.get_loss_scale(state)) for _, (state, _) in course]
    changes = {
        step: after / before
        for step, before, after in zip(
            range(3, 60), flax_scales[:-1], flax_scales[1:], strict=True
        )
        if after != before
    }
    assert changes == {3: 0.5, 5: 0.5, 56: 2.0}  # the 51st good step after the 5th

    (flax_state, flax_loss), (state, loss) = course[-1]
    np.testing.assert_allclose(loss, flax_loss, rtol=0.02)
    assert_close(state.params, flax_state.params)
    assert int(state.step) == int(flax_state.step) == 60
    assert int(ls.applied_steps(state, state.step)) == 58


@pytest.mark.slow
def test_what_is_said_of_flaxs_loss():
    def large(p):
        return p * 1e34

    def half(p):
        return jnp.float16(p)

    rule = ls.presets.flax_dynamic_scale()
    assert rule.init_scale == DynamicScale().scale == 65536
    p, state = jnp.float32(1.0), rule.init()
    assert DynamicScale().value_and_grad(large)(p).aux == np.inf
    assert ls.value_and_grad(large, state)(p)[0] == jnp.float32(1e34)
    result = DynamicScale().value_and_grad(half)(p)
    assert jnp.isnan(result.aux) and not result.finite
    with pytest.warns(UserWarning, match="float16"):
        ls.value_and_grad(half, state)(p)


@pytest.mark.slow
def test_flaxs_step_is_traced_twice_and_ours_once():
    theirs, ours = run_theirs("flax_dynamic_scale"), run("flax_dynamic_scale")
    x = ours["x"][0]
    for first, step, times in (
        (new_state(theirs, dynamic_scale=DynamicScale()), theirs["step"], 2),
        (new_state(ours), ours["train_step"].__wrapped__, 1),
    ):
        traces = []

        def counted(state, x, step=step, traces=traces):
            traces.append(1)
            return step(state, x)

        state, _ = jax.eval_shape(jax.jit(counted), first, x)
        jax.eval_shape(jax.jit(counted), state, x)
        assert len(traces) == times


@pytest.mark.slow
def test_uncompiled_flax_and_ours_are_the_same_bit_for_bit():
    run_theirs("flax_dynamic_scale"), run("flax_dynamic_scale")
    with jax.disable_jit():
        for (flax_state, flax_loss), (state, loss) in flax_course(8):
            theirs = flax_state.params, flax_state.opt_state, flax_loss
            assert_same_bits((*kept((state,)), loss), theirs)


@pytest.mark.slow
def test_flax_on_many_devices_and_ours_do_the_same():
    theirs, ours = (
        run_theirs("flax_dynamic_scale", programs=2),
        TRAININGS["flax parallel"],
    )
    assert jax.device_count() == 8
    for bad in (False, True):
        (x,) = ours.data(bad)
        flax_state, flax_loss = theirs["parallel_step"](
            theirs["parallel_state"], np.reshape(x, (8, -1, 8))
        )
        state, loss = run(ours.guide)[ours.step](*ours.start(), x)
        flax_scale = flax_state.dynamic_scale.scale
        np.testing.assert_array_equal(flax_scale, [float(ls.get_loss_scale(state))] * 8)
        if bad:
            assert_same_bits(flax_state.params, theirs["parallel_state"].params)
        else:
            np.testing.assert_allclose(np.mean(flax_loss), loss, rtol=0.02)


def jmp_course(steps):
    """The same for jmp: parameters, optimizer state and loss, and what scales."""
    theirs, ours = run_theirs("jmp"), run("jmp")
    half = jax.tree.map(lambda p: p / 2, ours["params"])
    params, opt_state = half, theirs["tx"].init(half)
    loss_scale = theirs["jmp"].DynamicLossScale(jnp.float32(2**15), period=50)
    our_state = None
    for i, x in enumerate(batches(ours["x"])[:steps]):
        if i == 2:
            saved = dataclasses.asdict(loss_scale)
            scale_state, rule = ls.presets.from_jmp_state_dict(saved)
            first = dataclasses.replace(rule, init_scale=2.0**15)
            assert first == ls.presets.jmp_dynamic(2.0**15, period=50)
            fresh = ours["tx"].init(params)
            our_state = (
                params,
                fresh._replace(inner_state=opt_state, scale_state=scale_state),
            )
        params, opt_state, loss_scale, loss = theirs["train_step"](
            params, opt_state, loss_scale, x
        )
        if our_state is not None:
            *our_state, our_loss = ours["train_step"](*our_state, x)
            there = (params, opt_state, loss), loss_scale
            yield there, ((*kept(our_state), our_loss), our_state[1].scale_state)


@pytest.mark.slow
def test_jmp_and_ours_take_the_same_course():
    course = list(jmp_course(60))
    for (_, loss_scale), (_, scale_state) in course:
        assert loss_scale.loss_scale == scale_state.loss_scale
        assert loss_scale.counter == scale_state.growth_tracker
    assert course[-1][1][1].skipped_steps == 2
    (theirs, _), (ours, _) = course[-1]
    assert_close(ours[0], theirs[0])

    with jax.disable_jit():
        for (theirs, _), (ours, _) in jmp_course(8):
            assert_same_bits(ours, theirs)


@pytest.mark.slow
def test_what_is_said_of_jmp():
    jmp = pytest.importorskip("jmp")
    down = jax.jit(lambda loss_scale: loss_scale.adjust(jnp.bool_(False)))
    scale = jmp.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(8))
    assert down(down(scale)).loss_scale == 2
    assert scales(ls.presets.jmp_dynamic(8.0, min_loss_scale=8.0), [False]) == [1.0]

    half = jmp.DynamicLossScale(jnp.float16(2**15))
    with pytest.raises(TypeError):
        half.adjust(jnp.bool_(True))
    same = dataclasses.replace(half, min_loss_scale=jnp.float16(1))
    assert same.adjust(jnp.bool_(True)).loss_scale == 2**15
    assert ls.presets.jmp_dynamic(jnp.float16(2**15)).scale_dtype == "float16"

    top = jmp.DynamicLossScale(jnp.float32(2.0**127))
    assert top.unscale(jnp.float32(2.0**127)) == 0
    with pytest.raises(TypeError, match="serializ"):
        serialization.msgpack_serialize({"loss_scale": top})

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def loss_fn(w):
        return policy.cast_to_output(jnp.sum(policy.cast_to_compute(w) ** 2))

    _, grads = ls.value_and_grad(loss_fn, ls.FixedLossScale(8.0).init())(jnp.ones(3))
    assert_same_bits(grads, jnp.full(3, 2.0))


MASTER_WEIGHTS = {
    "apex O2": TRAININGS["apex O2"],
    **{name: TRAININGS[name] for name in ("megatron_lm", "deepspeed", "fairseq")},
}


@pytest.mark.slow
@pytest.mark.parametrize("training", MASTER_WEIGHTS.values(), ids=MASTER_WEIGHTS)
def test_float16_parameters_are_the_rounded_master_weights(training):
    params, opt_state = training.start()
    masters = optax.tree.get(opt_state, "master_weights")
    assert_same_bits(params, jax.tree.map(jnp.float16, masters))
    assert {p.dtype for p in jax.tree.leaves(masters)} == {np.dtype("float32")}


@pytest.mark.slow
def test_apex_lowers_the_scale_of_the_loss_that_overflows_and_skips_for_all():
    page = run("apex")
    start = page["two_params"], page["two_state"]
    x, y = page["x"][0], page["y"][0]
    huge = jnp.full_like(y, 1e16)  # too much for the gradients of the first loss
    before = page["scale_states"]
    *after, scale_states = page["two_loss_step"](*start, before, x, huge)
    assert [
        float(new.loss_scale / old.loss_scale)
        for new, old in zip(scale_states, before, strict=True)
    ] == [0.5, 1.0]
    assert_same_bits(kept(after), kept(start))
    assert not ls.was_applied(after[1])
    *after, _ = page["two_loss_step"](*start, before, x, y)
    assert ls.was_applied(after[1])


@pytest.mark.slow
def test_what_uses_up_the_hysteresis_and_what_resets_it():
    megatron, deepspeed = run("megatron_lm")["rule"], run("deepspeed")["rule"]
    apart = [False, True, False]
    assert scales(megatron, apart) == [1.0, 1.0, 0.5]
    assert scales(ls.presets.deepspeed(delayed_shift=2), apart) == [1.0, 1.0, 0.5]
    assert scales(ls.DynamicLossScale(hysteresis=2), apart) == [1.0, 1.0, 1.0]
    assert scales(deepspeed, [*apart, False, False]) == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert ls.presets.megatron().init_scale == 2.0**32


@dataclasses.dataclass
class DeepSpeedScaler:
    """The rule of its ZeRO scaler, with the names of its attributes."""

    delayed_shift: int
    consecutive_hysteresis: bool
    scale_window: int
    cur_scale: float = 2.0**16
    cur_iter: int = 0
    last_overflow_iter: int = -1

    def __post_init__(self):
        self.cur_hysteresis = self.delayed_shift

    def update(self, finite):
        steps = self.cur_iter - self.last_overflow_iter - 1
        if not finite and self.cur_hysteresis == 1:
            self.cur_scale /= 2
        elif not finite:
            self.cur_hysteresis -= 1
        grows = finite and steps > 0 and steps % self.scale_window == 0
        if grows or (finite and self.consecutive_hysteresis):
            self.cur_hysteresis = self.delayed_shift
        self.cur_scale *= 2 if grows else 1
        if not finite:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


@pytest.mark.slow
def test_a_run_of_deepspeed_goes_on_from_any_step():
    page = run("deepspeed")
    resume = code_blocks(GUIDES["deepspeed"].read_text(), "python")[-1]
    resume = re.sub(r"saved = {(?s:.*?)\n}\n", "", resume)
    window, flags = 3, [True] * 8 + [False, True, False, False] + [True] * 9
    config = {"fp16": {**page["config"]["fp16"], "loss_scale_window": window}}
    rule = ls.presets.deepspeed_fp16(**config["fp16"])
    assert rule.first_growth_late
    scaler, courses = DeepSpeedScaler(2, True, window), []
    for finite in flags:
        namespace = {**page, "config": config, "rule": rule, "saved": vars(scaler)}
        exec(resume, namespace)
        courses.append(namespace["resumed_state"].scale_state)
        scaler.update(finite)
        courses = [rule.update(state, finite) for state in courses]
        found = {float(state.loss_scale) for state in courses}
        assert found == {scaler.cur_scale}


@pytest.mark.slow
def test_zero_shards_the_optimizer_state_and_trains_alike():
    page = run("deepspeed")
    state = page["zero_state"]
    for name in ("master_weights", "mu", "nu"):
        moments = optax.tree.get(state, name)
        specs = {key: moment.sharding.spec for key, moment in moments.items()}
        assert specs == {"w1": P("data"), "b1": P("data"), "w2": P("data"), "b2": P()}
    assert {p.sharding.spec for p in page["zero_params"].values()} == {P()}
    assert ls.get_loss_scale(state) == ls.get_loss_scale(page["opt_state"])
    close = functools.partial(np.testing.assert_allclose, atol=2e-2)
    jax.tree.map(close, page["zero_params"], page["params"])


def steps_until_fairseq_raises(scale, factor=2.0, minimum=1e-4):
    for step in range(1, 1000):
        scale /= factor
        if scale <= minimum:
            return step
    raise AssertionError


@pytest.mark.slow
def test_the_guard_raises_when_fairseq_does():
    page = run("fairseq")
    state = ls.get_loss_scale_state(page["stopped_state"])
    assert state.consecutive_skips == steps_until_fairseq_raises(2.0**7) == 21
    assert state.loss_scale == page["rule"].min_scale == 2.0**-13
    assert "training has stopped: The last 21 steps" in page["printed"]
    assert_same_bits(page["stopped_params"], page["initial"])


@pytest.mark.slow
def test_what_is_said_of_fairseqs_arguments():
    fairseq, rule = ls.presets.fairseq, run("fairseq")["rule"]
    assert fairseq().init_scale == 2.0**15
    assert isinstance(fairseq(), ls.DynamicLossScale)
    assert isinstance(rule, ls.TolerantLossScale)
    flags = [True] * 5 + [False, False]
    assert scales(rule, flags) == [1.0] * 6 + [0.5]  # 1 in 6 is less than a quarter
    assert fairseq(threshold=1.0).min_scale == 1.0

    metaseq = run("fairseq")["metaseq_rule"]
    state = metaseq.init()
    for _ in range(256):
        state = metaseq.update(state, True)
    assert state.memory.growth_interval == 512
    assert metaseq.update(state, False).memory.growth_interval == 256
    for _ in range(101):
        state = metaseq.update(state, False)
    assert state.loss_scale == 2.0**-5
    with pytest.raises(ls.LossScaleError):
        ls.check_loss_scale(state)


def mpx_course(mpx, steps):
    """States and losses of mpx and ours, from the same model; both skip a step."""
    theirs, ours = run_theirs("mpx"), run("mpx")
    model = ours["MLP"](jax.random.key(0))
    first = mpx.DynamicLossScaling(jnp.float32(2**14), jnp.float32(1), period=50)
    mpx_state = model, theirs["optimizer"].init(model), first
    state = model, ours["tx"].init(model)
    for i, x in enumerate(ours["x"][:steps]):
        x = jnp.asarray(x).at[0, 0].set(1e6 if i == 3 else x[0, 0])
        *mpx_state, mpx_loss = theirs["train_step"](*mpx_state, x)
        *state, loss = ours["train_step"](*state, x)
        yield (mpx_state, mpx_loss), (state, loss)


@pytest.mark.slow
def test_mpx_and_ours_take_the_same_course(tmp_path, monkeypatch):
    mpx = pytest.importorskip("mpx")
    monkeypatch.chdir(tmp_path)
    changes, before = {}, 2.0**14
    for i, ((mpx_state, mpx_loss), (state, loss)) in enumerate(mpx_course(mpx, 60)):
        scale = float(ls.get_loss_scale(state))
        assert scale == mpx_state[2].loss_scaling
        if scale != before:
            changes[i] = scale / before
        # Divided by the next scale.
        np.testing.assert_allclose(mpx_loss * scale / before, loss, rtol=0.05)
        before = scale
    assert changes == {3: 0.5, 53: 2.0}
    leaves = zip(*map(jax.tree.leaves, (mpx_state[0], state[0])), strict=True)
    for theirs_leaf, ours_leaf in leaves:
        np.testing.assert_allclose(theirs_leaf, ours_leaf, atol=2e-2)


@pytest.mark.slow
def test_what_is_said_of_mpx():
    mpx = pytest.importorskip("mpx")
    one = jnp.float32(1)
    scaling = mpx.DynamicLossScaling(jnp.float32(8), one, period=1)
    value_and_grad = mpx.filter_value_and_grad(lambda p: p**2, scaling)
    loss, new, finite, grad = value_and_grad(jnp.float32(3))
    assert (loss, grad, new.loss_scaling, bool(finite)) == (4.5, 3.0, 16, True)
    assert np.isinf(mpx.DynamicLossScaling(jnp.float32(2**16), one).scale(one))
    assert mpx.force_full_precision(jnp.mean)(jnp.ones(3)).dtype == "float16"
    top = mpx.DynamicLossScaling(jnp.float32(2**15), one, period=1)
    assert top.adjust(jnp.bool_(True)).loss_scaling == 65504

    def loss_fn(w):
        square = mpx.cast_to_half_precision(w) ** 2
        return mpx.force_full_precision(jnp.sum, jnp.float32)(square)

    _, grads = ls.value_and_grad(loss_fn, ls.FixedLossScale(8.0).init())(jnp.ones(3))
    assert_same_bits(grads, jnp.full(3, 2.0))
