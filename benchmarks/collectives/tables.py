"""Prints the README's tables from the JSON files of runs:

    python benchmarks/collectives/tables.py results/*.json

Files of the same MPI and the same ranks make one pair of tables: the times, and the ratios that were to be reached. In
them the first file that has an algorithm counts. What `alone.py` wrote is added to every MPI's.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from benchmarks.collectives.options import FUSED, GLOO, NO_MPI, UPDATE  # noqa: E402
from benchmarks.harness.tables import MISSING, number, render  # noqa: E402
from nnmpi.comm.algorithms.registry import ALGORITHMS, AUTO, NATIVE, SHARED  # noqa: E402
from nnmpi.errors import UsageError  # noqa: E402
from nnmpi.units import format_bytes  # noqa: E402

K, M = 2**10, 2**20

Times: TypeAlias = Mapping[str, float]
"""The medians of one size in microseconds, by algorithm."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster one is than another, and what it is meant to be.

    Attributes:
        value: above 1 nnmpi is the faster one.
        need: what it should reach at least; None where nothing is promised.
        note: which algorithm it was, where the claim leaves that open.
    """

    value: float
    need: float | None
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is reached."""
        return self.need is None or self.value >= self.need


@dataclass(frozen=True)
class Claim:
    """One column of the table.

    Attributes:
        title: who against whom.
        read: (times of one size) -> ratio and note; None where one of them was not measured.
        need: (ranks, MPI's name, bytes) -> what is promised, None for nothing.
    """

    title: str
    read: Callable[[Times], tuple[float, str] | None]
    need: Callable[[int, str, int], float | None]

    def judge(self, times: Times, ranks: int, mpi: str, nbytes: int) -> Ratio | None:
        """Return the ratio at one size, None where it was not measured.

        Args:
            times: the medians by algorithm.
            ranks: of the run.
            mpi: the library and its version.
            nbytes: of each rank's buffer.
        """
        found = self.read(times)
        return None if found is None else Ratio(found[0], self.need(ranks, mpi, nbytes), found[1])


def _against(own: str, other: str) -> Callable[[Times], tuple[float, str] | None]:
    return lambda times: (times[other] / times[own], "") if own in times and other in times else None


def _auto(times: Times) -> tuple[float, str] | None:
    """Return the best of all that "auto" can choose from against it."""
    others = {name: times[name] for name in (NATIVE, SHARED, *ALGORITHMS) if name in times}
    if AUTO not in times or not others:
        return None
    best = min(others, key=lambda name: others[name])
    return others[best] / times[AUTO], best


def _slowest(times: Times) -> tuple[float, str] | None:
    """Return gloo against the slowest of those of nnmpi's that one would use for gradients inside a node."""
    own = {name: times[name] for name in (SHARED, AUTO, "ring") if name in times}
    if GLOO not in times or not own:
        return None
    slowest = max(own, key=lambda name: own[name])
    return times[GLOO] / own[slowest], slowest


def _need_shared(ranks: int, mpi: str, nbytes: int) -> float | None:
    if nbytes < 16 * K:
        return None
    if ranks != 2:
        return 1.8 if ranks > 2 else None
    return 2.3 if mpi.startswith("MPICH") and nbytes == 16 * M else 2.5


def _need_ring(ranks: int, mpi: str, nbytes: int) -> float | None:
    if ranks != 2 or nbytes < 64 * K:
        return None
    return 1.7 if nbytes >= 64 * M else 1.0 if nbytes >= M else 0.9


CLAIMS: Sequence[Claim] = (
    Claim("shared against native", _against(SHARED, NATIVE), _need_shared),
    Claim(
        "fused against native+update",
        _against(FUSED, UPDATE),
        lambda ranks, mpi, nbytes: 4.0 if ranks == 2 and nbytes >= 64 * K else None,
    ),
    Claim("ring against native", _against("ring", NATIVE), _need_ring),
    Claim("auto against the best", _auto, lambda ranks, mpi, nbytes: 0.95 if ranks == 2 else None),
    Claim(
        "slowest of shared, ring, auto against gloo",
        _slowest,
        lambda ranks, mpi, nbytes: 3.0 if ranks == 2 and nbytes >= 64 * K else None,
    ),
)


def times_by_size(contents: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the medians of one kind of run by size and algorithm.

    The first file that has an algorithm at a size counts, so that ratios are of one interleaved run; of gloo, which is
    slower beside others than alone, the best of all files.
    """
    found: dict[int, dict[str, float]] = {}
    for content in contents:
        times: dict[int, dict[str, float]] = {}
        for row in content["rows"]:
            times.setdefault(row["size"], {})[row["algorithm"]] = row["p50_us"]
        for size, own in times.items():
            kept = found.setdefault(size, {})
            gloo = min((each[GLOO] for each in (kept, own) if GLOO in each), default=None)
            kept |= {name: value for name, value in own.items() if name not in kept}
            if gloo is not None:
                kept[GLOO] = gloo
    return dict(sorted(found.items()))


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
    columns = [("least ratio where one is promised", lambda claim: claim.title)]
    for ranks, mpi in sorted(kinds):
        times = times_by_size(kinds[ranks, mpi])
        columns.append((f"{ranks} ranks, {mpi}", partial(_least, ranks, mpi, times)))
    return render(columns, CLAIMS)


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
        f"### {ranks} ranks, {mpi}\n\n"
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, {header['nodes']} node"
        f"{'s' * (header['nodes'] != 1)}, {header['operation']} of {header['dtype']}, fit {header['fit']}."
    )
    return "\n\n".join([heading, _times(times), _ratios(ranks, mpi, times)])


def _times(times: Mapping[int, Mapping[str, float]]) -> str:
    """Return the medians in microseconds."""
    names = list(dict.fromkeys(name for own in times.values() for name in own))

    def cell(name: str, pair: tuple[int, Mapping[str, float]]) -> str:
        value = pair[1].get(name)
        return number(value, ".3g" if value is not None and value < 1000 else ".0f")

    columns = [("us", lambda pair: format_bytes(pair[0])), *((name, partial(cell, name)) for name in names)]
    return render(columns, times.items())


def _ratios(ranks: int, mpi: str, times: Mapping[int, Mapping[str, float]]) -> str:
    """Return how many times faster, with what is missed in bold."""
    columns = [("times faster", lambda pair: format_bytes(pair[0]))]
    for claim in CLAIMS:
        columns.append((claim.title, lambda pair, claim=claim: _cell(claim.judge(pair[1], ranks, mpi, pair[0]))))
    return render(columns, times.items())


def _least(ranks: int, mpi: str, times: Mapping[int, Mapping[str, float]], claim: Claim) -> str:
    """Return the ratio that comes closest to a broken promise, and where."""
    found = [(claim.judge(own, ranks, mpi, nbytes), nbytes) for nbytes, own in times.items()]
    promised = [(ratio, nbytes) for ratio, nbytes in found if ratio is not None and ratio.need is not None]
    if not promised:
        return MISSING
    ratio, nbytes = min(promised, key=lambda pair: pair[0].value / (pair[0].need or 1))
    return f"{_cell(ratio)} at {format_bytes(nbytes)}, needs {ratio.need:g}"


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return MISSING
    text = f"{ratio.value:.2f}" if ratio.holds else f"**{ratio.value:.2f}**"
    return f"{text} ({ratio.note})" if ratio.note else text


def read(file: Path) -> Content:
    """Return what the benchmark wrote: "header" and "rows".

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
