"""A float16 model of Flax NNX that changes while it is called."""

import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    """With BatchNorm statistics, and a counter for the keys of its dropout."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(8, 16, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(nnx.relu(self.hidden(x)))))
