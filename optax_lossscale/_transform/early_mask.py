"""Apply or skip an update: the mask that only makes it fast.

The mask of ``mask.py`` is slow on a CPU: a new moment is used twice, unmasked in the
update and masked in the state, so XLA computes it twice and copies the old one. Here,
the update is evaluated equation by equation, and a leaf of the new state is masked
where an equation defines it. If the step is skipped, everything that is computed from
it is masked in turn. Data flows as in the unwrapped optimizer: each moment is computed
once and written in place.

So a skipped step computes with NaN, and with an old moment beside a new one. That is
for programs that end on any numbers, and whose operations all are known here. A NaN
behind a mask would reach derivatives, so they are those of ``mask.py``.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from .._jax_internals import as_varying, is_staging, waiting_for, without_constants
from .._precision import dtype_of
from .._programs.derivatives import call_with_derivatives_of
from .._tree import choose, select
from .._validation import is_traced
from .mask import Arrays, Sanitize, masked, split

# Operations that end on any numbers, and have no effect but to wait for other devices.
_ALLOWED = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    ne neg nextafter not one_minus_square or polynomial population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor

    argmax argmin cumlogsumexp cummax cummin cumprod cumsum dot_general fft
    conv_general_dilated reduce reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_sum reduce_xor reduce_window reduce_window_max reduce_window_min
    reduce_window_sum sort top_k

    broadcast_in_dim concatenate device_put dynamic_slice dynamic_update_slice empty
    empty2 gather iota optimization_barrier pad reshape reshard rev scatter scatter-add
    scatter-max scatter-min scatter-mul scatter_add scatter_mul sharding_constraint
    slice split squeeze stack tile transpose unstack zeros_like

    cholesky geqrf householder_product lu lu_pivots_to_permutation qr triangular_solve

    random_bits random_clone random_fold_in random_seed random_split random_unwrap
    random_wrap rng_bit_generator threefry2x32

    all_gather all_gather_invariant all_to_all axis_index pbroadcast pcast pmax pmin
    ppermute psum psum2 psum_invariant pvary reduce_scatter

    checkpoint closed_call custom_jvp_call jit name pjit remat2 scan shard_map
    """.split()  # noqa: SIM905, a hundred lines of list otherwise
)


def masked_update(
    update: Callable[[optax.Updates, dict[str, Any]], Any],
    apply: jax.Array,
    grads: optax.Updates,
    extra_args: dict[str, Any],
    old_state: optax.OptState,
    *,
    is_checked: bool,
) -> tuple[jax.Array, optax.Updates, optax.OptState]:
    """Return the update of an applied step, or zeros and the old state if skipped.

    ``update`` takes the gradients and the extra arguments. It returns whether its
    results may be used (True unless ``is_checked``), the updates and the new state.

    The first result of this function is whether the step is applied.
    """
    staging = is_staging()
    arrays, sanitizers, rebuild = split(grads, extra_args, staging)
    # In the types that sanitized arrays have.
    arrays = [as_varying(x, apply) for x in arrays]

    def update_arrays(arrays: Arrays) -> Any:
        return update(*rebuild(arrays))

    given = update_arrays, apply, arrays, sanitizers, old_state
    outputs = None
    # Early masks of a checked update evaluate it twice, and then `grad_fn` as well.
    once = extra_args.get("grad_fn") is not None
    if staging and isinstance(apply, jax.core.Tracer) and not once:
        outputs = masked_early(*given, is_checked=is_checked)
    if outputs is None:
        # Eager derivatives are those of the last evaluation. No callback happens twice.
        again = is_checked and not staging and is_traced((arrays, old_state))
        outputs = masked(*given, again=again)
    applied, updates, new_state = outputs
    # Shaped like the output: the inner transformation may return another tree.
    no_updates = jax.tree.map(_zeros_like, updates)
    return applied, select(applied, updates, no_updates), new_state


def suits(jaxpr: Jaxpr, is_checked: bool = False) -> bool:
    """Return whether a program may compute with NaN in a skipped step."""
    # With `check_updates` it runs twice, for which a loop is too expensive.
    return _operations(jaxpr) <= _ALLOWED - ({"scan"} if is_checked else set())


def _operations(jaxpr: Jaxpr) -> set[str]:
    """Return the names of all primitives in a program."""
    names = set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(inner, ClosedJaxpr):
                inner = inner.jaxpr
            if isinstance(inner, Jaxpr):
                names |= _operations(inner)
    return names


