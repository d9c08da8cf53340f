"""A wrapped method is one of its module, in which NNX looks for it."""

import functools
import inspect

import numpy as np
from flax import nnx

from optax_lossscale._flax_internals.bound_methods import wraps

LINEAR = nnx.Linear(2, 1, rngs=nnx.Rngs(0))


def test_wrapped_method_stays_a_method_of_its_module():
    method = functools.partial(LINEAR.__call__)
    wrapped = wraps(method)(lambda x: 2 * method(x))
    assert inspect.ismethod(wrapped) and wrapped.__self__ is LINEAR
    assert inspect.signature(wrapped) == inspect.signature(method)
    x = np.ones((1, 2), np.float32)
    assert wrapped(x) == 2 * LINEAR(x)
    assert not inspect.ismethod(wraps(np.sum)(lambda x: x))
