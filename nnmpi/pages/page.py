"""One page: the frame, the script of its kind, and its numbers as JSON; and pictures for slides, as SVG."""

import html
import json
import re
from collections.abc import Mapping
from colorsys import hls_to_rgb
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from nnmpi.errors import UsageError

EMPTY, INK = "#e9edf1", "#1b1f24"  # of pictures: black on nothing, which every program for slides reads


def make_page(kind: str, title: str, data: Mapping[str, Any]) -> str:
    """Return a page as HTML.

    Args:
        kind: which script shows the data: "collective", "schedule", "plan" or "run".
        title: the heading.
        data: JSON values, for that script.
    """
    parts = {name: (files("nnmpi.pages") / name).read_text() for name in ("frame.html", "frame.css", "common.js")}
    script = parts["common.js"] + (files("nnmpi.pages") / f"{kind}.js").read_text()
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c")  # or a name such as "</script>" or "<!--<script>" would move the data's end
    values = {"TITLE": html.escape(title), "STYLE": parts["frame.css"], "SCRIPT": script, "DATA": text}
    return re.sub("@([A-Z]+)@", lambda mark: values[mark[1]], parts["frame.html"])


def write_page(file: Path, kind: str, title: str, data: Mapping[str, Any]) -> None:
    """Write a page into a file; one that is there is replaced.

    Args:
        file, kind, title, data: see `make_page`.

    Raises:
        UsageError: when the file cannot be written.
    """
    _write(file, make_page(kind, title, data))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8", "replace")  # names of folders may be any bytes
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror}); give another file") from None


# ---- pictures ----


def colour(number: int, count: int) -> str:
    """Return one of so many colours that are told apart."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(0.05 + number / count, 0.55, 0.55))


def rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    """Return a rectangle; lengths in pixels."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="{stroke}"/>'


def text(x: float, y: float, words: object, anchor: str = "start") -> str:
    """Return words at a place; anchor: "start", "middle" or "end"."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(str(words))}</text>'


def write_svg(file: Path, title: str, width: float, height: float, parts: list[str]) -> None:
    """Write a picture into a file; one that is there is replaced.

    Args:
        file: where.
        title: what it shows, for those who cannot see it.
        width, height: in pixels.
        parts: rectangles and words.

    Raises:
        UsageError: when the file cannot be written.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
    head += f'height="{height:.0f}" font-family="sans-serif" font-size="12" role="img" aria-label={quoteattr(title)}>'
    _write(file, "\n".join([head, *parts, "</svg>"]) + "\n")
