"""A gradient report by numpy and ml_dtypes, one element after the other."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import optax_lossscale as ls


def host(report):
    return jax.tree.map(lambda x: x.item(), jax.device_get(report))


def oracle(x, scale, dtype):
    """What numpy and ml_dtypes make of the scaled elements, one by one."""
    info = jnp.finfo(dtype)
    counts = dict.fromkeys(ls.GradientReport._fields, 0)
    counts["size"] = x.size
    for g in np.ravel(x).astype(np.float64):
        with np.errstate(over="ignore"):
            rounded = abs(float(np.asarray(g * scale).astype(jnp.dtype(dtype))))
        if math.isnan(g):
            counts["nan"] += 1
        elif math.isinf(g):
            counts["inf"] += 1
        elif g == 0:
            counts["zero"] += 1
        elif rounded == 0:
            counts["underflow"] += 1
        elif not math.isfinite(rounded):
            counts["overflow"] += 1
        elif rounded < float(info.tiny):
            counts["subnormal"] += 1
        if math.isfinite(g):
            counts["max_abs"] = max(counts["max_abs"], abs(g))
    return counts
