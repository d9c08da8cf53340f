"""What the text of a notebook says of its pictures, and its output does not print.

A function checks the notebook of its name. It runs in the notebook's kernel and gets
the variables of the notebook.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ls


def beyond_one_scale(n):
    assert jnp.sum(n.sizes < 2.0**-25) > n.LAYERS / 2
    assert jnp.all(n.sweep[n.best + 2][-3:] == 1)
    assert jnp.all(n.own_scales < 1.1 * n.sweep.min(axis=0))
    assert 6 < n.bfloat16.max() / n.own_scales.max() < 10
    assert jnp.all(n.own_scales < n.bfloat16) and n.own_scales.max() <= 0.01
    assert jnp.all(jnp.diff(n.scales) <= 0)


def finding_the_overflow(n):
    loss, scale, skipped = n.train(n.make_step(n.loss_fn), n.batches)[1]
    assert jnp.all(jnp.isfinite(loss)) and jnp.all(jnp.abs(loss - loss[0]) < 0.3)
    assert skipped.all() and scale[14] == 2 and jnp.all(scale[29:] == 2**-14)
    loss, scale, skipped = n.history
    assert loss[-30:].mean() < 0.2 and jnp.all(scale >= 2**13)
    assert skipped[n.STEPS // 2]


def float16_or_bfloat16(n):
    float16, bfloat16 = jnp.float16, jnp.bfloat16
    scaled = n.gradient_errors["float16, scale 2^15"]
    unscaled = n.gradient_errors["float16, no scale"]
    without_range = n.gradient_errors["bfloat16"]
    assert max(without_range, key=without_range.get) == "letter"
    assert min(without_range[name] / scaled[name] for name in scaled) > 4
    better = {x for x in unscaled if unscaled[x] < without_range[x] / 3}
    assert "head" in better <= {"letter", "down 4", "head"}

    sizes = {d: jnp.abs(n.same_gaps[d]) for d in (float16, bfloat16)}
    jumps = {d: size[size > 1e-5] for d, size in sizes.items()}
    assert jumps[float16].size > 3 * jumps[bfloat16].size
    assert jumps[bfloat16].mean() > 3 * jumps[float16].mean()
    spreads = [n.gaps["two devices"][d].cumsum(axis=1).std(axis=0) for d in sizes]
    for spread in spreads:
        assert np.all(np.diff(spread[np.array([0, 14, 28, 56])]) > 0)
    assert 4 < spreads[1][-1] / spreads[0][-1] < 16

    curves = [n.runs[d][2] for d in (jnp.float32, float16, bfloat16)]
    drifts = [np.abs(curve - curves[0]).mean() for curve in curves[1:]]
    assert drifts[0] < drifts[1] < 0.05


def how_the_scale_moves(n):
    after = ls.gradient_report(n.grads, loss_scale=n.suggested.loss_scale).totals
    assert after.underflow == after.overflow == 0
    scales, bad = n.scales, n.bad_step
    assert scales[bad + 1] == scales[bad] / 2 == scales[bad + 19]
    assert scales[bad + 21] == scales[bad]


def many_devices(n):
    assert np.argwhere(n.nans_over_time).tolist() == [[n.BAD_STEP, 5]]

    def float32_loss(params, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)

    def type_sent(loss_fn, mapped):
        def gradients(params, batch):
            return jax.grad(lambda p: jax.lax.pmean(loss_fn(p, batch), "data"))(params)

        specs = {"in_specs": (n.P(), n.P("data")), "out_specs": n.P()}
        shardings = {"in_shardings": (n.replicated, n.rows)}
        step = (
            jax.jit(jax.shard_map(gradients, mesh=n.mesh, **specs))
            if mapped
            else jax.jit(jax.grad(loss_fn), out_shardings=n.replicated, **shardings)
        )
        program = step.lower(n.params, (n.x[0], n.y[0])).compile().as_text()
        [sent] = re.findall(r"(\w+)\[(?:32,16|16,32)\].* all-reduce\(", program)
        return sent

    losses = n.loss_fn, ls.autocast(float32_loss, "float16")
    sent = [[type_sent(x, mapped) for mapped in (False, True)] for x in losses]
    assert sent == [["f16", "f16"], ["f16", "f32"]]


def quickstart(n):
    assert n.plain_losses[-10:].mean() > 1.1 * n.plain_losses.min()
    assert abs(n.scaled_losses[-1] / n.float32_losses[-1] - 1) < 0.05
    without = ls.gradient_report(n.grads).totals
    scaled = ls.gradient_report(n.grads, loss_scale=2.0**15).totals
    assert without.underflow > 0.9 * without.size
    assert scaled.underflow < 0.002 * scaled.size
