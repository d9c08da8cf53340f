"""select, and how trees are compared and cast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits
from jax.sharding import PartitionSpec as P
from meshes import EXPLICIT, make_mesh, set_mesh

import optax_lossscale as ls
from optax_lossscale._tree import at_paths_of, cast_like, mismatch


def tree(n):
    return {
        "f16": np.array([n, np.nan, -np.nan, np.inf, -0.0], np.float16),
        "int": np.int32(n),
        "key": jax.random.wrap_key_data(np.full(2, n, np.uint32)),
        "none": None,
        "nested": (optax.MaskedNode(), [np.full((2, 2), n * 1j, np.complex64)]),
    }


def test_select_is_where_on_every_kind_of_leaf(around):
    select = around(ls.select)
    assert_same_bits(select(np.True_, tree(1), tree(2)), tree(1))
    assert_same_bits(select(np.False_, tree(1), tree(2)), tree(2))


def test_select_differentiates_the_chosen_tree():
    gradient = jax.jit(jax.grad(lambda x: ls.select(True, x**2, x**3)))
    assert gradient(3.0) == 6.0


def test_select_takes_equal_functions_and_texts_and_selects_numbers():
    old = {"f": jax.nn.relu, "name": "relu", "n": 1}
    new = {**old, "name": "".join(["re", "lu"]), "n": 2}
    assert ls.select(False, new, old) == old


def test_result_of_select_is_sharded_like_the_new_tree():
    with set_mesh(make_mesh(EXPLICIT, d=2)):
        x = np.ones(4, np.float32)
        whole, split = (jax.sharding.reshard(x, P(axis)) for axis in (None, "d"))
        for new, old in ((whole, split), (split, whole), (split, split), (split, x)):
            for pred in (True, False):
                result = ls.select(pred, new, old)
                assert jax.typeof(result).sharding == jax.typeof(new).sharding
        # NumPy's arrays have no sharding.
        result = ls.select(True, x, split)
        assert jax.typeof(result).sharding == jax.typeof(split).sharding


SHAPES, STRUCTURE = r"the same shapes.* at \['a'\]\. Select", "the same structure"
REFUSED = {
    "other shapes": ({"a": np.ones(())}, {"a": np.ones(1)}, SHAPES),
    "other texts": ({"a": "relu"}, {"a": "tanh"}, SHAPES),
    "function and array": ({"a": jax.nn.relu}, {"a": np.ones(())}, SHAPES),
    "other keys": ({"a": 1.0}, {"b": 1.0}, STRUCTURE),
    "other containers": ([1.0], (1.0,), STRUCTURE),
}


@pytest.mark.parametrize(("new", "old", "words"), REFUSED.values(), ids=REFUSED)
def test_select_refuses_trees_that_do_not_match(new, old, words):
    with pytest.raises(ValueError, match=f"`on_true` and `on_false` must have {words}"):
        ls.select(True, new, old)


MISMATCHES = {
    "none": ({"a": np.ones(2)}, {"a": np.ones(2)}, None),
    "other length": ({"a": np.ones(2)}, {"a": np.ones(3)}, "['a']"),
    "array and number": ({"a": 1.0, "b": np.ones(1)}, {"a": 2, "b": 1.0}, "['b']"),
    "one more": ({"a": 1.0}, {"a": 1.0, "c": 1.0}, "['c']"),
    "other paths": ({"a": 1.0}, [1.0], "[0]"),
}


@pytest.mark.parametrize(("new", "old", "where"), MISMATCHES.values(), ids=MISMATCHES)
@pytest.mark.parametrize("only_shapes", [False, True])
def test_mismatch_is_where_shapes_differ(new, old, where, only_shapes):
    place, *texts = mismatch(new, old, only_shapes=only_shapes) or (None, 1, 2)
    assert place == where and texts[0] != texts[1]


def test_mismatch_of_containers_is_at_the_root_unless_shapes_alone_count():
    place, new, old = mismatch((1.0,), [1.0])
    assert place == "the root" and new != old
    assert mismatch((1.0,), [1.0], only_shapes=True) is None


def test_cast_like_makes_strong_types_and_leaves_what_is_not_an_array():
    x, key = jnp.ones(2), tree(0)["key"]
    leaves = [x, 1.0, jnp.asarray(1.0), np.float16(1), "text", key]
    same, *cast, text, other = cast_like(leaves, [x, x, x, x, "text", key])
    assert same is x and text == "text" and other is key
    assert [(y.dtype, y.weak_type) for y in cast] == [(jnp.float32, False)] * 3


def test_leaves_of_another_tree_are_found_by_their_paths():
    tree, other = {"a": [1, 2]}, {"a": [3, 4], "f": len}
    assert at_paths_of(tree, other) == {"a": [3, 4]}
    assert at_paths_of({"b": 1}, None) == {"b": 0}
