"""What casts save, by hand and by autocast, on a device that is not there: counted.

    pip install -e '.[plots]' --group cuda && python tests/benchmarks/casts.py
    pip install -e '.[plots]' --group tpu && python tests/benchmarks/casts.py \
        --device v5e --dtype bfloat16

A whole train step is compiled for each device: in float32, with casts by hand (all but
norms, softmax and the loss; in the LSTM the products alone), and the float32 program
through `autocast`. In float16 it has a dynamic loss scale. It prints the rows of the
page on casts: memory traffic / temporary memory in MB, and what `autocast` has of that
in float32. A checkpoint is in all three, and keeps the products if its row does not say
otherwise. ``--device`` names other devices, or a mesh such as ``H100:8``, where
``--model scan`` has a checkpoint that keeps nothing.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import topology
import transformer
from compiled import transformer_on
from count import count, place
from recipes import DYNAMIC, lossscale

import optax_lossscale as ls


def network_on(sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> tuple:
    """A convolution network with normalization over the batch, of 3 x 3 filters."""
    widths = [3, 64, 64, 128, 128, 256, 256, 256]

    def init() -> list:
        pairs = itertools.pairwise(widths)
        return [(jnp.zeros((3, 3, i, o)), jnp.ones(o), jnp.zeros(o)) for i, o in pairs]

    def loss_fn(params: list, batch: tuple) -> jax.Array:
        images, targets = batch
        x = images.astype(dtype)
        for i, (kernel, gain, bias) in enumerate(params):
            stride = (1 + i % 2,) * 2
            x = jax.lax.conv_general_dilated(
                *(x, kernel.astype(dtype), stride, "SAME"),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            wide = x.astype(jnp.float32)
            centered = wide - wide.mean((0, 1, 2))
            normal = centered * jax.lax.rsqrt((centered**2).mean((0, 1, 2)) + 1e-5)
            x = jax.nn.relu(normal * gain + bias).astype(dtype)
        return jnp.mean((x.astype(jnp.float32).mean((1, 2)) - targets) ** 2)

    batch = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((64, 64, 64, 3), (64, widths[-1]))
    ]
    return *place((jax.eval_shape(init), batch), sharding), loss_fn


def transformer_in(
    sharding: jax.sharding.Sharding,
    dtype: jnp.dtype,
    scan: bool = False,
    around_loss: Callable[[Callable], Callable] = lambda loss_fn: loss_fn,
    **options: Any,
) -> tuple:
    """The transformer with its layers in a Python loop or in a ``scan``."""
    params, batch, loss_fn = transformer_on(sharding, dtype)
    if scan and isinstance(params["layers"], list):
        params = place(jax.eval_shape(transformer.stacked, params), sharding)
    return params, batch, around_loss(functools.partial(loss_fn, **options))


def lstm_on(sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> tuple:
    """An LSTM of 1,024 units, over 64 steps of 64 rows."""
    width, batch = 1024, jax.ShapeDtypeStruct((64, 64, 1024), jnp.float32)

    def init() -> dict:
        return {"w": jnp.zeros((2 * width, 4 * width)), "b": jnp.zeros(4 * width)}

    def loss_fn(params: dict, batch: jax.Array) -> jax.Array:
        def step(carry: tuple, x: jax.Array) -> tuple:
            h, c = carry
            inputs = jnp.concatenate([x, h], axis=1)
            gates = inputs.astype(dtype) @ params["w"].astype(dtype)
            i, f, g, o = jnp.split(gates.astype(jnp.float32) + params["b"], 4, axis=1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros(batch.shape[1:])
        return jnp.mean(jax.lax.scan(step, (zeros, zeros), batch)[1] ** 2)

    return *place((jax.eval_shape(init), batch), sharding), loss_fn


products_kept = functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
)
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Python loop": {},
    "loop, checkpoint of the loss": {"around_loss": products_kept},
    "loop, checkpoint of each layer": {"around_layer": products_kept},
    "scan": {"scan": True},
    "scan, checkpoint of each layer": {
        "scan": True,
        "around_layer": functools.partial(products_kept, prevent_cse=False),
    },
    "scan, checkpoint that keeps nothing": {
        "scan": True,
        "around_layer": functools.partial(jax.checkpoint, prevent_cse=False),
    },
    "scan, relu and dropout": dict(scan=True, activation=jax.nn.relu, dropout=0.1),
}
MODELS = {
    **{
        name: (functools.partial(transformer_in, **options), optax.adamw(3e-4))
        for name, options in TRANSFORMERS.items()
    },
    "LSTM": (lstm_on, optax.adamw(3e-4)),
    "convolutions": (network_on, optax.sgd(0.1, momentum=0.9)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", nargs="+", default=["T4", "H100"])
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    args = parser.parse_args()
    is_tpu = args.device[0].partition(":")[0] in topology.TPUS
    platform = "tpu" if is_tpu else "cuda"
    topology.prepare(platform)
    print(f"Counted, not timed: compiled for {platform}, jax {jax.__version__}")
    print("| device, program | float32 | manual casts | `ls.autocast` |", end=" ")
    print("relative to float32 |")
    for device in args.device:
        sharding = topology.shardings(platform, device)[-1]
        for name in args.model:
            make, optimizer = MODELS[name]
            *shapes, plain = make(sharding, jnp.dtype("float32"))
            *_, by_hand = make(sharding, jnp.dtype(args.dtype))
            losses = {
                "float32": plain,
                "by hand": by_hand,
                "autocast": ls.autocast(plain, args.dtype),
            }
            rule = DYNAMIC if args.dtype == "float16" else ls.FixedLossScale(1.0)
            steps = {
                key: lossscale(optimizer, loss, rule) for key, loss in losses.items()
            }
            results = count(steps, *shapes, sharding, platform)
            figures = [(x.bytes_moved, x.temporary_bytes) for x in results]
            cells = [f"{x / 1e6:,.0f} / {y / 1e6:,.0f}" for x, y in figures]
            shares = [x / y for x, y in zip(figures[2], figures[0], strict=True)]
            cells.append("{:.2f} / {:.2f}".format(*shares))
            print("|", " | ".join([f"{device}, {name}", *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
