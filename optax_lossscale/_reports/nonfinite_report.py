"""Report where the NaN and inf in the results of a call are born."""

from collections.abc import Callable
from typing import Any

import jax

from .._programs.places import BACKWARD
from .._programs.traced_call import traced_call
from .._validation import check_concrete, check_function
from .births import Birth, Births, Cause, Origins
from .rows import Report

# How many causes at most are tried one by one.
_MOST_TRIED = 16
_MOST_SHOWN = 20
_NOTHING = """\
No NaN or inf. If a step with these arguments was skipped, its loss scale was higher, or
`value_and_grad` got another state than `update`, or `grads_finite` is inverted."""


class NonfiniteReport(Report[Birth]):
    """The result of `nonfinite_report`: a row for each operation that makes NaN or inf.

    An interactive session shows it. It is empty if all values are finite. Each row has

    - ``operation``: the name of JAX's operation; "argument" if the call was given NaN
      or inf; or "constant";
    - ``line``: the innermost line outside of installed packages, or else outside of
      JAX, with its function. Of an argument, its number or name, and its path;
    - ``scope``: the path of the module or of ``jax.named_scope``, or an empty string;
    - ``is_backward``: whether the operation is part of the backward pass;
    - ``parameter``: of a matmul, the path of the parameter that is an operand, such as
      "blocks/3/mlp/kernel", or an empty string;
    - ``iteration``: of the loops around it, the first one in which it makes NaN or inf,
      or an empty string;
    - ``values``: the operands and the result at the first such element, or the types
      and largest values of operands of which many elements are combined;
    - ``note``: "float32 holds it" if the result would be finite in float32, or another
      remark, or an empty string;
    - ``becomes_nan``: where inf first became NaN, or an empty string.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> report = ls.nonfinite_report(lambda x: jnp.log(x - 1), jnp.ones(3))
        >>> len(report), report[0].operation, report[0].values
        (1, 'log', 'log(0) = -inf at [0], 3 of 3')
    """

    def __repr__(self) -> str:
        if not self:
            return _NOTHING
        lines = [f"{len(self)} origin{'s' * (len(self) > 1)} of NaN and inf"]
        for row in self[:_MOST_SHOWN]:
            at = " " if row.operation == "argument" else " at "
            line = f"{row.operation}{at}{row.line}{BACKWARD * row.is_backward}"
            iteration = row.iteration and f"iteration {row.iteration}"
            lines.append(
                ", ".join(filter(None, [line, row.parameter or row.scope, iteration]))
            )
            lines.append(f"    {row.values}{row.note and ': ' + row.note}")
            if row.becomes_nan:
                lines.append(f"    inf becomes NaN: {row.becomes_nan}")
        if (more := len(self) - _MOST_SHOWN) > 0:
            lines.append(f"... and {more} more")
        return "\n".join(lines)


def nonfinite_report(
    fun: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> NonfiniteReport:
    """Report which operations make the NaN and inf in the results of a call.

    Pass a function, such as a loss, a gradient function, or a whole train step, and its
    arguments in a bad step::

        ls.nonfinite_report(train_step, params, opt_state, batch)

    A skipped step does not change the weights, so they have the same fault afterward.
    Only the loss scale may be lower: then the report shows no overflow that only the
    higher scale caused.

    The function runs in small parts, on the device that holds the arguments. A row is
    an operation that makes NaN or inf of finite numbers, if the results depend on it: a
    mask of -inf has no row, unless it does harm. If all results are finite, as those of
    a skipped step, the report shows what is not finite where this package checks for
    NaN and inf.

    A backward rule of a ``jax.custom_vjp`` has the line of its call. Inside of a
    ``shard_map``, the report names operations and lines only. A NaN that is a number in
    Python is a constant. It does not find what only the compiled program does.

    Args:
        fun: a function of pytrees.
        args: its arguments, which must be concrete, and in one process. Flax NNX
            modules are not changed.
        kwargs: its keyword arguments.

    Returns:
        A `NonfiniteReport`, which an interactive session shows.

    Raises:
        TypeError: if ``fun`` is not a function.
        ValueError: if an argument, or an array that ``fun`` closes over, is being
            traced, or is an array of several processes.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax_lossscale as ls
        >>> ls.nonfinite_report(jax.grad(jnp.linalg.norm), jnp.zeros(2))[0].values
        '0.5 / 0 = inf'
    """
    check_function("fun", fun, "Pass it as in `nonfinite_report(loss_fn, params)`.")
    check_concrete("args", (args, kwargs), "Call it outside of `jax.jit`.")
    with (
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.enable_checks(False),  # those of a `shard_map` that reports
        traced_call(fun, args, kwargs) as call,
    ):
        check_concrete("fun", call.inputs, "Call it outside of `jax.jit`.")
        if not all(getattr(x, "is_fully_addressable", True) for x in call.inputs):
            raise ValueError(
                "`args` must be arrays of this process, got arrays of several. Copy "
                "them first: `jax.experimental.multihost_utils.process_allgather`."
            )
        births = Births(call)
        causes = frozenset(cause for cause, _ in births.found)
        if 1 < len(causes) <= _MOST_TRIED:
            causes = _needed(causes, births.origins)
    order = [cause for cause, _ in births.rows]

    def rank(pair: tuple[Cause, Cause | None]) -> Any:
        cause, turned = pair
        return cause[0].endswith("inf"), order.index(cause), turned is None

    report: dict[Cause, Birth] = {}
    for cause, turned in sorted(births.found, key=rank):
        text = ""
        if turned:
            row = births.rows[turned, True]
            text = f"{turned[1].text}, {row.values}"
        row = births.rows[cause, False]._replace(becomes_nan=text)
        if cause in causes:
            report.setdefault(cause, row)
    return NonfiniteReport(report.values())


def _needed(
    causes: frozenset[Cause], origins: Callable[[frozenset[Cause]], Origins]
) -> frozenset[Cause]:
    """Leave out what is no cause: alone, it does no harm, and without it, harm remains.

    A mask of -inf, for example, reaches whatever an overflow next to it reaches.
    """
    needed = {x for x in causes if x in {y for y, _ in origins(causes - {x})}}
    needed = needed or {x for x in causes if not origins(frozenset({x}))}
    return frozenset(needed) or causes
