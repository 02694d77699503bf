"""Pictures for slides: SVG with black text on nothing, which every program for slides reads."""

from colorsys import hls_to_rgb
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from nnmpi.errors import UsageError

EMPTY, INK = "#e9edf1", "#1b1f24"


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
    try:
        file.write_text("\n".join([head, *parts, "</svg>"]) + "\n")
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror}); give another file") from None
