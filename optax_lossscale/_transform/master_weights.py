"""The Optax transformation that keeps a wide copy of narrow parameters."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._tree import difference, dtype_of, is_inexact, same_structure
from .._validation import check_float_dtype
from .extra_args import check_inner, with_extra_args
from .rounding import update_to


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`.

    Attributes:
        master_weights: the parameters that are narrower than ``dtype``, in ``dtype``;
            an ``optax.MaskedNode`` in the place of each of the others.
        inner_state: the state of the wrapped transformation.

    Examples:
        Start from parameters that were saved in float32:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> saved = {"w": jnp.array([0.1, 0.1, 0.1])}
        >>> params = jax.tree.map(lambda p: p.astype(jnp.float16), saved)
        >>> tx = ls.with_loss_scaling(ls.with_master_weights(optax.adam(1e-3)))
        >>> opt_state = optax.tree.set(tx.init(params), master_weights=saved)
        >>> optax.tree.get(opt_state, "master_weights")
        {'w': Array([0.1, 0.1, 0.1], dtype=float32)}
    """

    master_weights: optax.Params
    inner_state: optax.OptState


def with_master_weights(
    inner: optax.GradientTransformation, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Optimize a float32 copy of float16 parameters, and round it to them.

    In float16 an update that is smaller than a 4,000th of a weight is lost. Here
    ``inner`` works on master weights: a copy, in ``dtype``, of every parameter that is
    narrower. It is given their gradients in ``dtype`` too. The updates that come out
    take the parameters to the rounded master weights: ``optax.apply_updates(params,
    updates)`` equals ``master_weights`` cast to the types of the parameters. So
    training is the same, bit for bit, as that of float32 parameters of which each is
    cast once inside the loss, before it is used.

    Two cases differ. A float16 parameter above 1 that falls to less than an 8,192nd of
    itself in one step, or a bfloat16 parameter to less than a 65,536th, is off by up to
    2**-24 of what it was, until the next step: no float32 update could do better. And a
    float16 parameter whose master weight exceeds 65504 is infinite, and then stays so
    or becomes NaN. ``with_loss_scaling(..., check_updates=True)`` skips that step.

    Put it directly inside of `with_loss_scaling`, around everything else: a later
    transformation in a chain changes the parameters but not their master weights. If
    you change parameters yourself, change the master weights too, or call ``init``
    again: the next update takes the parameters back to them.

    Args:
        inner: the optimizer, any Optax transformation.
        dtype: the type of the master weights. Integers, None, and parameters that are
            at least as wide have no copy, and are updated as by ``inner`` alone. A
            complex parameter is as wide as its real part.

    Returns:
        The transformation. Its ``update`` needs ``params``. Updates of parameters that
        have master weights are of type ``dtype``, which ``optax.apply_updates`` adds
        and casts back; ``equinox.apply_updates`` does not cast. Updates of float8
        parameters, to which JAX adds nothing wider, are float8 and come as near as
        float8 sums can.

    Raises:
        TypeError: if ``inner`` is no transformation.
        ValueError: if ``dtype`` is no floating-point type that is enabled; from
            ``update``, if ``params`` is None or has other types than in ``init``.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_lossscale as ls
        >>> params = jnp.ones(2, jnp.float16)
        >>> tx = ls.with_loss_scaling(ls.with_master_weights(optax.sgd(1e-4)))
        >>> opt_state = tx.init(params)
        >>> for _ in range(10):
        ...     updates, opt_state = tx.update(jnp.ones(2), opt_state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params)
        [0.999 0.999]

        In float16 alone nothing would have moved:

        >>> print(jnp.ones(2, jnp.float16) - 1e-4)
        [1. 1.]

    References:
        Micikevicius et al., `Mixed Precision Training
        <https://arxiv.org/abs/1710.03740>`_, 2017, section 3.1
    """
    check_inner(inner, "with_master_weights")
    inner = with_extra_args(inner)
    dtype = _check_dtype(dtype)

    def wide(x: Any) -> Any:
        return _as_type(x, _wide_dtype(x, dtype)) if _is_narrow(x, dtype) else x

    def init_fn(params: optax.Params) -> MasterWeightsState:
        # Widened twice, since some optimizers keep what they are given: no array may
        # be two leaves of a state that is donated.
        inner_state = inner.init(jax.tree.map(wide, params))
        masters = jax.tree.map(
            lambda p: wide(p) if _is_narrow(p, dtype) else optax.MaskedNode(), params
        )
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
                "None. Call `tx.update(grads, state, params)`: its updates are "
                "differences to the parameters."
            )
        _check_params(params, state.master_weights, dtype)
        masters = jax.tree.map(wide, state.master_weights)
        for name, x in extra_args.items():
            if same_structure(x, updates):  # such as the gradients for a line search
                extra_args[name] = jax.tree.map(wide, x)
        new_updates, inner_state = inner.update(
            jax.tree.map(wide, updates),
            state.inner_state,
            _merged(params, masters),
            **extra_args,
        )

        def step(p: Any, master: Any, update: Any) -> Any:
            if _is_absent(master) or update is None:
                return master
            return optax.apply_updates(master, update)

        def to_master(p: Any, master: Any, update: Any) -> Any:
            if _is_absent(master) or update is None:
                return update
            return update_to(master, p)

        new_masters = jax.tree.map(step, params, masters, new_updates)
        new_updates = jax.tree.map(to_master, params, new_masters, new_updates)
        return new_updates, MasterWeightsState(new_masters, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def has_master_weights(state: Any) -> bool:
    """Return whether any parameter has a master weight in an optimizer state."""

    def is_state(node: Any) -> bool:
        return isinstance(node, MasterWeightsState)

    nodes = filter(is_state, jax.tree.leaves(state, is_leaf=is_state))
    return any(jax.tree.leaves(node.master_weights) for node in nodes)


def warn_of_float16(params: optax.Params, inner_state: optax.OptState) -> None:
    """Warn if parameters are kept in float16 alone."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [path for path, x in leaves if getattr(x, "dtype", None) == jnp.float16]
    if not paths or has_master_weights(inner_state):
        return
    where = jax.tree_util.keystr(paths[0])
    warnings.warn(
        f"{len(paths)} of {len(leaves)} parameters are float16"
        f"{f', the first one at {where}' if where else ''}, and the optimizer keeps no "
        "copy of them in float32. An update that is smaller than a 4,000th of a weight "
        "is lost. Keep them in float32 and cast them inside the loss, or keep float32 "
        "copies in the optimizer: `with_loss_scaling(with_master_weights(inner))`. "
        "Where they are frozen neither is needed.",
        stacklevel=3,  # where `init` is called
    )


def _is_narrow(x: Any, dtype: Any) -> bool:
    return is_inexact(x) and jnp.finfo(dtype_of(x)).bits < jnp.finfo(dtype).bits


def _wide_dtype(x: Any, dtype: Any) -> Any:
    is_complex = jnp.issubdtype(dtype_of(x), np.complexfloating)
    return jnp.complex128 if is_complex else dtype  # complex64 is the least


def _as_type(x: Any, dtype: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jnp.asarray(x, dtype)


def _is_absent(master: Any) -> bool:
    return isinstance(master, optax.MaskedNode)


def _merged(params: Any, masters: Any) -> Any:
    """Return the master weights, and the parameters that have none."""
    return jax.tree.map(lambda p, m: p if _is_absent(m) else m, params, masters)


def _check_dtype(dtype: Any) -> np.dtype[Any]:
    advice = "It is the type of the master weights, usually float32."
    checked = check_float_dtype("dtype", dtype, advice)
    if jax.dtypes.canonicalize_dtype(checked) != checked:
        raise ValueError(
            f"`dtype` must be a type that is enabled, got {checked}. Call "
            "`jax.config.update('jax_enable_x64', True)` first, or leave it at float32."
        )
    return checked


def _check_params(params: Any, masters: Any, dtype: Any) -> None:
    """Refuse parameters whose master weights are not those of the state."""
    expected = jax.tree.map(
        lambda p: (
            jax.ShapeDtypeStruct(jnp.shape(p), dtype)
            if _is_narrow(p, dtype)
            else optax.MaskedNode()
        ),
        params,
    )
    found = difference(expected, masters)
    if found or not same_structure(expected, masters):
        structures = jax.tree.structure(expected), jax.tree.structure(masters)
        path, new, old = found or ("", *structures)
        raise ValueError(
            "`params` must have the structure, the shapes and the types that `init` "
            f"was given, but the master weights of `params` have {new} at "
            f"{path or 'the root'}, where those in `state` have {old}. Pass the "
            "parameters of this state; where they have changed, call `init` again."
        )
