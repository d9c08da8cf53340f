"""What is refused: the call, and the words that name the argument or the way out."""

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
LONG, NO_B, NONE_B = {**GRADS, "b": np.ones(4)}, {"w": GRADS["w"]}, {**GRADS, "b": None}
HALF = jax.tree.map(np.float16, PARAMS)
FLOAT8 = {"w": np.ones(2, jnp.float8_e5m2), "b": np.ones(2, np.float32)}
ADAM, SGD = optax.adamw(0.1), optax.sgd(1.0)
KEY, ONE, TWO = wrap_key_data(np.uint32([0, 0])), np.float32([0]), np.float32([1, 1])
NEVER_SKIPS = ls.FixedLossScale(skip_nonfinite=False)
make, masters, masked = ls.with_loss_scaling, ls.with_master_weights, ls.skip_nonfinite


class UsersRule(ls.LossScale):
    """A rule that starts from any state, and replaces what is in it."""

    def __init__(self, first, rule_state=ONE):
        self.first, self.rule_state = first, rule_state

    def init(self):
        return self.first

    def update(self, state, grads_finite):
        return state.record(grads_finite)._replace(rule_state=self.rule_state)


def init(inner, params=PARAMS, rule=NEVER_SKIPS):
    return make(inner, rule).init(params)


def keep(new, old, many=False):
    state = init(SGD, TWO)
    state = jax.tree.map(lambda x: np.stack([x] * 3), state) if many else state
    return ls.keep_if_applied(state, new, old)


CHAIN = optax.chain(masters(ADAM), optax.scale(0.5))
LAST = r"`with_master_weights` must come last.*with_master_weights\(optax.chain"
CALLS = {
    TypeError: [
        (make, (ls.FixedLossScale(),), "`inner` .*got the rule.*optimizer comes first"),
        (make, (optax.adam,), "`inner` must be .*called as in `with_loss_scaling"),
        (make, (None,), "`inner` must be an Optax .*got None"),
        (masked, (None,), "`inner` must be .*called as in `skip_nonfinite"),
        (masters, (1e-3,), "`inner` must be .*called as in `with_master_weights"),
        (make, (SGD, 128.0), "`rule` must be an instance.*128.0.*from `presets`"),
        (make, (SGD, ls.DynamicLossScale), r"call it: `DynamicLossScale\(...\)"),
        (make, (SGD, ls.presets.deepspeed), r"call it: `deepspeed\(...\)"),
        *((init, (SGD, ONE, UsersRule(x)), "LossScaleState") for x in (None, 8.0)),
    ],
    ValueError: [
        (init, (make(SGD),), "`inner` must not scale losses itself.*Wrap once"),
        (init, (optax.chain(SGD, make(SGD)),), "`inner` must not scale losses itself"),
        (init, (CHAIN, HALF), LAST),
        (init, (optax.MultiSteps(CHAIN, 2), HALF), LAST),
        (masters(SGD).init, (FLOAT8,), r"must not be float8 .*_e5m2 at \['w'\]"),
        (keep, ({"a": TWO}, {"a": ONE, "b": ONE}), "must have the same"),
        (keep, ({"a": TWO}, {"a": ONE}), "must have the same"),
        (keep, (1.0, 2.0, True), "the loss scale of one run.* `jax.vmap`"),
    ],
}
CASES = [(error, *row) for error, rows in CALLS.items() for row in rows]


@pytest.mark.parametrize(
    ("error", "call", "arguments", "words"), CASES, ids=[case[-1] for case in CASES]
)
def test_call_refuses_arguments(error, call, arguments, words):
    with pytest.raises(error, match=words):
        call(*arguments)


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (make, {"check_updates": 1}, "`check_updates` must be True or False, got 1"),
        (make, {"check_updates": True, "rule": NEVER_SKIPS}, "must be False.* skips"),
        (masters, {"dtype": jnp.float64}, "type that JAX has enabled, got float64"),
        (masters, {"dtype": jnp.int32}, "`dtype` must be a floating-point type"),
        (masters, {"dtype": None}, "`dtype` must be a floating-point type"),
    ],
    ids=["not a boolean", "never skips", "float64", "integer", "None"],
)
def test_factory_refuses_options(factory, options, words):
    with pytest.raises(ValueError, match=words):
        factory(SGD, **options)


