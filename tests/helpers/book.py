"""The pages of the book, and what their programs define."""

import contextlib
import functools
import io
import json
import re

from shared import ROOT

PAGES = ROOT / "notebooks"
README = (ROOT / "README.md").read_text()


def code_blocks(text, language):
    """The blocks of a page in Markdown; ```python theirs is not ```python."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def page(name):
    """The text of a page of the book."""
    return text_of(PAGES / f"{name}.md")


def text_of(path):
    """The text of a page, or of the cells of a notebook that are text."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = ["".join(x["source"]) for x in cells if x["cell_type"] == "markdown"]
    return "\n\n".join(texts)


def headings(text):
    """What links to the headings of a page are called."""
    titles = re.findall(r"^#+ (.+)$", text.lower(), re.M)
    return [re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles]


def table(text, first_cell):
    """The cells of a table in Markdown, row by row, without its header.

    ``first_cell`` is what the header begins with.
    """
    header = rf"^\| {re.escape(first_cell)}[^|\n]* \|"
    found = re.split(header, text, maxsplit=1, flags=re.M)[1]
    rows = found.split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"(?<= )\|(?= )", row[1:-1]) for row in rows]
    return [[cell.strip() for cell in row] for row in cells]


def run_page(path):
    """What the Python blocks of a page define and print, after all of them have run.

    A page whose first line is ``<!-- continues: index -->`` begins with what the
    program of the start page has defined.
    """
    text, namespace = path.read_text(), {}
    if text.startswith("<!-- continues: index -->\n"):
        namespace = dict(first_program())
    return run_blocks(code_blocks(text, "python"), path.name, namespace)


def run_blocks(blocks, name, namespace):
    """What the blocks define and print, one after the other."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)
    return {**namespace, "printed": printed.getvalue()}


@functools.cache
def first_program():
    return run_page(PAGES / "index.md")
