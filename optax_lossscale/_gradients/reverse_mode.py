"""Refuse forward mode, wherever it is evaluated."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_identity = Primitive("reverse_mode_only")


def reverse_mode_only(x: jax.Array) -> jax.Array:
    """Return an array whose tangents can be transposed, but not evaluated.

    ``jax.custom_vjp`` alone refuses forward mode, too, but it cannot say what to do
    instead: inside ``jit``, ``scan`` and the like, jax raises after the block returned.
    """
    return _identity.bind(x, tangent=False)


def _evaluated(x: Any, tangent: bool) -> Any:
    if tangent:
        raise TypeError(
            "`scale_backward` has no derivative in forward mode, which has no backward "
            "pass to scale. Use reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`), or "
            "differentiate `fun` itself."
        )
    return x


def _jvp(primals: Any, tangents: Any, **_: bool) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return x, t if isinstance(t, ad.Zero) else _identity.bind(t, tangent=True)


def _batched(args: Any, axes: Any, tangent: bool) -> tuple[Any, Any]:
    return _identity.bind(_evaluated(args[0], tangent), tangent=tangent), axes[0]


_identity.def_impl(_evaluated)
_identity.def_abstract_eval(lambda x, tangent: x)
ad.primitive_jvps[_identity] = _jvp
ad.primitive_transposes[_identity] = lambda cotangent, x, tangent: [cotangent]
batching.primitive_batchers[_identity] = _batched
mlir.register_lowering(_identity, lambda ctx, x, tangent: [_evaluated(x, tangent)])
