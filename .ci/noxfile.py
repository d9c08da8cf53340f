"""What must pass: nox runs the sessions below, each in an environment of its own."""

import glob
import os
import shutil
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).parents[1]

nox.needs_version = ">=2025.5"
nox.options.sessions = [
    *("lint", "demo", "tests", "slow", "oldest", "newest_python", "book", "package"),
]
nox.options.stop_on_first_error = True
nox.options.default_venv_backend = "uv|venv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False

os.environ["JAX_PLATFORMS"] = "cpu"
# The command `python3.13` of pyenv fails unless that version has been made active.
pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
folders = glob.glob(f"{pyenv}/versions/3.1[234]*/bin")
os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])


def install(
    session: nox.Session, extra: str, *groups: str, pins: tuple[str, ...] = ()
) -> None:
    """Install the package with an extra and dependency groups of pyproject.toml."""
    session.chdir(ROOT)
    packages = nox.project.dependency_groups(nox.project.load_toml(), *groups)
    session.install("-e", f".[{extra}]", *packages, *pins)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, and mypy of the package and of programs that use it."""
    install(session, "test", "dev")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("mypy", "--strict", "tests/helpers/typed_programs.py")


@nox.session
def demo(session: nox.Session) -> None:
    """The README's first command."""
    install(session, "demo")
    session.run("python", "-m", "optax_lossscale")


@nox.session
def tests(session: nox.Session) -> None:
    """The README's second command."""
    install(session, "test")
    session.run("pytest")


@nox.session
def slow(session: nox.Session) -> None:
    """The tests marked slow. The demonstration trains for long and runs optimized."""
    install(session, "test", "slow")
    demonstration = "tests/test_main.py"
    options = ("-m", "slow", "--dist=worksteal", f"--ignore={demonstration}")
    session.run("pytest", *options)
    session.run("pytest", "-m", "slow", demonstration, env={"XLA_FLAGS": ""})


@nox.session
def oldest(session: nox.Session) -> None:
    """The tests on the oldest supported jax and optax, with optimized programs."""
    oldest = ("jax==0.7.0", "jaxlib==0.7.0", "optax==0.2.5", "chex==0.1.90")
    install(session, "test", pins=oldest)
    session.run("pytest", env={"XLA_FLAGS": ""})


@nox.session
def colab(session: nox.Session) -> None:
    """All programs of the book on the versions that Colab has."""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "avx512_fp16" in cpu.read_text():
        # Seen on one: the quickstart took 8 minutes, with jax 0.10 only 19 seconds, and
        # its losses were others.
        session.skip("jax 0.7 computes float16 slowly, and otherwise, on this CPU")
    versions = ("jax==0.7.2", "jaxlib==0.7.2", "numpy==2.1.3", "matplotlib==3.10.0")
    # This matplotlib uses names that pyparsing 3.3 warns of.
    install(session, "test", "slow", pins=(*versions, "pyparsing<3.3"))
    names = ("notebooks", "pages", "programs", "trainers", "compared")
    files = [f"tests/integration/test_{name}.py" for name in names]
    folder = "tests/integration/coming_from"
    session.run("pytest", "-m", "", "--dist=worksteal", *files, folder)


# On Python 3.11, the newest jax is 0.10 and the newest flax is 0.12.8.
@nox.session(python=["3.13", "3.14"])
def newest_python(session: nox.Session) -> None:
    """The tests on the newest jax, on each of these Pythons that the machine has."""
    install(session, "test")
    session.run("pytest")


@nox.session
def book(session: nox.Session) -> None:
    """The book, with warnings as errors."""
    install(session, "docs")
    with tempfile.TemporaryDirectory() as folder:
        session.run("sphinx-build", "-q", "-W", "--keep-going", "notebooks", folder)


@nox.session
def package(session: nox.Session) -> None:
    """The wheel and the sdist in dist/: built, checked, and used outside of the clone.

    The release publishes these files. The tests pass in the sdist.
    """
    session.chdir(ROOT)
    project = nox.project.load_toml()
    session.install(*nox.project.dependency_groups(project, "release"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--installer", "uv")
    files = glob.glob(f"{ROOT}/dist/*")
    session.run("twine", "check", "--strict", *files)
    with tempfile.TemporaryDirectory() as folder:
        session.chdir(folder)
        session.run("python", "-m", "venv", "used")
        for file in files:  # The second finds the packages that the first has brought.
            session.run("used/bin/pip", "install", "-q", file, external=True)
            program = (f"{folder}/used/bin/python", "-W", "error", "-P")
            session.run(*program, str(ROOT / ".ci" / "smoke.py"), external=True)
            uninstall = ("used/bin/pip", "uninstall", "-q", "-y", "optax_lossscale")
            session.run(*uninstall, external=True)
        shutil.unpack_archive(glob.glob(f"{ROOT}/dist/*.tar.gz")[0], folder, "gztar")
        session.chdir(glob.glob(f"{folder}/optax_lossscale-*")[0])
        session.install("-e", ".[test]")
        session.run("pytest")


@nox.session
def compiled(session: nox.Session) -> None:
    """Steps compiled for a TPU, without the device."""
    install(session, "test", "tpu")
    session.run(
        "pytest", "-m", "slow", "-k", "for_a_tpu", "tests/integration/test_benchmark.py"
    )


@nox.session
def faults(session: nox.Session) -> None:
    """Random changes of the package, of which the tests must catch four fifths."""
    install(session, "test")
    session.run("python", ".ci/faults.py", *session.posargs)


@nox.session
def random(session: nox.Session) -> None:
    """Random optimizers, masked early and late."""
    install(session, "test")
    program = "tests/transform/test_random_optimizers.py"
    options = ("-m", "slow or not slow", *session.posargs)
    session.run("pytest", program, *options, env={"RANDOM_OPTIMIZERS": "400"})


@nox.session(venv_backend="venv")
def nightly(session: nox.Session) -> None:
    """The tests on the nightly jax, which may fail. The first ones must not."""
    install(session, "test")
    registry = "https://us-python.pkg.dev/ml-oss-artifacts-published"
    index = f"{registry}/jax-public-nightly-artifacts-registry/simple/"
    session.install("--upgrade", "--pre", "jax", "jaxlib", "--index-url", index)
    session.run("pytest", "tests/test_unknown_jax.py", "-k", "train_step or updates")
    session.run("pytest")