def masked_early(
    update: Callable[[Arrays], Any],
    apply: jax.Array,
    arrays: Arrays,
    sanitizers: Sequence[Sanitize],
    old_state: optax.OptState,
    *,
    is_checked: bool,
) -> Any:
    """Return what ``masked`` does, or None if the program does not suit."""
    structure: Any = None

    def flat_update(arrays: Arrays) -> list[Any]:
        nonlocal structure
        leaves, structure = jax.tree.flatten(update(arrays))
        return leaves

    program = jax.make_jaxpr(flat_update)(arrays)
    jaxpr = without_constants(program)
    if not suits(jaxpr, is_checked):
        return None
    evaluate = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))

    def early(apply: jax.Array, arrays: Arrays, consts: Any, old: Any) -> list[Any]:
        if is_checked:
            # Evaluate twice, or the whole new state would wait in memory for the flag.
            apply &= evaluate(*arrays, *consts)[0]
            arrays = [waiting_for(apply, x) for x in arrays]
        return evaluate_early(jaxpr, apply, [*arrays, *consts], old)

    def late(apply: jax.Array, arrays: Arrays, consts: Any, old: Any) -> list[Any]:
        def update(arrays: Arrays) -> Any:
            usable, *leaves = evaluate(*arrays, *consts)
            first = len(leaves) - len(old)
            return usable, leaves[:first], leaves[first:]

        outputs = masked(update, apply, arrays, sanitizers, old, again=is_checked)
        return jax.tree.leaves(outputs)

    old = jax.tree.leaves(old_state)
    leaves = call_with_derivatives_of(late, early, apply, arrays, program.consts, old)
    return jax.tree.unflatten(structure, leaves)


def evaluate_early(
    jaxpr: Jaxpr, apply: jax.Array, inputs: Arrays, old: Arrays
) -> list[Any]:
    """Evaluate a program, and mask each leaf of the new state where it is defined.

    Its outputs are a flag that is not used, the updates and the new state. These leaves
    are masked at the end:

    - inputs that are passed through, and constants: no equation defines them;
    - a variable that is two leaves of the state: it has two old values;
    - a variable whose type the mask would change;
    - scalars: this costs nothing, and what is computed from one need not wait for the
      flag. Otherwise `schedule_free` with `check_updates` moves a tenth more bytes.
    """
    first = len(jaxpr.outvars) - len(old)
    uses = collections.Counter(map(id, jaxpr.outvars[first:]))
    early = {
        id(var): x
        for var, x in zip(jaxpr.outvars[first:], old, strict=True)
        if uses[id(var)] == 1 and jnp.ndim(x) > 0 and var.aval == jax.typeof(x)
    }
    env: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    done = set()
    for eqn in jaxpr.eqns:
        given = [var for var in eqn.invars if not isinstance(var, Literal)]
        one = jaxpr.replace(
            invars=given, eqns=[eqn], outvars=eqn.outvars, effects=eqn.effects
        )
        values = jaxpr_as_fun(ClosedJaxpr(one, []))(*map(env.__getitem__, given))
        env |= zip(eqn.outvars, values, strict=True)
        for var in eqn.outvars:
            if id(var) in early:
                # Both have one type, and `jnp.where` takes longer to trace.
                env[var] = jax.lax.select_n(apply, early[id(var)], env[var])
                done.add(id(var))
    outputs = [x.val if isinstance(x, Literal) else env[x] for x in jaxpr.outvars]
    pairs = zip(jaxpr.outvars[first:], outputs[first:], old, strict=True)
    new_state = [
        new if id(var) in done else choose(apply, new, x) for var, new, x in pairs
    ]
    return [apply, *outputs[1:first], *new_state]


def _zeros_like(x: Any) -> Any:
    """Return zeros that change no bit of any number that they are added to."""
    dtype = dtype_of(x)
    if jnp.issubdtype(dtype, np.inexact):
        # Adding 0.0 would turn a parameter of -0.0 into 0.0.
        return jnp.full_like(x, -0.0 if jnp.isrealobj(x) else complex(-0.0, -0.0))
    # float0 and PRNG keys have no zero, and nothing is added to them.
    has_zero = dtype == jnp.bool_ or jnp.issubdtype(dtype, np.integer)
    return jnp.zeros_like(x) if has_zero else x
