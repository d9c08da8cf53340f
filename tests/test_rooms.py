"""How the package is built: imports run downward, and tests are found by path."""

import ast

import pytest
from shared import ROOT

PACKAGE, TESTS = ROOT / "optax_lossscale", ROOT / "tests"
FILES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]

# From the top: a file imports from its own room and from those below it.
LAYERS = [
    *(["__init__"], ["__main__"], ["_demo"], ["plots", "presets"], ["_diagnostics"]),
    *(["_transform"], ["_gradients"], ["_rules"]),
    *(
        ["_find"],
        ["_state", "_finite"],
        ["_tree"],
        ["_validation", "_devices"],
        ["_precision"],
    ),
    ["_jax_internals", "_public", "_warn"],
]
DEPTH = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}

# The tests of every other room have its name, without the underscore.
TESTED_IN = {
    "__init__": "test_public.py",
    "__main__": "test_main.py",
    "_demo": "test_main.py",
    "_devices": "test_finite.py",
    "_precision": "diagnostics",
    "_public": "test_public.py",
    "_validation": "rules",
}


def room_of(path):
    return path.parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parts[: len(path.parts) - node.level]
            modules = [node.module] if node.module else [x.name for x in node.names]
            for module in modules:
                yield (*folder, *module.split("."))[0]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_downward(path):
    room = room_of(path)
    for other in imported_rooms(path):
        # The demonstration imports public names, as users do.
        public = room in ("__main__", "_demo") and other not in DEPTH
        assert public or room == other or DEPTH[room] < DEPTH[other], other


@pytest.mark.parametrize("room", sorted({room_of(path) for path in FILES}))
def test_the_tests_of_a_room_are_found_by_its_name(room):
    name = room.strip("_")
    default = name if (PACKAGE / room).is_dir() else f"test_{name}.py"
    assert (TESTS / TESTED_IN.get(room, default)).exists()
