"""The Optax transformation that keeps float32 copies of narrow parameters."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._dtypes import Leaf, as_type, dtype_of, is_inexact, loses_range
from .._find import find_nodes
from .._flax_internals.float8_overwrites import is_overwritten
from .._flax_internals.nnx_objects import unwrap
from .._state import MasterWeightsState
from .._tree import as_sharded, at_paths_of, mismatch, same_structure
from .._validation import check_dtype, warn
from .inner import check_inner, filter_for
from .rounding import round_to, update_to

# The types of the states of `optax.chain` and `optax.named_chain`.
_CHAINS = (tuple, collections.OrderedDict)


def with_master_weights(
    inner: optax.GradientTransformation, *, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Keep float32 copies of float16 parameters, and optimize the copies.

    Use it if your parameters are float16. In float16, an update smaller than a 4,000th
    of a weight is lost. Put it directly inside `with_loss_scaling`, around everything
    else.

    ``inner`` optimizes the master weights: copies, in ``dtype``, of all parameters with
    a narrower dtype. ``optax.apply_updates(params, updates)`` then sets the parameters
    to the rounded master weights. Training is the same, bit for bit, as with float32
    parameters if the loss casts each parameter once, before use.

    If you change a parameter yourself, for example clip, prune or load it, the next
    update continues from it: an element that is finite, and is not the rounded master
    weight, replaces the master weight.

    Args:
        inner: the optimizer, any Optax transformation.
        dtype: the dtype of the master weights. Complex parameters, and parameters that
            are at least as wide, have no copies: ``inner`` updates them directly.

    Returns:
        The transformation. Its ``update`` needs ``params``. Updates of parameters with
        master weights are in ``dtype``, which ``optax.apply_updates`` refuses under
        strict promotion. Call it inside ``jax.numpy_dtype_promotion("standard")``.

    Raises:
        TypeError: if ``inner`` is not an Optax transformation.
        ValueError: if ``dtype`` is not a floating-point dtype, or float64 without
            ``jax_enable_x64``; from ``init``, if a parameter is float8, which no update
            can set exactly; from ``update``, if ``params`` is None or differs from
            the parameters that ``init`` was given.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> params = jnp.ones(2, jnp.float16)
        >>> inner = ls.with_master_weights(optax.sgd(1e-4))
        >>> tx = ls.with_loss_scaling(inner, ls.FixedLossScale(1.0))
        >>> opt_state = tx.init(params)
        >>> for _ in range(10):
        ...     updates, opt_state = tx.update(jnp.ones(2), opt_state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params, jnp.ones(2, jnp.float16) - 1e-4)
        [0.999 0.999] [1. 1.]

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.1
    """
    check_inner(inner, "with_master_weights")
    drop_unknown = filter_for(inner)
    dtype = jnp.dtype(check_dtype("dtype", dtype))
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"`dtype` must be a dtype that JAX has enabled, got {dtype}. Call "
            "`jax.config.update('jax_enable_x64', True)` first, or leave `dtype` out."
        )

    def wide(x: Leaf) -> Leaf:
        return as_type(x, dtype) if _has_fewer_bits(x, dtype) else x

    def init_fn(params: optax.Params) -> MasterWeightsState:
        _refuse_float8(params)
        # Cast twice: some optimizers keep the arrays that they are given, and no array
        # may be two leaves of a donated state.
        inner_state = inner.init(jax.tree.map(wide, params))
        masters = jax.tree.map(wide, _keep_narrow(params, dtype))
        return MasterWeightsState(masters, inner_state)

    def update_fn(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError(
                "`params` must be given to `update` of `with_master_weights`, got "
                "None. Call `tx.update(grads, state, params)`: the updates are "
                "differences from the parameters."
            )
        _check_params(params, state.master_weights, dtype)
        masters = jax.tree.map(wide, state.master_weights)
        masters = jax.tree.map(_latest, params, masters)
        for name, x in extra_args.items():
            if same_structure(x, updates):  # such as gradients for a line search
                extra_args[name] = jax.tree.map(wide, x)
        new_updates, inner_state = inner.update(
            jax.tree.map(wide, updates),
            state.inner_state,
            jax.tree.map(lambda p, m: p if _is_absent(m) else m, params, masters),
            **drop_unknown(extra_args),
        )

        def stepped(p: Leaf, master: Leaf, update: Leaf) -> Leaf:
            absent = _is_absent(master) or update is None
            return master if absent else optax.apply_updates(master, update)

        def to_master(p: Leaf, master: Leaf, update: Leaf) -> Leaf:
            absent = _is_absent(master) or update is None
            return update if absent else update_to(master, p)

        new_masters = jax.tree.map(stepped, params, masters, new_updates)
        new_updates = jax.tree.map(to_master, params, new_masters, new_updates)
        return new_updates, MasterWeightsState(new_masters, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def has_master_weights(state: optax.OptState) -> bool:
    """Return whether an optimizer state contains any master weights."""
    nodes = find_nodes(state, MasterWeightsState)
    return any(jax.tree.leaves(node.master_weights) for node in nodes)


def check_last(state: optax.OptState) -> None:
    """Raise if a chain continues after `with_master_weights`, which sets updates."""

    def continues(node: Any) -> bool:
        if type(node) not in _CHAINS:
            return False
        members = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
        places = [i for i, x in enumerate(members) if has_master_weights(x)]
        after = members[places[0] + 1 :] if places else []
        # The states of Optax are tuples. A user's own may also hold arrays.
        return any(isinstance(x, tuple) for x in after)

    if any(map(continues, jax.tree.leaves(state, is_leaf=continues))):
        raise ValueError(
            "`with_master_weights` must come last in a chain, got transformations "
            "after it. They would move the parameters away from their float32 copies. "
            "Put the whole chain inside: `with_master_weights(optax.chain(...))`."
        )


def warn_of_float16(params: optax.Params, inner_state: optax.OptState) -> None:
    """Warn if float16 parameters that are trained have no master weights."""
    params, inner_state = unwrap((params, inner_state))  # `init` gets NNX variables
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [path for path, x in leaves if getattr(x, "dtype", None) == jnp.float16]
    masked = find_nodes(inner_state, optax.MaskedState)
    if any(isinstance(x.inner_state, optax.EmptyState) for x in masked):
        # If some parameters are frozen, those with moments are the trained ones.
        known = [path for path, _ in jax.tree_util.tree_leaves_with_path(inner_state)]
        paths = [p for p in paths if any(x[len(x) - len(p) :] == p for x in known)]
    if not paths or has_master_weights(inner_state):
        return
    where = jax.tree_util.keystr(paths[0])
    warn(
        f"{len(paths)} of {len(leaves)} parameters are float16"
        f"{f', the first one at {where}' if where else ''}, and the optimizer's state "
        "has no float32 copies. Updates smaller than a 4,000th of a weight are lost. "
        "Keep the parameters in float32 and cast them inside the loss, or put "
        "`with_master_weights` directly around the optimizer, and call `init` with "
        "these parameters.",
        "guides/float16_parameters.md",
    )


def warn_of_narrow_grads(grads: optax.Updates, params: Any) -> None:
    """Warn if the gradients are float16 or float8, but their parameters are not."""
    own = jax.tree.leaves(at_paths_of(grads, params))
    pairs = zip(jax.tree_util.tree_leaves_with_path(grads), own, strict=True)
    for (path, x), param in pairs:
        is_lost = loses_range(x) and is_inexact(param) and not loses_range(param)
        if is_lost and not is_overwritten(path):
            where = jax.tree_util.keystr(path) or "the root"
            warn(
                f"The unscaled gradients are {dtype_of(x)} at {where}, but the "
                f"parameter is {dtype_of(param)}. Small gradients, which the loss "
                "scale kept, are 0 in this dtype. Do not cast the gradients that "
                "`value_and_grad` or `unscale_grads` returns. To send float16 between "
                "devices, cast before `unscale_grads`."
            )
            return


def _has_fewer_bits(x: Leaf, dtype: Any) -> bool:
    is_real = is_inexact(x) and jnp.isrealobj(x)
    return is_real and jnp.finfo(dtype_of(x)).bits < jnp.finfo(dtype).bits


def _keep_narrow(params: Any, dtype: Any) -> Any:
    """Return the parameters that have master weights, and a MaskedNode for others."""
    return jax.tree.map(
        lambda p: p if _has_fewer_bits(p, dtype) else optax.MaskedNode(), params
    )


def _latest(param: Leaf, master: Leaf) -> Leaf:
    """Return a master weight, or its parameter where that was changed since.

    A parameter that is not finite is ignored, because no update could lead away from
    it.
    """
    if _is_absent(master):
        return master
    param, narrow = jnp.asarray(param, master.dtype), dtype_of(param)
    param = as_sharded(param, master)
    is_rounded = (round_to(master, narrow) == param) | ~jnp.isfinite(param)
    return jnp.where(is_rounded, master, param)


def _is_absent(master: Leaf) -> bool:
    return isinstance(master, optax.MaskedNode)


def _refuse_float8(params: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if is_inexact(x) and jnp.finfo(dtype_of(x)).bits < 16:
            raise ValueError(
                "`params` must not be float8 for master weights, because adding a "
                f"float8 update cannot reach each float8 value, got {dtype_of(x)} at "
                f"{jax.tree_util.keystr(path) or 'the root'}. Keep the parameters in "
                "float32 and cast them inside the loss."
            )


def _check_params(params: Any, masters: Any, dtype: Any) -> None:
    """Raise if parameters do not match the master weights in the state."""
    expected = _keep_narrow(params, dtype)
    if found := mismatch(expected, masters):
        path, new, old = found
        raise ValueError(
            "`params` must have the structure, shapes and dtypes that `init` was "
            f"given, but the master weights of `params` have {new} at {path}, "
            f"and the master weights in `state` have {old}. Pass the result of "
            "`optax.apply_updates(params, updates)`. Its first argument is `params`, "
            "and it keeps the dtypes; `eqx.apply_updates` makes float16 parameters "
            "float32. If you use other parameters now, call `init` again."
        )
