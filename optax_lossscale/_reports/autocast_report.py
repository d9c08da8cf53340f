"""Report the matmuls of a function: where, how large, and whether they are cast."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._dtypes import limits_of
from .._jax_internals import rewriting
from .._programs.names import FEW, in_common, shared_names
from .._programs.places import BACKWARD, Place, with_eqns_inside
from .._programs.traced_call import traced_call
from .._validation import check_concrete, check_function, check_switch
from .errors import Group, errors_of_groups
from .noting import noting
from .rows import Report
from .segments import compiled
from .sites import Site, Sites

_FLOAT16 = limits_of("float16")


class Product(NamedTuple):
    """A row of an `AutocastReport`."""

    line: str
    scope: str
    parameter: str
    operands: str
    times: int
    left: str
    largest: tuple[float, float, float]
    float16_error: float | None = None
    bfloat16_error: float | None = None

    @property
    def fits(self) -> bool:
        """Whether no value overflows or is NaN, and no operand rounds to zero whole."""
        return not self._state

    @property
    def name(self) -> str:
        """The name of the row for ``keep``: its parameter, scope or line."""
        return self.parameter or self.scope or self.line.removesuffix(BACKWARD)

    @property
    def _state(self) -> str:
        states = {
            "OVERFLOWS": any(x >= _FLOAT16.overflow for x in self.largest),
            "UNDERFLOWS": any(0 < x <= _FLOAT16.zero for x in self.largest[:2]),
            "NAN": any(map(math.isnan, self.largest)),
        }
        return ", ".join(name for name, is_so in states.items() if is_so)

    def _cells(self) -> list[str]:
        cast = f"no: {self.left}" if self.left else self._state or "yes"
        numbers = [f"{x:.3g}" for x in self.largest]
        errors = self.float16_error, self.bfloat16_error
        percent = ["" if x is None else f"{x:.2%}" for x in errors]
        name = self.parameter or self.scope
        place = [self.line, name, self.operands, f"{self.times:,}"]
        return [*place, cast, *percent, *numbers]

    def _rank(self) -> tuple[float, bool]:
        error = max(self.float16_error or 0.0, self.bfloat16_error or 0.0)
        return -error, bool(self.left) or self.fits


class AutocastReport(Report[Product]):
    """The result of `autocast_report`: a row for each matmul and convolution.

    An interactive session shows a table, also of a slice, such as ``report[:5]``. Equal
    matmuls of a line, such as those of equal layers, share a row. Of those that float16
    cannot hold, up to 3 have their own, or else the first of them. Matmuls that
    `autocast` casts, but whose values float16 cannot hold, come first. The others
    follow in the order of the program. With ``errors=True``, rows with larger errors
    come first. Each row has

    - ``line``: the innermost line outside of installed packages, or else outside of
      JAX, with its function, and "backward" if the row is its backward pass;
    - ``scope``: the path of the module or of ``jax.named_scope``, such as
      "decoder/layers_3/mlp", or an empty string;
    - ``parameter``: the path of the parameter that is an operand, such as
      "blocks/3/mlp/kernel", in the argument that holds it, or an empty string. It is
      found through casts, moves and elementwise operations. Of two arguments, it is the
      one in a tree, or else the first one;
    - ``name``: the parameter, or else the scope, or else the line, for the argument
      ``keep`` of `autocast`. In the name of a shared row, a star stands for a number in
      a list, ``"blocks/*"``, or at the end of a name that more than 3 neighbors have,
      ``"block_*"``. So ``wi_0`` and ``wi_1`` have two rows;
    - ``operands``: the dtypes and shapes of both operands;
    - ``times``: how often it was computed, on all devices together;
    - ``left``: why it is not in float16, or an empty string if it is;
    - ``largest``: the largest absolute values of both operands and of the result;
    - ``fits``: whether float16 can hold these values;
    - ``float16_error``, ``bfloat16_error``: with ``errors=True``, how much the results
      change if only the matmuls of this line and parameter (or else scope) are in this
      dtype: the Euclidean norm of the change, relative to the norm of the results. None
      if ``left`` has a reason.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> report = ls.autocast_report(jnp.matmul, jnp.ones((2, 8)), jnp.ones((8, 2)))
        >>> len(report), report[0].operands
        (1, 'float32[2, 8], float32[8, 2]')
    """

    def __repr__(self) -> str:
        narrow = [x for x in self if not x.left]
        head = f"{len(self)} matmuls and convolutions, {len(narrow)} in float16"
        if bad := sum(not x.fits for x in narrow):
            head += f", {bad} beyond its range"
        is_measured = any(x.float16_error is not None for x in self)
        errors = ["float16 error", "bfloat16 error"] if is_measured else ["", ""]
        titles = ["", "", "operands", "times", "float16", *errors, "largest operands"]
        table = [[*titles, "", "result"], *(row._cells() for row in self)]
        columns = [x for x in zip(*table, strict=True) if any(x)]
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([head, *lines])


def autocast_report(
    fun: Callable[..., Any], /, *args: Any, errors: bool = False, **kwargs: Any
) -> AutocastReport:
    """Report which matmuls of a call `autocast` casts, and which overflow in float16.

    It runs the function once and measures the operands and the result of each matmul
    and convolution. For those that stay in float32, the report shows the reason.

    Pass the function that you pass to `autocast`, to measure it in float32. Or pass the
    gradient function of your step, ``ls.grad(ls.autocast(loss_fn, jnp.float16),
    opt_state)``, to include the backward pass. This function computes in float16, so
    values that overflow are inf, and later values may be NaN.

    A matmul whose values fit may still cost accuracy, because float16 and bfloat16
    round. With ``errors=True``, the report measures this for each parameter in a line,
    or else each scope. Pass the gradient function of the float32 program,
    ``ls.grad(loss_fn, opt_state)``, because gradients change more than the loss. Both
    passes are rounded together, because ``keep`` also applies to both. Equal layers are
    rounded together, but up to 3 that make half of a large error have their own rows.
    Compare the errors only with each other: near a minimum of the loss, the gradients
    are small, so all errors are large.

    With ``errors=True``, operands and results are rounded, and sums are in float32, as
    on an accelerator. The program is compiled once more, and runs twice for each row of
    the forward pass, and twice for each of equal layers whose error is large.
    A ``while`` loop that waits for convergence may never end in float16. In a
    ``shard_map``, all axes of the mesh must be manual. Integer results are not
    compared.

    Args:
        fun: a function.
        args: its arguments, which must be concrete. Flax NNX modules are not changed.
        errors: whether to measure how much each row changes the results in float16 and
            in bfloat16. It is not passed on to ``fun``.
        kwargs: its other keyword arguments.

    Returns:
        An `AutocastReport`, which an interactive session shows as a table.

    Raises:
        TypeError: if ``fun`` is not a function; with ``errors=True``, if it has effects
            other than ``jax.debug.print`` and the like.
        ValueError: if an argument, or an array that ``fun`` closes over, is being
            traced. With ``errors=True``, if ``fun`` has no float32 matmuls that
            `autocast` casts, or returns no finite number other than 0.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> [row] = ls.autocast_report(lambda w: 1e4 * w @ w, jnp.ones((8, 8)))
        >>> row.times, row.left, row.largest, row.fits
        (1, '', (10000.0, 1.0, 80000.0), False)
        >>> w = jnp.full((8, 8), 1 + 2.0**-9)  # 1 in bfloat16
        >>> [row] = ls.autocast_report(jnp.matmul, jnp.ones((2, 8)), w, errors=True)
        >>> f"{row.float16_error:.2%}, {row.bfloat16_error:.2%}"
        '0.00%, 0.19%'
    """
    check_function("fun", fun, "Pass it as in `autocast_report(loss_fn, params)`.")
    check_concrete("args", (args, kwargs), "Call it outside of `jax.jit`.")
    check_switch("errors", errors, "It is not passed on to `fun`.")
    seen: _Seen = []
    # Loops are counted as loops, and NaN must not raise, since the report shows it. The
    # operations that measure a product in a `shard_map` would fail JAX's own checks.
    with jax.disable_jit(False), jax.debug_nans(False), jax.enable_checks(False):
        with traced_call(fun, args, kwargs) as call:
            check_concrete("fun", call.inputs, "Call it outside of `jax.jit`.")
            found = errors_of_groups(call) if errors else {}
            sites = Sites(call)

            def change(eqn: JaxprEqn, place: Place) -> Iterator[JaxprEqn]:
                yield eqn
                if site := sites.of(eqn, place):
                    numbers = list[list[float]]()
                    seen.append((eqn, site, numbers))
                    yield noting([*eqn.invars[:2], *eqn.outvars], numbers)

            with rewriting():
                program = with_eqns_inside(call.jaxpr, change, sites.names)
            # The program runs only once, and slower.
            run = compiled(ClosedJaxpr(program, []))
            jax.block_until_ready(run(*call.inputs))
        jax.effects_barrier()
    return AutocastReport(sorted(_rows(seen, found), key=Product._rank))


# The products of a program, and the largest values each time that one is computed.
_Seen = list[tuple[JaxprEqn, Site, list[list[float]]]]
_Errors = dict[Group, list[float]]


def _rows(seen: _Seen, errors: _Errors) -> Iterator[Product]:
    """Yield a row for each product, or for equal ones of a line."""
    # Without numbers, its branch was not taken.
    rows = [_row(*product, errors) for product in seen if product[2]]
    names = shared_names(name for x in rows for name in (x.scope, x.parameter))
    equal: dict[Any, list[Product]] = {}
    for row in rows:
        shared = names[row.scope], names[row.parameter]
        key = row._replace(scope="", parameter="", times=0, largest=(0, 0, 0))
        equal.setdefault((key, shared, row._state), []).append(row)
    for same in equal.values():
        # A few that float16 cannot hold are told apart, or else the first of many.
        apart = 0 if same[0].fits else len(same) if len(same) <= FEW else 1
        yield from same[:apart]
        if rest := same[apart:]:
            yield functools.reduce(_together, rest)


def _together(one: Product, other: Product) -> Product:
    a, b, c = np.maximum(one.largest, other.largest).tolist()
    return one._replace(
        scope=in_common(one.scope, other.scope),
        parameter=in_common(one.parameter, other.parameter),
        times=one.times + other.times,
        largest=(a, b, c),
    )


def _row(
    eqn: JaxprEqn, site: Site, numbers: list[list[float]], errors: _Errors
) -> Product:
    avals: list[Any] = [x.aval for x in eqn.invars[:2]]
    operands = ", ".join(f"{x.dtype.name}{[*x.shape]}" for x in avals)
    a, b, c = np.max(numbers, axis=0).tolist()
    return Product(
        site.named.where.text,
        site.named.where.scope,
        site.named.parameter,
        operands,
        len(numbers),
        site.left.reason if site.left else "",
        (a, b, c),
        *(() if site.left else errors.get(site.named.group, ())),
    )
