"""Prints the README's tables from the JSON files of runs:

    python benchmarks/collectives/tables.py results/*.json

Files of the same MPI and the same ranks make one pair of tables: the times, and the ratios that were to be reached. In
them the first file that has an algorithm counts. What `alone.py` wrote is added to every MPI's.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from benchmarks.collectives.claims import CLAIMS, Claim, Ratio, times_by_size  # noqa: E402
from benchmarks.collectives.names import NO_MPI  # noqa: E402
from benchmarks.collectives.results import read  # noqa: E402
from nnmpi.comm.sizes import name_bytes  # noqa: E402
from nnmpi.errors import UsageError  # noqa: E402

Content = Mapping[str, Any]


def tables(contents: Sequence[Content]) -> str:
    """Return all tables as Markdown: a summary, then times and ratios for each MPI and number of ranks."""
    kinds: dict[tuple[int, str], list[Content]] = {}
    for content in contents:
        kinds.setdefault((content["header"]["ranks"], content["header"]["mpi"]), []).append(content)
    alone = {ranks: kinds.pop((ranks, mpi)) for ranks, mpi in list(kinds) if mpi == NO_MPI}
    for (ranks, _), found in kinds.items():
        found += alone.get(ranks, [])
    parts = [summary(kinds)] + [part(ranks, mpi, kinds[ranks, mpi]) for ranks, mpi in sorted(kinds)]
    return "\n\n".join(parts)


def summary(kinds: Mapping[tuple[int, str], Sequence[Content]]) -> str:
    """Return a row for each claim: the least ratio of each kind of run where something is promised."""
    order = sorted(kinds)
    lines = [
        "| least ratio where one is promised | " + " | ".join(f"{ranks} ranks, {mpi}" for ranks, mpi in order) + " |",
        "|---" * (len(order) + 1) + "|",
    ]
    for claim in CLAIMS:
        cells = [_least(claim, ranks, mpi, times_by_size(kinds[ranks, mpi])) for ranks, mpi in order]
        lines.append(f"| {claim.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def part(ranks: int, mpi: str, contents: Sequence[Content]) -> str:
    """Return the tables of one MPI and number of ranks."""
    header, times = contents[0]["header"], times_by_size(contents)
    machine = header["machine"]
    said = (
        f"### {ranks} ranks, {mpi}\n\n"
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, {header['nodes']} node"
        f"{'s' * (header['nodes'] != 1)}, {header['operation']} of {header['dtype']}, fit {header['fit']}."
    )
    return "\n\n".join([said, _times(times), _ratios(ranks, mpi, times)])


def _times(times: Mapping[int, Mapping[str, float]]) -> str:
    """Return the medians in microseconds."""
    names = list(dict.fromkeys(name for own in times.values() for name in own))
    lines = ["| us | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for nbytes, own in times.items():
        cells = [f"{own[name]:.3g}" if name in own and own[name] < 1000 else _whole(own.get(name)) for name in names]
        lines.append(f"| {name_bytes(nbytes)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratios(ranks: int, mpi: str, times: Mapping[int, Mapping[str, float]]) -> str:
    """Return how many times faster, with what is missed in bold."""
    lines = [
        "| times faster | " + " | ".join(claim.title for claim in CLAIMS) + " |",
        "|---" * (len(CLAIMS) + 1) + "|",
    ]
    for nbytes, own in times.items():
        cells = [_cell(claim.judge(own, ranks, mpi, nbytes)) for claim in CLAIMS]
        lines.append(f"| {name_bytes(nbytes)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _least(claim: Claim, ranks: int, mpi: str, times: Mapping[int, Mapping[str, float]]) -> str:
    """Return the ratio that comes closest to a broken promise, and where."""
    found = [(claim.judge(own, ranks, mpi, nbytes), nbytes) for nbytes, own in times.items()]
    promised = [(ratio, nbytes) for ratio, nbytes in found if ratio is not None and ratio.need is not None]
    if not promised:
        return "-"
    ratio, nbytes = min(promised, key=lambda pair: pair[0].value / (pair[0].need or 1))
    return f"{_cell(ratio)} at {name_bytes(nbytes)}, needs {ratio.need:g}"


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    text = f"{ratio.value:.2f}" if ratio.holds else f"**{ratio.value:.2f}**"
    return f"{text} ({ratio.note})" if ratio.note else text


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def main(words: Sequence[str]) -> None:
    """Print the tables of these files.

    Raises:
        SystemExit: without files, and for one that holds no rows.
    """
    if not words or words[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    try:
        print(tables([read(Path(word)) for word in words]))
    except UsageError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
