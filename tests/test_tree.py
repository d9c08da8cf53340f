"""select."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asserts import assert_same_bits

import optax_lossscale as ls


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
