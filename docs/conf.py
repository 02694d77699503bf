"""Sphinx's settings: Markdown pages by MyST, the reference from docstrings. `scripts/docs` builds them.

The source folder is the checkout, so that links between the README, these pages and the benchmarks' are the same here
and where the code is hosted.
"""

import re
from pathlib import Path
from typing import Any

import nnmpi
from nnmpi.comm.__main__ import main as draw_collective
from nnmpi.memory.__main__ import main as draw_plan
from nnmpi.schedule.__main__ import main as draw_schedule

project = "nnmpi"
author = copyright = "the nnmpi developers"
version = release = nnmpi.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**.md", "benchmarks/**README.md", "examples/**README.md"]
exclude_patterns = ["docs/_build", ".*", "nnmpi", "tests", "runs", "build"]
html_theme = "furo"
html_title = "nnmpi"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
highlight_language = "text"  # most of what is indented is commands and pictures
pygments_style = "default"
myst_heading_anchors = 3
suppress_warnings = ["ref.python"]  # a type such as `shape: ...` that is a name in several classes
default_role = "code"  # `name` in a docstring is a name

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

TABLE = re.compile(r"\S {3,}\S")  # columns
ARRAY = re.compile(r"[~\w.]*ndarray\[tuple\[[~\w.]*Any, \.\.\.\], [~\w.]*dtype\[[~\w.]*Any\]\]")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def show_pictures(lines: list[str]) -> list[str]:
    """Return a docstring in which every indented block is shown as it stands, and no character has a second meaning.

    The docstrings are plain text: what is indented is a picture, a table or a program. In reStructuredText such a block
    needs `::` before it, and lone asterisks, bars and underscores are markup. Napoleon's sections stay what they are;
    a picture in them is indented further than their entries' continued lines.
    """
    out: list[str] = []
    section, at = False, 0
    while at < len(lines):
        line = lines[at]
        depth = len(line) - len(line.lstrip())
        section = bool(SECTION.match(line)) or section and (depth > 0 or not line)
        after_blank = not out or not out[-1].strip()
        if after_blank and not section and depth == 0 and TABLE.search(line):
            block = next((end for end in range(at, len(lines)) if not lines[end].strip()), len(lines))
            if sum(bool(TABLE.search(text)) for text in lines[at:block]) * 2 > block - at:
                out += ["::", "", *(f"    {text}" for text in lines[at:block]), ""]
                at = block
                continue
        if line.strip() and depth > 0 and after_blank and (not section or depth > 8):
            block = at
            while block < len(lines) and (not lines[block].strip() or _depth(lines[block]) > 0):
                block += 1
            out += ["::", "", *(f"    {text}" if text.strip() else "" for text in lines[at:block]), ""]
            section, at = False, block
            continue
        joined = bool(out) and bool(out[-1].strip()) and _depth(out[-1]) == 0 and not section
        if joined and line.strip() and depth > 0:  # a picture right below its sentence
            out.append("")
            continue
        out.append(_plain(line))
        at += 1
    return out


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _plain(line: str) -> str:
    """Escape what reStructuredText would read as markup, outside of backquotes."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        f"`{part}`" if number % 2 else re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part) for number, part in enumerate(parts)
    )


def before_napoleon(app: Any, what: str, name: str, object: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place; Sphinx calls it for each."""
    lines[:] = show_pictures(lines)
    if what in ("data", "attribute"):
        lines.insert(0, "")  # else Napoleon takes what stands before a colon for the type


def shorten(
    app: Any, what: str, name: str, object: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Return a signature in which arrays are `Array`, as in the code, and not all that NumPy's types say."""
    short = [text and ARRAY.sub("Array", text) for text in (signature, returned)]
    return short[0], short[1]


def name_files(app: Any, tree: Any) -> None:
    """Name the files of a shown difference as they are in the checkout."""
    from docutils import nodes  # here, so that tests load this file without Sphinx

    for block in tree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            text = block.astext().replace(f"{app.srcdir}/", "")
            block.rawsource, block.children = text, [nodes.Text(text)]


def write_pages(app: Any) -> None:
    """Write the pages that run, for those that embed them."""
    folder = Path(app.outdir) / "pages"
    folder.mkdir(parents=True, exist_ok=True)
    draw_collective(["render", "ring", "--ranks", "4", "--html", str(folder / "ring.html")])
    words = ["--schedule", "1f1b", "--stages", "4", "--microbatches", "4"]
    draw_schedule([*words, "--html", str(folder / "1f1b.html")])
    draw_plan(["plan", "--layers", "8", "--bandwidth", "2MiB", "--html", str(folder / "plan.html")])


def setup(app: Any) -> None:
    """Connect what is above, before Napoleon."""
    app.connect("builder-inited", write_pages)
    app.connect("doctree-read", name_files)
    app.connect("autodoc-process-docstring", before_napoleon, priority=1)
    app.connect("autodoc-process-signature", shorten)
