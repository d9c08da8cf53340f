"""Say in a line what the operands and the result of an operation are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._dtypes import is_inexact
from .._programs.primitives import ELEMENTWISE
from .._programs.rewrite import programs_in

_SIGNS = {"div": "/", "mul": "*", "sub": "-", "add": "+", "add_any": "+", "pow": "**"}
_NARROW = (jnp.dtype("float16"), jnp.dtype("bfloat16"))


def explained(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    results: Sequence[Any],
    kind_of: Callable[[Any], int],
) -> tuple[str, str]:
    """Return the values at the first element that is not finite, and a remark."""
    result, name = np.asarray(max(results, key=kind_of)), eqn.primitive.name
    flags = np.isnan(result) if np.any(np.isnan(result)) else ~np.isfinite(result)
    place = np.unravel_index(np.argmax(flags), flags.shape)
    if name in ELEMENTWISE:
        texts = [number(np.broadcast_to(x, flags.shape)[place]) for x in operands]
    else:
        texts = [*map(described, operands)]
    match name:
        case "integer_pow":
            text = f"{texts[0]} ** {eqn.params['y']}"
        case "convert_element_type":
            text = f"{result.dtype}({texts[0]})"
        case _ if name in _SIGNS:
            text = f" {_SIGNS[name]} ".join(texts)
        case _:
            text = f"{name}({', '.join(texts)})"
    text += f" = {number(result[place])}"
    if place:
        text += (
            f" at {[*map(int, place)]}, {np.count_nonzero(flags):,} of {flags.size:,}"
        )
    if name in ("gather", "dynamic_slice"):
        return text, "an index is out of range"
    return text, "float32 holds it" * _fits_float32(eqn, operands, kind_of)


def _fits_float32(
    eqn: JaxprEqn, operands: Sequence[Any], kind_of: Callable[[Any], int]
) -> bool:
    if programs_in(eqn.params) or not any(x.aval.dtype in _NARROW for x in eqn.outvars):
        return False

    def wide(x: Any) -> Any:
        is_dtype = isinstance(x, np.dtype | type) and np.dtype(x) in _NARROW
        return jnp.dtype("float32") if is_dtype else x

    arrays = [x.astype(jnp.float32) if x.dtype in _NARROW else x for x in operands]
    params = {key: wide(x) for key, x in eqn.params.items()}
    try:
        results = eqn.primitive.bind(*arrays, **params)
    except Exception:  # an operation that has no float32 version with these parameters
        return False
    return not any(map(kind_of, jax.tree.leaves(results)))


def described(x: Any) -> str:
    """Return the type of an array, and its largest value."""
    if not is_inexact(x):
        return f"{x.dtype}{[*x.shape]}"
    if not x.shape:
        return f"{x.dtype} {number(x)}"
    x, text = np.asarray(x), f"{x.dtype}{[*x.shape]}"
    finite = np.isfinite(x)
    parts = [f"up to {number(np.max(np.abs(x[finite])))}"] if finite.any() else []
    counts = {"nan": np.isnan(x).sum(), "inf": np.isinf(x).sum()}
    parts += [f"{count:,} {name}" for name, count in counts.items() if count]
    return f"{text} {', '.join(parts)}"


def number(x: Any) -> str:
    """Return three digits of a number."""
    return f"{complex(x):.3g}" if np.iscomplexobj(x) else f"{float(x):.3g}"
