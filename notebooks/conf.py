"""The book: `sphinx-build -W notebooks build/book` makes it, a warning is an error."""

import ast
import importlib.metadata
import inspect
import os
import re
import textwrap

import docutils.nodes
import sphinx.addnodes

METADATA = importlib.metadata.metadata("optax_lossscale")
URLS = dict(url.split(", ") for url in METADATA.get_all("Project-URL", []))

project = "optax_lossscale"
author = METADATA["Author"]
copyright = f"2026, {author}"
version = release = METADATA["Version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "notfound.extension",
]
exclude_patterns = ["refresh.py"]
# Single backticks in a docstring link to what they name. A name that does not exist is
# a warning; types of other packages, in signatures, have nothing to link to.
default_role = "any"
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*")]

nb_execution_mode = "off"  # notebooks are stored with their outputs
myst_heading_anchors = 3
myst_html_meta = {"description": METADATA["Summary"]}

autosummary_generate = False
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_rtype = False
napoleon_attr_annotations = False  # else each has a section "Type" of its own

toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = f"optax_lossscale {release}"
html_favicon = "_static/favicon.svg"
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = [("search.js", {"defer": "defer"})]
html_theme_options = {
    "repository_url": URLS["Source"],
    "repository_branch": "main",
    "path_to_docs": "notebooks",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_edit_page_button": True,
    "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    "navbar_persistent": [],
    "show_toc_level": 2,
}


def signature_as_written(app, what, name, obj, options, signature, returns):
    """`ArrayLike` rather than the union of the eleven types that it stands for."""
    if what not in ("function", "method"):
        return None
    function = ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]
    if what == "method":
        del function.args.args[0]  # self or cls
    if not name.startswith("optax_lossscale.presets."):  # their aliases are private
        returns = ast.unparse(function.returns).strip("'")
    return f"({ast.unparse(function.args)})", returns


def index_what_people_search(app, name, source):
    """Make index entries, which the search puts first, of comments in a page."""

    def entries(comment):
        quote, words = comment.groups()
        entries = ", ".join(f"! {word}" for word in words.split(", "))
        newline = r"\n" if quote else "\n"  # a line of a notebook is a JSON string
        return f"{quote}```{{index}} {entries}{newline}```"

    comments = re.compile('^( *"|)<!-- search: (.+) -->', re.M)
    source[0] = comments.sub(entries, source[0])


def lead_to_headings(app, doctree):
    """Let an index entry lead to the heading above it, whose title the search shows."""
    for node in doctree.findall(sphinx.addnodes.index):
        node["entries"] = [
            (kind, word, node.parent["ids"][0], *others)
            if target.startswith("index-")
            else (kind, word, target, *others)
            for kind, word, target, *others in node["entries"]
        ]
    index = app.env.get_domain("index")
    index.process_doc(app.env, app.env.docname, doctree)


def link_public_names(app, name, source):
    """Link the names of the table, which GitHub shows as they are, to their docs."""
    if name == "reference/index":
        role = r"| {py:obj}`\1 <optax_lossscale.\1>` |"
        source[0] = re.sub(r"^\| `([\w.]+)` \|", role, source[0], flags=re.M)


def break_names_at_joints(app, name, template, context, tree):
    """Let a long name break between its parts, as in `some_module.` `SomeClass`."""
    joint = r"(?<=[A-Za-z][._(=/])(?=\w)|(?<=[a-z])(?=[A-Z])"

    def with_breaks(code):
        return re.sub(joint, "<wbr>", code[0])

    if "body" in context:
        inline = r'(?<=<span class="pre">)[^<]{18,}'
        context["body"] = re.sub(inline, with_breaks, context["body"])


def write_llms_txt(app, exception):
    """List all pages for language models, as https://llmstxt.org proposes."""
    if exception:
        return

    def is_text(node):  # a badge, or a cell of a table, is none
        is_top = isinstance(node.parent, docutils.nodes.section)
        return is_top and not [*node.findall(docutils.nodes.image)]

    lines = [f"# {project}\n\n> {METADATA['Summary']} The tests run every program."]
    for toctree in app.env.get_doctree("index").findall(sphinx.addnodes.toctree):
        lines.append(f"\n## {toctree['caption']}\n")
        for _, name in toctree["entries"]:
            for page in (name, *app.env.toctree_includes.get(name, ())):
                texts = app.env.get_doctree(page).findall(docutils.nodes.paragraph)
                text = next(filter(is_text, texts)).astext()
                sentence = re.split(r"(?<=[.:])\s", text)[0]
                title = app.env.titles[page].astext()
                address = html_baseurl + app.builder.get_target_uri(page)
                lines.append(f"- [{title}]({address}): {sentence}")
    (app.outdir / "llms.txt").write_text("\n".join(lines))


def setup(app):
    app.connect("build-finished", write_llms_txt)
    app.connect("autodoc-process-signature", signature_as_written)
    app.connect("source-read", index_what_people_search)
    app.connect("source-read", link_public_names)
    app.connect("doctree-read", lead_to_headings)
    app.connect("html-page-context", break_names_at_joints)
