"""What several test files share."""

import contextlib
import functools
import io
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ls
from optax_lossscale._gradients.scaled_losses import SCALED

# Newer names, and those of the oldest supported jax.
enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
set_mesh = jax.set_mesh if hasattr(jax, "set_mesh") else jax.sharding.use_mesh

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
PAGES = ROOT / "notebooks"
README = (ROOT / "README.md").read_text()

# For programs that tests start. Two may meet at one entry of the cache of programs.
CACHE_WARNINGS = [
    f"ignore:Error {kind} persistent compilation cache"
    for kind in ("reading", "writing")
]
WARNINGS_ARE_ERRORS = [f"-W{rule}" for rule in ("error", *CACHE_WARNINGS)]


def worker_environment(**variables: str) -> dict[str, str]:
    """The environment of a program that imports from the package and the tests."""
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "integration")
    path = os.pathsep.join(map(str, folders))
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **variables}


def slow_but(quick: Any, cases: Any) -> list[Any]:
    """Cases of a test, of which all but the quick ones are slow."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x not in quick)) for x in cases]


def code_blocks(text: str, language: str) -> list[str]:
    """The blocks of a page in Markdown; ```python theirs is not ```python."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def page(name: str) -> str:
    """The text of a page of the book."""
    return (PAGES / f"{name}.md").read_text()


def recordings(name: str) -> Any:
    """What was recorded from other loss scalers, in a file of ``tests/data``."""
    return json.loads(lzma.decompress((DATA / f"{name}.json.xz").read_bytes()))


def headings(text: str) -> list[str]:
    """What links to the headings of a page are called."""
    titles = re.findall(r"^#+ (.+)$", text.lower(), re.M)
    return [re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles]


def table(text: str, first_cell: str) -> list[list[str]]:
    """The cells of a table in Markdown, row by row, without its header.

    ``first_cell`` is what the header begins with.
    """
    header = rf"^\| {re.escape(first_cell)}[^|\n]* \|"
    found = re.split(header, text, maxsplit=1, flags=re.M)[1]
    rows = found.split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"(?<= )\|(?= )", row[1:-1]) for row in rows]
    return [[cell.strip() for cell in row] for row in cells]


def run_page(path: Path) -> dict[str, Any]:
    """What the Python blocks of a page define and print, after all of them have run.

    A page whose first line is ``<!-- continues: index -->`` begins with what the
    program of the start page has defined.
    """
    text, namespace = path.read_text(), {}
    if text.startswith("<!-- continues: index -->\n"):
        namespace = dict(first_program())
    return run_blocks(code_blocks(text, "python"), path.name, namespace)


def run_blocks(blocks: list[str], name: str, namespace: Any) -> dict[str, Any]:
    """What the blocks define and print, one after the other."""
    before = dict(SCALED)
    SCALED.clear()  # as in a process of its own
    if "opt_state" in namespace:
        ls.value_and_grad(jnp.sum, namespace["opt_state"])(0.0)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            for block in blocks:
                exec(compile(block, name, "exec"), namespace)
        finally:
            SCALED.update(before)
    return {**namespace, "printed": printed.getvalue()}


@functools.cache
def first_program() -> dict[str, Any]:
    return run_page(PAGES / "index.md")


