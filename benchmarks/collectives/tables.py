"""Prints the README's tables from the JSON files of runs:

    python benchmarks/collectives/tables.py results/*.json

Files of the same MPI and number of ranks make one pair of tables: times, and ratios. The first file
with an algorithm counts. gloo measured alone, without MPI, is added to every MPI's.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.collectives.command import FUSED, GLOO, UPDATE  # noqa: E402
from benchmarks.harness.tables import MISSING, number, render  # noqa: E402
from nnmpi.base.errors import UsageError  # noqa: E402
from nnmpi.base.units import format_bytes  # noqa: E402
from nnmpi.comm.algorithms.registry import ALGORITHMS, AUTO, NATIVE, SHARED  # noqa: E402

K, M = 2**10, 2**20
NO_MPI = "without MPI"  # the MPI's name in a file of gloo alone

Times: TypeAlias = Mapping[str, float]
"""The medians of one size in microseconds, by algorithm."""


Read: TypeAlias = Callable[[Times], tuple[float, str] | None]
"""(times of one size) -> a ratio, and the algorithm that it is of; None without a measurement."""


def _against(name: str, baseline: str) -> Read:
    return lambda times: (
        (times[baseline] / times[name], "") if name in times and baseline in times else None
    )


def _auto(times: Times) -> tuple[float, str] | None:
    """Return the best of "auto"'s choices against "auto"."""
    others = {name: times[name] for name in (NATIVE, SHARED, *ALGORITHMS) if name in times}
    if AUTO not in times or not others:
        return None
    best = min(others, key=lambda name: others[name])
    return others[best] / times[AUTO], best


def _slowest(times: Times) -> tuple[float, str] | None:
    """Return gloo against the slowest of nnmpi's usual algorithms for gradients inside a node."""
    local = {name: times[name] for name in (SHARED, AUTO, "ring") if name in times}
    if GLOO not in times or not local:
        return None
    slowest = max(local, key=lambda name: local[name])
    return times[GLOO] / local[slowest], slowest


CLAIMS: Mapping[str, Read] = {
    "shared against native": _against(SHARED, NATIVE),
    "fused against native+update": _against(FUSED, UPDATE),
    "ring against native": _against("ring", NATIVE),
    "auto against the best": _auto,
    "slowest of shared, ring, auto against gloo": _slowest,
}


def times_by_size(contents: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the medians of one kind of run by size and algorithm.

    The first file with an algorithm at a size counts, so that ratios are of one interleaved run. Of
    gloo, which is slower beside others than alone, the best of all files counts.
    """
    result: dict[int, dict[str, float]] = {}
    for content in contents:
        times: dict[int, dict[str, float]] = {}
        for row in content["rows"]:
            times.setdefault(row["size"], {})[row["algorithm"]] = row["p50_us"]
        for size, local in times.items():
            saved = result.setdefault(size, {})
            gloo = min((item[GLOO] for item in (saved, local) if GLOO in item), default=None)
            saved |= {name: value for name, value in local.items() if name not in saved}
            if gloo is not None:
                saved[GLOO] = gloo
    return dict(sorted(result.items()))


Content = Mapping[str, Any]


def tables(contents: Sequence[Content]) -> str:
    """Return all tables as Markdown: times and ratios for each MPI and number of ranks."""
    kinds: dict[tuple[int, str], list[Content]] = {}
    for content in contents:
        kinds.setdefault((content["header"]["ranks"], content["header"]["mpi"]), []).append(content)
    alone = {ranks: kinds.pop((ranks, mpi)) for ranks, mpi in list(kinds) if mpi == NO_MPI}
    for (ranks, _), result in kinds.items():
        result += alone.get(ranks, [])
    return "\n\n".join(part(ranks, mpi, kinds[ranks, mpi]) for ranks, mpi in sorted(kinds))


def part(ranks: int, mpi: str, contents: Sequence[Content]) -> str:
    """Return the tables of one MPI and number of ranks.

    Args:
        ranks: of these runs.
        mpi: the library and its version.
        contents: of the files.
    """
    header, times = contents[0]["header"], times_by_size(contents)
    machine = header["machine"]
    heading = (
        f"### {ranks} ranks, {mpi}\n\n{machine['date']}, {machine['cpu']}, {machine['cores']}"
        f" cores, {header['nodes']} node{'s' * (header['nodes'] != 1)}, {header['operation']} of"
        f" {header['dtype']}, fit {header['fit']}."
    )
    return "\n\n".join([heading, _times(times), _ratios(times)])


def _times(times: Mapping[int, Mapping[str, float]]) -> str:
    """Return the medians in microseconds."""
    names = list(dict.fromkeys(name for local in times.values() for name in local))

    def cell(name: str, pair: tuple[int, Mapping[str, float]]) -> str:
        value = pair[1].get(name)
        return number(value, ".3g" if value is not None and value < 1000 else ".0f")

    columns = [
        ("us", lambda pair: format_bytes(pair[0])),
        *((name, partial(cell, name)) for name in names),
    ]
    return render(columns, times.items())


def _ratios(times: Mapping[int, Mapping[str, float]]) -> str:
    """Return how many times faster."""
    columns = [("times faster", lambda pair: format_bytes(pair[0]))]
    columns += [
        (title, lambda pair, read=read: _cell(read(pair[1]))) for title, read in CLAIMS.items()
    ]
    return render(columns, times.items())


def _cell(result: tuple[float, str] | None) -> str:
    if result is None:
        return MISSING
    ratio, name = result
    return f"{ratio:.2f}" + (f" ({name})" if name else "")


def read(file: Path) -> Content:
    """Return a result of the benchmark: "header" and "rows".

    Raises:
        UsageError: for another kind of file.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        content["rows"][0]["algorithm"], content["header"]["ranks"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{file} holds no rows of this benchmark: {error}") from None
    return content


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
