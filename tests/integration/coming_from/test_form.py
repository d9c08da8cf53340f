"""The tables of the migration guides quote the programs above them."""

import ast
import re

import guides
from guides import GUIDES, every_guide
from helpers import PAGES, page

PARTS = re.compile(
    r"^```(?P<fence>(?:python|bash)(?: theirs)?)\n(?P<code>(?s:.*?))^```$"
    r"|^(?P<table>(?:\|.*\n)+)",
    re.M,
)


def pairs(guide):
    """For each table of a page their program, ours, and the rows."""
    theirs = ours = None
    for match in PARTS.finditer(GUIDES[guide]):
        if match["table"]:
            rows = [row.strip("|").split(" | ") for row in match["table"].splitlines()]
            yield theirs, ours, rows[2:]
        elif match["fence"].endswith("theirs"):
            theirs = match["code"]
        else:
            ours = match["code"]


def snippets(cell):
    return [squeeze(code) for code in re.findall(r"`([^`]+)`", cell)]


def squeeze(code):
    """Without white space, and without the comma that ends a broken line."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s", "", code))


def statements(program):
    """The simple statements of a program in Python, and the options of a command."""
    try:
        tree = ast.parse(program)
    except SyntaxError:
        return re.findall(r"--\S+", program)
    simple = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
    nodes = [node for node in ast.walk(tree) if isinstance(node, simple)]
    return [ast.get_source_segment(program, node) for node in nodes]


def test_the_index_names_every_guide():
    named = re.findall(r"\]\((\w+)\.md[^)]*\)", page("coming_from/index"))
    files = {path.stem for path in PAGES.glob("coming_from/*.md")} - {"index"}
    assert {*named} == {*guides.PARTS} == files


@every_guide
def test_what_a_table_quotes_stands_in_the_programs(guide):
    for theirs, ours, rows in pairs(guide):
        for left, right in rows:
            assert snippets(left), left
            for cell, program in ((left, theirs), (right, ours)):
                for snippet in snippets(cell):
                    assert snippet in squeeze(program), snippet


@every_guide
def test_a_table_leaves_out_nothing_that_they_do_about_the_scale(guide):
    for theirs, _, rows in pairs(guide):
        quoted = [snippet for left, _ in rows for snippet in snippets(left)]
        for code in map(squeeze, statements(theirs)):
            about = re.search("[sS]cale|^--.*(fp16|hysteresis)", code)
            if about and not code.startswith("print"):
                assert any(q in code or code in q for q in quoted), code
