"""Keep products in float32 that the user chooses by their names in a report.

It is a pass before the cast, so the model stays as it is.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._jax_internals import rewriting
from .._programs.names import Named, Names
from .._programs.places import BACKWARD, Place, is_looked_into, with_eqns_inside
from .._programs.primitives import PRODUCTS
from .._programs.rewrite import remembered, with_eqns, with_programs
from .._programs.traced_call import TracedCall
from .products import reasons_to_leave


def with_kept(call: TracedCall, keep: Sequence[str]) -> Any:
    """Return a program whose chosen products ask for the highest precision."""
    # A row of two parameters has the names of both.
    chosen = [x for row in keep for x in row.removesuffix(BACKWARD).split(", ")]
    names, products = Names(call), list[tuple[Named, bool]]()

    def change(eqn: JaxprEqn, place: Place) -> Iterator[JaxprEqn]:
        if eqn.primitive.name in PRODUCTS:
            operands: list[Any] = [x.aval for x in eqn.invars[:2]]
            is_wide = any(x.dtype == jnp.float32 for x in operands)
            products.append((names.note(eqn, place), is_wide))
        yield eqn

    with rewriting():
        with_eqns_inside(call.jaxpr, change, names)
    known = [(_names_of(product), is_wide) for product, is_wide in products]
    wide = {x for xs, is_wide in known if is_wide for x in xs}
    by_hand = {x for xs, is_wide in known if not is_wide for x in xs}
    for name in chosen:
        # A parameter that has no product here may have one in training.
        is_used_later = _is_in(name, names.paths) and not _is_in(name, by_hand)
        if not _is_in(name, wide) and not is_used_later:
            raise _unknown(name, wide)
    flags = (is_wide and any(_is_in(x, xs) for x in chosen) for xs, is_wide in known)
    with rewriting():
        return _with_highest(call.jaxpr, tuple(flags))


@remembered
def _with_highest(program: Any, flags: tuple[bool, ...]) -> Any:
    """Return a program with some of its products changed, which are in order."""
    if not any(flags):
        return program
    rest = iter(flags)

    def inside(program: Any) -> Any:
        count = len([*reasons_to_leave(program, "float16")])
        return _with_highest(program, tuple(itertools.islice(rest, count)))

    def change(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        if is_looked_into(eqn):
            eqn = with_programs(eqn, inside)
        elif eqn.primitive.name in PRODUCTS and next(rest):
            precision = (jax.lax.Precision.HIGHEST,) * 2
            eqn = eqn.replace(params={**eqn.params, "precision": precision})
        yield eqn

    return with_eqns(program, change)


def _names_of(product: Named) -> list[str]:
    line, scope, _ = product.where
    return [line, line.partition(" ")[0], scope, *product.parameter.split(", ")]


def _is_in(name: str, paths: Iterable[str]) -> bool:
    """Return whether a name is one or more parts of a path. A star is within a part."""
    pattern = re.escape(name).replace(r"\*", "[^/]*")
    return any(re.search(f"(^|/){pattern}(/|$)", path) for path in paths)


def _unknown(name: str, known: Iterable[str]) -> ValueError:
    parts = {part for path in known for part in (path, *path.split("/"))}
    near = difflib.get_close_matches(name, sorted(parts - {""}), 3, 0)
    return ValueError(
        "`keep` must name float32 matmuls or convolutions of `fun`, by a parameter, a "
        f"scope or a line that `autocast_report` shows, got {name!r}. "
        f"The nearest names are {near}."
    )
