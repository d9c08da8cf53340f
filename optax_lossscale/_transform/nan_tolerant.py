"""Decide whether a program may compute with NaN.

It may if it terminates for any input, and has no effect except communication: a NaN can
then reach only its results. The list holds the primitives that are known to be so.
"""

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

_KNOWN = frozenset(
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


def tolerates_nan(program: Jaxpr) -> bool:
    return _operations(program) <= _KNOWN


def has_loop(program: Jaxpr) -> bool:
    """Return whether a program that tolerates NaN has a loop."""
    return "scan" in _operations(program)


def _operations(program: Jaxpr) -> set[str]:
    """Return the names of all primitives in a program."""
    names = set()
    for eqn in program.eqns:
        names.add(eqn.primitive.name)
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(inner, ClosedJaxpr):
                inner = inner.jaxpr
            if isinstance(inner, Jaxpr):
                names |= _operations(inner)
    return names
