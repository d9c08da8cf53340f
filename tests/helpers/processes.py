"""Programs that tests start."""

import os

from shared import ROOT

# For programs that tests start. Two may meet at one entry of the cache of programs.
CACHE_WARNINGS = [
    f"ignore:Error {kind} persistent compilation cache"
    for kind in ("reading", "writing")
]
WARNINGS_ARE_ERRORS = [f"-W{rule}" for rule in ("error", *CACHE_WARNINGS)]


def worker_environment(**variables):
    """The environment of a program that imports from the package and the tests."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers")))
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **variables}
