"""Say in a line what the operands and the result of an operation are."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .._dtypes import is_inexact
from .._finite import all_finite
from .._programs.primitives import ELEMENTWISE

_SIGNS = {"div": "/", "mul": "*", "sub": "-", "add": "+", "add_any": "+"}
_SIGNS |= {"pow": "**", "integer_pow": "**"}
_INF, _NAN = 1, 2  # what is in an array that is not finite
_NARROW = (jnp.dtype("float16"), jnp.dtype("bfloat16"))


def kind_of(x: Any) -> int:
    """Return whether an array holds NaN, or else inf."""
    if not is_inexact(x):
        return 0
    # NumPy reads the memory of a CPU. Elsewhere, only a bad array is copied.
    is_far = isinstance(x, jax.Array) and jax.default_backend() != "cpu"
    if is_far and all_finite(x) or np.all(np.isfinite(host := np.asarray(x))):
        return 0
    return _NAN if np.any(np.isnan(host)) else _INF


def explained(
    eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[str, str]:
    """Return the values at the first element that is not finite, and a remark."""
    bad = [np.asarray(x) for x in results if kind_of(x)]
    result, name = max(bad, key=lambda x: np.any(np.isnan(x))), eqn.primitive.name
    flags = np.isnan(result) if np.any(np.isnan(result)) else ~np.isfinite(result)
    place = np.unravel_index(np.argmax(flags), flags.shape)
    if name in ELEMENTWISE:
        texts = [number(np.broadcast_to(x, flags.shape)[place]) for x in operands]
        texts += [str(eqn.params["y"])] if name == "integer_pow" else []
    else:
        texts = [*map(described, operands)]
    called = result.dtype.name if name == "convert_element_type" else name
    sign = _SIGNS.get(name)
    text = f" {sign} ".join(texts) if sign else f"{called}({', '.join(texts)})"
    text += f" = {number(result[place])}"
    if place:
        count = f"{np.count_nonzero(flags):,} of {flags.size:,}"
        text += f" at {[*map(int, place)]}, {count}"
    if name in ("gather", "dynamic_slice"):
        return text, "an index is out of range"
    return text, "float32 holds it" * _fits_float32(eqn, operands)


def _fits_float32(eqn: JaxprEqn, operands: Sequence[Any]) -> bool:
    def wide(x: Any) -> Any:
        is_dtype = isinstance(x, np.dtype | type) and np.dtype(x) in _NARROW
        return jnp.dtype("float32") if is_dtype else x

    if all(x.aval.dtype not in _NARROW for x in eqn.outvars):  # type: ignore[attr-defined]
        return False
    arrays = [x.astype(jnp.float32) if x.dtype in _NARROW else x for x in operands]
    params = {key: wide(x) for key, x in eqn.params.items()}
    try:
        results = eqn.primitive.bind(*arrays, **params)
        return not any(map(kind_of, jax.tree.leaves(results)))
    except Exception:  # there is no float32 version with these parameters
        return False


def described(x: Any) -> str:
    """Return the type of an array, and its largest value."""
    text = f"{x.dtype}{[*x.shape]}"
    if not is_inexact(x):
        return text
    x = np.asarray(x)
    finite = np.abs(x[np.isfinite(x)])
    parts = [f"up to {number(finite.max())}"] if finite.size else []
    counts = {"nan": np.isnan(x).sum(), "inf": np.isinf(x).sum()}
    parts += [f"{count:,} {name}" for name, count in counts.items() if count]
    return f"{text} {', '.join(parts)}"


def number(x: Any) -> str:
    """Return three digits of a number, and zero without a sign."""
    return f"{complex(x):.3g}" if np.iscomplexobj(x) else f"{float(x) + 0.0:.3g}"
