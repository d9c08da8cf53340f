"""Report, suggestion and guard under derivatives, strict promotion and in exports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64
from jax import export
from report_oracle import host

import optax_lossscale as ls

STOPPED = ls.DynamicLossScale().init()._replace(consecutive_skips=jnp.int32(7))

DERIVATIVES = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1] / x,
    "hessian": lambda f: lambda x: jax.hessian(f)(x) * x,
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize(
    ("derivative", "jit"),
    [
        ("grad", False),
        ("checkpoint", True),
        pytest.param("jvp", False, marks=pytest.mark.slow),
        pytest.param("hessian", True, marks=pytest.mark.slow),
    ],
)
def test_inside_of_a_function_that_is_differentiated_they_are_constants(
    derivative, jit, monkeypatch
):
    errors = []
    if not jit:
        # The guard decides on the host, where the numbers are.
        monkeypatch.setattr("jax.debug.callback", None)

    def loss(x):
        grads = {"w": x * jnp.array([1.0, 2.0]), "complex": jax.lax.complex(x, x)}
        grads |= {"key": jax.random.key(0), "count": jnp.arange(2), "none": None}
        report = ls.gradient_report(grads, loss_scale=x)
        suggested = ls.suggest_loss_scale(grads)
        state = STOPPED._replace(loss_scale=x * STOPPED.loss_scale)
        ls.watch_loss_scale(
            state, max_consecutive_skips=4, grads=grads, on_error=errors.append
        )
        constants = report.max_abs["w"] * suggested.loss_scale * suggested.rescued
        return (1 + constants) * x**2

    function = DERIVATIVES[derivative](loss)
    x = jnp.float32(2.0**-26)
    slope = (jax.jit(function) if jit else function)(x)
    assert float(slope) == 2 * x * (1 + 2.0**-25 * 2.0**24)
    jax.effects_barrier()
    assert "The last 7 steps were" in str(errors[0]) and "['w']" in str(errors[0])


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float16", "bfloat16", "float8_e5m2", "complex64"),
        pytest.param(("float64", "complex128"), marks=pytest.mark.slow),
    ],
)
def test_under_strict_promotion_they_are_the_same(dtypes):
    def everything():
        grads = {name: jnp.array([1, 0, 2.0**-10], name) for name in dtypes}
        report = ls.gradient_report(grads, loss_scale=2.0**-10)
        suggested = ls.suggest_loss_scale(grads, min_scale=0.5)
        with pytest.raises(ls.LossScaleError) as error:
            ls.watch_loss_scale(STOPPED, max_consecutive_skips=2, grads=grads)
        return host([report, report.totals, suggested]), str(error.value)

    with enable_x64("float64" in dtypes):
        expected = everything()
        with jax.numpy_dtype_promotion("strict"):
            assert everything() == expected
    [_, totals, suggested], text = expected
    assert totals.zero == totals.subnormal == len(dtypes) == totals.size / 3
    assert suggested == (2.0**12, 0, 0, True) and f"['{dtypes[0]}']" in text


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
