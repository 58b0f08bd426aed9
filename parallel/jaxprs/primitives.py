"""What primitives do, by name: the one table that readers of a program ask.

Some names belong to one version of jax only. A reader that asks for something else builds it from
these sets, so that a new primitive is entered once.
"""

# Calls: their body runs once, on their operands.
PLAIN_CALLS = frozenset("jit pjit closed_call core_call eval_jaxpr".split())
REMAT_CALLS = frozenset("checkpoint remat remat2".split())
CALLS = PLAIN_CALLS.union(
    REMAT_CALLS,
    "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_lin".split(),
)
CONTROL_FLOW = frozenset("scan while cond".split())
KERNELS = frozenset("pallas_call custom_call ffi_call".split())

# The primitive of operations that are objects (jax.experimental.hijax.HiPrim), and what they are,
# by class. Any other is a custom_vjp_call: a program with a derivative of its own.
HI_PRIMITIVE = "call_hi_primitive"
HI_CLASSES = {
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "RematTraced": "checkpoint",
}

# What keeps all entries of its operand, and their values.
RESHAPES = frozenset("reshape squeeze expand_dims".split())
COPIES = frozenset("copy copy_p".split())
VIEWS = RESHAPES.union(COPIES, ["transpose"])
ANNOTATIONS = frozenset(
    "name optimization_barrier pcast pvary reshard sharding_constraint stop_gradient".split()
)
CASTS = frozenset("convert_element_type reduce_precision".split())  # but for rounding

# What computes.
POINTWISE = COPIES.union(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul mulhi name ne neg nextafter not one_minus_square or polygamma population_count pow
    random_gamma_grad real reduce_precision reshard regularized_incomplete_beta
    rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
    zeta""".split()
)
MATMULS = frozenset("dot_general conv_general_dilated".split())
RAGGED_MATMULS = frozenset("ragged_dot ragged_dot_general".split())
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or argmax argmin".split()
)
CUMULATIVE = frozenset("cumsum cumlogsumexp".split())
INDEXING = frozenset("gather scatter scatter-add scatter_add".split())
WINDOWS = frozenset(
    "reduce_window_sum reduce_window_max select_and_scatter_add select_and_gather_add".split()
)

# What sends between devices.
ALL_GATHERS = frozenset("all_gather all_gather_invariant".split())
COLLECTIVES = ALL_GATHERS.union("all_to_all ppermute psum psum_invariant reduce_scatter".split())

# Linear in each operand, or in the first where the others are indices.
LINEAR_MAPS = VIEWS.union(
    ANNOTATIONS,
    """all_gather all_to_all broadcast_in_dim conj cumsum dynamic_slice gather imag neg ppermute
    psum psum_invariant real reduce_scatter reduce_sum rev slice""".split(),
)
ADDS = frozenset("add add_any sub".split())
# Linear in these operands together.
SUMS = {
    **dict.fromkeys((*ADDS, "pad", "dynamic_update_slice"), slice(2)),
    "concatenate": slice(None),
    "scatter-add": slice(0, None, 2),
    "select_n": slice(1, None),
}
PRODUCTS = MATMULS.union(["mul"])  # linear in each of two operands
