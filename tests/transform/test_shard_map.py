"""Where every device has gradients of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from devices import (
    ADAM,
    BAD_X,
    PARAMS,
    RULE,
    alone,
    assert_agree,
    like_params,
    loss_fn,
    vary,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import train, transformation

import optax_lossscale as ls


def test_parameters_and_moments_in_shards_equal_one_device():
    """Gather the weights, scatter the gradients; each device updates its own rows."""
    tx = ls.with_loss_scaling(ADAM, RULE, axis_name="d")
    specs = {"w": P("d"), "b": P()}
    state_specs = like_params(tx, specs, P())

    def step(params, state, x):
        whole = {
            "w": jax.lax.all_gather(params["w"], "d", tiled=True),
            "b": vary(params["b"], "d"),
        }
        _, grads = ls.value_and_grad(loss_fn, state)(whole, x)
        grads = {
            "w": jax.lax.psum_scatter(grads["w"], "d", tiled=True) / 8,
            "b": jax.lax.pmean(grads["b"], "d"),
        }
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = on_mesh(step, (specs, state_specs, P("d")), (specs, state_specs))
    params, state = train(step, PARAMS, tx.init(PARAMS), BAD_X)
    sharding = NamedSharding(make_mesh(d=8), P("d"))
    assert state.inner_state[0].mu["w"].sharding.is_equivalent_to(sharding, 2)
    assert int(state.scale_state.skipped_steps) == 1
    assert_agree((params, state), alone(BAD_X))


@pytest.mark.parametrize(("axis_name", "axes"), [(None, "'d', 'e'"), ("d", "'e'")])
@pytest.mark.parametrize("through", ["grads", "grads_finite", "value", "params"])
def test_devices_that_would_decide_differently_are_refused(axis_name, axes, through):
    tx = ls.with_loss_scaling(
        ADAM, RULE, axis_name=axis_name, check_updates=through == "params"
    )

    def step(params, state, x):
        grads, extra_args = params, {}
        if through == "grads":
            grads = jax.tree.map(lambda p: p * x[0], params)
        elif through == "params":
            params = jax.tree.map(lambda p: p * x[0], params)
        else:
            extra_args[through] = x[0] if through == "value" else x[0] > 0
        return tx.update(grads, state, params, **extra_args)

    step = on_mesh(step, (P(), P(), P(("d", "e"))), P(), make_mesh(d=2, e=4))
    with pytest.raises(ValueError, match=rf"`axis_name` must name every .*\[{axes}\]"):
        jax.eval_shape(step, PARAMS, tx.init(PARAMS), np.ones(8, np.float32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_with_models_of_their_own_skip_alone(check_vma):
    """And all of them reach a collective, even in a loop of the optimizer.

    With ``check_vma=False`` jax does not know what varies, and nothing is refused.
    """
    ones = np.ones(3, np.float32)

    def update(g, m):
        largest = jax.lax.fori_loop(
            0, m[0].astype(int), lambda i, x: 0 * x + jax.lax.pmax(x, "d"), jnp.sum(m)
        )
        return g * largest, (m + 1,)

    tx = ls.with_loss_scaling(transformation(update, ones))

    def on_each(losses, state):
        loss, state = jax.tree.map(lambda x: x[0], (losses, state))
        return jax.tree.map(lambda x: x[None], tx.update(ones, state, value=loss))

    step = on_mesh(on_each, P("d"), P("d"), make_mesh(d=4), check_vma=check_vma)
    states = jax.vmap(tx.init)(np.stack([ones] * 4))  # as the error says
    updates, states = step(np.float32([1.0, np.nan, 1.0, 1.0]), states)
    assert np.asarray(updates)[:, 0].tolist() == [3.0, 0.0, 3.0, 3.0]
    assert states.scale_state.skipped_steps.tolist() == [0, 1, 0, 0]


def test_devices_that_skip_alone_may_share_a_leaf_of_the_state():
    """After the step the leaf differs, because not every device has applied it."""
    ones = np.ones(3, np.float32)
    tx = ls.with_loss_scaling(transformation(lambda g, m: (g, (m + 1,)), ones))

    def on_each(losses, scale_states, shared):
        loss, scale_state = jax.tree.map(lambda x: x[0], (losses, scale_states))
        state = ls.WithLossScalingState(scale_state, shared)
        state = tx.update(ones, state, value=loss)[1]
        return state.inner_state[0][None]

    step = on_mesh(on_each, (P("d"), P("d"), P()), P("d"), make_mesh(d=2))
    state = tx.init(ones)
    scale_states = jax.tree.map(lambda x: np.stack([x] * 2), state.scale_state)
    new = step(np.float32([1.0, np.nan]), scale_states, state.inner_state)
    assert (np.asarray(new) - ones)[:, 0].tolist() == [1.0, 0.0]
