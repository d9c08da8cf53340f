"""How the package is built: imports run downward, as the page on contributing says."""

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
    dots = r"\." * len(path.parts)
    text = (PACKAGE / path).read_text()
    return re.findall(rf"^from {dots}(\w+)", text, re.M)


def depth(room):
    return ORDER.index(room) if room in ORDER else len(ORDER)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_downward(path):
    room = room_of(path)
    # The demonstration imports public names, as users do: they are no rooms.
    for other in ROOMS.intersection(imported_rooms(path)) - {room}:
        assert depth(room) < depth(other) or {room, other}.isdisjoint(ORDER), other
