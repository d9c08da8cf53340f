"""Split a program into segments, each of which is compiled as one.

It takes as long to compile a segment as a few of its operations. Products end segments,
so that equal layers have equal segments, which are compiled once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from .._jax_internals import like
from .._programs.primitives import PRODUCTS
from .._programs.rewrite import OPERATIONS, Program, jaxpr_of, programs_in

# The name of a call of a segment. No function of a user has it.
SEGMENT = "segment of optax_lossscale"
_LONGEST = 32
_known: dict[Any, Callable[..., Any]] = {}


def segments(jaxpr: Jaxpr, empty: Callable[..., Any]) -> Sequence[JaxprEqn]:
    """Return equations that call segments of a program, unless it is one itself.

    ``empty`` returns an `empty_call`.
    """
    parts: list[list[JaxprEqn]] = [[]]
    for eqn in jaxpr.eqns:
        if not is_plain(eqn):
            parts += [eqn], []
        else:
            parts[-1].append(eqn)
            if eqn.primitive.name in PRODUCTS or len(parts[-1]) == _LONGEST:
                parts.append([])
    calls: list[JaxprEqn] = []
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    for part in reversed(parts):
        used = dict.fromkeys(x for e in part for x in e.invars if isinstance(x, Var))
        made = dict.fromkeys(x for e in part for x in e.outvars)
        if 1 < len(part) < len(jaxpr.eqns):
            inputs: Any = [x for x in used if x not in made]
            outputs = [x for x in made if x in needed]
            call = empty(len(inputs), len(outputs))
            inside = call.params["jaxpr"]
            new = jaxpr_of(inside).replace(eqns=part, invars=inputs, outvars=outputs)
            params = {"jaxpr": like(inside, new), "name": SEGMENT}
            part = [call.replace(invars=inputs, outvars=outputs, params=params)]
        calls += reversed(part)
        needed.update(used)
    return calls[::-1]


def is_plain(eqn: JaxprEqn) -> bool:
    """Return whether an equation may be part of a segment.

    A literal -inf, such as a mask, would look like a birth inside.
    """
    literals = [x.val for x in eqn.invars if isinstance(x, Literal)]
    is_known = eqn.primitive.name in OPERATIONS and all(map(np.isfinite, literals))
    return is_known and not eqn.effects and not programs_in(eqn.params)


def compiled_once(program: Program) -> Callable[..., Any]:
    """Compile a segment, unless an equal one is compiled."""
    # The text names variables in order, and has all parameters but not the context.
    key = str(program), *(eqn.ctx for eqn in program.eqns)
    return _known.setdefault(key, compiled(program))


def compiled(program: Program) -> Callable[..., Any]:
    """Compile a program fast. As on a GPU, float16 is rounded."""
    options = dict(
        xla_backend_optimization_level=0,
        xla_llvm_disable_expensive_passes=True,
        xla_allow_excess_precision=False,
    )
    return jax.jit(jaxpr_as_fun(program), compiler_options=options)
