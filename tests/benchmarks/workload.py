"""What the benchmarks step: optimizers, and the types of their gradients."""

import optax

OPTIMIZERS = {
    "sgd": optax.sgd(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "clip + adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "lion": optax.lion(1e-3),
}
DTYPES = ["float32", "float16", "bfloat16"]
