"""Which optimizers get the mask that only makes updates fast."""

import jax
from every_optimizer import (
    FACTORIES,
    IGNORED_WARNINGS,
    LEFT_OUT,
    VARIANTS,
    grads_for,
    make,
    params_for,
    update,
)

from optax_lossscale._transform.early_mask import suits

NAMES = sorted((FACTORIES.keys() | VARIANTS.keys()) - LEFT_OUT.keys())

# They have loops that may never end, branches, or decompositions that iterate. If
# another one is refused, it is only slow: the list in `early_mask.py` lacks something.
REFUSED = {
    "MultiSteps",
    "optax.apply_if_finite",
    "optax.conditionally_mask",
    "optax.conditionally_transform",
    "optax.contrib.galore",
    "optax.contrib.mechanize",
    "optax.contrib.reduce_on_plateau",
    "optax.contrib.scale_by_galore",
    "optax.contrib.sophia",
    "optax.lbfgs",
    "optax.novograd",
    "optax.scale_by_backtracking_linesearch",
    "optax.scale_by_novograd",
    "optax.scale_by_zoom_linesearch",
}

pytestmark = IGNORED_WARNINGS


def test_all_optimizers_are_fast_but_those_with_branches_and_loops():
    refused = set()
    for name in NAMES:
        tx, params = make(name), params_for(name)
        args = grads_for(name, params), tx.init(params), params
        program = jax.make_jaxpr(lambda *args, n=name, tx=tx: update(n, tx, *args))
        if not suits(program(*args).jaxpr):
            refused.add(name)
    assert refused == REFUSED & set(NAMES)
