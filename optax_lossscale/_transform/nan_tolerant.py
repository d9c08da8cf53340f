"""Decide whether a program may compute with NaN.

It may if it terminates for any input, and has no effect except communication: a NaN can
then reach only its results. The list holds the primitives that are known to be so.
"""

from jax.extend.core import Jaxpr

from .._programs.equations import ELEMENTWISE, REDUCTIONS, RESHAPES, operations

_KNOWN = (
    ELEMENTWISE
    | REDUCTIONS
    | RESHAPES
    | frozenset(
        """
    cumlogsumexp cummax cummin cumprod cumsum dot_general fft conv_general_dilated
    reduce_window reduce_window_max reduce_window_min reduce_window_sum sort top_k

    device_put dynamic_slice dynamic_update_slice empty empty2 gather
    optimization_barrier reshard scatter scatter-add scatter-max scatter-min scatter-mul
    scatter_add scatter_mul sharding_constraint

    cholesky geqrf householder_product lu lu_pivots_to_permutation qr triangular_solve

    random_bits random_clone random_fold_in random_seed random_split random_unwrap
    random_wrap rng_bit_generator threefry2x32

    all_gather all_gather_invariant all_to_all axis_index pbroadcast pmax pmin
    ppermute psum psum2 psum_invariant reduce_scatter

    checkpoint closed_call custom_jvp_call jit name pjit remat2 scan shard_map
    """.split()  # noqa: SIM905, a hundred lines of list otherwise
    )
)


def tolerates_nan(program: Jaxpr) -> bool:
    return operations(program) <= _KNOWN


def has_loop(program: Jaxpr) -> bool:
    """Return whether a program that tolerates NaN has a loop."""
    return "scan" in operations(program)
