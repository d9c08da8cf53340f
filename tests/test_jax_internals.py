"""What is private in JAX: one canary for each use, which says what a release moved."""

import jax
import jax.numpy as jnp
import optax
import pytest
from asserts import assert_holds
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from training import make_step

import optax_lossscale as ls
from optax_lossscale import _jax_internals as internals
from optax_lossscale._programs import rewrite

W = jnp.ones((8, 2))
TX = ls.with_loss_scaling(optax.adam(0.1))
STEP = make_step(TX, lambda w, x: jnp.mean((x @ w - 1.0) ** 2))
ONES = jnp.ones(3)


def run(program, *inputs):
    return jaxpr_as_fun(ClosedJaxpr(program, []))(*inputs)


def constants_become_inputs():
    closed = jax.make_jaxpr(lambda x: x + ONES)(ONES)
    [result] = run(rewrite.without_constants(closed), ONES, *closed.consts)
    return bool(jnp.all(result == 2))


def a_program_takes_other_outputs():
    program = jax.make_jaxpr(lambda x: (x + 1, 3 * x))(ONES).jaxpr
    [result] = run(rewrite.replace(program, outvars=program.outvars[1:]), ONES)
    return bool(jnp.all(result == 3))


def an_equation_is_followed_by_a_conversion():
    def convert(eqn):
        [old] = eqn.outvars
        wide = rewrite.new_var(old.aval, jnp.float32)
        yield rewrite.replace(eqn, outvars=[middle := rewrite.new_var(old.aval)])
        yield rewrite.eqn_like(eqn, jnp.float32, [middle], wide)
        yield rewrite.eqn_like(eqn, jnp.float16, [wide], old)

    program = jax.make_jaxpr(lambda x: x + 1)(jnp.float16(1)).jaxpr
    [result] = run(rewrite.with_eqns(program, convert), jnp.float16(1))
    return result == 2 and result.dtype == jnp.float16


def an_equation_is_followed_by_a_selection():
    flag, old = (rewrite.new_var(jax.typeof(x)) for x in (jnp.array(True), ONES))

    def mask(eqn):
        [var] = eqn.outvars
        yield rewrite.replace(eqn, outvars=[new := rewrite.new_var(var.aval)])
        yield rewrite.eqn_like(eqn, jax.lax.select_n, [flag, old, new], var)

    program = jax.make_jaxpr(lambda x: x + 1)(ONES).jaxpr
    masked = rewrite.with_eqns(program, mask, [flag, old])
    results = [run(masked, ONES, jnp.array(x), ONES)[0][0] for x in (True, False)]
    return results == [2, 1]


def a_closed_program_keeps_its_constants():
    closed = jax.make_jaxpr(lambda x: x + ONES)(ONES)
    [result] = jaxpr_as_fun(rewrite.with_eqns(closed, lambda eqn: [eqn]))(ONES)
    return bool(jnp.all(result == 2))


def a_program_becomes_one_checkpoint():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x + ONES))(ONES)
    new = rewrite.checkpointed(closed, lambda *_, **__: False)
    [eqn] = new.eqns
    [result] = jaxpr_as_fun(new)(ONES)
    is_one = eqn.primitive.name in ("checkpoint", "remat2")
    return is_one and bool(jnp.all(result == jnp.sin(2.0)))


def staging_is_known():
    seen = []

    def note(x):
        seen.append(internals.is_staging())
        return x

    note(1.0)
    jax.vmap(note)(ONES)
    jax.grad(note)(1.0)
    jax.make_jaxpr(note)(1.0)
    return seen == [False, False, False, True]


def varying_axes_are_known():
    def along(x):
        assert internals.varying_axes(x) == {"d"}
        assert internals.varying_axes(internals.varying_like(ONES, x)) == {"d"}
        return x

    on_mesh(along, P("d"), P("d"), make_mesh(d=2))(jnp.ones(2))
    return internals.varying_axes(ONES) == frozenset()


def a_barrier_keeps_the_order():
    text = str(jax.make_jaxpr(internals.after)(ONES, 1.0))
    return "optimization_barrier" in text and internals.after(ONES, 5.0)[0] == 1


def memories_are_known():
    here = jax.jit(internals.in_memory_of)(2 * ONES, ONES)
    if not hasattr(jax, "memory"):  # this jax has no spaces of memory
        return here[0] == 2
    far = jax.device_put(ONES, jax.memory.Space.Host)
    moved = jax.jit(internals.in_memory_of)(2 * ONES, far)
    kinds = [x.sharding.memory_kind for x in (here, moved, far)]
    return here[0] == 2 and kinds[1] == kinds[2] != kinds[0]


def effects_have_names():
    def program(fun, *args, **axes):
        return jax.make_jaxpr(fun, **axes)(*args).jaxpr

    def printing(x):
        jax.debug.print("{}", x)

    ref = jax.new_ref(1.0) if hasattr(jax, "new_ref") else None
    summed = program(lambda x: jax.lax.psum(x, "d"), 1.0, axis_env=[("d", 2)])
    return (
        rewrite.effect_names(program(printing, 1.0)) & rewrite.DEBUGGING
        and rewrite.collective_axes(summed) == {"d"}
        and (
            ref is None
            or rewrite.effect_names(program(lambda: ref[...])) & rewrite.MUTABLE_ARRAYS
        )
    )


def a_ref_is_known():
    new_ref = getattr(jax, "new_ref", None) or jax._src.core.mutable_array
    return internals.is_ref(new_ref(ONES)) and not internals.is_ref(ONES)


def zeros_have_any_type():
    key = jax.random.key(0)
    zeros = [internals.zeros_like_aval(jax.typeof(x)) for x in (ONES, key)]
    return [x.dtype for x in zeros] == [ONES.dtype, key.dtype]


CANARIES = [
    constants_become_inputs,
    a_program_takes_other_outputs,
    an_equation_is_followed_by_a_conversion,
    an_equation_is_followed_by_a_selection,
    a_closed_program_keeps_its_constants,
    a_program_becomes_one_checkpoint,
    staging_is_known,
    varying_axes_are_known,
    a_barrier_keeps_the_order,
    memories_are_known,
    effects_have_names,
    a_ref_is_known,
    zeros_have_any_type,
]


@pytest.mark.parametrize("holds", CANARIES, ids=lambda x: x.__name__)
def test_a_private_part_of_jax_is_where_it_was(holds):
    assert_holds(
        holds,
        f"jax {jax.__version__} has moved it: mend `_jax_internals.py` "
        "or `_programs/rewrite.py`",
    )


@pytest.fixture
def renamed(monkeypatch):
    """A jax that calls the mapped axes of an array's type something else."""

    def get(x, name, *default):
        hidden = name in ("vma", "manual_axis_type")
        return getattr(object() if hidden else x, name, *default)

    monkeypatch.setattr(internals, "getattr", get, raising=False)


def test_a_jax_that_reports_no_varying_axes_trains_on_one_device(renamed):
    w, state = jax.jit(STEP)(W, TX.init(W), W.T)
    assert ls.was_applied(state) and jnp.all(w != W)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_jax_that_reports_no_varying_axes_is_refused_under_shard_map(
    check_vma, renamed
):
    """An empty set would let devices decide differently."""
    mesh = make_mesh(d=2)
    step = on_mesh(STEP, (P(), P(), P("d")), P(), mesh, check_vma=check_vma)
    with pytest.raises(RuntimeError, match="no longer reports .*earlier jax"):
        step(W, TX.init(W), W.T)
