"""Measurements of OSU's programs and of nccl-tests, as a fit.

A line with a program's name begins its table; several tables may follow one another in a file:

    # OSU MPI Latency Test v7.4             seconds of a message: both of a link's curves
    # Size       Avg Latency(us)
    1                       0.18
    # OSU MPI Bandwidth Test v7.4           of many messages at once: beyond the latency's sizes
    # OSU MPI Bi-Directional Bandwidth ..   the curve of messages in both directions
    # OSU MPI Allreduce Latency Test ..     MPI's own all-reduce

sendrecv_perf has the curve of both directions, all_reduce_perf the all-reduce. The tables of
nccl-tests look alike, so the name must be there. Of their two times, that in place counts.

An all-reduce alone tells of a link, too: its first time is that of the fewest latencies with which
ranks can sum, and what its last one takes more, that of the fewest bytes.
"""

import re
from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any, TypeAlias

from nnmpi.base.errors import UsageError, shortened
from nnmpi.base.files import foreign
from nnmpi.comm.algorithms.registry import native_algorithms
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.duration import coefficients, price
from nnmpi.comm.fit import EXAMPLES, Fit
from nnmpi.comm.machine import Curve, Link, Machine
from nnmpi.lab.goal import check_length
from nnmpi.lab.measure import rising_curve

MOST_BYTES = 2**20
# program -> what its table has, and how many bytes its bandwidth counts of each; 0 for seconds
PROGRAMS = {
    "latency": ("one way", 0),
    "bandwidth": ("stream", 1),
    "bi-directional bandwidth": ("streams", 2),
    "allreduce latency": ("native", 0),
    "all_reduce_perf": ("native", 0),
    "sendrecv_perf": ("both ways", 0),
}
PROGRAM = re.compile(r"(\w+_perf)\b|MPI\S* (.+) Test")
HOST = re.compile(r"#\s+Rank\s+\d+ .* on\s+(\S+) device")
Tables: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]


def read_tables(file: Path) -> tuple[Tables, list[int]]:
    """Return (bytes, seconds) by what a table has, and the node of each rank, where it is told.

    Raises:
        UsageError: for a file without such tables; for a line that does not belong to one.
    """
    tables, hosts, nodes = dict[str, Any](), dict[str, int](), list[int]()
    rows, factor, column = [(-1.0, 0.0)], 0, 0
    with foreign(file, UsageError, "no measurements"):
        check_length(file, MOST_BYTES)
        lines = file.read_text("utf-8", "replace").split("\n")
    for number, line in enumerate(lines, 1):
        words, place = line.split(), f"{file}, line {number}:"
        if match := PROGRAM.search(line):
            name = (match[1] or match[2]).lower()
            if name not in PROGRAMS:
                raise UsageError(f"{place} {name} is none of {', '.join(PROGRAMS)}")
            kind, factor = PROGRAMS[name]
            rows, column, nodes = tables.setdefault(kind, rows[:1]), 0, []
        elif words[:2] in (["#", "Size"], ["#", "size"]):
            # of nccl-tests the last time, which is that in place
            column = max([1, *(at - 1 for at, word in enumerate(words) if word == "time")])
        elif match := HOST.match(line):
            nodes.append(hosts.setdefault(match[1], len(hosts)))
        elif words and words[0][0] != "#":
            try:
                size, value = float(words[0]), float(words[column])
            except (ValueError, IndexError):
                size = value = nan
            if not (column and rows[-1][0] < size < inf and 0 < value < inf):
                raise UsageError(
                    f"{place} {shortened(line.strip())!r} is no row: a program's name and the names"
                    " of columns come first, sizes grow, and what was measured is above 0"
                )
            rows.append((size, 1e-6 * (factor * size / value if factor else value)))
    return {kind: rows[1:] for kind, rows in tables.items()}, nodes


def fit_of(file: Path, tables: Tables, add: Curve, facts: Mapping[str, Any]) -> Fit:
    """Return the fit of a file's tables.

    Args:
        file: for errors.
        tables: see `read_tables`.
        add: of a machine whose messages were measured; an all-reduce alone includes it.
        facts: of the fit; every link is taken to be the measured one.

    Raises:
        UsageError: for tables that do not tell the seconds of a message.
    """
    curves = {name: rising_curve(*zip(*rows, strict=True)) for name, rows in tables.items() if rows}
    points = {name: curve.points for name, curve in curves.items()}
    one, both, native = map(points.get, ("one way", "both ways", "native"))
    ranks, nodes, algorithms = facts["ranks"], facts["nodes"], native_algorithms(ALL_REDUCE.name)
    if start := one or both:
        alpha_s = start[0][1]
        stream, streams = (
            tuple((size, alpha_s + seconds - rows[0][1]) for size, seconds in rows)
            for rows in (points.get("stream", ()), points.get("streams", ()))
        )
        one = start + tuple(row for row in stream if row[0] > start[-1][0])
        link = Link(Curve(one), Curve(both or streams or one))
    elif native:
        latencies, sent = (
            min(coefficients(item, ranks)[which] for item in algorithms) for which in (0, 1)
        )
        (_, first), (size, last) = native[0], native[-1]
        link, add = (
            Link.line(first / latencies, (last - first) / (size or 1) / sent),
            Curve.line(0, 0),
        )
    else:
        raise UsageError(f"{file} has no latency of messages and no all-reduce")
    if link.one_way.points[0][1] == link.one_way.points[-1][1]:
        raise UsageError(f"{file} says nothing of bandwidth; it needs messages of other lengths")
    machine = Machine(link, nodes=tuple(nodes) if any(nodes) else None, add=add)
    curve = curves.get("native") or Curve(
        tuple(
            (size, min(price(item, ranks, size, machine) for item in algorithms))
            for size in EXAMPLES
        )
    )
    return Fit(machine, curve, curve, None, facts)
