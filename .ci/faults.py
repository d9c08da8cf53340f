"""Put random faults into a copy of the package, one at a time, and run the tests.

``python .ci/faults.py [--number 60] [--seed 0] [--slow] [--own] [ROOM or FILE ...]``
prints which faults the tests catch, by default in the whole package, and fails if more
than a fifth survive. ``--slow`` runs the tests marked slow, too; ``--own`` runs only
those of the room of the fault. Rooms and files are named as they are below
``optax_lossscale``, such as ``_rules`` or ``_tree.py``. A fault that survives either
changes nothing, or is not tested.
"""

import argparse
import ast
import collections
import concurrent.futures
import functools
import importlib
import itertools
import multiprocessing
import os
import queue
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "optax_lossscale"
# Each fault gets a fork of a process that has imported what takes long to import.
sys.path.insert(0, str(ROOT / "tests"))
importlib.import_module("conftest")  # It sets what jax reads when it is imported.
for name in ("equinox", "flax.nnx", "flax.linen", "haiku", "matplotlib.pyplot"):
    importlib.import_module(name)
import pytest  # noqa: E402

PROCESSES = 2
# Two threads at a time may fail: https://github.com/python/cpython/issues/106905
PARSING = threading.Lock()
LIMIT = 0.2  # the share of faults that may survive

PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.BitAnd, ast.BitOr)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift)),
]
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
NO_IMPORT = 99  # pytest has codes up to 5
PYTEST = [
    # Without rewritten assertions: they would warn of what has been imported before.
    *("-x", "-q", "-n0", "--assert=plain", "-p", "no:cacheprovider"),
    "--override-ini=addopts=--import-mode=importlib",
]


def faults_of(node: ast.AST, definitions: dict[str, int]) -> Iterator[tuple]:
    """Yield nodes, and what may stand in their place; names stay defined."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in OTHER:
            yield node, ast.Compare(left, [OTHER[type(op)]()], right)
        case ast.BoolOp(op, values) if type(op) in OTHER:
            yield node, ast.BoolOp(OTHER[type(op)](), values)
        case ast.BinOp(left, op, right) if type(op) in OTHER:
            yield node, ast.BinOp(left, OTHER[type(op)](), right)
        case ast.UnaryOp(_, operand):
            yield node, operand
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield node, ast.Constant(2 * value or 1)
        case ast.If(test) | ast.IfExp(test):
            yield from ((test, ast.Constant(value)) for value in (True, False))
        case ast.Call(ast.Attribute(_, "where") as where, [condition, yes, no], others):
            yield node, ast.Call(where, [condition, no, yes], others)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield node, ast.Pass()
        case ast.Assign([ast.Name(name)]) if definitions[name] > 1:
            yield node, ast.Pass()


def faults_in(node: ast.AST, definitions: dict[str, int]) -> Iterator[tuple]:
    """Yield the faults of a tree, without those that change no result."""
    if isinstance(node, ast.FunctionDef):
        inside = list(ast.walk(node))
        names = [x.arg for x in inside if isinstance(x, ast.arg)]
        stored = [x for x in inside if isinstance(getattr(x, "ctx", None), ast.Store)]
        names += [x.id for x in stored if isinstance(x, ast.Name)]
        definitions = collections.Counter(names)
    yield from faults_of(node, definitions)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_idle = isinstance(child, ast.Raise | ast.JoinedStr)
            is_idle |= name in ("annotation", "returns")
            is_idle |= getattr(child, "arg", None) == "strict"  # only ever checks
            if isinstance(child, ast.AST) and not is_idle:
                yield from faults_in(child, definitions)


class Put(ast.NodeTransformer):
    """Put one node of a tree in the place of another."""

    def __init__(self, new: ast.AST, old: ast.AST) -> None:
        self.new, self.old = new, old

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def parse(file: Path) -> tuple[ast.AST, list[tuple[ast.AST, ast.AST]]]:
    tree = ast.parse((PACKAGE / file).read_text())
    return tree, list(faults_in(tree, collections.Counter()))


def room_of(path: Path) -> str:
    """The room of a file of the package or of the tests; the ground is a room."""
    room = path.parts[0].removesuffix(".py").strip("_")
    return room if (ROOT / "tests" / room).is_dir() else "ground"


def tests_of(file: Path, own: bool) -> list[Path]:
    """The tests of the name of the file, of its room, and unless own all others."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = [
        path.relative_to(ROOT) for path in tests if "integration" not in path.parts
    ]
    room = room_of(file)

    def distance(path: Path) -> int:
        is_namesake = path.name == f"test_{file.stem.strip('_')}.py"
        is_near = room_of(path.relative_to("tests")) == room
        return 0 if is_namesake else 1 if is_near else 2

    return sorted((x for x in tests if not own or distance(x) < 2), key=distance)


