"""Meshes of CPU devices."""

import jax

# A newer name, and that of the oldest supported jax.
set_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


def make_mesh(axis_type=AUTO, **axes):
    """A mesh of CPU devices, such as ``make_mesh(data=2, model=4)``."""
    types = (axis_type,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def on_mesh(fun, in_specs, out_specs, mesh=None, **options):
    """Compile ``fun`` for each device of a mesh, which by default has one axis, d."""
    options |= {"mesh": mesh or make_mesh(d=8)}
    return jax.jit(
        jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs, **options)
    )
