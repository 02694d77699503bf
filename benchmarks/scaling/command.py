"""The command: simulate, print the tables and the crossovers, write what is asked for."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.scaling.crossings import EQUAL, Crossing, best_by_ranks, crossings, in_words
from benchmarks.scaling.models import Model, cluster, fitted, flat
from benchmarks.scaling.plot import check_can_draw, draw
from benchmarks.scaling.sweep import NAMES, Point, is_power, rank_counts, sweep
from nnmpi.comm.fit import load_fit
from nnmpi.comm.sizes import name_bytes, name_seconds, parse_bytes, parse_seconds
from nnmpi.command import Parser
from nnmpi.errors import NnmpiError, UsageError

TAUGHT = ("ps", "tree", "ring")  # those of the course's table
CROSSING_RANKS = (4, 16, 64, 100, 256)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        run(_parse(sys.argv[1:] if words is None else words))
    except NnmpiError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def run(options: argparse.Namespace) -> None:
    """Simulate and print; write the files."""
    if options.plot:
        check_can_draw(options.plot)
    for file in filter(None, (options.json, options.plot)):
        check_writable(file)
    counts = rank_counts(options.max_ranks)
    points: list[Point] = []
    found: list[Crossing] = []
    models = _models(options)
    for model in models:
        print(f"{model.description}\n")
        for nbytes in options.sizes:
            own = list(sweep(model, nbytes, counts))
            points += own
            print("\n".join(_table(nbytes, own)) + "\n", flush=True)
        found += _crossings(model, [ranks for ranks in CROSSING_RANKS if ranks <= options.max_ranks])
    if options.json:
        records = {
            "machines": {model.name: model.description for model in models},
            "rows": [asdict(point) for point in points],
            "crossings": [asdict(crossing) for crossing in found],
        }
        try:
            options.json.write_text(json.dumps(records, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"{options.json} cannot be written ({error.strerror}); give another file") from None
    if options.plot:
        draw(options.plot, models, points)


def check_writable(file: Path) -> None:
    """Raise a UsageError unless a file can be written there; what is in it stays."""
    try:
        file.open("a").close()
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror}); give another file") from None


def _models(options: argparse.Namespace) -> list[Model]:
    if options.fit:
        return [fitted(load_fit(options.fit))]
    every = {"flat": flat(options.alpha, options.beta, options.gamma), "cluster": cluster()}
    return list(every.values()) if options.machine == "both" else [every[options.machine]]


def _table(nbytes: int, points: Sequence[Point]) -> list[str]:
    """Return the lines of one message size: a row per number of ranks, a column per algorithm."""
    lines = [
        f"{name_bytes(nbytes)}    (* the fastest)",
        "  ".join([f"{'ranks':>6}", *(f"{name:>16}" for name in NAMES)]),
    ]
    for ranks in dict.fromkeys(point.ranks for point in points):
        row = {point.algorithm: point.seconds for point in points if point.ranks == ranks}
        least = min(row.values()) * EQUAL
        cells = [f"{name_seconds(row[name])} {'*' if row[name] <= least else ' '}" for name in NAMES]
        lines.append("  ".join([f"{ranks:6}", *(f"{cell:>16}" for cell in cells)]).rstrip())
    powers, others = ([p for p in points if is_power(p.ranks) == power] for power in (True, False))
    lines.append(f"fastest, ranks a power of two: {', '.join(best_by_ranks(powers))}")
    if others:
        lines.append(f"fastest, other numbers of ranks: {', '.join(best_by_ranks(others))}")
    return lines


def _crossings(model: Model, counts: Sequence[int]) -> list[Crossing]:
    """Print who is fastest for which messages; return the crossovers among all algorithms and among the course's."""
    every: list[Crossing] = []
    for title, names in (("all", NAMES), ("of parameter server, tree and ring", TAUGHT)):
        print(f"fastest by message size, {title}:")
        for ranks in counts:
            first, found = crossings(model, ranks, names)
            every += [crossing for crossing in found if crossing not in every]
            print(f"{ranks:6} ranks: {in_words(first, found)}", flush=True)
        print()
    return every


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "python benchmarks/scaling",
        description="Simulated time of all all-reduces against the number of ranks, and where one overtakes another.",
    )
    parser.add_argument("--machine", choices=("both", "flat", "cluster"), default="both", help="what to simulate")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="simulate the machine of a fit instead")
    parser.add_argument("--alpha", type=_seconds, default=2e-6, help="of the flat machine: seconds of latency (2e-6)")
    parser.add_argument("--beta", type=_seconds, default=1 / 12.5e9, help="seconds per byte (8e-11, 12.5 GB/s)")
    parser.add_argument("--gamma", type=_seconds, default=1 / 50e9, help="seconds per byte added (2e-11, 50 GB/s)")
    parser.add_argument("--max-ranks", type=_ranks, default=4096, metavar="N", help="the most ranks (4096)")
    parser.add_argument("--sizes", type=_sizes, default=_sizes("1k,64k,1m,64m"), help="bytes (1k,64k,1m,64m)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all points and crossovers")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="time against ranks, a panel per size")
    return parser.parse_args(words)


def _sizes(text: str) -> list[int]:
    try:
        return sorted({parse_bytes(word) for word in text.split(",")})
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks from 2 to {2**16}")
    return int(text)
