"""The command: measures part by part, prints tables and what was missed, writes the results and the README."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.machine import facts
from benchmarks.pipeline import picture
from benchmarks.pipeline.marks import MISSED
from benchmarks.pipeline.parts import PARTS
from benchmarks.pipeline.readme import rewrite
from benchmarks.pipeline.tables import TABLES, machine
from nnmpi.command import Parser
from nnmpi.errors import NnmpiError, UsageError

Content = Mapping[str, Any]
PICTURE, PICTURE_MICROBATCHES = "order.png", 16
ATTEMPTS = 3  # of a part in a reduced run


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of several parts.

    Attributes:
        program: how it is started.
        description: for --help.
        parts: name -> (check, data_dir) -> what was measured.
        tables: name -> its table.
        missed: name -> what misses its mark, in words.
        folder: where its README and results are.
        timed: the parts whose marks mean nothing in a reduced run.
        draw: (folder of results) -> draws what belongs to some parts, after they were measured.
    """

    program: str
    description: str
    parts: Mapping[str, Callable[[bool, Path | None], dict[str, Any]]]
    tables: Mapping[str, Callable[[Content], str]]
    missed: Mapping[str, Callable[[Content], list[str]]]
    folder: Path
    timed: tuple[str, ...]
    pictures: Mapping[str, Callable[[Path], None]]


PIPELINE = Benchmark(
    "python benchmarks/pipeline",
    "Pipelines measured beside their simulation, their memory beside formulas, and their accuracy beside one rank's.",
    PARTS,
    TABLES,
    MISSED,
    Path(__file__).parent,
    ("times",),
    {"order": lambda folder: picture.draw(folder / PICTURE, PICTURE_MICROBATCHES)},
)


def main(words: Sequence[str] | None = None, benchmark: Benchmark = PIPELINE) -> int:
    """Run the command; return its exit status: 1 when a reduced run misses a mark."""
    try:
        return run(benchmark, _parse(benchmark, sys.argv[1:] if words is None else words))
    except NnmpiError as error:
        print(f"{benchmark.program}: {error}", file=sys.stderr)
        return error.exit_status


def run(benchmark: Benchmark, options: argparse.Namespace) -> int:
    """Measure and print; write the files."""
    folder: Path | None = options.results
    if folder is not None:
        if any(name in options.parts for name in benchmark.pictures):
            picture.check_can_draw()
        _make(folder)
    misses = 0
    for name in options.parts:
        content = _measure(benchmark, name, options)
        shown = benchmark.tables[name](content)
        print(f"{name}: {machine(content)}\n\n{shown}\n", flush=True)
        if not (options.check and name in benchmark.timed):
            missed = benchmark.missed[name](content)
            misses += len(missed)
            print("\n".join([f"missed: {each}" for each in missed] or ["all marks are met"]) + "\n", flush=True)
        if folder is not None:
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
            if name in benchmark.pictures:
                benchmark.pictures[name](folder)
            if folder.resolve() == (benchmark.folder / "results").resolve():
                rewrite(benchmark.folder / "README.md", {name: f"{machine(content)}\n\n{shown}"})
    return int(options.check and misses > 0)


def _measure(benchmark: Benchmark, name: str, options: argparse.Namespace) -> Content:
    """Return what a part measures; in a reduced run again if it misses a mark, as other programs may have been busy."""
    content: Content = {}
    for _ in range(ATTEMPTS if options.check and name not in benchmark.timed else 1):
        content = {"machine": facts(), **benchmark.parts[name](options.check, options.data_dir)}
        if not benchmark.missed[name](content):
            break
    return content


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--results {folder} cannot be made: {error.strerror}; give another folder") from None


def _parse(benchmark: Benchmark, words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(benchmark.program, description=benchmark.description)
    every = ",".join(benchmark.parts)
    parser.add_argument("--parts", default=every, metavar="A,B,...", help=f"what to measure ({every})")
    parser.add_argument("--check", action="store_true", help="reduced: seconds, and no times worth keeping")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="write JSON files there; in the benchmark's own folder results, its README's tables are rewritten too",
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of MNIST's files, if they are there")
    options = parser.parse_args(words)
    options.parts = [part.strip() for part in options.parts.split(",")]
    unknown = [part for part in options.parts if part not in benchmark.parts]
    if unknown:
        raise UsageError(f"--parts {unknown[0]!r} is unknown; the parts are {every}")
    return options
