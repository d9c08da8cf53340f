"""A gradient report by numpy and ml_dtypes."""

import jax
import jax.numpy as jnp
import numpy as np


def host(report):
    return jax.tree.map(lambda x: x.item(), jax.device_get(report))


def oracle(x, scale, dtype):
    """What numpy and ml_dtypes make of the scaled elements."""
    x = np.ravel(x).astype(np.complex128)
    with np.errstate(over="ignore"):
        rounded = (abs(x) * scale).astype(jnp.dtype(dtype)).astype(np.float64)
    finite = np.isfinite(x)
    flags = {
        "nan": np.isnan(x),
        "inf": np.isinf(x) & ~np.isnan(x),
        "zero": x == 0,
        "underflow": (rounded == 0) & (x != 0),
        "subnormal": (rounded > 0) & (rounded < float(jnp.finfo(dtype).tiny)),
        "overflow": finite & ~np.isfinite(rounded),
    }
    counts = {name: flag.sum().item() for name, flag in flags.items()}
    max_abs = min(abs(x[finite]).max(initial=0), np.finfo(np.float32).max)
    return {**counts, "max_abs": float(np.float32(max_abs)), "size": x.size}
