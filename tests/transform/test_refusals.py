"""What is refused: the call, and the words that name the argument or the way out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.random import wrap_key_data
from training import transformation

import optax_lossscale as ls

PARAMS = {"w": np.linspace(-1, 1, 8, dtype=np.float32), "b": np.float32(1.0)}
GRADS = {"w": np.linspace(-0.5, 1.5, 8, dtype=np.float32), "b": np.float32(1.5)}
HALF = jax.tree.map(np.float16, PARAMS)
FLOAT8 = {"w": np.ones(2, jnp.float8_e5m2), "b": np.ones(2, np.float32)}
ADAM, SGD = optax.adamw(0.1), optax.sgd(1.0)
KEY, ONE, TWO = wrap_key_data(np.uint32([0, 0])), np.float32([0]), np.float32([1, 1])
MLP = eqx.nn.MLP(1, 1, 1, 1, key=KEY)
NEVER_SKIPS = ls.FixedLossScale(skip_nonfinite=False)
wrap, copy, guard = ls.with_loss_scaling, ls.with_master_weights, ls.skip_nonfinite
SCALED, COPIED = wrap(ADAM), copy(ADAM)


class UsersRule(ls.LossScale):
    """A rule that starts from any state, and replaces what is in it."""

    def __init__(self, first, rule_state=ONE):
        self.first, self.rule_state = first, rule_state

    def init(self):
        return self.first

    def update(self, state, grads_finite):
        return state.record(grads_finite)._replace(rule_state=self.rule_state)


def init(inner, params=PARAMS, rule=NEVER_SKIPS):
    return jax.eval_shape(wrap(inner, rule).init, params)


def keep(new, old):
    return ls.keep_if_applied(NEVER_SKIPS.init(), new=new, old=old)


def keep_of_many_runs():
    states = jax.tree.map(lambda x: np.stack([x] * 3), NEVER_SKIPS.init())
    return ls.keep_if_applied(states, new=1.0, old=2.0)


def swapped():
    return SCALED.init(PARAMS), GRADS, PARAMS


CHAIN = optax.chain(COPIED, optax.scale(0.5))
LAST = r"`with_master_weights` must come last.*with_master_weights\(optax.chain"
CALLS = {
    TypeError: [
        (lambda: wrap(NEVER_SKIPS), "`inner` .*got the rule.*optimizer comes first"),
        (lambda: wrap(optax.adam), "`inner` must be .*called as in `with_loss_scaling"),
        (lambda: wrap(SGD, init_scale=8.0), r"'init_scale'.*LossScale\(init_scale="),
        (lambda: wrap(None), "`inner` must be an Optax .*got None"),
        (lambda: guard(None), "`inner` must be .*called as in `skip_nonfinite"),
        (lambda: copy(1e-3), "`inner` must be .*called as in `with_master_weights"),
        (lambda: wrap(SGD, 128.0), "`rule` must be an instance.*128.0.*from `presets`"),
        (lambda: wrap(SGD, ls.DynamicLossScale), r"call it: `DynamicLossScale\(...\)"),
        (lambda: wrap(SGD, ls.presets.deepspeed), r"call it: `deepspeed\(...\)"),
        (lambda: init(SGD, ONE, UsersRule(8.0)), "LossScaleState"),
        (lambda: ls.keep_if_applied(ONE, TWO, ONE), "`: .*opt_state, new=new, old=old"),
        (lambda: SCALED.init(MLP), r"hold only arrays.*eqx.filter\(model, eqx.is_inex"),
        (lambda: SCALED.update(*swapped()), r"Call `tx.update\(grads, state, params"),
    ],
    ValueError: [
        (lambda: init(SCALED), "`inner` must not scale losses itself.*one wrapper"),
        (lambda: init(optax.chain(SGD, SCALED)), "`inner` must not scale losses"),
        (lambda: init(CHAIN, HALF), LAST),
        (lambda: init(optax.MultiSteps(CHAIN, 2), HALF), LAST),
        (lambda: COPIED.init(FLOAT8), r"must not be float8 .*_e5m2 at \['w'\]"),
        (lambda: keep({"a": TWO}, {"a": ONE, "b": ONE}), "^`new` and `old` must"),
        (
            lambda: keep({"a": TWO}, {"a": np.float32([0, 0, 0])}),
            "^`new` and `old` must",
        ),
        (lambda: ls.keep_if_applied(ONE, new=TWO, old=ONE), "call is `keep_if"),
        (keep_of_many_runs, "the loss scale of one run.* `jax.vmap`"),
        (lambda: wrap(SGD, check_updates=1), "must be True or False, got 1"),
        (lambda: wrap(SGD, NEVER_SKIPS, check_updates=True), "must be False.* skips"),
        (lambda: copy(SGD, dtype=jnp.float64), "that JAX has enabled, got float64"),
        (lambda: copy(SGD, dtype=None), "`dtype` must be a floating-point dtype"),
        (lambda: copy(SGD, dtype=PARAMS), "`dtype` must be a floating-point dtype"),
        (lambda: ls.FixedLossScale(ls.suggest_loss_scale(GRADS)), "its `.loss_scale`"),
    ],
}
CASES = [(error, *row) for error, rows in CALLS.items() for row in rows]


@pytest.mark.parametrize(
    ("error", "call", "words"), CASES, ids=[case[-1] for case in CASES]
)
def test_call_refuses_arguments(error, call, words):
    with pytest.raises(error, match=words):
        call()


NO_B, NONE_B = {"w": GRADS["w"]}, {**GRADS, "b": None}
LONG, LONG_PARAMS = {**GRADS, "b": np.ones(4)}, {**PARAMS, "b": np.ones(4)}
HALF_B = {**HALF, "w": PARAMS["w"]}
UPDATES_APART = r"`updates` and `params` must belong together.*\['b'\].*keep the scale"
STATE_APART = r"`state` and `params` must belong together.*\['b'\].*keep the scale"
FLAG, VALUE = "`grads_finite` must be one boolean", "`value` must be one real number"
ALIKE = "`optax.apply_updates.*`eqx.apply_updates` makes"
# The transformation, gradients, parameters and extra arguments.
UPDATES = [
    (SCALED, NO_B, PARAMS, {}, UPDATES_APART),
    (SCALED, LONG, PARAMS, {}, UPDATES_APART),
    (SCALED, NONE_B, PARAMS, {}, UPDATES_APART),
    (SCALED, GRADS, NO_B, {}, UPDATES_APART),
    (SCALED, LONG, LONG_PARAMS, {}, STATE_APART),
    (SCALED, GRADS["w"], PARAMS, {}, "of one model and one optimizer"),
    (SCALED, np.float32(0.5), PARAMS, {}, "the loss first: `loss, grads = "),
    (SCALED, (np.float32(0.5), GRADS), PARAMS, {}, "the loss first: `loss, grads ="),
    (SCALED, GRADS, PARAMS, {"grads_finite": TWO > 0}, FLAG),
    (SCALED, GRADS, PARAMS, {"value": TWO}, VALUE),
    (COPIED, GRADS, None, {}, r"`params` must .*tx.update\(grads, state, params\)"),
    (COPIED, GRADS, HALF_B, {}, ALIKE),
    (COPIED, GRADS, PARAMS, {}, ALIKE),
    (COPIED, [*GRADS.values()], [*HALF.values()], {}, ALIKE),
]


@pytest.mark.parametrize(
    ("tx", "grads", "params", "extra_args", "words"),
    UPDATES,
    ids=[case[-1] for case in UPDATES],
)
def test_update_refuses_what_does_not_fit(tx, grads, params, extra_args, words):
    """Also if wrong shapes would broadcast."""
    state = jax.eval_shape(tx.init, HALF if tx is COPIED else PARAMS)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda *x: tx.update(*x, **extra_args), grads, state, params)


TYPES, SHAPES = r"must keep the dtypes of .* at \[0\]", "must keep the structure and"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (np.int32(0), 0.3, TYPES),
        (0.0, 0.5j, TYPES),
        (KEY, 0.3, TYPES),
        (ONE, TWO, SHAPES),
        (ONE, (), SHAPES),
    ],
    ids=["integer", "real number", "key", "shape", "structure"],
)
@pytest.mark.parametrize(
    "rule", [ls.DynamicLossScale(), NEVER_SKIPS], ids=["skips", "never skips"]
)
def test_update_refuses_an_optimizer_that_changes_types_or_shapes_of_its_state(
    old, new, words, rule
):
    tx = wrap(transformation(lambda u, s: (u, (new,)), old), rule)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(tx.update, ONE, tx.init(ONE))


@pytest.mark.parametrize("rule_state", [(), TWO], ids=["structure", "shape"])
def test_update_refuses_a_rule_that_changes_shapes_of_its_state(rule_state):
    first = ls.LossScaleState.create(1.0, rule_state=ONE)
    tx = wrap(SGD, UsersRule(first, rule_state))
    with pytest.raises(ValueError, match="an `update` that keeps"):
        jax.eval_shape(tx.update, ONE, tx.init(ONE))


def test_update_refuses_a_loss_without_its_name():
    with pytest.raises(TypeError, match="by name, got .* by position.*value=loss"):
        SCALED.update(GRADS, SCALED.init(PARAMS), PARAMS, np.float32(0.5))


def test_update_refuses_the_inner_state_and_a_dict():
    state = SCALED.init(PARAMS)
    for wrong in (state.inner_state, state._asdict()):
        with pytest.raises(TypeError, match="`state` must be a .*params.._replace"):
            SCALED.update(GRADS, wrong, PARAMS)


def test_update_refuses_the_state_of_another_optimizer_with_the_same_arrays():
    """It names the state, where Optax counts updates and states."""
    state = wrap(optax.adam(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match="`state` and `params` must belong together"):
        SCALED.update(GRADS, state, PARAMS)


def test_error_names_an_earlier_import_of_the_type_that_it_asks_for():
    """As after `importlib.reload`."""
    names = {"__module__": ls.__name__}
    earlier = type("WithLossScalingState", (), names)()
    for call in (ls.get_loss_scale, lambda state: SCALED.update(GRADS, state)):
        words = "got a WithLossScalingState of an earlier import .*: restart Python"
        with pytest.raises((TypeError, ValueError), match=words):
            call(earlier)


def fails(updates, state, params=None):
    raise ZeroDivisionError("its own")


def calls_wrongly(updates, state, params=None):
    return dict(updates, missing=len(value=3))


@pytest.mark.parametrize(
    ("update", "words"), [(fails, "its own"), (calls_wrongly, "no keyword arguments")]
)
def test_update_raises_the_optimizers_own_errors(update, words):
    """Though Adafactor's moments have other shapes, as of other parameters."""
    tx = wrap(optax.GradientTransformation(optax.adafactor(0.1).init, update))
    with pytest.raises((ZeroDivisionError, TypeError), match=words):
        tx.update(GRADS, tx.init(PARAMS), value=3.0)
