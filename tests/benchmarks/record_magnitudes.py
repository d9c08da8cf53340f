"""Record how large the gradients of four trainings in float32 are, step by step.

``python tests/benchmarks/record_magnitudes.py`` writes ``tests/data/magnitudes.npz``:
for each training the largest magnitude of every step, and of every tenth step how many
elements lie in each octave. ``compare_rules.py`` and the tests replay it.
"""

from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lossscale as ls
from optax_lossscale._demonstration import training as demo

FILE = Path(__file__).parents[1] / "data" / "magnitudes.npz"
STEPS = 3000
EVERY = 10
# The octave [2**e, 2**(e+1)) is counted at e - LOWEST.
LOWEST, HIGHEST = -64, 24


def octaves(grads):
    """Count the elements other than zero in each octave of magnitude."""
    flat = jnp.abs(jnp.concatenate([jnp.ravel(g) for g in jax.tree.leaves(grads)]))
    exponent = jnp.clip(jnp.frexp(flat)[1] - 1, LOWEST, HIGHEST - 1) - LOWEST
    counts = jnp.zeros(HIGHEST - LOWEST, jnp.int32)
    return counts.at[exponent].add(flat > 0)


def run(loss_fn, params, tx, batches):
    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        measured = ls.max_magnitude(grads), octaves(grads)
        return optax.apply_updates(params, updates), opt_state, measured

    opt_state, magnitudes, counts = tx.init(params), [], []
    for number, batch in zip(range(STEPS), batches, strict=False):
        params, opt_state, (magnitude, count) = step(params, opt_state, batch)
        magnitudes.append(float(magnitude))
        if number % EVERY == 0:
            counts.append(np.asarray(count))
    return np.array(magnitudes, np.float32), np.array(counts)


def word_model():
    """The demonstration's network: a mean over half a million labels."""
    positions, rng = demo.load_positions()[0], np.random.default_rng(0)

    def batches():
        while True:
            yield positions[rng.integers(0, len(positions), 512)], 1.0

    return demo.loss_fn, demo.init_params(), optax.adam(1e-3), batches()


def recurrent():
    """A plain recurrent network over letters, with a loss that spikes."""
    text = "".join(topics[name] for name in sorted(topics))
    letters = np.frombuffer(text.encode("ascii", "replace"), np.uint8) % 128
    rng = np.random.default_rng(0)

    def batches():
        while True:
            starts = rng.integers(0, len(letters) - 41, 32)
            yield letters[starts[:, None] + np.arange(41)].astype(np.int32)

    def loss_fn(params, batch):
        def cell(hidden, letter):
            hidden = jnp.tanh(params["in"][letter] + hidden @ params["hidden"])
            return hidden, hidden @ params["out"]

        hidden = jnp.zeros((len(batch), 64))
        _, logits = jax.lax.scan(cell, hidden, batch.T[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch.T[1:]
        ).mean()

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (128, 64)),
        "hidden": 1.5 * jax.random.normal(keys[1], (64, 64)) / 8,
        "out": jax.random.normal(keys[2], (64, 128)) / 8,
    }
    return loss_fn, params, optax.adam(1e-2), batches()


def autoencoder():
    """Curves squeezed through three numbers: a squared error that comes close to 0."""
    at = jnp.linspace(0, 1, 64)

    def batches():
        for key in jax.random.split(jax.random.key(1), STEPS):
            height, place, width = jax.random.uniform(key, (3, 256, 1))
            yield 0.1 * height * jnp.exp(-(((at - place) / (0.2 + width)) ** 2))

    def loss_fn(params, batch):
        x = batch
        for number, (weights, bias) in enumerate(params):
            x = x @ weights + bias
            x = jnp.tanh(x) if number < len(params) - 1 else x
        return jnp.mean(jnp.square(x - batch))

    sizes = [64, 64, 3, 64, 64]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [
        (jax.random.normal(key, (fan_in, fan_out)) * fan_in**-0.5, jnp.zeros(fan_out))
        for key, fan_in, fan_out in zip(keys, sizes, sizes[1:], strict=False)
    ]
    schedule = optax.cosine_decay_schedule(1e-3, STEPS)
    return loss_fn, params, optax.adam(schedule), batches()


def policy_gradient():
    """REINFORCE on a pole to balance: returns, and gradients with them, grow."""

    def move(state, action):
        x, v, angle, w = state
        force = jnp.where(action, 10.0, -10.0)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        push = (force + 0.05 * w**2 * sin) / 1.1
        spin = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speed = push - 0.05 * spin * cos / 1.1
        return jnp.stack(
            [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * w, w + 0.02 * spin]
        )

    def log_probabilities(params, state):
        hidden = jnp.tanh(state @ params["in"])
        return jax.nn.log_softmax(hidden @ params["out"])

    def loss_fn(params, key):
        def episode(key):
            def one(carry, key):
                state, alive = carry
                log_p = log_probabilities(params, state)
                action = jax.random.categorical(key, jax.lax.stop_gradient(log_p))
                state = move(state, action == 1)
                alive &= (jnp.abs(state[0]) < 2.4) & (jnp.abs(state[2]) < 0.21)
                return (state, alive), (log_p[action], alive)

            start, *keys = jax.random.split(key, 201)
            state = jax.random.uniform(start, (4,), minval=-0.05, maxval=0.05)
            _, (log_p, alive) = jax.lax.scan(one, (state, True), jnp.stack(keys))
            returns = jnp.cumsum(alive[::-1])[::-1].astype(jnp.float32)
            return -jnp.sum(log_p * returns * alive)

        return jax.vmap(episode)(jax.random.split(key, 8)).mean()

    def batches():
        yield from jax.random.split(jax.random.key(1), STEPS)

    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "in": jax.random.normal(keys[0], (4, 32)) / 2,
        "out": jax.random.normal(keys[1], (32, 2)) / 8,
    }
    return loss_fn, params, optax.adam(1e-3), batches()


if __name__ == "__main__":
    recorded = {}
    for training in (word_model, recurrent, autoencoder, policy_gradient):
        magnitudes, counts = run(*training())
        recorded[f"{training.__name__}_magnitude"] = magnitudes
        recorded[f"{training.__name__}_octaves"] = counts
        print(training.__name__, np.log2(np.quantile(magnitudes, [0, 0.5, 1])))
    np.savez_compressed(FILE, **recorded)
    print(f"{FILE}: {FILE.stat().st_size} bytes")
