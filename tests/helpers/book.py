"""The pages of the book, and what their programs define."""

import contextlib
import functools
import io
import json
import re
from pathlib import Path
from typing import Any

from shared import ROOT

PAGES = ROOT / "notebooks"
README = (ROOT / "README.md").read_text()


def code_blocks(text: str, language: str) -> list[str]:
    """The blocks of a page in Markdown; ```python theirs is not ```python."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def page(name: str) -> str:
    """The text of a page of the book."""
    return text_of(PAGES / f"{name}.md")


def text_of(path: Path) -> str:
    """The text of a page, or of the cells of a notebook that are text."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(x["source"]) for x in cells if x["cell_type"] == "markdown"]
    return "\n\n".join(texts)


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
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)
    return {**namespace, "printed": printed.getvalue()}


@functools.cache
def first_program() -> dict[str, Any]:
    return run_page(PAGES / "index.md")
