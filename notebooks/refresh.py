"""Execute the notebooks and store them with their outputs.

Run it after you change a notebook, or anything that a notebook shows::

    python notebooks/refresh.py [NAME...]

A name is that of a notebook in this folder, such as ``quickstart``. Without names, all
are refreshed, the picture in the README, and the repository's address in CITATION.cff.
The address in the Colab badges and in the first cells is that of pyproject.toml, too.
You need what
``pip install -e '.[test]'`` installs. The notebooks run on the CPU.
"""

import base64
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]
PICTURE = FOLDER / "images" / "demonstration.png"
# From the repository until there is a release. pip keeps the jax that Colab has.
INSTALL = f'%pip install -q "optax_lossscale[plots] @ git+{SOURCE}"'
LIMIT = 300_000  # bytes
COLAB = "https://colab.research.google.com"
BADGE = re.compile(r"\[!\[Open in Colab\]\(\S+\)\]\(\S+\)")


def main(names: list[str]) -> None:
    """Refresh the notebooks in ``names``, or all of them and what goes with them."""
    if not names:
        citation = ROOT / "CITATION.cff"
        address = f"repository-code: {SOURCE}"
        text = re.sub("(?m)^repository-code: .*", address, citation.read_text())
        citation.write_text(text)
        command = [sys.executable, "-m", "optax_lossscale", "--plot", PICTURE]
        subprocess.run(command, check=True)
    paths = [FOLDER / f"{name.removesuffix('.ipynb')}.ipynb" for name in names]
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        refresh(path)


def refresh(path: Path) -> None:
    """Execute a notebook, and store it if it is small enough."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = BADGE.sub(badge(path), notebook.cells[0].source)
    execute(notebook)
    text = nbformat.writes(notebook) + "\n"
    size = len(text.encode())
    if size >= LIMIT:
        sys.exit(
            f"{path.name} has {size / 1000:.0f} kB with its outputs, and must stay "
            f"below {LIMIT / 1000:.0f} kB. Draw fewer or smaller pictures."
        )
    path.write_text(text)
    print(f"{path.name}: {size / 1000:.0f} kB")


def badge(path: Path) -> str:
    """Return the Markdown that links to a notebook in Colab."""
    repository = SOURCE.removeprefix("https://github.com/")
    page = f"{COLAB}/github/{repository}/blob/main/{FOLDER.name}/{path.name}"
    return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({page})"


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run a notebook in a kernel of its own, and store outputs that stay the same.

    No times are recorded. The notebook's own metadata stay, because a kernel would
    add its version of Python.
    """
    metadata, install = notebook.metadata.copy(), notebook.cells[1]
    install.source = "pass"  # the package that is here, not the one in the repository
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    client = nbclient.NotebookClient(
        notebook, record_timing=False, coalesce_streams=True
    )
    client.execute(env={**environment, "JAX_PLATFORMS": "cpu"})
    notebook.metadata, install.source = metadata, INSTALL
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                sys.exit(f"This cell writes to stderr:\n{cell.source}\n\n{output.text}")
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])


def smaller(png: str) -> str:
    """Store a picture with 64 colors, in a third of the bytes."""
    stored = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        few_colors = picture.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few_colors.save(stored, "PNG", optimize=True)
    return base64.b64encode(stored.getvalue()).decode() + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
