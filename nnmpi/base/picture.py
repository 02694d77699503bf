"""Pictures for a terminal and for slides: rows of bars along an axis, and arrows between rows.

    Two ranks' step

    rank 0  F0##F1##        B0==B1==
    rank 1      F0##B0==F1##B1==
            0                          7 ms
            # forward   = backward

Picture files have a white background and the colours of nnmpi's HTML pages.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from nnmpi.base.errors import UsageError, raised_as

INK, PALE = "#1b1f24", "#e9edf1"
USUAL = {
    "forward": "#4c78a8",
    "backward": "#2f8f88",
    "backward to the input": "#2f8f88",
    "backward to the weights": "#8aa83c",
    "kept": "#8aa83c",
    "waiting": "#d1495b",
    "waits": "#c98b2b",
    "moves": "#8d6bb1",
    "killed": "#d1495b",
    "freed": PALE,
    "": PALE,
}
OTHERS = "#4c78a8", "#c98b2b", "#2f8f88", "#8d6bb1", "#8aa83c", "#6b7785"
MARKS = "#=+*%@"
WIDTH = 64  # characters of the axis, as text
LETTER = 0.0112  # inches: mean width of a letter per point of font size
# What a file says of its origin, by which `files.is_own` knows it again.
_ABOUT: Mapping[str, dict[str, str | None]] = {
    ".svg": {"Creator": "nnmpi", "Date": None},
    ".png": {"Software": "nnmpi"},
    ".pdf": {"Creator": "nnmpi"},
}
ENDINGS = tuple(_ABOUT)


class Bar(NamedTuple):
    """A bar.

    Attributes:
        row: its label.
        begin, end: along the axis.
        kind: the kind of work, such as "forward". It sets the colour; "" is pale.
        text: written inside the bar. If the bar is too short, it stands to the right of the bar;
            a file leaves it out unless the bar is the last of its row.
    """

    row: str
    begin: float
    end: float
    kind: str = ""
    text: str = ""


class Arrow(NamedTuple):
    """An arrow from (row, begin) to (to, end), such as a message; its kind sets the colour."""

    row: str
    begin: float
    to: str
    end: float
    kind: str = ""
    text: str = ""


@dataclass(frozen=True)
class Picture:
    """Bars and arrows along an axis; `print` draws the bars as text, `save` all in a file.

    >>> print(Picture("Bytes", "bytes", [Bar("ring", 0, 3, "sent"), Bar("server", 0, 4, "sent")]))
    Bytes
    <BLANKLINE>
    ring    ################################################
    server  ################################################################
            0                                                        4 bytes
            # sent
    """

    title: str
    along: str
    bars: Sequence[Bar]
    arrows: Sequence[Arrow] = ()

    @property
    def end(self) -> float:
        """The end of the axis; 1 if all bars have length 0."""
        return max(bar.end for bar in self.bars) or 1

    @property
    def kinds(self) -> list[str]:
        """The kinds of bars and arrows: the legend."""
        kinds = [bar.kind for bar in self.bars] + [arrow.kind for arrow in self.arrows]
        return [kind for kind in dict.fromkeys(kinds) if kind]

    @property
    def rows(self) -> list[str]:
        """The rows in the order of their first bars."""
        return [*dict.fromkeys(bar.row for bar in self.bars)]

    def __str__(self) -> str:
        """Return the picture as text, without arrows."""
        end, rows = self.end, self.rows
        kinds = [kind for kind in self.kinds if kind != "waiting"]
        marks = {"": ".", "waiting": "."} | dict(zip(kinds, cycle(MARKS), strict=False))
        edge = max(map(len, rows)) + 2
        lines = [self.title, ""]
        for row in rows:
            line = ""
            for _, at, to, kind, text in sorted(bar for bar in self.bars if bar.row == row):
                begin, stop = round(at * WIDTH / end), round(to * WIDTH / end)
                drawn = marks[kind] * (stop - begin)
                inside = len(text) < len(drawn)
                line = line[:begin].ljust(begin) + (
                    text + drawn[len(text) :] if inside else f"{drawn} {text}"
                )
            lines.append(f"{row:{edge}}{line}".rstrip())
        last = f"{end:,.0f} {self.along}" if end >= 100 else f"{end:.3g} {self.along}"
        lines.append(f"{'':{edge}}0{last:>{WIDTH - 1}}")
        lines.append(" " * edge + "   ".join(f"{marks[kind]} {kind}" for kind in self.kinds))
        return "\n".join(lines).rstrip()

    def save(self, file: Path) -> None:
        """Write the picture to a file; see `save_figure`."""
        check_figure(file)
        figure = new_figure(7, 1.3 + 0.32 * len(self.rows))
        from matplotlib import rc_context

        inked = dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
        )
        with rc_context(inked | {"svg.fonttype": "none", "svg.hashsalt": "nnmpi"}):
            # fonttype: text in an SVG stays text; hashsalt: equal pictures give equal bytes
            self._draw(figure)
            save_figure(figure, file)

    def _draw(self, figure: Any) -> None:
        axes, rows, kinds, end = figure.subplots(), self.rows, self.kinds, self.end
        last = {bar.row: bar.begin for bar in sorted(self.bars, key=lambda bar: bar.begin)}
        inner = [bar for bar in self.bars if bar.begin < last[bar.row] and bar.end > bar.begin]
        # The axis's length in letters, so that every bar but a row's last holds its text. It sets
        # the font size and the figure's width, 7 to 16 inches.
        letters = max((len(bar.text) * end / (bar.end - bar.begin) for bar in inner), default=0)
        size = 8 if 8 * LETTER * letters < 8 else 6
        figure.set_figwidth(min(max(7, 1.1 + size * LETTER * letters), 16))
        letter = size * LETTER * end / (figure.get_figwidth() - 1.1)
        free = cycle(item for item in OTHERS if item not in map(USUAL.get, kinds))
        colours = (
            dict(zip((kind for kind in kinds if kind not in USUAL), free, strict=False)) | USUAL
        )
        for row, begin, to, kind, text in self.bars:
            y, inside = rows.index(row), letter * len(text) <= 1.001 * (to - begin)
            axes.barh(
                y,
                to - begin,
                0.8,
                begin,
                color=colours[kind],
                edgecolor="white",
                linewidth=0.5 * (to > begin),
            )
            at, side = ((begin + to) / 2, "center") if inside else (to + 0.006 * end, "left")
            ink = "white" if inside and colours[kind] != PALE else INK
            if inside or begin == last[row]:
                axes.text(at, y, text, va="center", ha=side, color=ink, size=size, clip_on=inside)
        for row, begin, other, to, kind, text in self.arrows:
            look = {
                "arrowstyle": "-|>",
                "color": colours[kind] if kind else INK,
                "shrinkA": 1,
                "shrinkB": 0,
            }
            ends = (to, rows.index(other)), (begin + 0.01 * end, rows.index(row))
            axes.annotate(text, *ends, arrowprops=look, va="center", size=8)
        axes.set_yticks(range(len(rows)), rows, size=9)
        axes.set(xlabel=self.along, xlim=(0, end), ylim=(len(rows) - 0.5, -0.5))
        axes.xaxis.get_major_locator().set_params(integer=end >= 3)
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.suptitle(self.title, x=0.01, ha="left", size=10.5)
        for kind in kinds:
            axes.barh(0, 0, color=colours[kind], label=kind)
        figure.legend(loc="outside lower left", ncols=6, frameon=False, fontsize=8)


def check_figure(file: Path | None) -> None:
    """Refuse a figure that cannot be made, before anything is computed for it; None is none.

    Raises:
        UsageError: without matplotlib, and for another suffix than those of `ENDINGS`.
    """
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise UsageError(f"{file} is drawn by matplotlib; pip install matplotlib")
    if file.suffix not in ENDINGS:
        raise UsageError(
            f"{file} must end in {', '.join(ENDINGS)}; give another name, such as picture.svg"
        )


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure of this size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, file: Path) -> None:
    """Write a figure to a .svg, .png or .pdf file.

    Raises:
        UsageError: as `check_figure`, and for a file that cannot be written.
    """
    check_figure(file)
    with raised_as(
        UsageError, f"{file} cannot be written", "give another file, such as picture.svg"
    ):
        figure.savefig(file, metadata=_ABOUT[file.suffix])


def preformat(text: str) -> str:
    """Return a text picture as HTML, for a notebook's `_repr_html_`."""
    return f'<pre style="line-height: 1.2">{html.escape(text)}</pre>'