def float16_loss(params: Any, x: jax.Array) -> jax.Array:
    """Of a linear layer that computes in float16."""
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    y = x.astype(jnp.float16) @ half["w"] + half["b"]
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1.0))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers, of numpy: all test files are imported, and nothing compiled."""
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def make_mesh(axis_type: Any = AUTO, **axes: int) -> jax.sharding.Mesh:
    """A mesh of CPU devices, such as ``make_mesh(data=2, model=4)``."""
    types = (axis_type,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def on_mesh(
    fun: Any, in_specs: Any, out_specs: Any, mesh: Any = None, **options: Any
) -> Callable[..., Any]:
    """Compile ``fun`` for each device of a mesh, which by default has one axis, d."""
    options |= {"mesh": mesh or make_mesh(d=8)}
    return jax.jit(
        jax.shard_map(fun, in_specs=in_specs, out_specs=out_specs, **options)
    )


def make_step(tx: Any, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """One step of training, not yet compiled."""

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        _, grads = ls.value_and_grad(loss_fn, opt_state)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def train(step: Any, params: Any, opt_state: Any, batches: Any) -> tuple[Any, Any]:
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params, opt_state


def run_rule(
    rule: ls.LossScale, grads_finite: Any, magnitudes: Any = (), state: Any = None
) -> ls.LossScaleState:
    """Every state of a run, stacked, from ``rule.init()`` or the state given.

    They are those of compiled steps of ``with_loss_scaling``, which users run. Runs up
    to a length share one program.
    """
    steps = len(grads_finite)
    length = next(n for n in (32, 256, 512) if steps <= n)
    grads = np.zeros(length, np.float32)
    grads[: len(magnitudes)] = magnitudes
    grads[:steps][~np.asarray(grads_finite, bool)] = np.nan
    states = _run_rule(rule, grads, rule.init() if state is None else state)
    return jax.tree.map(lambda x: np.asarray(x)[:steps], states)


@functools.partial(jax.jit, static_argnums=0)
def _run_rule(rule: ls.LossScale, grads: jax.Array, state: Any) -> Any:
    tx = ls.with_loss_scaling(optax.identity(), rule)

    def step(opt_state: Any, grad: jax.Array) -> Any:
        _, opt_state = tx.update(grad, opt_state)
        return opt_state, opt_state.scale_state

    return jax.lax.scan(step, tx.init(0.0)._replace(scale_state=state), grads)[1]


def kept(run: Any) -> list[jax.Array]:
    """Copies of what a skipped step keeps: all but the scale, and Flax's ``step``."""
    leaves = jax.tree_util.tree_leaves_with_path(
        run, is_leaf=lambda x: isinstance(x, ls.LossScaleState)
    )
    arrays = {jax.tree_util.keystr(path): x for path, x in leaves}
    arrays = {k: x for k, x in arrays.items() if hasattr(x, "dtype")}
    return [jnp.copy(x) for k, x in arrays.items() if not re.search(r"\Wstep\b", k)]


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Assert equal structures, shapes, dtypes and bytes; NaN equals itself."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(without_keys(actual)),
        jax.tree.leaves(without_keys(expected)),
        strict=True,
    ):
        a, e = np.asarray(a), np.asarray(e)
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (e.shape, e.dtype), where
        assert a.tobytes() == e.tobytes(), f"{where}: {a} is not {e}"


def assert_close(actual: Any, expected: Any, rtol: float, atol: float = 0) -> None:
    """Assert numbers of equal structure that differ by no more than rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = (jax.tree.leaves(without_keys(x)) for x in (actual, expected))
    for a, e in zip(*pairs, strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(e), rtol, atol)


def assert_no_update(updates: Any) -> None:
    """Assert that every update is -0.0, which added to 0.0 or -0.0 changes neither."""
    zeros = jax.tree.map(lambda x: -jnp.zeros_like(x), updates)
    assert_same_bits(updates, zeros)


def assert_same_types(actual: Any, expected: Any) -> None:
    """Assert equal structures, shapes, dtypes and weak types."""

    def types(tree: Any) -> Any:
        assert all(hasattr(x, "dtype") for x in jax.tree.leaves(tree))
        return jax.tree.map(
            lambda x: (x.shape, x.dtype, getattr(x, "weak_type", None)), tree
        )

    assert types(actual) == types(expected)


def transformation(update: Any, *state: Any) -> optax.GradientTransformation:
    """A stateful transformation from a function of gradients and states."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        return update(updates, *state)

    return optax.GradientTransformation(lambda params: state, update_fn)


def without_keys(tree: Any) -> Any:
    """Replace typed PRNG keys by their data."""

    def leaf(x: Any) -> Any:
        dtype = getattr(x, "dtype", np.dtype(object))
        is_key = jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(leaf, tree)
