"""The masked update: what a skipped step keeps, whatever the optimizer computes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import with_a_branch
from helpers import (
    assert_close,
    assert_same_bits,
    slow_but,
    transformation,
)
from jax.experimental import io_callback

import optax_lossscale as ls
from optax_lossscale._transform import masks

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:. of . parameters are float16")

NUMBERS = [-0.0, 0.0, 1.0, -1.5, jnp.inf, -jnp.inf]
ZERO, ONE, TWO = jnp.zeros(3), jnp.ones(3), jnp.full(3, 2.0)
BAD = jnp.array([1.0, jnp.nan, 2.0])
ADAM = optax.adam(0.1)


def test_added_to_any_number_a_skipped_update_changes_no_bit():
    """Also of -0.0, to which adding 0.0 makes 0.0."""
    dtypes = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64)
    params = [jnp.array(NUMBERS).astype(dtype) for dtype in dtypes]
    params += [jnp.array([True, False]), jnp.array([-(2**31), 2**31 - 1, 0])]
    tx = ls.with_loss_scaling(optax.identity())
    # An infinity is among them.
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert [u.dtype for u in updates] == [p.dtype for p in params]
    pairs = zip(params, updates, strict=True)
    new_params = [p | u if p.dtype == bool else p + u for p, u in pairs]
    assert_same_bits(new_params, params)


def test_updates_of_a_type_without_a_zero_are_refused():
    to_e8m0 = optax.stateless(lambda g, params: g.astype(jnp.float8_e8m0fnu))
    tx = ls.with_loss_scaling(to_e8m0)
    with pytest.raises(ValueError, match="type that has a zero.*float8_e8m0fnu"):
        tx.update(ONE, tx.init(ONE))


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


def finite(x):
    assert np.isfinite(x).all() and np.all(x != 0)
    return 1 / x


def called(x):
    return jax.pure_callback(finite, x, x, vmap_method="sequential")


def loop(x):
    return jax.lax.while_loop(lambda y: y < 9.0, lambda y: y + jnp.abs(x) + 0.1, 0.0)


def in_a_loop(f, x):
    return jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, f(x)), (0, jnp.zeros_like(x))
    )[1]


def in_a_branch(f, x):
    return jax.lax.cond(x > 0, lambda: f(x), lambda: -x)


def in_a_scan(f, x):
    return jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0]


def noted(x):
    jax.debug.callback(lambda x: None, x)
    return x


def in_place(x):
    own = jax.new_ref(x)
    own[...] = own[...] * 2
    return own[...]


# What an optimizer multiplies gradients by, from them and its state. These end on any
# numbers, so a leaf of the state is masked where it is defined:
SAFE = {
    "arithmetic": lambda g, m: g / jnp.linalg.norm(m),
    "custom_jvp": lambda g, m: twice(m) + g,
    "jit": lambda g, m: jax.jit(jnp.sin)(m + g),
    "scan": lambda g, m: in_a_scan(jnp.sin, m + g),
}
# These may not: their inputs are sanitized, and the masks stand at the end.
UNSAFE = {
    "branch": lambda g, m: in_a_branch(jnp.sin, m[0] + g[0]),
    "callback": lambda g, m: called(m),
    "callback in a loop": lambda g, m: in_a_loop(called, g),
    "custom_vjp": lambda g, m: thrice(m + g),
    "debug callback": lambda g, m: noted(m),
    "eigenvalues": lambda g, m: jnp.linalg.eigvalsh(jnp.diag(g + m)),
    "loop": lambda g, m: loop(m[0]),
    "loop in a branch": lambda g, m: in_a_branch(loop, m[1]),
    "loop in a loop": lambda g, m: in_a_loop(loop, g[1]),
    "loop in a scan": lambda g, m: in_a_scan(loop, g[1]),
    "loop in jit": lambda g, m: jax.jit(loop)(m[0]),
    "ordered callback": lambda g, m: io_callback(finite, m, m + g, ordered=True),
    "singular values": lambda g, m: jnp.linalg.norm(jnp.diag(g + m), 2),
}
if hasattr(jax, "new_ref"):  # which has another name in earlier versions
    UNSAFE["mutable array"] = lambda g, m: in_place(g + m)


def multiplies(factor):
    return transformation(lambda g, m: (g * factor(g, m + 1), (m + 1,)), ZERO)


def same_value(g, m, n):
    y = m + g
    return y * n, (y, y)


def last_of_a_scan(g, m):
    last, updates = jax.lax.scan(lambda c, x: (c + x, c * x), m, g)
    return updates, (last,)


# What an equation may not define, or what a mask may not change.
STATES = {
    "constant": (lambda g, m: (m * g, (jnp.zeros(3),)), ONE),
    "gradient": (lambda g, m: (m, (g,)), ONE),
    "key": (
        lambda g, key: (g * jax.random.uniform(key), (jax.random.split(key)[0],)),
        jax.random.key(0),
    ),
    "none": (lambda g: (g, ()),),
    "numpy constant": (lambda g, m: (m * g, (np.ones(3, "f4"),)), ONE),
    "other type": (lambda g, m: (g, (m.astype("f4") + g,)), ONE.astype("f2")),
    "passed through": (lambda g, m, n: (g + m, (n, m)), ONE, TWO),
    "same value twice": (same_value, ONE, TWO),
    "scanned": (last_of_a_scan, ONE[0]),
    "weakly typed": (lambda g, m: (g, (jnp.where(g[0] > 0, 1.5, 2.5),)), ONE[0]),
}
INNER = {
    **{name: multiplies(factor) for name, factor in (SAFE | UNSAFE).items()},
    **{name: transformation(*state) for name, state in STATES.items()},
}
QUICK = ("arithmetic", "callback", "loop in a loop", "same value twice", "scan")

# Bad steps come first, while the leaves of the state are still told apart.
ROWS = jnp.array([[0.5, 1, 2], [0.5, 1, 2], [1, 1, 1], [1, 1, 1]])
NOISES = jnp.array([[jnp.inf, 0, 0], [0, 0, 0], [0, jnp.nan, 0], [0, 0, 0]])


def trained(tx, x, rows=ROWS, noises=NOISES):
    """Parameters and inner states after each step, stacked."""

    def step(carry, batch):
        params, state = carry
        row, noise = batch
        updates, state = tx.update(x * row + noise, state, params)
        params += updates
        return (params, state), (params, getattr(state, "inner_state", state))

    return jax.lax.scan(step, (ONE, tx.init(ONE)), (rows, noises))[1]


def typed(inner):
    """The same, which keeps the types of its state as `with_loss_scaling` does."""

    def update(updates, state, params=None):
        updates, new = inner.update(updates, state, params)
        return updates, jax.tree.map(lambda n, old: n.astype(old.dtype), new, state)

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.filterwarnings("ignore:Every update rounds the state")  # the other type
@pytest.mark.parametrize("transform", slow_but(("jit",), ("jit", "vmap", "grad")))
@pytest.mark.parametrize("name", slow_but(QUICK, INNER))
def test_a_skipped_step_is_as_if_it_had_not_been(name, transform):
    """Whatever the optimizer computes, in both layouts, with `check_updates` or not."""
    inner = INNER[name]
    forward_only = name == "ordered callback" and transform != "jit"
    if forward_only or ("callback" in name and transform == "grad"):
        pytest.skip("does not work unwrapped")
    both = [ls.with_loss_scaling(inner, check_updates=c) for c in (False, True)]
    both.append(ls.with_loss_scaling(with_a_branch(inner)))

    def run(x):
        expected = trained(typed(inner), x, ROWS[1::2], NOISES[1::2])
        return [trained(tx, x) for tx in both], expected

    def last_params(x):
        ours, (expected, _) = run(x)
        return [params[-1] for params, _ in ours], expected[-1]

    if transform == "grad":
        # A loop has no reverse mode, and these no forward mode.
        reverse = name in ("custom_vjp", "mutable array")
        jacobian = jax.jacrev if reverse else jax.jacfwd
        derivatives, expected = jax.jit(jacobian(last_params))(1.0)
        for actual in derivatives:
            assert_close(actual, expected, rtol=1e-6)
        return
    start = ONE, inner.init(ONE)
    if transform == "vmap":
        run_all = jax.jit(jax.vmap(run, out_axes=1))
        ours, expected = run_all(jnp.array([1.0, 2.0]))
        start = jax.tree.map(lambda x: jnp.stack([x, x]), start)
    else:
        ours, expected = jax.jit(run)(1.0)
    for steps in ours:
        assert_same_bits(at(0, steps), start)
        assert_same_bits(at(2, steps), at(1, steps))
        assert_close(at(jnp.array([1, 3]), steps), expected, rtol=1e-6)


def at(step, trajectory):
    return jax.tree.map(lambda x: x[step], trajectory)


def selects(tx):
    """How many arrays of the size of the gradients one step selects at once."""
    program = jax.jit(tx.update).lower(ONE, tx.init(ONE), ONE).as_text()
    return len(re.findall(r"call @_where\S* .* -> tensor<3xf32>", program))


@pytest.mark.parametrize("name", SAFE | UNSAFE)
def test_only_what_may_not_end_is_given_sanitized_inputs(name):
    """The norm of others need not wait for the check."""
    late = name in ("custom_vjp", "mutable array", "ordered callback")
    expected = 1 if name in SAFE else 2 + late
    assert selects(ls.with_loss_scaling(INNER[name])) == expected
    checked = ls.with_loss_scaling(INNER[name], check_updates=True)
    # A scan would be made twice.
    assert (selects(checked) == 1) == (name in SAFE and name != "scan")


@pytest.mark.parametrize("check_updates", [False, True])
def test_effects_happen_once_in_a_step(check_updates):
    seen = []

    def update(g, m):
        jax.debug.callback(lambda m: seen.append(("debug", float(m[0]))), m)
        total = io_callback(
            lambda m: seen.append(("io", float(m[0]))) or m, m, m, ordered=True
        )
        return g, (total + g,)

    inner = transformation(update, ONE)
    tx = ls.with_loss_scaling(inner, check_updates=check_updates)
    step = jax.jit(lambda g, state: tx.update(g, state)[1])
    step(BAD, step(ONE, step(BAD, tx.init(ONE))))
    jax.effects_barrier()
    expected = [(kind, m) for m in (1.0, 1.0, 2.0) for kind in ("debug", "io")]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("check_updates", [False, True])
@pytest.mark.parametrize(
    "inner", [ADAM, pytest.param(optax.lbfgs(), marks=slow)], ids=["adam", "lbfgs"]
)
def test_an_optimizer_may_record_traced_values_for_the_caller(inner, check_updates):
    """As one that logs from compiled code does. They are not sanitized."""
    recorded = {}

    def record(updates, state, params=None, **extra_args):
        recorded["norm"] = jnp.linalg.norm(updates)
        return inner.update(updates, state, params, **extra_args)

    recording = optax.GradientTransformationExtraArgs(inner.init, record)
    tx, other = (
        ls.with_loss_scaling(x, check_updates=check_updates) for x in (recording, inner)
    )

    def of(tx):
        def step(grads, state):
            arguments = {"value": jnp.sum(ONE), "grad": grads, "value_fn": jnp.sum}
            updates, state = tx.update(grads, state, ONE, **arguments)
            return updates, state, recorded.pop("norm", None)

        return jax.jit(step)

    state, ours, theirs = tx.init(ONE), of(tx), of(other)
    for grads in (TWO, BAD, TWO):
        updates, new_state, norm = ours(grads, state)
        expected, expected_state, _ = theirs(grads, state)
        assert_same_bits((updates, new_state), (expected, expected_state))
        np.testing.assert_allclose(norm, jnp.linalg.norm(grads), rtol=1e-6)
        state = new_state


def test_a_recording_optimizer_calls_the_host_once_and_never_with_nan():
    recorded, seen = [], []

    def update(g, m):
        recorded.append(g.sum())
        jax.debug.callback(seen.append, g)
        return g, (m,)

    tx = ls.with_loss_scaling(transformation(update, ZERO))

    @jax.jit
    def step(grads, state):
        _, state = tx.update(grads, state)
        return state, recorded[-1]

    for grads in (TWO, BAD):
        _, total = step(grads, tx.init(ZERO))
        jax.effects_barrier()
        assert jnp.isfinite(total)
    assert len(seen) == 2
    np.testing.assert_array_equal(seen[0], TWO)
    assert np.isfinite(seen[1]).all()


def test_an_update_that_cannot_be_evaluated_again_is_slower_and_says_so(monkeypatch):
    def refuse(eqn, args):
        raise RuntimeError("not here")

    monkeypatch.setattr(masks, "bind", refuse)
    tx = ls.with_loss_scaling(transformation(lambda g, m: (m * g, (m + g,)), ONE))
    message = r"correct, but slower .*equation by equation \(RuntimeError: not here\)"
    with pytest.warns(UserWarning, match=message) as record:
        updates, state = jax.jit(lambda *args: tx.update(*args))(TWO, tx.init(ONE))
    assert record[0].filename == __file__
    assert_same_bits((updates, state.inner_state), (TWO, (TWO + 1,)))


def test_an_inner_transformation_may_look_at_numbers_where_there_are_some():
    """Under eager ``jax.vmap`` what is not mapped is there; in a program nothing is."""
    inner = transformation(
        lambda g, m: ((2.0 if m[0] > 0 else 3.0) * g * jnp.sum(m[m > 0]), (m + 1,)), ONE
    )
    tx = ls.with_loss_scaling(inner)
    state = tx.init(ONE)
    update = jax.vmap(tx.update, in_axes=(0, None))
    updates, new_state = update(jnp.stack([TWO, BAD]), state)
    np.testing.assert_array_equal(updates, [6 * TWO, ZERO])
    assert_same_bits(new_state.inner_state, (jnp.stack([TWO, ONE]),))
    with pytest.raises(TypeError):
        jax.jit(tx.update)(ONE, state)


def test_no_tracer_outlives_its_trace():
    tx = ls.with_loss_scaling(optax.adam(0.1))
    with jax.check_tracer_leaks():
        updates, _ = jax.jit(tx.update)(ONE, tx.init(TWO), TWO)
    assert jnp.all(updates < 0)
