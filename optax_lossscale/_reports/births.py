"""Run a program part by part, and follow NaN and inf to where they are born.

Each value has the origins of its NaN and inf. If a result is not finite, the operation
runs once more on operands in which a number takes the place of NaN and inf. If the
result is still not finite, it is a birth. Otherwise, the origins are those of the
operands. The same holds for a segment of several operations, and for a loop. They run
operation by operation only if there is a birth inside, or if inf becomes NaN.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import JaxprEqn, Var

from .._jax_internals import inputs_of_scan, rewriting
from .._programs.names import Named, Names
from .._programs.places import Place, Where, with_eqns_inside
from .._programs.primitives import CALLS, CUSTOM, PRODUCTS
from .._programs.rewrite import (
    Program,
    empty_call,
    equations,
    jaxpr_of,
    program_of,
    programs_in,
)
from .._programs.traced_call import TracedCall
from .noting import noting
from .segments import SEGMENT, compiled, compiled_once, is_plain, segments
from .values import described, explained, kind_of, number

# The checks of this package: what is not finite there skips a step.
_CHECKS = {"_all_finite", "_outcome_finite"}
# Takes the place of NaN and inf. Fewer derivatives are infinite here than at 0 or 1.
_NUMBER = 0.5


class Birth(NamedTuple):
    """A row of a `NonfiniteReport`."""

    operation: str
    line: str
    scope: str
    is_backward: bool
    parameter: str
    iteration: str
    values: str
    note: str
    becomes_nan: str = ""


# An operation and its place.
Cause = tuple[str, Where]
# The causes of the NaN and inf in a value, and where inf became NaN, if it did.
Origins = frozenset[tuple[Cause, Cause | None]]


class _Value(NamedTuple):
    array: Any
    kind: int = 0
    origins: Origins = frozenset()


class Births:
    """Where the NaN and inf in the results of a call are born."""

    def __init__(self, call: TracedCall) -> None:
        self.rows: dict[tuple[Cause, bool], Birth] = {}  # of births, and of inf to NaN
        self._call, self._named = call, dict[Any, Named]()
        names = Names(call)

        def name(eqn: JaxprEqn, place: Place) -> Iterator[JaxprEqn]:
            if eqn.primitive.name in PRODUCTS:
                self._named[(*place.around, eqn)] = names.note(eqn, place)
            yield eqn

        with rewriting():
            with_eqns_inside(call.jaxpr, name, names)
        empty = functools.cache(empty_call)

        @functools.cache
        def program(eqn: JaxprEqn) -> Any:
            return program_of(eqn, empty(len(eqn.invars), len(eqn.outvars)))

        @functools.cache
        def run(eqn: JaxprEqn) -> Any:
            if eqn.params.get("name") == SEGMENT:
                return compiled_once(eqn.params["jaxpr"])
            if is_plain(eqn):
                return compiled_once(program(eqn))
            if eqn.primitive.name in ("scan", "while"):
                return compiled(program(eqn))
            return functools.partial(eval_jaxpr, jaxpr_of(program(eqn)), [])

        self._program, self._run_alone = program, run
        self._compiled = functools.cache(compiled)
        self._segments = functools.cache(lambda jaxpr: segments(jaxpr, empty))
        self._has_check = functools.cache(_has_check)
        self.found = self.origins(frozenset())

    def origins(self, replaced: frozenset[Cause]) -> Origins:
        """Run the program, with a number in the place of what some causes make."""
        self._replaced, self._checked = replaced, Origins()
        self._iterations: dict[Any, list[Origins]] = {}
        inputs = [
            self._given(x, "argument" if path else "constant", _argument(path))
            for x, path in zip(self._call.inputs, self._call.paths, strict=True)
        ]
        return _origins(self._run(self._call.jaxpr, inputs, Place())) or self._checked

    def _given(self, x: Any, operation: str, line: str) -> _Value:
        """Return a value that no operation has made."""
        if not (kind := kind_of(x)):
            return _Value(x)
        if operation == "constant" and not x.shape:
            operation = f"constant {number(x)}"
        cause = operation, Where(line, "", False)
        row = Birth(operation, *cause[1], "", "", described(x), "")
        self.rows.setdefault((cause, False), row)
        if cause in self._replaced:  # a mask stays a mask
            return _Value(jnp.nan_to_num(x, nan=_NUMBER, posinf=1e4, neginf=-1e4))
        return _Value(x, kind, frozenset({(cause, None)}))

    def _run(
        self, program: Program, inputs: Iterable[_Value], place: Place
    ) -> list[_Value]:
        jaxpr: Any = jaxpr_of(program)
        consts = getattr(program, "consts", ())
        arrays = [self._given(x, "constant", place.line) for x in consts]
        known = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*arrays, *inputs], strict=True)
        )
        eqns = self._segments(jaxpr)
        used = [{x for x in eqn.invars if isinstance(x, Var)} for eqn in eqns]
        last = {x: i for i, variables in enumerate(used) for x in variables}
        last |= {x: len(used) for x in jaxpr.outvars if isinstance(x, Var)}

        def read(x: Any, eqn: JaxprEqn | None = None) -> _Value:
            if isinstance(x, Var):
                return known[x]
            array = np.asarray(x.val, x.aval.dtype)
            line = place.where(eqn).line if eqn and kind_of(array) else place.line
            return self._given(array, "constant", line)

        for i, eqn in enumerate(eqns):
            values = [read(x, eqn) for x in eqn.invars]
            results = self._equation(eqn, values, place)
            known.update(zip(eqn.outvars, results, strict=True))
            for x in {*used[i], *eqn.outvars}:
                if last.get(x, i) == i:
                    del known[x]  # its memory is free
        return [*map(read, jaxpr.outvars)]

    def _equation(
        self, eqn: JaxprEqn, values: list[_Value], place: Place
    ) -> Sequence[_Value]:
        name, params, programs = eqn.primitive.name, eqn.params, programs_in(eqn.params)
        inside = place.inside(eqn) if programs else place
        if params.get("name") in _CHECKS:
            self._checked |= _origins(values)
        if params.get("name") == SEGMENT:
            look_inside = functools.partial(self._run, programs[0], values, place)
            return self._operation(eqn, values, place, look_inside)
        if name in CALLS | CUSTOM | {"composite"}:
            return self._run(programs[0], values, inside)
        if name == "cond":
            index, *values = values
            return self._run(programs[int(index.array)], values, inside)
        if name not in ("scan", "while") or params.get("length") == 0:
            return self._operation(eqn, values, place)
        loop = self._scan if name == "scan" else self._while
        look_inside = functools.partial(loop, params, values, inside)
        if any(map(self._has_check, programs)):
            return look_inside()  # a skipped step has finite results
        return self._operation(eqn, values, place, look_inside)

    def _operation(
        self,
        eqn: JaxprEqn,
        values: list[_Value],
        place: Place,
        look_inside: Callable[[], Sequence[_Value]] | None = None,
    ) -> Sequence[_Value]:
        given, run = [x.array for x in values], self._run_alone(eqn)
        results = run(*given)
        if not any(kinds := [*map(kind_of, results)]):
            return [*map(_Value, results)]
        known, origins = max([x.kind for x in values], default=0), _origins(values)
        finite, alone = given, results
        if known:
            finite = [_finite(x.array) if x.kind else x.array for x in values]
            alone = run(*finite)
        is_born = any(map(kind_of, alone))
        if is_born or max(kinds) > known:
            if look_inside:
                return look_inside()
            name, where, texts = eqn.primitive.name, place.where(eqn), None
            if is_born and name == "shard_map":
                first = _first_inside(self._program(eqn), finite)
                name, where, *texts = first or (name, where)
            cause = name, where
            if (cause, not is_born) not in self.rows:
                shown = (finite, alone) if is_born else (given, results)
                product = self._named.get((*place.around, eqn))
                parameter = product.parameter if product else ""
                texts = texts or explained(eqn, *shown)
                row = Birth(name, *where, parameter, place.iteration, *texts)
                self.rows[cause, not is_born] = row
            if not is_born:
                origins = frozenset((x, y or cause) for x, y in origins)
            elif cause in self._replaced:
                results = [*map(_finite, results, alone)]
            else:
                origins |= {(cause, None)}
        return [_value(x, origins) for x in results]

    def _scan(self, params: Any, values: list[_Value], place: Place) -> list[_Value]:
        consts, carry, xs = inputs_of_scan(params, values)
        order = range(params["length"])
        rows: dict[int, list[_Value]] = {}
        for i in reversed(order) if params["reverse"] else order:
            inputs = [*consts, *carry, *(_value(x.array[i], x.origins) for x in xs)]
            results = self._iteration(params["jaxpr"], inputs, place, i)
            carry, rows[i] = results[: len(carry)], results[len(carry) :]
        columns = zip(*(rows[i] for i in order), strict=True)
        stacked = ((jnp.stack([x.array for x in xs]), _origins(xs)) for xs in columns)
        return [*carry, *(_value(*x) for x in stacked)]

    def _while(self, params: Any, values: list[_Value], place: Place) -> list[_Value]:
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        carry, i = values[last:], 0
        goes_on = self._compiled(params["cond_jaxpr"])
        while goes_on(*(x.array for x in [*values[:first], *carry]))[0]:
            inputs = [*values[first:last], *carry]
            carry, i = self._iteration(params["body_jaxpr"], inputs, place, i), i + 1
        return carry

    def _iteration(
        self, body: Any, values: list[_Value], place: Place, i: int
    ) -> list[_Value]:
        arrays = self._compiled(body)(*(x.array for x in values))
        kinds = tuple(map(kind_of, arrays))
        has_check = self._has_check(body)
        if not any(kinds) and not has_check:
            return [*map(_Value, arrays)]
        # Later iterations are like the first one with NaN and inf at the same places.
        key = body, tuple(x.origins for x in values), kinds
        if has_check or self._replaced or key not in self._iterations:
            iteration = ", ".join(filter(None, [place.iteration, str(i)]))
            results = self._run(body, values, place._replace(iteration=iteration))
            self._iterations[key] = [x.origins for x in results]
            return results
        return [*map(_Value, arrays, kinds, self._iterations[key])]


def _first_inside(program: Program, arrays: Sequence[Any]) -> Any:
    """Return the first operation of a ``shard_map`` whose results are not finite.

    The host cannot run its parts one by one.
    """
    seen: list[tuple[JaxprEqn, Where, list[list[float]]]] = []

    def change(eqn: JaxprEqn, place: Place) -> Iterator[JaxprEqn]:
        yield eqn
        if not programs_in(eqn.params):
            seen.append((eqn, place.where(eqn), []))
            yield noting(eqn.outvars, seen[-1][2])

    with rewriting():
        changed = with_eqns_inside(program, change)
    jax.block_until_ready(compiled(changed)(*arrays))
    jax.effects_barrier()
    for eqn, where, numbers in seen:
        if not np.all(np.isfinite(numbers)):
            name = eqn.primitive.name
            return name, where, f"{name}(...) = {np.max(numbers)}", "in a `shard_map`"
    return None


def _has_check(program: Program) -> bool:
    return any(x.params.get("name") in _CHECKS for x in equations(program))


def _argument(path: Any) -> str:
    if not path:
        return "an array that the function closes over"
    name = getattr(path[1], "idx", getattr(path[1], "key", ""))
    return f"{name}, {jax.tree_util.keystr(path[2:])}".removesuffix(", ")


def _origins(values: Iterable[_Value]) -> Origins:
    return frozenset().union(*(x.origins for x in values))


def _value(x: Any, origins: Origins) -> _Value:
    return _Value(x, kind, origins) if origins and (kind := kind_of(x)) else _Value(x)


def _finite(x: Any, like: Any = None) -> Any:
    """Put a number in the place of NaN and inf, or where ``like`` is not finite."""
    like = x if like is None else like
    return _where_finite(like, x) if kind_of(like) else x


@jax.jit
def _where_finite(like: Any, x: Any) -> Any:
    return jnp.where(jnp.isfinite(like), x, _NUMBER)
