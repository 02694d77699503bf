"""Sphinx's settings: Markdown pages by MyST, the reference from docstrings. `scripts/docs` builds
them.

The source folder is the checkout, so that links between the README, these pages and the benchmarks'
are the same here and where the code is hosted.
"""

import base64
import gzip
import html
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nnmpi
from nnmpi.base.files import read_json
from nnmpi.base.picture import INK, PALE, Arrow, Bar, Picture
from nnmpi.lab.comm import main as draw_collective
from nnmpi.lab.memory import main as draw_plan
from nnmpi.lab.render.collectives import draw_fit as draw_sums
from nnmpi.lab.schedule import main as draw_schedule

ROOT = Path(__file__).resolve().parents[1]

project = "nnmpi"
author = copyright = "the nnmpi developers"
version = release = nnmpi.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**.md", "benchmarks/**README.md", "examples/**README.md"]
exclude_patterns = ["docs/_build", ".*", "nnmpi", "tests", "runs", "build"]
html_theme = "furo"
html_title = "nnmpi, neural networks on MPI"
html_favicon = "_static/icon.svg"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["frames.js"]
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

# Python for browsers, on npm, and what its loader asks for.
PYODIDE = "314.0.7"
TEXTS = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide-lock.json")
BINARIES = ("pyodide.asm.wasm", "python_stdlib.zip")
IN_BROWSERS = ("base", "comm", "schedule")  # of nnmpi: what needs no NumPy, and its neighbours

TABLE = re.compile(r"\S {3,}\S")  # columns
ARRAY = re.compile(r"[~\w.]*ndarray\[tuple\[[~\w.]*Any, \.\.\.\], [~\w.]*dtype\[[~\w.]*Any\]\]")
OPTIONS = {
    item.name
    for section in (nnmpi.Layout, nnmpi.GradientExchange, nnmpi.Numerics, nnmpi.Sync)
    for item in fields(section)
}
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")


def show_pictures(lines: list[str]) -> list[str]:
    """Return a docstring in which every indented block is shown as it stands, and no character has
    a second meaning.

    The docstrings are plain text: what is indented is a picture, a table or a program. In
    reStructuredText such a block needs `::` before it, and lone asterisks, bars and underscores are
    markup. Napoleon's sections stay what they are; a picture in them is indented further than their
    entries' continued lines.
    """
    out: list[str] = []
    section, at = False, 0
    while at < len(lines):
        line = lines[at]
        depth = len(line) - len(line.lstrip())
        section = bool(SECTION.match(line)) or section and (depth > 0 or not line)
        after_blank = not out or not out[-1].strip()
        if after_blank and not section and depth == 0 and TABLE.search(line):
            block = next(
                (end for end in range(at, len(lines)) if not lines[end].strip()), len(lines)
            )
            if sum(bool(TABLE.search(text)) for text in lines[at:block]) * 2 > block - at:
                out += ["::", "", *(f"    {text}" for text in lines[at:block]), ""]
                at = block
                continue
        if line.strip() and depth > 0 and after_blank and (not section or depth > 8):
            block = at
            while block < len(lines) and (not lines[block].strip() or _depth(lines[block]) > 0):
                block += 1
            out += [
                "::",
                "",
                *(f"    {text}" if text.strip() else "" for text in lines[at:block]),
                "",
            ]
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
        f"`{part}`" if number % 2 else re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part)
        for number, part in enumerate(parts)
    )


def before_napoleon(
    app: Any, what: str, name: str, object: Any, options: Any, lines: list[str]
) -> None:
    """Rewrite a docstring in place; Sphinx calls it for each."""
    lines[:] = show_pictures(lines)
    if what in ("data", "attribute"):
        lines.insert(0, "")  # else Napoleon takes what stands before a colon for the type


def skip_fields(app: Any, what: str, name: str, object: Any, skip: bool, options: Any) -> bool:
    """Skip an option of the library as a member: its class's docstring lists it."""
    return skip or (name in OPTIONS and not callable(object) and not isinstance(object, property))


def shorten(
    app: Any,
    what: str,
    name: str,
    object: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Return a signature in which arrays are `Array`, as in the code, and not all that NumPy's
    types say.
    """
    short = [text and ARRAY.sub("Array", text) for text in (signature, returned)]
    return short[0], short[1]


def name_files(app: Any, tree: Any) -> None:
    """Name the files of a shown difference as they are in the checkout."""
    from docutils import nodes  # here, so that tests load this file without Sphinx

    for block in tree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            text = block.astext().replace(f"{app.srcdir}/", "")
            block.rawsource, block.children = text, [nodes.Text(text)]


def draw(name: str) -> str:
    """Return the picture that `FIGURES` names, or what a lesson draws on 3 simulated ranks, as SVG
    in the colours of the page.
    """
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        file = Path(folder) / "picture.svg"
        made = FIGURES[name](file) if name in FIGURES else run_lesson(name)
        if isinstance(made, Picture):
            made.save(file)
        title, text = str(getattr(made, "title", made)), file.read_text()
    text = text[text.index("<svg") :].replace(INK, "var(--color-foreground-primary)")
    text = text.replace("#000000", "var(--color-foreground-primary)")  # of a figure's axes
    text = re.sub(r'(<path [^>]*style="fill: )#ffffff', r"\1none", text).replace(
        PALE, "var(--color-background-border)"
    )
    shown = (
        f'<svg role="img" aria-label="{html.escape(title)}" class="picture" fill="currentColor" '
    )
    text = re.sub(r"<svg (?:(?:width|height)=.[0-9.]+pt. ?)*", shown, text, count=1)
    return f'<div class="picture">{text}</div>'


def run_lesson(name: str) -> Picture:
    """Return what a lesson draws."""
    words, sys.argv = sys.argv, [name, "--simulate", "3"]
    try:
        found = runpy.run_path(
            str(ROOT / "examples" / "lessons" / f"{name}.py"), run_name="__main__"
        )
    finally:
        sys.argv = words
    return found["picture"]


def run_from(page: str, start: str, folder: Path, **changed: str) -> None:
    """Run the first command of a page that begins so, with other values of some options."""
    text = (ROOT / "docs" / page).read_text()
    words = (
        re.findall(rf"^    ({start}(?:.*\\\n)*.*)\n", text, re.M)[0].replace("\\\n", " ").split()
    )
    for name, value in changed.items():
        words[words.index(f"--{name}") + 1] = value
    subprocess.run(
        [sys.executable, "-m", *words],
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )


def draw_speedup(file: Path) -> str:
    """Draw what the command of docs/simulated.md plots; return its title."""
    (file.parent / "matplotlibrc").write_text("svg.fonttype: none")  # text in the page's font
    run_from("simulated.md", "nnmpi speedup", file.parent, plot=str(file))
    return "Speed-ups on 1, 2, 4 and 8 simulated ranks: measured, the cost model's, and ideal"


def draw_fit(file: Path) -> str:
    """Draw the all-reduces of a committed measurement beside the fitted model's; return a title."""
    from matplotlib import rc_context

    saved = read_json(ROOT / "benchmarks" / "collectives" / "results" / "openmpi-4.json")
    head, rows = saved["header"], saved["rows"]
    machine = head["machine"]
    known = {
        (row["algorithm"], row["size"]): row["predicted_us"] / 1e6
        for row in rows
        if row["predicted_us"]
    }
    fit = SimpleNamespace(
        ranks=head["ranks"],
        machine=None,
        facts={"nodes": [0], "mpi": head["mpi"], "host": machine["cpu"], "date": machine["date"]},
        predict=lambda name, nbytes: known[name, nbytes],
    )
    sums = {
        name: SimpleNamespace(
            points=[(row["size"], row["p50_us"] / 1e6) for row in rows if row["algorithm"] == name]
        )
        for name in ("shared", "native", "ring", "halving-doubling")
    }
    with rc_context({"svg.fonttype": "none"}):  # text in the page's font
        draw_sums(fit, sums, file)
    return f"All-reduces of {head['ranks']} ranks, measured beside predicted"


def draw_trace(file: Path) -> Picture:
    """Return a step of the run that docs/layouts.md traces, in Perfetto's rows."""
    run_from("layouts.md", "nnmpi train --simulate 2 --pp 2", file.parent, out="run")
    events = json.loads(gzip.decompress((file.parent / "run" / "trace.json.gz").read_bytes()))
    rows = events["traceEvents"]
    names = {
        (row["pid"], row["tid"]): f"rank {row['pid']}, {row['args']['name']}"
        for row in rows
        if row["name"] == "thread_name"
    }
    step = [row for row in rows if row["name"] == "step 12"]
    begin, over = min(row["ts"] for row in step), max(row["ts"] + row["dur"] for row in step)
    shown = [row for row in rows if begin <= row.get("ts", 0) < over and row.get("cat") != "step"]

    def place(row: dict[str, Any]) -> tuple[str, float]:
        return names[row["pid"], row["tid"]], (row["ts"] - begin) / 1e3

    kinds = {"collective": "sum over ranks", "reduce": "sum over ranks", "input": "waiting"}
    spans = [row for row in shown if row["ph"] == "X"]
    bars = [
        Bar(name, 0, 0)
        for name in sorted({place(row)[0] for row in spans}, key=[*names.values()].index)
    ]
    for row in spans:
        (track, at), kind = place(row), kinds.get(row["cat"], row["cat"])
        text = row["name"][1:] if kind in ("forward", "backward") else ""
        bars.append(Bar(track, at, at + row["dur"] / 1e3, kind, text))
    ends = {row["id"]: row for row in shown if row["ph"] == "f"}
    sent = [row for row in shown if row["ph"] == "s" and row["id"] in ends]
    arrows = [Arrow(*place(row), *place(ends[row["id"]])) for row in sent]
    return Picture("A traced step: two stages of a pipeline, four microbatches", "ms", bars, arrows)


def draw_synchrony(file: Path) -> Picture:
    """Return what 3 ranks do in their first steps, one of them slow, by each rule of who may go
    on.
    """
    folder = file.parent
    words = "--dataset digits --model mlp --max-steps 8 --eval-every 0 --trace --quiet --simulate 3"
    bars = []
    for rule in ("bsp", "ssp --staleness 2", "asp", "local --local-steps 4"):
        more = f"--sync {rule} --out {folder / rule[:3]}".split()
        command = [
            sys.executable,
            "-m",
            "nnmpi.train",
            *words.split(),
            "--slow",
            "ms=10; rank=2,factor=3",
            *more,
        ]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        rows = json.loads(gzip.decompress((folder / rule[:3] / "trace.json.gz").read_bytes()))[
            "traceEvents"
        ]
        over = max(row["ts"] + row["dur"] for row in rows if row["ph"] == "X")
        for rank in range(3):
            own = [row for row in rows if row["pid"] == rank and row["name"] == "slowed down"]
            busy = sorted((row["ts"], row["ts"] + row["dur"]) for row in own)
            idle = [
                (a, b) for (_, a), (b, _) in pairwise([(0, 0), *busy, (over, over)]) if b - a > 100
            ]
            for kind, spans in (("waiting", idle), ("computing", busy)):
                bars += [
                    Bar(f"{rule.split()[0]}, rank {rank}", a / 1e3, b / 1e3, kind) for a, b in spans
                ]
    return Picture("Who waits for whom: 8 steps of 3 ranks, rank 2 three times as slow", "ms", bars)


FIGURES = {
    "speedup": draw_speedup,
    "fit": draw_fit,
    "trace": draw_trace,
    "synchrony": draw_synchrony,
}  # by the name that a page gives


def write_pages(app: Any) -> None:
    """Write the pages that run, for those that embed them."""
    folder = Path(app.outdir) / "pages"
    first = (
        '<!doctype html><html lang="en"><title>nnmpi: neural networks on MPI, in Python</title>'
        '<meta http-equiv="refresh" content="0; url=docs/index.html">'
        '<a href="docs/index.html">nnmpi</a>'
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "index.html").write_text(f"{first}\n")
    draw_collective(["render", "ring", "--ranks", "4", "--html", str(folder / "ring.html")])
    words = ["--pipeline", "1f1b", "--stages", "4", "--microbatches", "4"]
    draw_schedule([*words, "--html", str(folder / "1f1b.html")])
    drawn, kept = folder / "1f1b.svg", ROOT / "docs" / "_static" / "1f1b.svg"
    words[words.index("--microbatches") + 1] = "8"
    draw_schedule([*words, "--svg", str(drawn)])
    if texts_of(drawn) != texts_of(kept):
        raise ValueError(f"{kept}, the README's picture, is old; draw it again as the README says")
    write_python(folder / "python.js")
    write_run(folder / "run.html")
    draw_plan(["plan", "--layers", "8", "--bandwidth", "2MiB", "--html", str(folder / "plan.html")])


def texts_of(picture: Path) -> list[str]:
    """Return the texts of an SVG: another matplotlib may place and round in another way."""
    return re.findall(r">([^<>]+)</text>", picture.read_text())


def write_run(page: Path) -> None:
    """Write the page of a run on 2 simulated ranks, one of which is slower, with its evaluation."""
    words = (
        "--simulate 2 --model mlp --epochs 8 --slow ms=2;rank=1,factor=1.5 --log-every 3 --quiet"
    )
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/digits-mlp"
        for command in (
            ["nnmpi.train", *words.split(), "--out", run],
            ["nnmpi", "evaluate", run],
            ["nnmpi", "report", run, "--out", str(page)],
        ):
            subprocess.run(
                [sys.executable, "-m", *command],
                check=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
            )


def fetch_pyodide() -> Path | None:
    """Return the archive of Python for browsers, from npm's registry; None where npm has none.

    It is kept in docs/_build, so a second build needs no network.
    """
    file = ROOT / "docs" / "_build" / f"pyodide-{PYODIDE}.tgz"
    file.parent.mkdir(exist_ok=True)
    words = ["npm", "pack", f"pyodide@{PYODIDE}", "--silent", "--pack-destination", file.parent]
    with suppress(OSError, subprocess.SubprocessError):
        if not file.exists():
            subprocess.run(words, check=True, capture_output=True, timeout=300, cwd=file.parent)
    return file if file.exists() else None


def write_python(file: Path) -> bool:
    """Write the script from which docs/browser.md starts Python, with nnmpi's proofs and pictures
    inside; return whether there is a Python for browsers.

    A script, and not files to fetch, since a page that is opened from a disk may fetch nothing.
    """
    archive = fetch_pyodide()
    if archive is None:
        print("npm has no pyodide: docs/browser.md runs no programs", file=sys.stderr)
        return False
    code = io.BytesIO()
    with zipfile.ZipFile(code, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted((ROOT / "nnmpi").rglob("*.*")):
            name = path.relative_to(ROOT)
            if path.suffix != ".pyc" and (len(name.parts) == 2 or name.parts[1] in IN_BROWSERS):
                packed.write(path, name)
    with tarfile.open(archive) as held:
        parts = {
            name: reader.read()
            for name in (*TEXTS, *BINARIES)
            if (reader := held.extractfile(f"package/{name}"))
        }
    here = ROOT / "docs" / "browser"
    text = {name: parts[name].decode() for name in TEXTS} | {
        name: (here / name).read_text() for name in ("worker.js", "run.py")
    }
    # of packages that could be fetched, there are none
    text["pyodide-lock.json"] = json.dumps(
        {**json.loads(text["pyodide-lock.json"]), "packages": {}}
    )
    binary = {name: parts[name] for name in BINARIES} | {"nnmpi.zip": code.getvalue()}
    encoded = {name: base64.b64encode(value).decode() for name, value in binary.items()}
    file.write_text(f"self.PYTHON = {json.dumps({'text': text, 'binary': encoded})};\n")
    return True


def setup(app: Any) -> None:
    """Connect what is above, before Napoleon; `drawn` shows a picture that is made now."""
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class Drawn(Directive):
        required_arguments = 1

        def run(self) -> list[Any]:
            return [nodes.raw("", draw(self.arguments[0]), format="html")]

    app.add_directive("drawn", Drawn)
    app.connect("builder-inited", write_pages)
    app.connect("doctree-read", name_files)
    app.connect("autodoc-process-docstring", before_napoleon, priority=1)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip_fields)
