"""What takes the place of a gradient is finite."""

import jax
import jax.numpy as jnp

from optax_lossscale._flax_internals.float8_overwrites import with_finite_overwrites


def test_overwrite_that_is_not_finite_keeps_the_old_value():
    """That of a parameter is a gradient, and stays NaN."""
    name, old, new = "_overwrite_with_gradient", [1.0, 2.0], [jnp.nan, 5.0]
    old, new = ({name: x, "w": x} for x in map(jnp.array, (old, new)))
    [grads] = jax.vjp(with_finite_overwrites, old)[1](new)
    assert grads[name].tolist() == [1, 5]
    assert jnp.isnan(grads["w"]).tolist() == [True, False]
