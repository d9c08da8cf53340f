"""Run a program operation by operation, and follow NaN and inf to where they are born.

Each value carries the origins of its NaN and inf. A result that is not finite although
the operands are is a birth. If the operands are not finite either, the operation runs
once more on operands in which a number takes the place of NaN and inf.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from .._dtypes import is_inexact
from .._finite import all_finite, max_magnitude
from .._jax_internals import inputs_of_scan, rewriting
from .._programs.places import Place, Where, with_eqns_inside
from .._programs.primitives import CALLS, CUSTOM, RESHAPES
from .._programs.rewrite import (
    Program,
    empty_call,
    eqn_of,
    equations,
    jaxpr_of,
    program_of,
    programs_in,
)
from .._programs.traced_call import TracedCall
from .values import described, explained, number

# As on a GPU, float16 is rounded.
_OPTIONS = dict(
    xla_backend_optimization_level=0,
    xla_llvm_disable_expensive_passes=True,
    xla_allow_excess_precision=False,
)
# The checks of this package: what is not finite there skips a step.
_CHECKS = {"_all_finite", "_outcome_finite"}
# Takes the place of NaN and inf. More derivatives are infinite at 0 or 1 than here.
_NUMBER = 0.5
_INF, _NAN = 1, 2  # the kinds of values that are not finite


class Birth(NamedTuple):
    """A row of a `NonfiniteReport`."""

    operation: str
    line: str
    scope: str
    is_backward: bool
    iteration: str
    values: str
    note: str
    becomes_nan: str = ""


# What makes NaN or inf: an operation and its place.
Cause = tuple[str, Where]
# The causes of the NaN and inf in a value, and where inf became NaN, if it did.
Origins = frozenset[tuple[Cause, Cause | None]]


class _Value(NamedTuple):
    array: Any
    kind: int = 0
    origins: Origins = frozenset()


class Tools(NamedTuple):
    """What all runs of a program share."""

    program_of: Callable[[JaxprEqn], Any]
    compiled: Callable[[Any], Any]


def tools() -> Tools:
    empty = functools.cache(empty_call)

    @functools.cache
    def of_eqn(eqn: JaxprEqn) -> Any:
        return program_of(eqn, empty(len(eqn.invars), len(eqn.outvars)))

    @functools.cache
    def compiled(program: Any) -> Any:
        return jax.jit(jaxpr_as_fun(program), compiler_options=_OPTIONS)

    return Tools(of_eqn, compiled)


class Search:
    """A run of a program, in which what some causes make is replaced by a number."""

    def __init__(
        self, call: TracedCall, tools: Tools, replaced: frozenset[Cause] = frozenset()
    ):
        self.rows: dict[tuple[Cause, bool], Birth] = {}
        self._program, self._compiled = tools
        self._replaced, self._seen = replaced, dict[Any, Any]()
        self._checked: Origins = frozenset()
        inputs = [
            self._given(x, "argument", _argument(path))
            if path
            else self._given(x, "constant", "an array that the function closes over")
            for x, path in zip(call.inputs, call.paths, strict=True)
        ]
        results = self._run(call.jaxpr, inputs, Place(), "")
        self.found = _origins(results) or self._checked

    def _given(self, x: Any, operation: str, line: str) -> _Value:
        """Return a value that no operation has made."""
        if not (kind := _kind(x)):
            return _Value(x)
        if operation == "constant" and not x.shape:
            operation = f"constant {number(x)}"
        cause = operation, Where(line, "", False)
        self.rows.setdefault(
            (cause, False), Birth(operation, *cause[1], "", described(x), "")
        )
        if cause in self._replaced:  # a mask stays a mask
            return _Value(jnp.nan_to_num(x, nan=_NUMBER, posinf=1e4, neginf=-1e4))
        return _Value(x, kind, frozenset({(cause, None)}))

    def _run(
        self, program: Program, inputs: Iterable[_Value], place: Place, iteration: str
    ) -> list[_Value]:
        jaxpr = jaxpr_of(program)
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        for x, array in zip(
            jaxpr.constvars, getattr(program, "consts", ()), strict=True
        ):
            known[x] = self._given(array, "constant", place.line)
        uses = [[x for x in eqn.invars if isinstance(x, Var)] for eqn in jaxpr.eqns]
        last = {x: i for i, used in enumerate(uses) for x in used}
        last |= {x: len(uses) for x in jaxpr.outvars if isinstance(x, Var)}

        def read(x: Any, line: str = place.line) -> _Value:
            if isinstance(x, Var):
                return known[x]
            return self._given(jnp.asarray(x.val, x.aval.dtype), "constant", line)

        for i, eqn in enumerate(jaxpr.eqns):
            line = place.where(eqn).line
            values = [read(x, line) for x in eqn.invars]
            results = self._equation(eqn, values, place, iteration)
            known.update(zip(eqn.outvars, results, strict=True))
            for x in {*uses[i], *eqn.outvars}:
                if last.get(x, i) == i:
                    del known[x]  # its memory is free
        return [*map(read, jaxpr.outvars)]

    def _equation(
        self, eqn: JaxprEqn, values: list[_Value], place: Place, iteration: str
    ) -> Sequence[_Value]:
        name, params = eqn.primitive.name, eqn.params
        programs = programs_in(params)
        inside = place.inside(eqn) if programs else place
        if params.get("name") in _CHECKS:
            self._checked |= _origins(values)
        if name in CALLS | CUSTOM | {"composite"}:
            return self._run(programs[0], values, inside, iteration)
        if name == "cond":
            index, *values = values
            return self._run(programs[int(index.array)], values, inside, iteration)
        results = self._operation(eqn, values, place, iteration)
        # A loop runs as a whole first. A skipped step inside has finite results.
        is_bad = any(x.kind for x in results) or any(map(_has_check, programs))
        if name in ("scan", "while") and is_bad and params.get("length") != 0:
            loop = self._scan if name == "scan" else self._while
            return loop(params, values, inside, iteration)
        return results

    def _operation(
        self, eqn: JaxprEqn, values: list[_Value], place: Place, iteration: str
    ) -> Sequence[_Value]:
        given, known = (
            [x.array for x in values],
            max([x.kind for x in values], default=0),
        )
        alone = results = self._evaluate(eqn, given)
        if not any(kinds := [*map(_kind, results)]):
            return [*map(_Value, results)]
        finite = given
        if known:
            finite = [*map(_finite, given)]
            alone = self._evaluate(eqn, finite) if _may_make(eqn, known) else []
        origins = _origins(values)
        is_born = any(map(_kind, alone))
        if is_born or max(kinds) > known:
            name, where, texts = eqn.primitive.name, place.where(eqn), None
            if is_born and name == "shard_map":
                name, where, texts = _first_inside(self._program(eqn), finite) or (
                    name,
                    where,
                    None,
                )
            cause = name, where
            if (cause, not is_born) not in self.rows:
                shown = (finite, alone) if is_born else (given, results)
                texts = texts or explained(eqn, *shown, _kind)
                row = Birth(name, *where, iteration, *texts)
                self.rows[cause, not is_born] = row
            if not is_born:
                origins = frozenset((x, y or cause) for x, y in origins)
            elif cause in self._replaced:
                results = [*map(_finite, results, alone)]
            else:
                origins |= {(cause, None)}
        return [_value(x, origins) for x in results]

    def _evaluate(self, eqn: JaxprEqn, arrays: Sequence[Any]) -> Sequence[Any]:
        program = self._program(eqn)
        if eqn.primitive.name in ("scan", "while"):
            return self._compiled(program)(*arrays)
        return eval_jaxpr(jaxpr_of(program), [], *arrays)

    def _scan(
        self, params: Any, values: list[_Value], place: Place, iteration: str
    ) -> Sequence[_Value]:
        consts, carry, xs = inputs_of_scan(params, values)
        order = range(params["length"])
        rows: dict[int, list[_Value]] = {}
        for i in reversed(order) if params["reverse"] else order:
            row = [_value(x.array[i], x.origins) for x in xs]
            inputs = [*consts, *carry, *row]
            results = self._iteration(params["jaxpr"], inputs, place, iteration, i)
            carry, rows[i] = [*results[: len(carry)]], [*results[len(carry) :]]
        columns = zip(*(rows[i] for i in order), strict=True)
        stacked = ((jnp.stack([x.array for x in xs]), _origins(xs)) for xs in columns)
        return [*carry, *(_value(*x) for x in stacked)]

    def _while(
        self, params: Any, values: list[_Value], place: Place, iteration: str
    ) -> Sequence[_Value]:
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        carry, i = values[last:], 0
        goes_on = self._compiled(params["cond_jaxpr"])
        while goes_on(*(x.array for x in [*values[:first], *carry]))[0]:
            inputs = [*values[first:last], *carry]
            carry = [
                *self._iteration(params["body_jaxpr"], inputs, place, iteration, i)
            ]
            i += 1
        return carry

    def _iteration(
        self, body: Any, values: list[_Value], place: Place, iteration: str, i: int
    ) -> Sequence[_Value]:
        arrays = self._compiled(body)(*(x.array for x in values))
        kinds = tuple(map(_kind, arrays))
        has_check = _has_check(body)
        if not any(kinds) and not has_check:
            return [*map(_Value, arrays)]
        # Later iterations are like the first one with NaN and inf at the same places.
        key = body, tuple(x.origins for x in values), kinds
        if self._replaced or has_check or key not in self._seen:
            text = ", ".join([*filter(None, [iteration]), str(i)])
            self._seen[key] = results = self._run(body, values, place, text)
            self._seen[key] = [x.origins for x in results]
            return results
        return [*map(_Value, arrays, kinds, self._seen[key])]


def _origins(values: Iterable[_Value]) -> Origins:
    return frozenset().union(*(x.origins for x in values))


def _value(x: Any, origins: Origins) -> _Value:
    return _Value(x, kind, origins) if origins and (kind := _kind(x)) else _Value(x)


def _has_check(program: Any) -> bool:
    return any(x.params.get("name") in _CHECKS for x in equations(program))


def _kind(x: Any) -> int:
    """Return whether an array holds NaN, or else inf."""
    if not is_inexact(x):
        return 0
    # NumPy reads the memory of a CPU. Elsewhere, a whole array is copied only if bad.
    is_near = all(device.platform == "cpu" for device in x.devices())
    if not is_near and all_finite(x) or np.all(np.isfinite(host := np.asarray(x))):
        return 0
    return _NAN if np.any(np.isnan(host)) else _INF


def _finite(x: Any, like: Any = None) -> Any:
    """Put a number in the place of NaN and inf, or where ``like`` is not finite."""
    if not _kind(like := x if like is None else like):
        return x
    return jnp.where(jnp.isfinite(like), x, jnp.asarray(_NUMBER, x.dtype))


def _argument(path: Any) -> str:
    number = getattr(path[1], "idx", getattr(path[1], "key", ""))
    return f"{number}, {jax.tree_util.keystr(path[2:])}".removesuffix(", ")


# They make no NaN and no inf themselves.
_PASS_ON = RESHAPES | frozenset(
    ["abs", "copy", "max", "min", "neg", "reduce_max", "reduce_min", "select_n"]
)
_POLES = frozenset(["div", "integer_pow", "log", "log1p", "pow", "rsqrt", "sqrt"])
_READS = frozenset(["gather", "dynamic_slice"])


def _may_make(eqn: JaxprEqn, known: int) -> bool:
    """Return whether an operation may make NaN or inf beside that of its operands.

    Where an operand holds NaN, which is never meant, overflows of float32 do not count.
    """
    name = eqn.primitive.name
    is_narrow = any(getattr(x.aval, "dtype", None) == jnp.float16 for x in eqn.outvars)
    return name not in _PASS_ON and (
        known == _INF or is_narrow or name in _READS | _POLES
    )


def _first_inside(program: Program, arrays: Sequence[Any]) -> Any:
    """Return the first operation of a ``shard_map`` whose results are not finite.

    The host cannot run its parts one by one, so each of them reports.
    """
    sites: list[tuple[str, Where]] = []
    found: dict[int, float] = {}

    def change(eqn: JaxprEqn, place: Place) -> Iterator[JaxprEqn]:
        yield eqn
        results = [x for x in eqn.outvars if is_inexact(x.aval)]
        if results and not programs_in(eqn.params):
            i = len(sites)
            sites.append((eqn.primitive.name, place.where(eqn)))

            def note(*largest: Any) -> None:
                if bad := [float(x) for x in largest if not np.isfinite(x)]:
                    found[i] = bad[0]

            def measure(*arrays: Any) -> None:
                jax.debug.callback(note, *map(max_magnitude, arrays))

            yield eqn_of(measure, results)

    with rewriting():
        program = with_eqns_inside(program, change)
    jax.block_until_ready(jax.jit(jaxpr_as_fun(program))(*arrays))
    jax.effects_barrier()
    if not found:
        return None
    name, where = sites[first := min(found)]
    return name, where, (f"{name}(...) = {found[first]}", "inside of a `shard_map`")
