"""select."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

import optax_lossscale as ls
from optax_lossscale._tree import at_paths_of, cast_like, mismatch


@pytest.mark.parametrize("jit", [False, True])
def test_select_is_where_on_every_kind_of_leaf(jit):
    select = jax.jit(ls.select) if jit else ls.select

    def tree(n):
        return {
            "f16": jnp.array([n, np.nan, -np.nan, np.inf, -0.0], jnp.float16),
            "int": jnp.int32(n),
            "key": jax.random.key(n),
            "none": None,
            "nested": (optax.MaskedNode(), [jnp.full((2, 2), n * 1j)]),
        }

    assert_same_bits(select(jnp.bool_(True), tree(1), tree(2)), tree(1))
    assert_same_bits(select(jnp.bool_(False), tree(1), tree(2)), tree(2))


def test_the_derivative_of_select_is_that_of_the_chosen_tree():
    assert jax.grad(lambda x: ls.select(True, x**2, x**3))(3.0) == 6.0


@pytest.mark.parametrize("pred", [1, None, jnp.ones(2, bool)])
def test_select_refuses_what_is_not_one_boolean(pred):
    with pytest.raises(ValueError, match="`pred` must be one boolean"):
        ls.select(pred, 1.0, 2.0)


def test_select_passes_on_what_is_no_array():
    tree = {"f": jax.nn.relu, "name": "relu", "n": 1}
    equal = {**tree, "name": "".join(["re", "lu"]), "n": 2}
    result = ls.select(False, equal, tree)
    assert result["f"] is jax.nn.relu and result["name"] == "relu"
    assert int(result["n"]) == 1


@pytest.mark.parametrize(
    ("t", "f"),
    [(jnp.ones(()), jnp.ones(1)), ("relu", "tanh"), (jax.nn.relu, jnp.ones(()))],
)
def test_select_refuses_trees_that_do_not_match(t, f):
    with pytest.raises(ValueError, match=r"the same shapes.* at \['a'\]\. Select"):
        ls.select(True, {"a": t}, {"a": f})
    with pytest.raises(ValueError, match="must have the same structure"):
        ls.select(True, {"a": t}, {"b": t})


MISMATCHES = [
    ({"a": jnp.ones(2)}, {"a": jnp.ones(2)}, None),
    ({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, "['a']"),
    ({"a": 1.0, "b": jnp.ones(1)}, {"a": 2, "b": 1.0}, "['b']"),
    ({"a": 1.0}, {"a": 1.0, "c": 1.0}, "['c']"),
    ({"a": 1.0}, [1.0], "[0]"),
    # The same arrays at the same paths, in other containers.
    ((1.0,), [1.0], "the root"),
]


@pytest.mark.parametrize(("new", "old", "where"), MISMATCHES)
def test_a_mismatch_is_where_shapes_or_containers_differ(new, old, where):
    found = mismatch(new, old)
    assert found is None if where is None else found[0] == where
    assert found is None or found[1] != found[2]


def test_leaves_are_cast_unless_they_have_the_type_strongly():
    x, key = jnp.ones(2), jax.random.key(0)
    tree = [x, 1.0, jnp.asarray(1.0), jnp.float16(1), "text", key]
    like = [x, x, x, x, "text", key]
    same, *cast, text, other = cast_like(tree, like)
    assert same is x and text == "text" and other is key
    assert [(y.dtype, y.weak_type) for y in cast] == [(jnp.float32, False)] * 3


def test_other_leaves_are_found_by_their_paths():
    tree, other = {"a": [1, 2]}, {"a": [3, 4], "f": len}
    assert at_paths_of(tree, other) == {"a": [3, 4]}
    assert at_paths_of({"b": 1}, None) == {"b": 0}
