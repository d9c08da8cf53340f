"""Random train steps: good ones are the optimizer's own, bad ones leave no trace."""

import pickle

import chex
import numpy as np
import optax
import pytest
from asserts import assert_same_bits, noted
from random_steps import RandomStep, run, simulate
from shared import slow_but
from simulated_rules import Simulated

import optax_lossscale as ls


# Told where Optax turns a bfloat16 average into float32.
@pytest.mark.filterwarnings("ignore:Every update rounds the state")
@pytest.mark.usefixtures("new_process")  # no loss that is scaled is said not to be
# The quick ones take a step in each place, except eagerly, where it compiles most.
@pytest.mark.parametrize("seed", slow_but(range(1, 7), range(120)))
def test_random_steps_are_the_optimizers_or_leave_no_trace(seed):
    case = RandomStep.draw(seed)
    rule, new_rule = case.rules
    params, simulated = case.make_params(), Simulated(rule)
    with noted(case, "init"):
        state = case.wrapped(rule)[0].init(params)
    params, state = check_steps(case, rule, simulated, params, state, 0)
    if case.event == "pickle":
        state = pickle.loads(pickle.dumps(state))
    elif case.event == "scale":
        simulated.scale = simulated.scale * 4 if seed % 2 else 8.0
        state = optax.tree.set(state, loss_scale=np.float32(simulated.scale))
    elif any(isinstance(x, ls.HeadroomLossScale) for x in case.rules):
        simulated = Simulated(new_rule)
        state = state._replace(scale_state=new_rule.init())
    simulated.rule = new_rule
    check_steps(case, new_rule, simulated, params, state, 1)


def check_steps(case, rule, simulated, params, state, part):
    """Compare some steps, and return the parameters and the state after them."""
    step, plain, batches = case.wrapped(rule)[1], case.plain, case.batches[part]
    rtol = 2.0**-7 if case.tree == "bfloat16" else 2e-5
    with noted(case, f"part {part}"):
        carries = run(case.place, step, (params, state), batches)
    for t, (batch, carry) in enumerate(zip(batches, carries, strict=True)):
        with noted(case, f"step {t} of part {part}"):
            old, new = (params, state.inner_state), (carry[0], carry[1].inner_state)
            expected, largest = plain(old, batch)
            applied = simulate(simulated, case, batch, float(largest))
            simulated.assert_is(carry[1].scale_state)
            if applied:
                chex.assert_trees_all_close(new, expected, rtol=rtol, atol=2e-6)
            else:
                assert_same_bits(new, old)
        params, state = carry
    return params, state
