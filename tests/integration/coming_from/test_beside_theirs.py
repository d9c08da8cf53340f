"""Flax, jmp and mpx run beside the programs that replace them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.training.dynamic_scale import DynamicScale
from guides import TRAININGS, assert_close, batches, kept, run, run_theirs, scales
from helpers import assert_same_bits

import optax_lossscale as ls


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
