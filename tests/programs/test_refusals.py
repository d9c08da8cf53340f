"""What cannot be cast or measured is refused, and the words name a way out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from shared import new_ref

import optax_lossscale as ls

X = np.ones((8, 8), np.float32)
BAD_FUNCTIONS = {
    "number as a function": ("got 1", lambda: ls.autocast(1, jnp.float16)),
    "swapped": ("got .*float16.* comes first", lambda: ls.autocast(jnp.float16, X)),
    "report of an array": ("got .*`autocast_report", lambda: ls.autocast_report(X)),
    "no function": ("got .*`nonfinite_report", lambda: ls.nonfinite_report(X)),
}


@pytest.mark.parametrize(("words", "call"), BAD_FUNCTIONS.values(), ids=BAD_FUNCTIONS)
def test_autocast_and_its_report_refuse_what_is_not_a_function(words, call):
    with pytest.raises(TypeError, match=f"`fun` must be a function, {words}"):
        call()


LEFT_OUT = {
    "type": lambda: ls.autocast(jnp.sum),
    "type, by its name": lambda: ls.autocast(jnp.sum, dtype=None),
    "both": lambda: ls.autocast(),
    "function behind the type": lambda: ls.autocast(jnp.float16),
}


@pytest.mark.parametrize("call", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_autocast_needs_is_named_if_it_is_left_out(call):
    words = "`dtype` must be given.*needs no scale.*not a context manager"
    with pytest.raises(TypeError, match=words):
        call()


BAD_TYPES = {
    jnp.float32: "must be float16 or bfloat16, got float32",
    "float8_e4m3fn": "float8 needs a scale for each",
    jnp.int8: "`dtype` must be a floating-point dtype",
    "bf16": 'such as "bfloat16", got .bf16',
}


@pytest.mark.parametrize(("dtype", "words"), BAD_TYPES.items())
def test_type_that_is_neither_float16_nor_bfloat16_is_refused(dtype, words):
    with pytest.raises(ValueError, match=words):
        ls.autocast(jnp.sum, dtype)


def two_layers(params, x):
    return jnp.tanh(x @ params["w"]) @ params["router"]


KEPT = {
    "of nothing": (
        two_layers,
        ["w", "rooter"],
        r"'rooter'.*nearest names are \['router'",
    ),
    "of a product cast by hand": (
        lambda *args: ls.autocast(two_layers, "float16")(*args),
        ["router"],
        "name float32 matmuls",
    ),
    "in no list": (two_layers, "router", "be a list of names"),
    "no text": (two_layers, [1], r"be a list of names.*got \[1\]. A row"),
}


@pytest.mark.parametrize(("fun", "keep", "words"), KEPT.values(), ids=KEPT)
def test_name_that_cannot_be_kept_is_refused(fun, keep, words):
    with pytest.raises(ValueError, match=f"`keep` must .*{words}"):
        ls.autocast(fun, "float16", keep=keep)({"w": X, "router": X}, X)


def test_function_that_writes_a_ref_is_refused_before_it_runs():
    calls = new_ref(np.float32(0))

    def counts(x):
        calls[...] += 1.0
        return jnp.sum(x)

    with pytest.raises(TypeError, match="must be free of effects .*`jax.Ref`"):
        ls.autocast(counts, "float16")(X)
    assert calls[...] == 0


CHANGES = {
    "replaces": ("w", lambda tree: tree.update(w=2 * tree["w"])),
    "adds": ("new", lambda tree: tree.update(new=tree["w"])),
    "removes": ("w", lambda tree: tree.pop("w")),
    "appends": ("list", lambda tree: tree["list"].append(tree["w"])),
}


@pytest.mark.parametrize(("key", "change"), CHANGES.values(), ids=CHANGES)
def test_function_that_changes_its_arguments_is_refused(key, change):
    words = rf"must not change its arguments.*kwargs\)\[0\]\[0\]\['{key}'\].*Return new"
    with pytest.raises(ValueError, match=words):
        ls.autocast(change, "float16")({"w": jnp.asarray(X), "list": [X]})


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("args", lambda x: ls.autocast_report(jnp.sum, x)),
        ("fun", lambda x: ls.autocast_report(lambda: x @ x)),
        ("args", lambda x: ls.nonfinite_report(jnp.sum, x)),
        ("fun", lambda x: ls.nonfinite_report(lambda: x @ x)),
    ],
)
def test_report_of_arrays_that_are_being_traced_is_refused(name, report):
    with pytest.raises(ValueError, match=f"`{name}` must hold concrete"):
        jax.eval_shape(report, X)


def io(x):
    return io_callback(lambda x: x, jax.ShapeDtypeStruct(X.shape, X.dtype), x @ x)


def in_part_of_a_mesh(x):
    product = jax.shard_map(
        lambda x: x @ x,
        mesh=make_mesh(d=2, e=2),
        axis_names={"d"},
        in_specs=P("d"),
        out_specs=P("d"),
    )
    return product(jnp.concatenate([x, x], axis=0))


UNMEASURED = {
    "cast": (
        ValueError,
        "must have float32 matmuls .*got none. Pass `fun` without `au",
        ls.autocast(jnp.matmul, "float16"),
    ),
    "highest": (
        ValueError,
        "`fun` must have float32 matmuls or convolutions that `autocast`",
        functools.partial(jnp.matmul, precision="highest"),
    ),
    "zero": (
        ValueError,
        "must return a finite number other than 0",
        lambda x, y: 0 * x @ y,
    ),
    "NaN": (
        ValueError,
        "must return a finite number .*shows where NaN",
        lambda x, y: jnp.log(-x @ y),
    ),
    "integers": (
        ValueError,
        "must return a finite number",
        lambda x, y: jnp.argmax(x @ y),
    ),
    "callback": (TypeError, "must be free of effects .*IOEffect", lambda x, _: io(x)),
    "part of a mesh": (
        NotImplementedError,
        "all mesh axes are partitioned",
        lambda x, _: in_part_of_a_mesh(x),
    ),
}


@pytest.mark.parametrize(("error", "words", "fun"), UNMEASURED.values(), ids=UNMEASURED)
def test_report_of_errors_that_cannot_be_measured_is_refused(error, words, fun):
    with pytest.raises(error, match=words):
        ls.autocast_report(fun, X, X, errors=True)


def test_errors_of_a_report_is_a_switch():
    with pytest.raises(
        ValueError, match="`errors` must be True or False, got 1. It is not passed"
    ):
        ls.autocast_report(jnp.matmul, X, X, errors=1)