def run_tests(folder: Path, module: str, tests: list[Path], mark: str) -> None:
    """Import a module of a copy and run tests there, in a process of their own."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        importlib.import_module(module)
    except BaseException:
        os._exit(NO_IMPORT)
    os._exit(pytest.main([*PYTEST, "-m", mark, *map(str, tests)]))


def exit_code(*arguments: Any, timeout: int) -> int | None:
    """How a fork of this process ends, which has imported what tests need. Or None."""
    process = multiprocessing.get_context("fork").Process(
        target=run_tests, args=arguments
    )
    process.start()
    process.join(timeout)
    code = process.exitcode
    process.kill()
    return code


def try_out(
    file: Path, number: int, copies: queue.Queue[Path], slow: bool, own: bool
) -> str:
    """Print and return whether the tests catch a fault."""
    with PARSING:
        tree, found = parse(file)
    old, new = found[number]
    fault = f"{file}:{old.lineno}: {ast.unparse(old)} -> {ast.unparse(new)}"
    module = ".".join([PACKAGE.name, *file.with_suffix("").parts])
    folder = copies.get()
    (folder / PACKAGE.name / file).write_text(ast.unparse(Put(new, old).visit(tree)))
    outcome = "SURVIVED"
    # Those of the room first: to collect all the others takes longer than to run them.
    near = tests_of(file, own=True)
    others = [] if own else [x for x in tests_of(file, own=False) if x not in near]
    marks = {"not slow": 600, "slow": 3600} if slow else {"not slow": 600}
    for (mark, timeout), tests in itertools.product(marks.items(), (near, others)):
        if tests and outcome == "SURVIVED":
            code = exit_code(folder, module, tests, mark, timeout=timeout)
            if code == NO_IMPORT:
                outcome = "no import"
            elif code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                outcome = "caught"
    shutil.copy(PACKAGE / file, folder / PACKAGE.name / file)
    copies.put(folder)
    print(f"{outcome:9} {fault}", flush=True)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    parser.add_argument("--own", action="store_true", help="only tests of its room")
    parser.add_argument("names", nargs="*", metavar="ROOM or FILE")
    arguments = parser.parse_args()

    files = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    if names := {Path(name) for name in arguments.names}:
        files = [file for file in files if names & {file, *file.parents}]
    places = [(file, i) for file in files for i in range(len(parse(file)[1]))]
    random.Random(arguments.seed).shuffle(places)
    places = places[: arguments.number]
    copies: queue.Queue[Path] = queue.Queue()
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool,
    ):
        for i in range(PROCESSES):
            copies.put(path := Path(folder, str(i)))
            shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(".*"))
        # Without faults all tests pass, and fill the cache of programs.
        tests = sorted({x for file, _ in places for x in tests_of(file, arguments.own)})
        parts = [tests[i::PROCESSES] for i in range(PROCESSES)]
        check = functools.partial(exit_code, path, PACKAGE.name, timeout=3600)
        if any(pool.map(lambda part: check(part, "not slow"), parts)):
            sys.exit("First see all tests pass that are not in tests/integration.")
        outcomes = list(
            pool.map(
                lambda place: try_out(*place, copies, arguments.slow, arguments.own),
                places,
            )
        )
    rooms = collections.defaultdict(collections.Counter)
    for (file, _), outcome in zip(places, outcomes, strict=True):
        rooms[room_of(file)][outcome] += 1
    for room, counts in sorted(rooms.items()):
        print(f"{room:12} caught {counts['caught']}, survived {counts['SURVIVED']}")
    survived, caught = map(outcomes.count, ("SURVIVED", "caught"))
    share = survived / max(survived + caught, 1)
    print(f"{survived} of {survived + caught} faults survived: {share:.0%}")
    sys.exit(share > LIMIT)


if __name__ == "__main__":
    main()
