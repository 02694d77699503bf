"""The command: simulate, print the tables, write what is asked for."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.harness import command, results
from benchmarks.scaling.sweep import (
    NAMES,
    MachineModel,
    SimulatedTime,
    cluster,
    flat,
    rank_counts,
    sweep,
)
from nnmpi.units import format_bytes, format_seconds

PROGRAM = "python benchmarks/scaling"
DESCRIPTION = "Simulated time of all all-reduces against the number of ranks."
EQUAL = 1 + 1e-9  # as good as the fastest, but for rounding


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return command.run(PROGRAM, lambda: _run(_parse(sys.argv[1:] if words is None else words)))


def _run(options: argparse.Namespace) -> None:
    """Simulate and print; write the files."""
    results.check_writable("--json", options.json)
    counts = rank_counts(options.max_ranks)
    points: list[SimulatedTime] = []
    models = _models(options)
    for model in models:
        print(f"{model.description}\n")
        for nbytes in options.sizes:
            own = list(sweep(model, nbytes, counts))
            points += own
            print("\n".join(_table(nbytes, own)) + "\n", flush=True)
    content = {
        "machines": {model.name: model.description for model in models},
        "rows": [asdict(point) for point in points],
    }
    results.write(options.json, content)


def _models(options: argparse.Namespace) -> list[MachineModel]:
    every = {"flat": flat(options.alpha, options.beta, options.gamma), "cluster": cluster()}
    return list(every.values()) if options.machine == "both" else [every[options.machine]]


def _table(nbytes: int, points: Sequence[SimulatedTime]) -> list[str]:
    """Return the lines of one message size: a row per number of ranks, a column per algorithm."""
    lines = [
        f"{format_bytes(nbytes)}    (* the fastest)",
        "  ".join([f"{'ranks':>6}", *(f"{name:>16}" for name in NAMES)]),
    ]
    for ranks in dict.fromkeys(point.ranks for point in points):
        row = {point.algorithm: point.seconds for point in points if point.ranks == ranks}
        least = min(row.values()) * EQUAL
        cells = [f"{format_seconds(row[name])} {'*' if row[name] <= least else ' '}" for name in NAMES]
        lines.append("  ".join([f"{ranks:6}", *(f"{cell:>16}" for cell in cells)]).rstrip())
    return lines


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = command.CommandParser(PROGRAM, DESCRIPTION)
    add, duration = parser.add_argument, command.duration
    add("--machine", choices=("both", "flat", "cluster"), default="both", help="what to simulate")
    add("--alpha", type=duration, default=2e-6, help="of the flat machine: seconds of latency (2e-6)")
    add("--beta", type=duration, default=1 / 12.5e9, help="seconds per byte (8e-11, 12.5 GB/s)")
    add("--gamma", type=duration, default=1 / 50e9, help="seconds per byte added (2e-11, 50 GB/s)")
    add("--max-ranks", type=_ranks, default=4096, metavar="N", help="the most ranks (4096)")
    sizes = command.each(command.nbytes)
    add("--sizes", type=sizes, default="1k,64k,1m,64m", metavar="BYTES,...", help="of messages (1k,64k,1m,64m)")
    add("--json", type=command.file, metavar="FILE", help="all points")
    options = parser.parse(words)
    options.sizes = sorted(options.sizes)
    return options


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 2 to {2**16}")
    return int(text)
