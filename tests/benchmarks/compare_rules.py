"""Compare rules on recorded magnitudes of gradients, and on the demonstration.

``python tests/benchmarks/compare_rules.py`` prints both tables, ``--recorded`` only the
first.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from record_magnitudes import EVERY, FILE, LOWEST

import optax_lossscale as ls

RULES = {
    "dynamic": ls.DynamicLossScale(),
    "dynamic every 20": ls.DynamicLossScale(growth_interval=20),
    "headroom": ls.HeadroomLossScale(),
}
# What is replayed: a name, a rule, and how often a step is repeated at most.
REPLAYED = [(name, rule, 0) for name, rule in RULES.items()]
REPLAYED.append(("dynamic with retries", RULES["dynamic"], 4))
LARGEST_HALF = 65504.0
LEAST_NORMAL = -14
LEAST = -24


@jax.custom_vjp
def loss_fn(weight, magnitude):
    """A loss whose gradient is the magnitude, and overflows at a scale as float16."""
    return weight * magnitude


def _forward(weight, magnitude):
    return loss_fn(weight, magnitude), magnitude


def _backward(magnitude, loss_scale):
    scaled = magnitude * loss_scale
    return jnp.where(scaled <= LARGEST_HALF, scaled, jnp.inf), None


loss_fn.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("rule", "max_retries"))
def replay(rule, magnitudes, max_retries):
    """The scale of each step, and whether it made the largest gradient overflow."""

    def step(state, magnitude):
        fun = ls.value_and_grad_with_retries(loss_fn, state, max_retries=max_retries)
        _, gradient, state = fun(jnp.zeros(()), magnitude)
        finite = ls.all_finite(gradient)
        args = (magnitude,) if rule.uses_max_magnitude else ()
        return rule.update(state, finite, *args), (state.loss_scale, ~finite)

    return jax.lax.scan(step, rule.init(), magnitudes)[1]


def shares_below(octaves, scales, exponent):
    """The share of elements that a scale leaves below 2**exponent, step by step."""
    octave = LOWEST + np.arange(octaves.shape[1])
    # A scale that is no power of two cuts through an octave: all of it must be below.
    below = octave + 1 + np.log2(scales)[:, None] <= exponent
    return (octaves * below).sum(axis=1) / octaves.sum(axis=1)


def figures(rule, max_retries, magnitudes, octaves):
    """Return the steps lost, and what is left below float16's range on average."""
    replayed = replay(rule, jnp.asarray(magnitudes), max_retries)
    scales, skipped = map(np.asarray, replayed)
    kept = ~skipped[::EVERY]
    scales = scales[::EVERY][kept]
    zero = shares_below(octaves[kept], scales, LEAST - 1).mean()
    coarse = shares_below(octaves[kept], scales, LEAST_NORMAL).mean()
    return int(skipped.sum()), zero, coarse


def recorded():
    """Yield each training's name, magnitudes and octaves."""
    with np.load(FILE) as data:
        for name in data.files:
            if name.endswith("_magnitude"):
                name = name.removesuffix("_magnitude")
                yield name, data[f"{name}_magnitude"], data[f"{name}_octaves"]


def print_recorded():
    print("training, rule: steps lost, elements below 2^-25 (zero), below 2^-14")
    for training, magnitudes, octaves in recorded():
        for name, rule, max_retries in REPLAYED:
            lost, zero, coarse = figures(rule, max_retries, magnitudes, octaves)
            print(f"{training:16} {name:22} {lost:5} {zero:8.2%} {coarse:8.2%}")


def print_demonstration(steps):
    from optax_lossscale._demonstration import training as demo

    positions = demo.load_positions()
    print("\nthe demonstration: held-out loss, logits' gradients flushed, last scale")
    for name, rule in RULES.items():
        result = demo.train(demo.half, rule, positions, steps)
        print(
            f"{name:22} {result.loss:.4f} {result.flushed:8.2%} "
            f"2^{np.log2(result.scales[-1]):g}, {sum(result.skipped)} skipped"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recorded", action="store_true", help="no training")
    parser.add_argument("--steps", type=int, default=150, help="of each training (150)")
    options = parser.parse_args()
    print_recorded()
    if not options.recorded:
        print_demonstration(options.steps)
