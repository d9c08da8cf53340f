"""How the package is built: imports run downward, as the page on contributing says."""

import ast
import importlib.util
import re

import pytest
from book import code_blocks, page
from shared import ROOT

PACKAGE = ROOT / "optax_lossscale"
FILES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
TREE, _ = code_blocks(page("contributing"), "text")[1].split("\ntests/")
# From the top. Every file that is not in the tree belongs to its last line, the basis.
ORDER = re.findall(r"^  (\w+)[/.]", TREE, re.M)


def room_of(path):
    return path.parts[0].removesuffix(".py")


ROOMS = {room_of(path) for path in FILES}


def imported_rooms(path):
    """The rooms that a file imports from, anywhere in it."""
    package = ".".join(["optax_lossscale", *path.parts[:-1]])
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        modules = [x.name for x in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(module, package)
            modules = [f"{module}.{x.name}" for x in node.names]
        for module in modules:
            yield from re.findall(r"^optax_lossscale\.(\w+)", module)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_downward(path):
    room = room_of(path)
    # The demonstration imports public names, as users do: they are no rooms.
    for other in ROOMS.intersection(imported_rooms(path)) - {room}:
        assert depth(room) < depth(other) or {room, other}.isdisjoint(ORDER), other


def depth(room):
    return ORDER.index(room) if room in ORDER else len(ORDER)


def test_page_names_every_room_above_the_basis():
    """All that are public or have a folder, but for what is private in Flax."""
    above = {room for room in ROOMS if not room.startswith("_")}
    above |= {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert above - {"_flax_internals"} == set(ORDER) - {"__init__", "__main__"}


def test_names_that_the_page_says_to_change_stand_in_its_files():
    rows = re.findall(r"`([\w/]+\.py)`: ([^;\n]*)", page("contributing"))
    names = {file: re.findall(r"`([A-Z_]{4,}|test_\w+)`", row) for file, row in rows}
    assert sum(map(len, names.values())) > 5
    for file in filter(names.get, names):
        [path] = [x for x in (ROOT / file, PACKAGE / file) if x.exists()]
        assert [x for x in names[file] if x not in path.read_text()] == []