def changing(old, new, rule=NEVER_SKIPS):
    """An optimizer whose state becomes another one."""
    return make(transformation(lambda u, s: (u, (new,)), old), rule)


def rule_changing(rule_state):
    first = ls.LossScaleState.create(1.0, rule_state=ONE)
    return make(SGD, UsersRule(first, rule_state))


SCALED, COPIED, SKIPS = make(ADAM), masters(ADAM), ls.DynamicLossScale()
APART = r"`{}` and `params` must belong together.*\['b'\].*keep the scale".format
TYPES, SHAPES = r"must keep the types of .* at \[0\]", "must keep the structure and"
FLAG, VALUE = "`grads_finite` must be one boolean", "`value` must be one real number"
KEPT = "an `update` that keeps"
ALIKE = "`optax.apply_updates.*`eqx.apply_updates` makes"
NO_FLAGS = 1.0, "yes", TWO > 0
CHANGES = [(np.int32(0), 0.3, TYPES), (0.0, 0.5j, TYPES), (KEY, 0.3, TYPES)]
CHANGES += [(ONE, TWO, SHAPES), (ONE, (), SHAPES)]
# The transformation, gradients, parameters, extra arguments.
UPDATES = [
    *((SCALED, x, PARAMS, {}, APART("updates")) for x in (NO_B, LONG, NONE_B)),
    (SCALED, GRADS, NO_B, {}, APART("updates")),
    (SCALED, LONG, {**PARAMS, "b": LONG["b"]}, {}, APART("state")),
    (SCALED, GRADS["w"], PARAMS, {}, "of one model and one optimizer"),
    (SCALED, np.float32(0.5), PARAMS, {}, "the loss first: `loss, grads = "),
    *((SCALED, GRADS, PARAMS, {"grads_finite": x}, FLAG) for x in NO_FLAGS),
    *((SCALED, GRADS, PARAMS, {"value": x}, VALUE) for x in (TWO, True, 1j)),
    *(
        (changing(old, new, rule), GRADS, None, {}, words)
        for rule in (SKIPS, NEVER_SKIPS)
        for old, new, words in CHANGES
    ),
    *((rule_changing(x), GRADS, PARAMS, {}, KEPT) for x in ((), TWO)),
    (COPIED, GRADS, None, {}, r"`params` must .*tx.update\(grads, state, params\)"),
    *((COPIED, GRADS, x, {}, ALIKE) for x in ({**HALF, "w": PARAMS["w"]}, PARAMS)),
    (COPIED, [*GRADS.values()], [*HALF.values()], {}, ALIKE),
]


@pytest.mark.parametrize(
    ("tx", "grads", "params", "extra_args", "words"),
    UPDATES,
    ids=[case[-1] for case in UPDATES],
)
def test_update_refuses_what_does_not_fit(tx, grads, params, extra_args, words):
    """Whether the optimizer fails or broadcasts."""
    state = jax.eval_shape(tx.init, HALF if tx is COPIED else PARAMS)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda *x: tx.update(*x, **extra_args), grads, state, params)


def test_update_refuses_arguments_in_the_wrong_place():
    state = SCALED.init(PARAMS)
    with pytest.raises(TypeError, match="all else by name, got .*value=loss"):
        SCALED.update(GRADS, state, PARAMS, np.float32(0.5))
    for wrong in (state.inner_state, state._asdict()):
        with pytest.raises(TypeError, match="`state` must be a .*params.._replace"):
            SCALED.update(GRADS, wrong, PARAMS)


def fails(updates, state, params=None):
    raise ZeroDivisionError("its own")


def calls_wrongly(updates, state, params=None):
    return dict(updates, missing=len(value=3))


@pytest.mark.parametrize("extra_args", [{}, {"value": 3.0}], ids=["none", "value"])
@pytest.mark.parametrize(
    ("update", "words"), [(fails, "its own"), (calls_wrongly, "no keyword arguments")]
)
def test_update_raises_the_optimizers_own_errors(update, words, extra_args):
    """Some of Adafactor's moments have other shapes than the parameters."""
    tx = make(optax.GradientTransformation(optax.adafactor(0.1).init, update))
    with pytest.raises((ZeroDivisionError, TypeError), match=words):
        tx.update(GRADS, tx.init(PARAMS), **extra_args)
