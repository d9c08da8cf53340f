"""The names of JAX's primitives, in groups that this package handles alike.

A primitive that is in no list is left as it is, kept by loops with its operands, and
not run on NaN. To leave an operation of its own out of `autocast`, take its name out of
``PRODUCTS``, or give a reason in ``products.py``.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Computed in a narrower type.
PRODUCTS = _names("conv_general_dilated dot_general ragged_dot ragged_dot_general")

# Loops may compute these again, instead of keeping their results.
ELEMENTWISE = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    ne neg nextafter not one_minus_square or polynomial population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
""")
# They only move elements, from places that are known when the program is compiled, or
# return them as they are. The derivatives of the first ones do no more.
MOVES = _names("""
    copy expand_dims name reshape rev sharding_constraint squeeze transpose
""")
RESHAPES = MOVES | _names("""
    broadcast_in_dim concatenate iota optimization_barrier pad pcast pvary slice split
    stack tile unstack zeros_like
""")
REDUCTIONS = _names("""
    reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor
""")
CHOICES = _names("argmax argmin")
# Loops do not compute these again from floats, because the floats may then round
# differently, and these functions jump somewhere, or end, or are vertical. Conversions
# from floats to other dtypes jump. Quotients stay out, since softmax needs them.
DECISIONS = _names("""
    acos acosh asin atan2 atanh bitcast_convert_type cbrt ceil convert_element_type
    digamma eq eq_to erf_inv floor ge gt is_finite le le_to lgamma log log1p log2 lt
    lt_to ne nextafter pow rem round rsqrt sign sqrt tan
""")
# Their results are elements of their operands, perhaps with another sign. Computed
# again, they are the same if the operands are.
_PICKS = _names("abs clamp max min select_n")
COPIES = _PICKS | RESHAPES | _names("convert_element_type neg stop_gradient")
# Loops may keep their results and compute their operands again. Operations in no list
# count as selections: they may return elements of their operands. Loops see those of
# ``DECISIONS`` under the name "decision".
SMOOTH = (
    (ELEMENTWISE - _PICKS)
    | PRODUCTS
    | RESHAPES
    | _names("""
    cumlogsumexp cumprod cumsum fft psum psum2 psum_invariant reduce_prod reduce_sum

    decision
""")
)

# Equations that run a program inside.
CHECKPOINTS = _names("checkpoint remat2")
CALLS = CHECKPOINTS | _names("call closed_call eval_jaxpr jit pjit")
# Their results are the results of the one program inside.
ONE_PROGRAM = CALLS | {"shard_map"}
# The programs in these are evaluated and differentiated as they stand. Others, such as
# ``custom_vmap_call``, have a derivative or a batch rule that was written for their
# types.
TRANSPARENT = ONE_PROGRAM | {"scan", "while", "cond", "composite"}
CUSTOM = _names("""
    custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
""")

# A NaN reaches only their results: they end for any input, and have no effect except
# communication.
NAN_TOLERANT = (
    ELEMENTWISE
    | RESHAPES
    | REDUCTIONS
    | CHOICES
    | _names("""
    cumlogsumexp cummax cummin cumprod cumsum dot_general fft conv_general_dilated
    reduce_window reduce_window_max reduce_window_min reduce_window_sum sort top_k

    device_put dynamic_slice dynamic_update_slice empty empty2 gather reshard scatter
    scatter-add scatter-max scatter-min scatter-mul scatter_add scatter_mul

    cholesky geqrf householder_product lu lu_pivots_to_permutation qr triangular_solve

    random_bits random_clone random_fold_in random_seed random_split random_unwrap
    random_wrap rng_bit_generator threefry2x32

    all_gather all_gather_invariant all_to_all axis_index pbroadcast pmax pmin
    ppermute psum psum2 psum_invariant reduce_scatter

    checkpoint closed_call custom_jvp_call jit pjit remat2 scan shard_map
    """)
)
