"""What casts save, by hand and by autocast, on a device that is not there: counted.

    pip install -e '.[plots]' --group cuda && python tests/benchmarks/casts.py
    pip install -e '.[plots]' --group tpu && python tests/benchmarks/casts.py \
        --device v5e --dtype bfloat16

A whole train step is compiled for each device: in float32, with casts by hand (all but
norms, softmax and the loss; in the LSTM the products alone), and the float32 program
through `autocast`. In float16 it has a dynamic loss scale. In ``remat``, a
``jax.checkpoint`` around the layers of the ``scan`` decides what is kept, in all three;
``dropout`` is the transformer with relu and a dropout of 0.1. ``--device`` names other
devices, or a mesh such as ``H100:8``, for which only the transformer is meant.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import topology
import transformer
from compiled import transformer_on
from count import count, place
from recipes import DYNAMIC, lossscale

import optax_lossscale as ls

ROW = "{:6}  {:12}  {:8}  {:>8}  {:>12}  {:>7}  {:>9}"


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


def scanned_on(sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> tuple:
    """The transformer with its layers in a ``scan`` that keeps what it needs."""
    params, batch, loss_fn = transformer_on(sharding, dtype)
    params = place(jax.eval_shape(transformer.stacked, params), sharding)
    return params, batch, functools.partial(loss_fn, in_scan=lambda layer: layer)


def remat_on(sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> tuple:
    """The same, but each layer keeps its products and computes the rest again."""
    params, batch, loss_fn = scanned_on(sharding, dtype)
    layer = functools.partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.dots_saveable,
        prevent_cse=False,
    )
    return params, batch, functools.partial(loss_fn, in_scan=layer)


def dropout_on(sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> tuple:
    """The same without a checkpoint, and with relu and dropout."""
    params, batch, loss_fn = scanned_on(sharding, dtype)
    options = {"activation": jax.nn.relu, "dropout": 0.1}
    return params, batch, functools.partial(loss_fn, **options)


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


MODELS = {
    "transformer": (transformer_on, optax.adamw(3e-4)),
    "scanned": (scanned_on, optax.adamw(3e-4)),
    "remat": (remat_on, optax.adamw(3e-4)),
    "dropout": (dropout_on, optax.adamw(3e-4)),
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
    headings = "casts", "MB moved", "MB temporary", "MB sent", "/ float32"
    print(ROW.format("device", "model", *headings))
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
            for x in count(steps, *shapes, sharding, platform):
                figures = x.bytes_moved, x.temporary_bytes, x.collective_bytes
                cells = [f"{n / 1e6:.0f}" for n in figures]
                cells.append(f"{x.bytes_ratio:.2f}")
                print(ROW.format(device, name, x.recipe, *cells), flush=True)


if __name__ == "__main__":
    main()
