"""What is private in JAX: if a test fails, a release has moved it.

Fix `_jax_internals.py`. What `_programs/rewrite.py` uses, tests/autocast runs.
"""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import on_mesh
from shared import new_ref

from optax_lossscale import _jax_internals as internals

ONES = jax.device_put(np.ones(8, np.float32))


def test_only_compiled_code_is_staged():
    seen = []

    def note(x):
        seen.append(internals.is_staging())
        return x

    note(1.0)
    jax.vmap(note)(ONES)
    jax.grad(note)(1.0)
    jax.jit(note)(1.0)
    assert seen == [False, False, False, True]


def test_arrays_in_shard_map_vary_along_its_axis():
    def local(x):
        assert internals.varying_axes(x) == {"d"}
        assert internals.varying_axes(internals.varying_like(ONES, x)) == {"d"}
        return x

    jax.eval_shape(on_mesh(local, P("d"), P("d")), ONES)
    assert internals.varying_axes(ONES) == frozenset()


def test_array_waits_for_another():
    [barrier] = jax.make_jaxpr(internals.after)(ONES, 1.0).eqns
    assert barrier.primitive.name == "optimization_barrier" and len(barrier.invars) == 2
    assert internals.after(ONES, 5.0)[0] == 1


@pytest.mark.skipif(not hasattr(jax, "memory"), reason="jax has no memory spaces")
def test_array_moves_into_the_memory_of_another():
    far = jax.device_put(ONES, jax.memory.Space.Host)
    for other in (ONES, far):
        moved = jax.jit(internals.in_memory_of)(2 * ONES, other)
        assert moved.sharding.memory_kind == other.sharding.memory_kind
        assert moved[0] == 2
    assert far.sharding.memory_kind != ONES.sharding.memory_kind


def test_ref_is_not_an_array():
    assert internals.is_ref(new_ref(ONES)) and not internals.is_ref(ONES)


def test_zeros_are_made_of_arrays_and_of_keys():
    zeros = internals.zeros_like_aval(jax.typeof(ONES))
    assert zeros.shape == ONES.shape and not zeros.any()
    key = jax.random.key(0)
    assert internals.zeros_like_aval(jax.typeof(key)).dtype == key.dtype


@pytest.mark.parametrize("check_vma", [True, False])
def test_jax_that_hides_varying_axes_is_refused_in_shard_map(monkeypatch, check_vma):
    """An empty set would let devices decide differently. One device needs none."""

    def renamed(x, name, *default):
        is_hidden = name in ("vma", "manual_axis_type")
        return getattr(object() if is_hidden else x, name, *default)

    monkeypatch.setattr(internals, "getattr", renamed, raising=False)
    assert internals.varying_axes(ONES) == frozenset()
    mapped = on_mesh(internals.varying_axes, P("d"), P(), check_vma=check_vma)
    with pytest.raises(RuntimeError, match="no longer reports .*earlier jax"):
        jax.eval_shape(mapped, ONES)
