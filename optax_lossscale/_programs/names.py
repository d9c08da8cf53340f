"""The names of matmuls and convolutions: the parameters that are their operands.

The arguments of a call have paths. Facts about where values come from lead from these
to the operands, and in the backward pass to what an operand has met in the forward one.
"""

import contextlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .._flax_internals import nnx_objects
from .facts import Facts
from .places import Place, Where
from .primitives import CUSTOM, ELEMENTWISE, MOVES, REDUCTIONS, RESHAPES, TRANSPARENT
from .traced_call import TracedCall

# The arguments that a value comes from without a product, by their numbers, or an
# object that stands for a value that is computed from anything else.
Source = Any
_SAME_VALUE = MOVES | {"convert_element_type", "pcast", "pvary", "reduce_precision"}
_SAME_ARGUMENTS = (
    ELEMENTWISE
    | RESHAPES
    | REDUCTIONS
    | {"all_gather", "all_gather_invariant", "device_put", "dynamic_slice", "reshard"}
)
_MOST = 8  # a value that comes from more arguments is no parameter
FEW = 3  # equal names or rows that are told apart


class Named(NamedTuple):
    """A product, and what tells its name once all products are known."""

    where: Where
    sources: list[Source]
    names: "Names"

    @property
    def parameter(self) -> str:
        """The path of the parameter that is an operand, or of more than one."""
        return ", ".join(self.names.of(self))

    @property
    def group(self) -> tuple[str, str]:
        return self.where.line, self.parameter or self.where.scope


class Names(Facts[Source]):
    """The names of the arguments of a call, and which products have them as operands.

    Of two arguments, the parameter is the one in a tree, or else the first one, as in
    ``loss_fn(params, batch)``.
    """

    constant = frozenset[int]()
    entered = TRANSPARENT | CUSTOM

    def __init__(self, call: TracedCall):
        super().__init__()
        pairs = _paths_and_ranks(call)
        self.paths, self._ranks = [x for x, _ in pairs], [x for _, x in pairs]
        self.inputs = [frozenset({i} if x else ()) for i, x in enumerate(self.paths)]
        # The parameters that a value has met in products, and those of each place.
        self._met: defaultdict[Source, set[Source]] = defaultdict(set)
        self._at: defaultdict[Any, set[Source]] = defaultdict(set)

    def of_operation(self, eqn: JaxprEqn, known: Sequence[Source]) -> Sequence[Source]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in _SAME_VALUE and count == len(known):
            return known
        if name == "dynamic_slice":
            known = known[:1]  # the others are indices
        # Without operands, it fills what another branch of a `cond` leaves out.
        is_same = name in _SAME_ARGUMENTS or not known
        if is_same and not any(map(_is_computed, known)):
            source = self.constant.union(*known)
            if len(source) <= _MOST:
                return [source] * count
        return [object() for _ in range(count)]

    def joined(self, one: Source, other: Source) -> Source:
        computed = [*filter(_is_computed, (one, other))]
        return computed[0] if computed else one | other

    def note(self, eqn: JaxprEqn, place: Place) -> Named:
        """Remember a product, in the order of the program."""
        sources = [*map(place.fact_of, eqn.invars[:2])]
        product = Named(place.where(eqn), sources, self)
        if parameters := self._parameters(sources):
            source = frozenset().union(*parameters)
            self._at[product.where[:2]].add(source)
            for x in {*sources}.difference(parameters):
                self._met[x].add(source)
        return product

    def of(self, product: Named) -> list[str]:
        """Return the paths of the parameters of a product."""
        found = self._parameters(product.sources)
        if not found and product.where.is_backward:
            # The gradient of a parameter is a product of two values that have met it.
            # If only one has, or both have met more, it is one of the same place.
            met = [self._met[x] for x in product.sources if x in self._met]
            either = found.union(*met)
            found = either.intersection(*met)
            if len(met) < 2 or len(found) != 1:
                here = self._at[product.where[:2]].intersection(found or either)
                found = here if found or len(here) == 1 else found
        return sorted({self.paths[i] for x in found for i in x})

    def _parameters(self, sources: Sequence[Source]) -> set[Source]:
        found = [x for x in sources if x and not _is_computed(x) and x not in self._met]
        ranks = [(min(self._ranks[i] for i in x), len(x)) for x in found]
        return {x for x, rank in zip(found, ranks, strict=True) if rank == min(ranks)}


def _is_computed(source: Source) -> bool:
    return type(source) is object


def _paths_and_ranks(call: TracedCall) -> list[tuple[str, Any]]:
    """Return the path of each input in its argument, and which argument comes first.

    If the argument is an array or a list, the path begins with the argument's name.
    """
    known: dict[Any, tuple[int, str]] = {}
    with contextlib.suppress(TypeError, ValueError):  # of a function in C
        for i, x in enumerate(inspect.signature(call.fun).parameters.values()):
            if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD):
                known[i] = known[x.name] = i, x.name

    def named(_: Any, argument: Any, *keys: Any) -> tuple[str, Any]:
        key = getattr(argument, "key", getattr(argument, "idx", None))
        i, name = known.get(key, (len(known), f"argument {key}"))
        text = jax.tree_util.keystr(keys, simple=True, separator="/")
        text = nnx_objects.without_own(text)
        if not text or text.split("/")[0].isdigit():
            return f"{name}/{text}".strip("/"), (not text, i)
        return text, (False, i)

    return [named(*path) if path else ("", None) for path in call.paths]


def shared_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each name the one that equal layers share, such as "blocks/*/kernel".

    A star stands for a number in a list, or for the last number in a part of a path, if
    more than 3 neighbors differ only in it. So `wi_0` and `wi_1` are two names.
    """
    names = {*names}
    neighbors = defaultdict(set)
    for name in names:
        for above, part in _parts(name):
            neighbors[above, _starred(part)].add(part)

    def shared(above: str, part: str) -> str:
        star = _starred(part)
        return star if star == "*" or len(neighbors[above, star]) > FEW else part

    return {x: "/".join(shared(*pair) for pair in _parts(x)) for x in names}


def in_common(one: str, other: str) -> str:
    """Return two names of equal layers as one, such as "blocks/*/kernel"."""
    pairs = zip(one.split("/"), other.split("/"), strict=True)
    return "/".join(x if x == y else _starred(x) for x, y in pairs)


def _parts(name: str) -> list[tuple[str, str]]:
    parts = name.split("/")
    return [("/".join(parts[:i]), part) for i, part in enumerate(parts)]


def _starred(part: str) -> str:
    return re.sub(r"\d+(?=\D*$)", "*", part)
