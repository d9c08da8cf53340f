"""The names of matmuls and convolutions: the parameters that are their operands.

The arguments of a call have paths. Facts about where values come from lead from these
to the operands, and in the backward pass to what an operand has met in the forward one.
"""

import contextlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .._flax_internals import nnx_objects
from .facts import Facts
from .places import Place, Where, with_eqns_inside
from .primitives import CUSTOM, ELEMENTWISE, MOVES, REDUCTIONS, RESHAPES, TRANSPARENT
from .rewrite import Program, jaxpr_of
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


class _Sources(Facts[Source]):
    constant = frozenset[int]()
    entered = TRANSPARENT | CUSTOM

    def __init__(self) -> None:
        super().__init__()
        self._joined: dict[Any, Source] = {}

    def of_operation(self, eqn: JaxprEqn, known: Sequence[Source]) -> Sequence[Source]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in _SAME_VALUE and count == len(known):
            return known
        if name == "dynamic_slice":
            known = known[:1]  # the others are indices
        if name in _SAME_ARGUMENTS and not any(map(_is_computed, known)):
            source = frozenset().union(*known)
            if len(source) <= _MOST:
                return [source] * count
        return [object() for _ in range(count)]

    def joined(self, one: Source, other: Source) -> Source:
        if one == other or _is_computed(one):
            return one  # in the next iteration, it is what it was
        if _is_computed(other):
            return self._joined.setdefault((one, other), object())
        return one | other

    def inside(
        self, eqn: JaxprEqn, program: Program, known: Sequence[Source]
    ) -> tuple[Source, ...]:
        inputs = super().inside(eqn, program, known)
        count = len(jaxpr_of(program).invars)
        return inputs if len(inputs) == count else (self.constant,) * count


def _is_computed(source: Source) -> bool:
    return type(source) is object


class Named(NamedTuple):
    """A product, and what tells its name once all products are known."""

    where: Where
    sources: tuple[Source, ...]
    names: "Names"

    @property
    def parameter(self) -> str:
        """The path of the parameter that is an operand, or of more than one."""
        return ", ".join(self.names.of(self))


class Names:
    """The names of the arguments of a call, and which products have them as operands.

    Of two arguments, the parameter is the one in a tree, or else the first one, as in
    ``loss_fn(params, batch)``.
    """

    def __init__(self, call: TracedCall):
        self.facts = _Sources()
        self.paths, self._ranks = _paths_and_ranks(call)
        self.of_inputs: list[Source] = [
            frozenset({i} if path else ()) for i, path in enumerate(self.paths)
        ]
        # The parameters that a value has met in products, and those of each place.
        self._met: defaultdict[Any, set[Source]] = defaultdict(set)
        self._at: defaultdict[Any, set[Source]] = defaultdict(set)

    def with_eqns_inside(
        self, program: Any, change: Callable[..., Iterable[JaxprEqn]]
    ) -> Any:
        """Replace equations. ``change(eqn, place)`` may `note` products."""
        return with_eqns_inside(program, change, self.facts, self.of_inputs)

    def note(self, eqn: JaxprEqn, place: Place) -> Named:
        """Remember a product, in the order of the program."""
        sources = tuple(map(place.fact_of, eqn.invars[:2]))
        product = Named(place.where(eqn), sources, self)
        if parameters := self._parameters(sources):
            source = frozenset().union(*parameters)
            self._at[product.where[:2]].add(source)
            for x in {*sources}.difference(parameters):
                self._met[x].add(source)
        return product

    def of(self, product: Named) -> list[str]:
        """Return the paths of the parameters of a product."""
        found = {*self._parameters(product.sources)}
        if not found and product.where.is_backward:
            # The gradient of a parameter is a product of two values that have met it.
            # What only one has met is another one, unless it stands in the same place.
            met = [self._met[x] for x in product.sources if x in self._met]
            found = set.intersection(*met) if met else found
            if len(met) < 2 or len(found) > 1:
                found &= self._at[product.where[:2]]
        return sorted({self.paths[i] for x in found for i in x})

    def _parameters(self, sources: Iterable[Source]) -> list[Source]:
        found = [x for x in sources if x and not _is_computed(x) and x not in self._met]
        ranks = [(min(self._ranks[i] for i in x), len(x)) for x in found]
        return [x for x, rank in zip(found, ranks, strict=True) if rank == min(ranks)]


def _paths_and_ranks(call: TracedCall) -> tuple[list[str], list[Any]]:
    """Return the path of each input in its argument, and which comes first.

    If the argument is an array or a list, the path begins with the argument's name.
    """
    known: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # of a function in C
        known += inspect.signature(call.fun).parameters

    def named(path: Any) -> tuple[str, Any]:
        if not path:
            return "", None
        kind, argument, *keys = path
        if kind.idx:
            name, i = argument.key, [*known, argument.key].index(argument.key)
        else:
            i = argument.idx
            name = known[i] if i < len(known) else f"argument {i}"
        keys = nnx_objects.without_own(keys)
        text = jax.tree_util.keystr(tuple(keys), simple=True, separator="/")
        if not keys or text.split("/")[0].isdigit():
            text = f"{name}/{text}".removesuffix("/")
        return text, (not keys, i)

    pairs = [*map(named, call.paths)]
    return [text for text, _ in pairs], [rank for _, rank in pairs]


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
