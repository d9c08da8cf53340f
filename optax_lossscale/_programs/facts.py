"""Follow facts about the inputs of a program to all its variables.

Where does a value come from: is it differentiated, and is it a parameter? A walk goes
through calls, branches and loops, and asks a subclass of `Facts` about the operations.
"""

import abc
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import JaxprEqn

from .._jax_internals import inputs_of_scan
from .primitives import ONE_PROGRAM
from .rewrite import Program, jaxpr_of, programs_in, walked

Fact = TypeVar("Fact")


class Facts(abc.ABC, Generic[Fact]):
    """What a walk asks. Facts are hashable, and repeated joins come to an end."""

    constant: Fact
    """The fact about a constant."""
    entered = ONE_PROGRAM | {"scan", "while", "cond"}
    """The operations whose programs are walked through."""
    inputs: Sequence[Fact] = ()
    """The facts about the inputs of a program, if they are known from the start."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, Any]]
        self._known = weakref.WeakKeyDictionary()

    @abc.abstractmethod
    def of_operation(self, eqn: JaxprEqn, known: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts about the results of an operation that is not entered."""

    @abc.abstractmethod
    def joined(self, one: Fact, other: Fact) -> Fact:
        """Return the fact about a value that is one of two."""

    def of_loop(self, fact: Fact) -> Fact:
        """Return the fact about a value that a loop hands on."""
        return fact

    def of_variables(
        self, program: Program, inputs: Sequence[Fact]
    ) -> Callable[[Any], Fact]:
        """Return a function that takes a variable and returns the fact about it."""
        results = self._known.setdefault(program, {})
        if (key := tuple(inputs)) not in results:
            results[key] = walked(program, key, self._of_results, self.constant)
        return results[key]

    def inside(
        self, eqn: JaxprEqn, program: Program, known: Sequence[Fact]
    ) -> tuple[Fact, ...]:
        """Return the facts about the inputs of a program inside an equation."""
        params = eqn.params
        match eqn.primitive.name:
            case "scan":
                return self._in_any_iteration(program, *inputs_of_scan(params, known))
            case "while":
                first = params["cond_nconsts"]
                last = first + params["body_nconsts"]
                body, consts = params["body_jaxpr"], known[first:last]
                inputs = self._in_any_iteration(body, consts, known[last:], ())
                is_body = program is body
                return inputs if is_body else (*known[:first], *inputs[len(consts) :])
            case "cond":
                return tuple(known[1:])
        return tuple(known)

    def _in_any_iteration(
        self,
        body: Program,
        consts: Sequence[Fact],
        carry: Sequence[Fact],
        xs: Sequence[Fact],
    ) -> tuple[Fact, ...]:
        carry = [*map(self.of_loop, carry)]
        inputs = (*consts, *carry, *xs)
        pairs = zip(carry, self._of_outputs(body, inputs), strict=False)
        new = [self.of_loop(self.joined(x, y)) for x, y in pairs]
        return inputs if new == carry else self._in_any_iteration(body, consts, new, xs)

    def _of_results(self, eqn: JaxprEqn, known: Sequence[Fact]) -> Sequence[Fact]:
        name = eqn.primitive.name
        if name not in self.entered:
            return self.of_operation(eqn, known)
        if name == "while":  # its results are its carry
            inputs = self.inside(eqn, eqn.params["body_jaxpr"], known)
            return inputs[eqn.params["body_nconsts"] :]
        ways = [
            self._of_outputs(program, self.inside(eqn, program, known))
            for program in programs_in(eqn.params)
        ]
        results = [functools.reduce(self.joined, xs) for xs in zip(*ways, strict=True)]
        return [*map(self.of_loop, results)] if name == "scan" else results

    def _of_outputs(self, program: Program, inputs: Sequence[Fact]) -> list[Fact]:
        fact_of = self.of_variables(program, inputs)
        return [*map(fact_of, jaxpr_of(program).outvars)]
