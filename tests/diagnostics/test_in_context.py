"""Report, suggestion and guard under derivatives and in exports."""

import jax
import jax.numpy as jnp

import optax_lossscale as ls

STOPPED = ls.DynamicLossScale().init()._replace(consecutive_skips=jnp.int32(7))


def test_diagnostics_are_constants_to_derivatives():
    errors = []

    def grads_at(x):
        return {"w": x * jnp.array([1.0, 2.0]), "complex": jax.lax.complex(x, x)}

    def loss(x):
        grads = grads_at(x)
        report = ls.gradient_report(grads, loss_scale=x)
        suggested = ls.suggest_loss_scale(grads)
        state = STOPPED._replace(loss_scale=x * STOPPED.loss_scale)
        ls.check_loss_scale(
            state, max_consecutive_skips=4, grads=grads, on_error=errors.append
        )
        constants = report.max_abs["w"] * suggested.loss_scale * suggested.rescued
        return (1 + constants) * x**2

    x = jnp.float32(2.0**-26)
    second_derivative = jax.jit(jax.hessian(jax.checkpoint(loss)))
    assert float(second_derivative(x)) == 2 * (1 + 2.0**-25 * 2.0**24)
    jax.effects_barrier()
    assert str(errors[0]).startswith("The last 7 steps were")
    report = ls.gradient_report(grads_at(x), loss_scale=x * STOPPED.loss_scale)
    assert str(errors[0]).endswith(f"The last gradients:\n{ls.format_report(report)}")
