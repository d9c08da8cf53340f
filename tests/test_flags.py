"""With JAX's debugging flags, calls give the same, or raise what plain JAX does."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_close_in_float16, assert_same_types
from every_rule import DEFAULTS
from shared import enable_x64, slow_but
from training import normal

import optax_lossscale as ls

EAGER_FLAGS = {
    "disable_jit": lambda: jax.disable_jit(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
}


@contextlib.contextmanager
def updated(name, value):
    """Set a flag that has no context manager."""
    if not hasattr(jax.config, name):
        pytest.skip("this jax has no such flag")
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


FLAGS = {
    **EAGER_FLAGS,
    "checking_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "enable_x64": lambda: enable_x64(True),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "enable_checks": lambda: jax.enable_checks(True),
    "remat3": lambda: updated("jax_remat3", True),
    "custom_vjp3": lambda: updated("jax_custom_vjp3", True),
    "no direct linearize": lambda: updated("jax_use_direct_linearize", False),
    "thread_guard": lambda: updated("jax_thread_guard", True),
    "static indices": lambda: updated("jax_check_static_indices", True),
    "legacy_prng_key": lambda: updated("jax_legacy_prng_key", "error"),
    "bwd_checks": lambda: updated("jax_disable_bwd_checks", True),
    "simplified constants": lambda: updated("jax_use_simplified_jaxpr_constants", True),
}
W, X = normal(8, 8), normal(3, 8)
GRADS = {"finite": W, "NaN": np.full_like(W, np.nan), "inf": np.full_like(W, np.inf)}


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w))


def scanned(w, x):
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 2)
    return jnp.mean(x)


def overflowing(w):
    """At the first scale, 2**15, but not at a lower one."""
    return 8.0 * jnp.sum(w.astype(jnp.float16)).astype(jnp.float32)


def update(tx, w, grads, **extra):
    updates, state = tx.update(grads, tx.init(w), w, **extra)
    return optax.apply_updates(w, updates), state


def train(tx, w, x):
    state = tx.init(w)
    cast = ls.autocast(loss_fn, jnp.float16)
    loss, grads = ls.value_and_grad(cast, state)(w, x)
    updates, state = tx.update(grads, state, w, value=loss)
    return optax.apply_updates(w, updates), state


def guard(grads):
    scale_state = ls.DynamicLossScale().init().record(ls.all_finite(grads))
    ls.check_loss_scale(scale_state, grads=[grads])
    return ls.gradient_report([grads]), ls.suggest_loss_scale([grads])


def keep(w, grads):
    state = ls.DynamicLossScale().init()
    return ls.all_finite([grads]), ls.keep_if_applied(state, new=[grads], old=[w])


def scaled_by_hand(w, x):
    state = ls.DynamicLossScale().init()
    loss, grads = jax.value_and_grad(lambda w: ls.scale_loss(loss_fn(w, x), state))(w)
    return loss, ls.unscale_grads(grads, state), ls.max_magnitude(grads)


# Each is a function and its arguments.
SGD = optax.sgd(0.125, momentum=0.5)
TRANSFORMATIONS = {
    **{name: ls.with_loss_scaling(SGD, rule) for name, rule in DEFAULTS.items()},
    "skip_nonfinite": ls.skip_nonfinite(SGD),
    "check_updates": ls.with_loss_scaling(SGD, check_updates=True),
    "master weights": ls.with_loss_scaling(ls.with_master_weights(SGD)),
}
STEPS = {
    "step": lambda tx: (functools.partial(train, tx), W, X),
    "flag": lambda tx: (
        lambda w, flag: update(tx, w, w, grads_finite=flag),
        *(W, np.bool_(False)),
    ),
    "loss": lambda tx: (lambda w, x: update(tx, w, w, value=x), W, np.float32(np.inf)),
    "NaN": lambda tx: (functools.partial(update, tx), W, GRADS["NaN"]),
    "inf": lambda tx: (functools.partial(update, tx), W, GRADS["inf"]),
}
DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: jax.value_and_grad(f, (0, 1)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jvp": lambda f: lambda *wx: jax.jvp(f, wx, wx),
    "linearize": lambda f: lambda *wx: jax.linearize(f, *wx)[1](*wx),
    "hessian": lambda f: lambda *wx: jax.jvp(jax.grad(f), wx, wx),
    "vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[None]),
    "map": lambda f: lambda w, x: jax.lax.map(lambda x: jax.grad(f)(w, x), x[None]),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "scale_backward": lambda f: jax.grad(ls.scale_backward(f, 8.0)),
    "scale_block": lambda f: jax.grad(ls.scale_block(f)),
    "value_and_grad": lambda f: ls.value_and_grad(f, ls.FixedLossScale().init()),
    "retries": lambda f: (
        lambda *wx: ls.value_and_grad_with_retries(f, ls.FixedLossScale().init())(*wx)
    ),
}
CALLS = {
    **{
        f"{name}, {kind}": call(tx)
        for name, tx in TRANSFORMATIONS.items()
        for kind, call in STEPS.items()
    },
    **{
        f"{name} of {fun.__name__}": (derivative(ls.autocast(fun, "float16")), W, X)
        for fun in (loss_fn, scanned)
        for name, derivative in DERIVATIVES.items()
    },
    "retries of an overflow": (
        lambda w: ls.value_and_grad_with_retries(
            overflowing, ls.DynamicLossScale().init()
        )(w),
        W,
    ),
    "types of an update": (
        lambda w: jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype),
            jax.eval_shape(functools.partial(update, TRANSFORMATIONS["dynamic"]), w, w),
        ),
        W,
    ),
    "steps in a scan": (
        lambda w, xs: jax.lax.scan(
            lambda w, x: train(TRANSFORMATIONS["headroom"], w, x), w, xs
        ),
        *(W, X[None]),
    ),
    "scaled by hand": (scaled_by_hand, W, X),
    **{f"guard, {name}": (guard, x) for name, x in GRADS.items()},
    **{f"keep, {name}": (keep, W, x) for name, x in GRADS.items()},
}
REPORTS = {
    f"report, errors={x}": (
        lambda *wx, errors=x: repr(ls.autocast_report(scanned, *wx, errors=errors)),
        *(W, X),
    )
    for x in (False, True)
}
REPORTS |= {
    f"births, {name}": (lambda *wx: repr(ls.nonfinite_report(scanned, *wx)), W, x)
    for name, x in {"none": X, "all": np.nan * X}.items()
}
CALLS |= REPORTS
WAYS = {"eager": lambda f: f, "jit": jax.jit}
# The others are slow. These fail first.
QUICK = {
    "eager": [
        *("headroom, flag", "headroom, NaN", "types of an update"),
        *("grad of loss_fn", "keep, NaN", "guard, NaN"),
    ],
    "jit": ["grad of scanned"],
}


def cells():
    """Every flag, call and way, but what plain JAX refuses or nobody does."""
    for flag, call, way in itertools.product(FLAGS, CALLS, WAYS):
        # JAX transfers the constants of each operation.
        transfers = flag == "transfer_guard" and way == "eager"
        if transfers or call in REPORTS and way == "jit":
            continue
        is_quick = call in QUICK[way] and (way == "jit" or flag in EAGER_FLAGS)
        yield pytest.param(flag, call, way, marks=[pytest.mark.slow] * (not is_quick))


@functools.cache
def without_flags(call, way):
    fun, *args = CALLS[call]
    args = jax.device_put(args)
    return args, WAYS[way](fun)(*args)


@pytest.mark.parametrize(("flag", "call", "way"), [*cells()])
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_call_under_a_flag_gives_the_same(flag, call, way):
    args, expected = without_flags(call, way)
    with FLAGS[flag]():
        found = jax.block_until_ready(WAYS[way](CALLS[call][0])(*args))
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if isinstance(y, str):
            assert x == y
        else:
            assert_same_types(x, y)
            assert_close_in_float16(x, y)


BORN = {
    "debug_nans": ("nan", lambda w, x: jnp.mean(jnp.sqrt(x @ w - 40.0))),
    "debug_infs": ("inf", lambda w, x: jnp.mean(jnp.exp(100.0 + jnp.abs(x @ w)))),
}


@pytest.mark.parametrize("way", slow_but(["eager"], WAYS))
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("flag", slow_but(["debug_nans"], BORN))
def test_error_names_the_operation_as_without_autocast(flag, derivative, way):
    kind, fun = BORN[flag]
    texts = []
    for f in (fun, ls.autocast(fun, "bfloat16")):
        run = WAYS[way](DERIVATIVES[derivative](f))
        with FLAGS[flag](), pytest.raises(FloatingPointError) as error:
            run(W, X)
        texts.append(str(error.value).splitlines()[0])
    assert texts[0] == texts[1] and kind in texts[0]
