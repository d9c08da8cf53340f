"""What the migration guides say of limits, hysteresis, sharding and guards."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from guides import GUIDES, kept, run, scales
from helpers import assert_same_bits, code_blocks
from jax.sharding import PartitionSpec as P

import optax_lossscale as ls


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
    assert state.rule_state.growth_interval == 512
    assert metaseq.update(state, False).rule_state.growth_interval == 256
    for _ in range(101):
        state = metaseq.update(state, False)
    assert state.loss_scale == 2.0**-5
    with pytest.raises(ls.LossScaleError):
        ls.check_loss_scale(state)
