"""The layout of the masks: what it computes, what it may not cost, when it yields."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import OPTIMIZERS, grads_for, make, params_for, update
from helpers import assert_same_bits, assert_same_types, without_keys
from jax.experimental import io_callback

import optax_lossscale as ls
from optax_lossscale._transform import masks


def refuse(*args):
    raise RuntimeError("not here")


@pytest.fixture
def plain_layout(monkeypatch):
    """A function that runs another one with the plain layout of the masks."""

    def run(function, *args):
        with monkeypatch.context() as m, pytest.warns(UserWarning, match="slower"):
            m.setattr(masks, "bind", refuse)
            m.setattr(masks, "_maskable", refuse)  # also where there is no equation
            return function(*args)

    return run


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")
@pytest.mark.filterwarnings('ignore:"seed" is deprecated')  # dpsgd takes no key
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_layouts_agree_on_every_optimizer(name, plain_layout):
    tx = ls.with_loss_scaling(make(name))
    start = params_for(name)
    grads = grads_for(name, start)
    bad = {**grads, "b": grads["b"].at[..., 1].set(jnp.nan)}

    def run():
        @jax.jit
        def step(params, state, grads):
            updates, state = update(name, tx, grads, state, params)
            return optax.apply_updates(params, updates), state, updates

        trajectory, params, state = [], start, tx.init(start)
        for g in (grads, bad, grads):
            params, state, updates = step(params, state, g)
            trajectory.append((params, state, updates))
        return trajectory

    actual, expected = run(), plain_layout(run)
    chex.assert_trees_all_close(
        *map(without_keys, (actual, expected)), rtol=2e-5, atol=1e-6
    )
    assert_same_types(actual[-1][1], expected[-1][1])
    (params, state, _), (skipped_params, skipped_state, updates), _ = actual
    assert_same_bits(skipped_params, params)
    assert_same_bits(skipped_state.inner_state, state.inner_state)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))


def transformation(update, *state):
    """A stateful transformation from a function of gradients and states."""

    def update_fn(updates, state, params=None):
        return update(updates, *state)

    return optax.GradientTransformation(lambda params: state, update_fn)


@jax.custom_jvp
def twice(x):
    return 2 * x


@twice.defjvp
def _(primals, tangents):
    return twice(*primals), 2 * tangents[0]


@jax.custom_vjp
def thrice(x):
    return 3 * x


thrice.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))

ONE, TWO = jnp.ones(3), jnp.full(3, 2.0)
INNER = {
    "cond": transformation(
        lambda g, m: jax.lax.cond(
            m[0] > 1, lambda: (g, (m + g,)), lambda: (m, (m - g,))
        ),
        ONE,
    ),
    "while_loop": transformation(
        lambda g, m: (lambda y: (g * y, (y,)))(
            jax.lax.while_loop(lambda y: jnp.sum(y) < 50, lambda y: 2 * y + g, m)
        ),
        ONE,
    ),
    "scan": transformation(
        lambda g, m: (lambda total, y: (y, (total,)))(
            *jax.lax.scan(lambda c, x: (c + x, c * x), m, g)
        ),
        jnp.float32(1),
    ),
    "nested jit": transformation(jax.jit(lambda g, m: (m * g, (m + g,))), ONE),
    "custom derivatives": transformation(
        lambda g, m: (twice(m) + g, (thrice(m + g),)), ONE
    ),
    "key": transformation(
        lambda g, key: (
            g + jax.random.normal(key, g.shape),
            (jax.random.split(key)[0],),
        ),
        jax.random.key(0),
    ),
    "gradient as state": transformation(lambda g, m: (m, (g,)), ONE),
    "passed through": transformation(lambda g, m, n: (g + m, (n, m)), ONE, TWO),
    "constant": transformation(lambda g, m: (m * g, (jnp.zeros(3),)), ONE),
    "numpy constant": transformation(lambda g, m: (m * g, (np.ones(3, "f4"),)), ONE),
    "one value, two leaves": transformation(
        lambda g, m, n: (lambda y: (y * n, (y, y)))(m + g), ONE, TWO
    ),
    "state as update": transformation(lambda g, m: (lambda y: (y, (y,)))(m + g), ONE),
    "another dtype": transformation(
        lambda g, m: (g, (m.astype(jnp.float32) + g,)), ONE.astype(jnp.float16)
    ),
    "weak type": transformation(
        lambda g, m: (g, (jnp.where(g[0] > 0, 1.5, 2.5),)), jnp.float32(1)
    ),
    "stateless": optax.identity(),
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize(
    "transform",
    [
        "jit",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("vmap", "scan", "grad")),
    ],
)
def test_both_layouts_agree_on_every_construct(name, transform, plain_layout):
    tx = ls.with_loss_scaling(INNER[name])
    # A bad step first, while the leaves of the state are still told apart.
    rows = [[jnp.inf, 0, 0], [0.5, 1, 2], [0.5, jnp.nan, 2], [1, 1, 1]]
    grads = jnp.array(rows, jnp.float32)

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (params + updates, state), updates

    def steps(factor):
        carry = ONE, tx.init(ONE)
        for g in grads:
            carry, _ = step(carry, factor * g)
        return carry

    # A while_loop has no reverse mode, a custom_vjp no forward mode.
    derivative = jax.jacrev if name == "custom derivatives" else jax.jacfwd
    function = {
        # A function of its own for each layout: jax would trace a common one once.
        "jit": lambda x: jax.jit(lambda x: steps(x))(x),
        "vmap": lambda x: jax.jit(jax.vmap(lambda x: steps(x)))(jnp.stack([x, 2 * x])),
        "scan": lambda x: jax.lax.scan(
            lambda carry, g: step(carry, g), (ONE, tx.init(ONE)), x * grads
        ),
        "grad": lambda x: jax.jit(derivative(lambda x: steps(x)[0]))(x),
    }[transform]
    actual = function(jnp.float32(1))
    expected = plain_layout(function, jnp.float32(1))
    chex.assert_trees_all_close(*map(without_keys, (actual, expected)), rtol=1e-6)
    if transform != "grad":
        assert_same_types(actual, expected)


def test_effects_happen_once_in_a_step():
    seen = []

    def update(g, m):
        jax.debug.callback(lambda m: seen.append(("debug", float(m[0]))), m)
        total = io_callback(
            lambda m: seen.append(("io", float(m[0]))) or m, m, m, ordered=True
        )
        return g, (total + g,)

    tx = ls.with_loss_scaling(transformation(update, ONE))
    step = jax.jit(lambda g, state: tx.update(g, state))
    _, state = step(ONE, tx.init(ONE))
    step(ONE, state)
    jax.effects_barrier()
    expected = [(kind, m) for m in (1.0, 2.0) for kind in ("debug", "io")]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("with_effect", [False, True])
def test_what_cannot_be_evaluated_again_is_masked_in_the_plain_layout(
    with_effect, monkeypatch
):
    """And says so, because the step is slower then."""
    seen = []

    def update(g, m):
        if with_effect:
            jax.debug.callback(lambda: seen.append(1))
        return m * g, (m + g,)

    bind = masks.bind
    # An equation after the effect is refused.
    monkeypatch.setattr(
        masks,
        "bind",
        lambda eqn, args: refuse() if eqn.primitive.name == "mul" else bind(eqn, args),
    )
    tx = ls.with_loss_scaling(transformation(update, ONE))
    message = r"correct, but slower .*equation by equation \(RuntimeError: not here\)"
    with pytest.warns(UserWarning, match=message):
        updates, state = jax.jit(tx.update)(TWO, tx.init(ONE))
    jax.effects_barrier()
    assert_same_bits((updates, state.inner_state), (TWO, (jnp.full(3, 3.0),)))
    assert seen == [1] * with_effect


def test_an_error_of_the_inner_transformation_is_its_own_and_comes_at_once():
    traces = []

    def update(g, m):
        traces.append(1)
        raise ZeroDivisionError("from the optimizer")

    tx = ls.with_loss_scaling(transformation(update, ONE))
    state = tx.init(ONE)
    traces.clear()
    with pytest.raises(ZeroDivisionError, match="from the optimizer"):
        jax.jit(tx.update)(ONE, state)
    assert len(traces) == 1


LOOKING = {
    "branch": lambda m: 2.0 if m[0] > 0 else 3.0,
    "mask": lambda m: jnp.sum(m[m > 0]) - 1,
    "shape": lambda m: jnp.sum(jnp.ones((m[0],))) + 1,
}


@pytest.mark.parametrize("look", LOOKING.values(), ids=LOOKING)
def test_an_inner_transformation_may_look_at_numbers_where_there_are_some(look):
    """Under eager ``jax.vmap`` what is not mapped is there; in a program nothing is."""
    inner = transformation(lambda g, m: (look(m) * g, (m + 1,)), jnp.ones(3, jnp.int32))
    tx = ls.with_loss_scaling(inner)
    state = tx.init(ONE)
    grads = jnp.array([[1.0, 2.0, 3.0], [1.0, jnp.nan, 3.0]])
    updates, new_state = jax.vmap(tx.update, in_axes=(0, None))(grads, state)
    np.testing.assert_array_equal(updates, [2 * grads[0], jnp.zeros(3)])
    assert new_state.inner_state[0].tolist() == [[2, 2, 2], [1, 1, 1]]
    with pytest.raises((TypeError, IndexError)):
        jax.jit(tx.update)(ONE, state)


GUARDED = ("optax.sgd", "momentum", "optax.adamw", "clip + adamw", "optax.lion")
SHAPE = (64, 128)
guarded = pytest.mark.parametrize(
    "name",
    [
        n if n == "optax.adamw" else pytest.param(n, marks=pytest.mark.slow)
        for n in GUARDED
    ],
)


def compiled(tx, leaves, scanned=False, swapped=False):
    params = {f"p{i}": jnp.full(SHAPE, 0.5) for i in range(leaves)}

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (state, params) if swapped else (params, state)

    def epoch(params, state, batches):
        def body(carry, x):
            def loss(params):
                return sum(jnp.sum((x @ p) ** 2) for p in params.values())

            return step(*carry, jax.grad(loss)(carry[0])), None

        return jax.lax.scan(body, (params, state), batches)[0]

    batch = jnp.ones((3, 2, SHAPE[0])) if scanned else params
    function = jax.jit(epoch if scanned else step, donate_argnums=(0, 1))
    return function.lower(params, tx.init(params), batch).compile()


def full_size_copies(program):
    return len(re.findall(r"= f32\[64,128\]\S* copy\(", program.as_text()))


# Earlier versions of XLA CPU have no library for reductions, which keeps them from
# writing their operands out.
reductions_are_fused = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="needs a newer XLA"
)


# A scanned plain lion frees one gradient before it copies the next moment; whoever
# checks has to have all gradients first.
CASES = [
    pytest.param(n, s, marks=() if "adamw" in n and not s else pytest.mark.slow)
    for n in GUARDED
    for s in (False, True)
    if (n, s) != ("optax.lion", True)
]


@reductions_are_fused
@pytest.mark.parametrize("name, scanned", CASES)
def test_no_memory_beyond_the_plain_step(name, scanned):
    leaves = 16
    plain = compiled(make(name), leaves, scanned)
    masked = compiled(ls.with_loss_scaling(make(name)), leaves, scanned)
    extra = (
        masked.memory_analysis().temp_size_in_bytes
        - plain.memory_analysis().temp_size_in_bytes
    )
    assert extra <= 0.01 * leaves * 4 * np.prod(SHAPE)
    assert full_size_copies(masked) <= full_size_copies(plain)


@reductions_are_fused
def test_the_plain_layout_would_fail_the_guards(plain_layout):
    """So they do measure what they are for."""
    masked = plain_layout(compiled, ls.with_loss_scaling(make("optax.adamw")), 16)
    parameters = 16 * 4 * np.prod(SHAPE)
    assert masked.memory_analysis().temp_size_in_bytes > 0.5 * parameters


@guarded
def test_the_program_grows_linearly_with_the_leaves(name):
    tx = ls.with_loss_scaling(make(name))
    small, large = (len(compiled(tx, n).as_text()) for n in (32, 128))
    assert large < 4.4 * small


@guarded
def test_a_step_never_leaves_the_device(name):
    text = compiled(ls.with_loss_scaling(make(name)), 4).as_text()
    assert not re.search(r"\b(infeed|outfeed|send|recv|callback)\b|S\(5\)", text)


@pytest.mark.parametrize("wrap", [ls.with_loss_scaling, lambda tx: tx])
def test_donating_in_another_order_costs_copies_with_and_without_scaling(wrap):
    tx = wrap(make("optax.adamw"))
    assert full_size_copies(compiled(tx, 4)) == 0
    assert full_size_copies(compiled(tx, 4, swapped=True)) >= 3 * 4


def test_no_check_and_no_mask_where_nothing_is_skipped():
    tx = make("optax.adamw")
    unchecked = ls.with_loss_scaling(tx, ls.FixedLossScale(8.0, skip_nonfinite=False))
    plain, masked = (
        compiled(t, 4).as_text().count("f32[64,128]") for t in (tx, unchecked)
    )
    assert masked == plain


NUMBERS = [-0.0, 0.0, 1.0, -1.5, jnp.inf, -jnp.inf]


@pytest.mark.parametrize("jit", [False, True])
def test_added_to_any_number_a_skipped_update_changes_no_bit(jit):
    """Also of -0.0, to which adding 0.0 makes 0.0."""
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64)
    params = [jnp.array(NUMBERS).astype(dtype) for dtype in dtypes]
    params += [jnp.array([True, False]), jnp.array([-(2**31), 2**31 - 1, 0])]
    tx = ls.with_loss_scaling(optax.identity())
    step = jax.jit(tx.update) if jit else tx.update
    updates, _ = step(params, tx.init(params), params)  # an infinity is among them
    assert [u.dtype for u in updates] == [p.dtype for p in params]
    pairs = zip(params, updates, strict=True)
    new_params = [p | u if p.dtype == bool else p + u for p, u in pairs]
    assert_same_bits(new_params, params)


def test_updates_of_a_type_without_a_zero_are_refused():
    tx = ls.with_loss_scaling(
        transformation(lambda g: (g.astype(jnp.float8_e8m0fnu), ()))
    )
    with pytest.raises(ValueError, match="type that has a zero.*float8_e8m0fnu"):
        tx.update(ONE, tx.init(ONE))


def test_what_addition_itself_changes_can_be_kept():
    """XLA on CPU flushes subnormal numbers, and float32 holds no 2**24 + 1."""
    params = [
        jnp.array([3e-45, 1.0], jnp.float32),
        jnp.array([1e-40, 1.0], jnp.bfloat16),
        jnp.array([2**24 + 1, 1], jnp.int32),
        jnp.array([6e-8, 1.0], jnp.float16),
    ]
    tx = ls.with_loss_scaling(optax.identity())
    grads = [jnp.full(2, jnp.nan)] * 4
    updates, state = tx.update(grads, tx.init(params), params)
    new_params = jax.jit(optax.apply_updates)(params, updates)
    pairs = zip(new_params, params, strict=True)
    flushed = jax.default_backend() == "cpu"
    kept = [np.asarray(p).tobytes() == np.asarray(q).tobytes() for p, q in pairs]
    assert kept == [not flushed, not flushed, False, True]
    assert_same_bits(ls.keep_if_applied(state, new_params, params), params)
