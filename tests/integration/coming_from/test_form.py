"""Every migration guide has the same form, and its tables quote its programs."""

import ast
import re

from guides import GUIDES, every_guide
from helpers import PAGES, code_blocks

PARTS = re.compile(
    r"^```(?P<fence>.*)\n(?P<code>(?s:.*?))^```$"
    r"|^(?P<level>#+) (?P<title>.+)$"
    r"|^(?P<table>(?:\|.*\n)+)"
    r"|^(?P<bullets>(?:- .*\n)+)"
    r"|^\*\*(?P<label>.+?):\*\*.*$"
    r"|^(?P<prose>.+)$",
    re.M,
)
FENCES = {"python theirs": "theirs", "bash theirs": "theirs", "python": "ours"}


def parts(guide):
    """The kind and the text of each part of a page, from top to bottom."""
    for match in PARTS.finditer(GUIDES[guide].read_text()):
        kind = match.lastgroup
        yield FENCES[match["fence"]] if kind == "code" else kind, match[kind]


def pairs(guide):
    """For each table of a page their program, ours, and the rows."""
    last = {}
    for kind, text in parts(guide):
        last[kind] = text
        if kind == "table":
            rows = [row.strip("|").split(" | ") for row in text.splitlines()[2:]]
            yield last["theirs"], last["ours"], rows


def snippets(cell):
    return [squeeze(code) for code in re.findall(r"`([^`]+)`", cell)]


def squeeze(code):
    """Without white space, and without the comma that ends a broken line."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s", "", code))


@every_guide
def test_a_guide_has_the_form_of_all(guide):
    found = list(parts(guide))
    kinds = " ".join(kind for kind, _ in found)
    pair = r"(title )?(prose )?label theirs label ours table "
    assert re.fullmatch(rf"title prose ({pair})+title bullets label ours", kinds)
    titles = [text for kind, text in found if kind == "title"]
    assert titles[0].startswith("Coming from ") and titles[-1] == "What differs"


@every_guide
def test_each_block_says_whose_it_is_and_the_table_says_the_same(guide):
    label = theirs = None
    for kind, text in parts(guide):
        if kind == "label":
            label = text
        elif kind == "theirs":
            theirs = label
        elif kind == "ours":
            assert label == "optax_lossscale"
        elif kind == "table":
            assert text.startswith(f"| {theirs} | optax_lossscale |\n")


def test_the_table_of_systems_and_the_contents_name_every_guide():
    text = (PAGES / "coming_from" / "index.md").read_text()
    contents = text.split("```{toctree}\n:hidden:\n\n")[1].split("\n```")[0]
    assert sorted(contents.splitlines()) == sorted(GUIDES)
    systems = text.split("| system |")[1].split("\n\n")[0]
    assert set(re.findall(r"\]\((\w+)\.md\)", systems)) == set(GUIDES)


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
        if theirs in code_blocks(GUIDES[guide].read_text(), "bash theirs"):
            words = {word for left, _ in rows for word in re.split(r"[` ]", left)}
            flags = re.findall(r"--\S*(?:scale|fp16|hysteresis)\S*", theirs)
            assert words.issuperset(flags)
            continue
        quoted = [snippet for left, _ in rows for snippet in snippets(left)]
        simple = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
        for node in ast.walk(ast.parse(theirs)):
            if isinstance(node, simple):
                code = squeeze(ast.get_source_segment(theirs, node))
                if re.search("[sS]cale", code) and not code.startswith("print"):
                    assert any(q in code or code in q for q in quoted), code
