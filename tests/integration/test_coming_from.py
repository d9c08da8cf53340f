"""The migration guides: their form, and what their programs are said to do."""

import ast
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

import optax_lossscale as ls

GUIDES = {path.stem: path for path in sorted(PAGES.glob("coming_from/*.md"))}
every_guide = pytest.mark.parametrize("guide", GUIDES)

PARTS = re.compile(
    r"^```(?P<fence>.*)\n(?P<code>(?s:.*?))^```$"
    r"|^(?P<level>#+) (?P<title>.+)$"
    r"|^(?P<table>(?:\|.*\n)+)"
    r"|^(?P<bullets>(?:- .*\n)+)"
    r"|^(?P<prose>.+)$",
    re.M,
)
FENCES = {"python theirs": "theirs", "python": "ours"}


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
    pair = r"(title )?(prose )?theirs (prose )?ours table "
    assert re.fullmatch(rf"title prose ({pair})+title bullets( (prose )?ours)?", kinds)
    titles = [text for kind, text in found if kind == "title"]
    assert titles[0].startswith("Coming from ") and titles[-1] == "What differs"


@every_guide
def test_links_lead_somewhere(guide):
    for link in re.findall(r"\]\(([^)]+)\)", GUIDES[guide].read_text()):
        path, _, anchor = link.partition("#")
        target = (GUIDES[guide].parent / path).read_text()
        titles = re.findall(r"^#+ (.+)$", target, re.M)
        anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
        assert anchor in ["", *anchors], link


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
        quoted = [snippet for left, _ in rows for snippet in snippets(left)]
        simple = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
        for node in ast.walk(ast.parse(theirs)):
            if isinstance(node, simple):
                code = squeeze(ast.get_source_segment(theirs, node))
                if re.search("[sS]cale", code) and not code.startswith("print"):
                    assert any(q in code or code in q for q in quoted), code


@functools.cache
def run(guide):
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
        index = slice(64) if self.guide == "keras" else 0
        x, *labels = (np.array(run(self.guide)[name][index]) for name in self.batch)
        if bad:
            x.reshape(-1)[-1] = 1e6  # too much for float16 alone
        if "parallel_state" in self.state:
            x = jax.device_put(x, run(self.guide)["shards"].sharding)
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
    assert len(counts(after)) == 2


@pytest.mark.slow
@every_guide
def test_what_was_saved_is_what_was_trained(guide):
    page = run(guide)
    params, opt_state = params_and_opt_state(TRAININGS[guide].start())
    whole = {"params": params, "opt_state": opt_state}
    if guide == "pytorch":
        assert_same_bits(page["checkpoint"], whole)
    elif guide == "keras":
        assert_same_bits(page["restored"], whole)
    elif guide == "flax_dynamic_scale":
        restored = serialization.from_bytes(page["state"], page["checkpoint"])
        assert_same_bits(restored.opt_state, opt_state)
    else:
        target = whole if guide == "tensorflow" else opt_state
        saved = serialization.to_bytes(target)
        assert "path" not in page or page["path"].read_bytes() == saved
        assert_same_bits(serialization.from_bytes(target, saved), target)


CONVERTED = {"pytorch": "torch", "keras": "keras", "jmp": "jmp"}
CONVERTED["flax_dynamic_scale"] = "flax"


@pytest.mark.slow
@every_guide
def test_a_run_begun_there_goes_on_here(guide):
    """With the scale and the counter: the next finite step is one that grows."""
    page = run(guide)
    state, rule = page["resumed_state"], page["rule"]
    assert ls.get_loss_scale(state) == 16384.0
    assert rule.update(state.scale_state, True).loss_scale == 32768.0
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
    ):
        rule = run(guide)["rule"]
        assert (rule.min_scale, rule.max_scale) == (floor, largest)
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
