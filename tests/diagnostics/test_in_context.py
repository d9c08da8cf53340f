"""Report, suggestion and guard under derivatives and in exports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from report_oracle import host

import optax_lossscale as ls

STOPPED = ls.DynamicLossScale().init()._replace(consecutive_skips=jnp.int32(7))


@pytest.mark.parametrize(
    "derivative",
    [jax.grad, lambda f: lambda x: jax.jit(jax.hessian(jax.checkpoint(f)))(x) * x],
    ids=["grad", "hessian"],
)
def test_diagnostics_are_constants_inside_of_a_differentiated_function(derivative):
    errors = []

    def loss(x):
        grads = {"w": x * jnp.array([1.0, 2.0]), "complex": jax.lax.complex(x, x)}
        grads |= {"key": jax.random.key(0), "count": jnp.arange(2), "none": None}
        report = ls.gradient_report(grads, loss_scale=x)
        suggested = ls.suggest_loss_scale(grads)
        state = STOPPED._replace(loss_scale=x * STOPPED.loss_scale)
        ls.check_loss_scale(
            state, max_consecutive_skips=4, grads=grads, on_error=errors.append
        )
        constants = report.max_abs["w"] * suggested.loss_scale * suggested.rescued
        return (1 + constants) * x**2

    x = jnp.float32(2.0**-26)
    assert float(derivative(loss)(x)) == 2 * x * (1 + 2.0**-25 * 2.0**24)
    jax.effects_barrier()
    assert "The last 7 steps were" in str(errors[0]) and "['w']" in str(errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["b, 4", "2, b, c"])
def test_a_program_exported_for_any_size_gives_the_right_counts(shape):
    shape = export.symbolic_shape(shape)
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def both(grads):
        return ls.gradient_report(grads), ls.suggest_loss_scale(grads)

    exported = export.export(jax.jit(both))(grads)
    for size in (3, 50):
        sizes = [n if isinstance(n, int) else size for n in shape]
        x = np.resize(np.float32([1e-9, 0, np.nan, 1.0, 1e9, np.inf, 1e-6]), sizes)
        assert host(exported.call({"w": x})) == host(both({"w": x}))
