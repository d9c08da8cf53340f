"""How the package is built: small files, imports that run downwards, tests by path."""

import ast
from pathlib import Path

import pytest
from helpers import ROOT

PACKAGE, TESTS = ROOT / "optax_lossscale", ROOT / "tests"
SOURCES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# From the top: a file imports from its own room and from what stands below it.
LAYERS = (
    ("__main__",),
    ("_demo",),
    ("plots", "presets"),
    ("_diagnostics",),
    ("_transform",),
    ("_gradients",),
    ("_rules",),
    ("_applied",),
    ("_find",),
    ("_state", "_finite"),
    ("_tree",),
    ("_precision",),
    ("_validation",),
    ("_jax_internals", "_public"),
)
LAYER = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}

# The tests of every other file have its name: `_rules/fixed.py`, `rules/test_fixed.py`.
TESTED_BY = {
    "__main__.py": "test_main.py",
    "_demo/report.py": "test_main.py",
    "_demo/task.py": "test_main.py",
    "_demo/train.py": "test_main.py",
    "_diagnostics/counting.py": "diagnostics/test_report.py",
    "_gradients/at_scale.py": "gradients/test_value_and_grad.py",
    "_gradients/checks.py": "gradients/test_scale_backward.py",
    "_gradients/staged.py": "gradients/test_scale_backward.py",
    "_precision.py": "diagnostics/test_report.py",
    "_rules/growth.py": "rules/test_dynamic.py",
    "_rules/verbatim.py": "presets/test_conformance.py",
    "_validation.py": "rules/test_arguments.py",
}


def room(path):
    return path.parts[0].removesuffix(".py")


def imported_rooms(path):
    """The rooms of the package that a file imports from, at any place."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parts[: len(path.parts) - node.level]
            names = [node.module] if node.module else [a.name for a in node.names]
            for name in names:
                yield (*base, *name.split("."))[0]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if hasattr(node, "module") else []
            names += [alias.name for alias in node.names]
            assert not any(n.startswith("optax_lossscale") for n in names), path


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_run_downwards(path):
    # The package's face imports from everywhere; the demonstration is a user of it.
    if path == Path("__init__.py"):
        return
    user = room(path) in ("__main__", "_demo")
    for other in imported_rooms(path):
        if user and other not in LAYER:
            continue
        here, there = LAYER[room(path)], LAYER[other]
        assert here < there or room(path) == other, f"{path} imports {other}"


def test_files_are_few_and_small_and_rooms_say_who_lives_there():
    assert len(list(PACKAGE.glob("*.py"))) <= 12
    for path in SOURCES:
        text = (PACKAGE / path).read_text()
        assert len(text.splitlines()) <= 250, path
        assert ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_the_tests_of_a_file_are_found_by_its_path(path):
    # The presets are rows of the tables in their room: see `test_every_preset_is_here`.
    if path.name == "__init__.py" or room(path) == "presets":
        return
    by_name = [part.strip("_") for part in path.parts[:-1]]
    default = "/".join([*by_name, f"test_{path.name.strip('_')}"])
    assert (TESTS / TESTED_BY.get(path.as_posix(), default)).is_file(), path


def test_the_exceptions_are_needed():
    files = {path.as_posix() for path in SOURCES}
    assert TESTED_BY.keys() <= files


def test_tests_run_in_two_processes_on_a_cpu_and_in_one_beside_an_accelerator(
    pytestconfig, monkeypatch
):
    [workers] = [
        plugin.pytest_xdist_auto_num_workers
        for plugin in pytestconfig.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(TESTS / "conftest.py")
    ]
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ["cuda"])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert workers(pytestconfig) == 2
    monkeypatch.delenv("JAX_PLATFORMS")
    assert workers(pytestconfig) == 0
