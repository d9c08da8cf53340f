"""Every transformation that optax has, enumerated from its modules, ready to run."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from training import normal

# What optax warns of in its own factories, and what we do.
IGNORED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:. of . parameters are float16"),
    pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated"),
    pytest.mark.filterwarnings('ignore:"seed" is deprecated'),
    # L-BFGS writes float32 differences into its float16 memory.
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types"),
]

PARAMS = {
    # Of full rank: Muon's orthogonalization would blow up the rounding of any other.
    "w": normal(4, 3),
    "b": np.array([0.1, -0.2, 0.3], np.float32),
    "s": np.array(0.5, np.float32),
}


def value_fn(params):
    leaves = jax.tree.leaves(params)
    return sum(jnp.sum((x.astype(jnp.float32) - 0.25) ** 2) for x in leaves)


ADAM = optax.adam(0.1)
# What the factories require, by the name of the parameter; 0.1 for all others.
ARGUMENTS = {
    **dict.fromkeys(("adv_optimizer", "base_optimizer", "fast_optimizer"), ADAM),
    **dict.fromkeys(("inner", "optimizer", "tx"), ADAM),
    "decay": 0.9,
    "f": lambda updates, params: jax.tree.map(lambda u: -u, updates),
    "freeze_mask": {"w": False, "b": True, "s": False},
    "gamma": 0.55,
    "key": 0,
    "l2_norm_clip": 1.0,
    "mask": {"w": True, "b": False, "s": True},
    "max_backtracking_steps": 5,
    "max_consecutive_errors": 2,
    "max_linesearch_steps": 5,
    "max_norm": 1.0,
    "measure": optax.tree.norm,
    "measure_name": "norm",
    "param_labels": {"w": "adam", "b": "sgd", "s": "adam"},
    "seed": 0,
    "should_transform_fn": lambda step, **extra_args: step % 2 == 0,
    "slow_step_size": 0.5,
    "step_size": -0.1,
    "step_size_fn": optax.linear_schedule(-0.1, 0.0, 10),
    "sync_period": 2,
    "transforms": {"adam": ADAM, "sgd": optax.sgd(0.1, momentum=0.9)},
}

RATES = {"learning_rate", "max_learning_rate"}
LEFT_OUT = {
    "optax.contrib.scale_by_muon",  # wants dimension numbers, which muon makes
    *("optax.inject_hyperparams", "optax.inject_stateful_hyperparams"),  # of factories
    "optax.measure_with_ema",  # returns measurements in the place of updates
}
# More than the defaults of a factory show.
VARIANTS = {
    "optax.chain": optax.chain(optax.clip(0.1), optax.trace(0.9)),
    "optax.named_chain": optax.named_chain(("a", optax.clip(0.1)), ("b", ADAM)),
    "adafactor factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adam float32 moments": optax.adam(0.1, mu_dtype=jnp.float32),
    "adam scheduled": optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "adamw decaying": optax.adamw(0.1, weight_decay=0.1),
    "clip + adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.1, 0.0, 4)
    ),
    "lbfgs without line search": optax.lbfgs(0.1, linesearch=None),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
}


def _parameters(factory):
    return inspect.signature(factory).parameters


def _transforms(name, function):
    returns = str(inspect.signature(function).return_annotation)
    is_factory = "GradientTransformation" in returns or RATES & {*_parameters(function)}
    return is_factory and not name.startswith("_")


FACTORIES = {
    f"{module.__name__}.{name}": function
    for module in (optax, contrib)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if _transforms(name, function)
}
NAMES = sorted((FACTORIES.keys() | VARIANTS.keys()) - LEFT_OUT)
OPTIMIZERS = [
    name
    for name, factory in FACTORIES.items()
    if RATES & {*_parameters(factory)} and "scale_by_" not in name
]


def make(name):
    if name in VARIANTS:
        return VARIANTS[name]
    # Parameters without a default, or one that will not do.
    required = {
        p.name: ARGUMENTS.get(p.name, 0.1)
        for p in _parameters(FACTORIES[name]).values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.default is p.empty or p.name in {*RATES, "key"})
    }
    return FACTORIES[name](**required)


def params_for(name, dtype=jnp.float32):
    # SM3 has no accumulator for a scalar, and DoG's scaling makes an array of it.
    no_scalars = "sm3" in name or name.endswith("scale_by_distance_over_gradients")
    params = {k: v.astype(dtype) for k, v in PARAMS.items() if v.ndim or not no_scalars}
    is_pair = name == "optax.lookahead"
    return optax.LookaheadParams.init_synced(params) if is_pair else params


def trained(name, params):
    """The parameters that have gradients."""
    return params.fast if name == "optax.lookahead" else params


def grads_for(name, params):
    """True gradients, in the types of `ls.value_and_grad` and in the form that fits."""
    # They take the gradients of each example.
    private = ("optax.contrib.dpsgd", "optax.contrib.differentially_private_aggregate")
    return _grads(trained(name, params), per_example=name in private)


@functools.partial(jax.jit, static_argnames="per_example")
def _grads(params, per_example):
    grads = jax.grad(value_fn)(jax.tree.map(lambda x: x.astype(jnp.float32), params))
    keeps = jnp.bfloat16
    grads = jax.tree.map(
        lambda g, p: g.astype(keeps) if p.dtype == keeps else g, grads, params
    )
    return jax.tree.map(lambda g: jnp.stack([g, 2 * g]) if per_example else g, grads)


def update(name, tx, grads, state, params):
    """Update with the extra arguments that the transformation may want."""
    value = value_fn(trained(name, params))
    extra_args = {"value": value, "grad": grads, "value_fn": value_fn}
    if "sophia" in name:
        extra_args["obj_fn"] = extra_args.pop("value_fn")
    if name == "optax.contrib.sam":  # refuses what it does not name
        extra_args = {}
    tx = optax.with_extra_args_support(tx)
    return tx.update(grads, state, params, **extra_args)


def compiled_step(name, tx, wide=lambda params: params):
    """A step; ``wide`` makes of the parameters what the optimizer is given."""

    @jax.jit
    def step(params, state, grads):
        updates, state = update(name, tx, grads, state, wide(params))
        return optax.apply_updates(params, updates), state, updates

    return step
