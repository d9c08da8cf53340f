"""How many kernels a whole step of a small model launches on a GPU: counted.

    pip install -e '.[plots]' --group cuda && python tests/benchmarks/kernels.py

Small models are bound by launches. The step of a float16 network of layers of 64 units
on 256 rows is compiled for each device, which need not be there. A later XLA may merge
other kernels.
"""

import argparse
import warnings

import jax
import jax.numpy as jnp
import optax
import topology
from count import count, place
from recipes import make_steps

RECIPES = ["plain", "optax_lossscale", "flax", "jmp"]
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "clip + adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def loss_fn(params: list, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float16)
    for w, b in params:
        x = jax.nn.relu(x @ w.astype(jnp.float16) + b.astype(jnp.float16))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", nargs="+", default=["H100"])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 8, 32])
    args = parser.parse_args()
    topology.prepare("cuda")
    warnings.simplefilter("ignore")
    print(f"Counted, not timed: compiled for cuda, jax {jax.__version__}")
    print("| device, arrays, optimizer |", " | ".join(RECIPES), "|")
    for device in args.device:
        sharding = topology.shardings("cuda", device)[-1]
        for layers in args.layers:
            like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
            params = [(like, jax.ShapeDtypeStruct((64,), jnp.float32))] * layers
            x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
            shapes = place((params, x), sharding)
            for name, tx in OPTIMIZERS.items():
                steps = make_steps(RECIPES, tx, loss_fn)
                found = count(steps, *shapes, sharding, "cuda")
                cells = [f"{device}, {2 * layers}, {name}", *(x.kernels for x in found)]
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
