"""One page: the frame, the script of its kind, and its data as JSON."""

import html
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from nnmpi.base.errors import UsageError, raised_as
from nnmpi.base.files import json_text, write_atomically


def make_page(kind: str, title: str, data: Mapping[str, Any]) -> str:
    """Return a page as HTML.

    Args:
        kind: of the script: "collective", "schedule", "plan" or "run".
        title: the heading.
        data: JSON values for the script.
    """
    parts = {
        name: (files("nnmpi.lab.pages") / name).read_text("utf-8")
        for name in ("frame.html", "frame.css", "common.js")
    }
    script = f"{parts['common.js']}\n{(files('nnmpi.lab.pages') / f'{kind}.js').read_text('utf-8')}"
    text = json_text(data, separators=(",", ":"))
    # Escape "<": a name such as "</script>" or "<!--<script>" would end the data early.
    text = text.replace("<", "\\u003c")
    values = {
        "TITLE": html.escape(title),
        "STYLE": parts["frame.css"],
        "SCRIPT": script,
        "DATA": text,
    }
    return re.sub("@([A-Z]+)@", lambda mark: values[mark[1]], parts["frame.html"])


def write_page(file: Path, kind: str, title: str, data: Mapping[str, Any]) -> None:
    """Write a page to a file, replacing an existing one.

    Args:
        file, kind, title, data: see `make_page`.

    Raises:
        UsageError: when the file cannot be written, and for values that a page cannot show.
    """
    try:
        page = make_page(kind, title, data)
    except ValueError as error:  # of a number with thousands of digits, for one
        raise UsageError(f"{file} cannot show a value of the run: {error}") from None
    with raised_as(UsageError, f"{file} cannot be written", "give another file"):
        # "replace", since names of folders may be any bytes
        write_atomically(file, page.encode("utf-8", "replace"))
