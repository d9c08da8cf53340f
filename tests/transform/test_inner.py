"""How the transformation calls the inner one, and what it refuses of it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ls

PARAMS = {"w": jnp.arange(4.0), "b": jnp.ones(())}


GRADS = {"w": jnp.array([0.5, -1.0, 2.0, 0.25]), "b": jnp.float32(0.125)}


def test_extra_arguments_that_the_inner_transformation_does_not_know_are_dropped():
    tx = ls.with_loss_scaling(optax.sgd(0.1))
    tx.update(GRADS, tx.init(PARAMS), PARAMS, unheard_of=1)


def test_params_may_be_left_out_where_the_inner_transformation_allows_it():
    tx = ls.with_loss_scaling(optax.sgd(0.1))
    tx.update(GRADS, tx.init(PARAMS))


def monitor():
    if hasattr(optax, "monitor"):  # from optax 0.2.7
        return optax.monitor({"sum": optax.tree.sum})
    return optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (u, (1.0,)))


def test_a_state_that_changes_its_structure_is_refused_by_name():
    tx = ls.with_loss_scaling(monitor())
    with pytest.raises(
        ValueError,
        match=r"`inner` must keep the structure of its state.*"
        "`optax.monitor`",
    ):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    "grads, where",
    [
        (
            {"w": GRADS["w"]},
            r"no array at \[0\].mu\['b'\], and `state` has .* shape \(\)",
        ),
        (
            {**GRADS, "new": 1.0},
            r"shape \(\) at \[0\].mu\['new'\], and `state` has none",
        ),
        ({**GRADS, "b": jnp.ones(4)}, r"shape \(4,\) at \[0\].mu\['b'\], .*\(\)"),
        (list(GRADS.values()), r"no array at \[0\].mu\['b'\]"),
    ],
)
def test_gradients_of_another_model_are_refused(grads, where, jit):
    tx = ls.with_loss_scaling(optax.adam(0.1))
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError, match=f"`updates` and `state` must belong.*{where}"):
        update(grads, tx.init(PARAMS), PARAMS)


def test_parameters_of_another_model_are_refused():
    tx = ls.with_loss_scaling(optax.adamw(0.1))
    with pytest.raises(ValueError, match="`params` and `state` must belong together"):
        tx.update(GRADS, tx.init(PARAMS), {"w": PARAMS["w"]})


def test_the_state_of_another_optimizer_is_refused():
    tx = ls.with_loss_scaling(optax.adam(0.1))
    state = tx.init(PARAMS)._replace(inner_state=optax.sgd(0.1, 0.9).init(PARAMS))
    with pytest.raises(ValueError, match="`params` and `state` must belong together"):
        tx.update(GRADS, state, PARAMS)


def test_a_state_that_grows_is_refused():
    inner = optax.GradientTransformation(
        lambda p: jnp.zeros(1), lambda u, s, p=None: (u, jnp.append(s, 1.0))
    )
    tx = ls.with_loss_scaling(inner)
    with pytest.raises(ValueError, match=r"`inner` must keep the shapes of its state"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_an_error_of_the_inner_transformation_on_a_good_tree_is_its_own():
    def update(updates, state, params=None):
        raise KeyError("its own")

    inner = optax.GradientTransformation(optax.adam(0.1).init, update)
    tx = ls.with_loss_scaling(inner)
    with pytest.raises(KeyError, match="its own"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_an_error_about_per_example_gradients_is_its_own():
    """Their shapes are not those of the parameters, as it should be."""
    private = optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
    tx = ls.with_loss_scaling(optax.chain(private, optax.adam(0.1)))
    per_example = jax.tree.map(lambda g: jnp.stack([g, g]), GRADS)
    tx.update(per_example, tx.init(PARAMS), PARAMS)

    def update(updates, state, params=None):
        raise KeyError("its own")

    tx = ls.with_loss_scaling(optax.GradientTransformation(optax.adam(1).init, update))
    with pytest.raises(KeyError, match="its own"):
        tx.update(per_example, tx.init(PARAMS), PARAMS)
    tx = ls.with_loss_scaling(optax.adam(0.1))  # and where nothing was raised it is not
    with pytest.raises(ValueError, match="`updates` and `state` must belong together"):
        tx.update(per_example, tx.init(PARAMS), PARAMS)
