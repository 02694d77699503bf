"""Tables of these pages that are made from what the package knows.

Each stands between two comments of its page, which name it:

    <!-- made: readers -->
    <!-- made to here -->

`python docs/made.py` writes them; `scripts/docs` does that before it builds the pages, and a test
compares them.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from nnmpi.comm.algorithms.registry import COLLECTIVES
from nnmpi.comm.synchrony.sync import MODES
from nnmpi.compose.losses import NAMES as LOSSES
from nnmpi.data.catalogue import BUNDLED, NAMES, SOURCES, TEXTS
from nnmpi.data.readers import READERS
from nnmpi.data.transform import AUGMENTATIONS
from nnmpi.metrics.metric import QUANTITIES, Metric
from nnmpi.metrics.rows import METRICS
from nnmpi.optim.updates import OPTIMIZERS
from nnmpi.parallel.compressed import EXAMPLES
from nnmpi.schedule.schedules import TRAINING

DOCS = Path(__file__).resolve().parent
END = "<!-- made to here -->"
BLOCK = re.compile(rf"(<!-- made: ([\w-]+) -->\n).*?({END})", re.DOTALL)


def table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of Markdown; the head's columns are separated by bars."""
    columns = [cell.strip() for cell in head.split("|")]
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def quoted(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def readers() -> str:
    """Files by their suffixes, and what each holds."""
    rows = ((quoted(row.suffixes), row.help) for row in READERS)
    return table("suffixes | a file holds", rows)


def data_sets() -> str:
    """Data sets by name."""

    def kind(name: str) -> str:
        text = ", a text for language models" if name in TEXTS else ""
        if name in BUNDLED:
            return f"in the package{text}"
        return f"downloaded, {sum(file.size for file in SOURCES[name]) / 1e6:.0f} MB{text}"

    return table("`--dataset` | where it is", ((quoted([name]), kind(name)) for name in NAMES))


def optimizers() -> str:
    """Optimizers by name, and their settings with defaults."""

    def settings(name: str) -> str:
        given = (item for item in OPTIMIZERS[name].options.values() if item.name != "lr")
        return quoted(f"{item.name}={item.default}" for item in given)

    rows = (
        (f"`{name}`", f"`{row.kind.__name__}`", row.words, settings(name))
        for name, row in OPTIMIZERS.items()
    )
    return table("`--optimizer` | class | what it does | arguments beside `lr`", rows)


def metrics() -> str:
    """Metrics by name, and what they are for."""

    def tasks(row: Metric) -> str:
        kinds = ", ".join("numbers" if kind == QUANTITIES else kind for kind in row.kinds)
        if not row.fewest:
            return kinds
        return (
            f"{row.fewest} {kinds}" if row.fewest == row.most else f"{row.fewest} or more {kinds}"
        )

    rows = ((f"`{name}`", tasks(row), row.help) for name, row in METRICS.items())
    return table("`--metric` | of | value", rows)


def algorithms() -> str:
    """The reference of each file of algorithms."""
    modules = dict.fromkeys(
        phase.__module__ for row in COLLECTIVES.values() for phase in row.phases
    )
    return "\n".join(
        f"## {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n" for module in modules
    )


MADE: dict[str, Callable[[], str]] = {
    "readers": readers,
    "data-sets": data_sets,
    "optimizers": optimizers,
    "metrics": metrics,
    "algorithms": algorithms,
}

# Tables with columns that nobody can make: each name must have its row.
ROWS: dict[tuple[str, str], set[str]] = {
    ("layouts.md", "--pipeline"): {*TRAINING},
    ("reference/layouts.md", "--pipeline"): {*TRAINING},
    ("synchrony.md", "--sync"): {*MODES},
    ("layouts.md", "--compress"): {*EXAMPLES.values()},
    ("reference/data.md", "--loss"): {*LOSSES},
    ("reference/data.md", "--augment"): {*AUGMENTATIONS},
    ("reference/costs.md", "--allreduce"): {
        *(algorithm for operation, algorithm in COLLECTIVES if operation == "all-reduce"),
        *("native", "shared", "auto"),
    },
}


def pages() -> list[Path]:
    """Return all pages."""
    return [file for file in sorted(DOCS.rglob("*.md")) if "_build" not in file.parts]


def made(text: str) -> str:
    """Return a page with its tables as they are made now."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{MADE[block[2]]()}\n{block[3]}", text)


def names_in(text: str, option: str) -> set[str]:
    """Return the names in the first column of the table whose head begins with an option."""
    result, is_here = set[str](), False
    for line in text.splitlines():
        first = line.split("|")[1] if line.startswith("|") else ""
        is_here = bool(first) and (is_here or first.strip() == f"`{option}`")
        if is_here and f"`{option}`" != first.strip():
            result |= {*re.findall("`([^`]+)`", first)}
    return result


if __name__ == "__main__":
    for page in pages():
        if (text := made(page.read_text())) != page.read_text():
            page.write_text(text)
