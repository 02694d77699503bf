"""The command: measures case by case, prints tables, writes the files."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pipeline.readme import rewrite
from benchmarks.training import picture, results, start, tables
from benchmarks.training.cases import SHALLOWSPEED
from benchmarks.training.header import collect, lines
from benchmarks.training.measure import Found, measure
from benchmarks.training.options import PROGRAM, Options, parse
from benchmarks.training.rows import ratios, speedups
from nnmpi.errors import NnmpiError

README = Path(__file__).with_name("README.md")
WITHOUT = "PyTorch is not installed, so nnmpi runs alone; pip install torch==2.13.0 to compare"
START_RANKS = 2


def main(words: Sequence[str], removed: Mapping[str, str]) -> int:
    """Run the command; return its exit status.

    Args:
        removed: the pins of the BLAS that were in the environment.
    """
    try:
        run(parse(words), removed)
    except NnmpiError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


def run(options: Options, removed: Mapping[str, str]) -> None:
    """Measure and print; write the files."""
    if options.plot is not None:
        picture.check_can_draw()
        results.check_writable("--plot", options.plot)
    if options.json is not None:
        results.check_writable("--json", options.json)
    torch = options.torch and importlib.util.find_spec("torch") is not None
    if options.torch and not torch:
        print(f"{WITHOUT}\n", flush=True)
    found, started = Found(), list[dict[str, Any]]()
    for name in options.cases:
        measure(name, options, torch, found, lambda rows: _say(tables.contestants(rows, options.markdown)))
        _save(options, removed, found, started)
    if options.start_repeats:
        started += start.measure(START_RANKS, options.start_repeats, torch)
        _save(options, removed, found, started)
    header = lines(collect(options, removed, found.facts))
    _say("\n".join(header))
    for title, text in _summaries(options.markdown, found, started).values():
        _say(f"{title}\n\n{text}")
    if options.readme:
        shown = {name: text for name, (_, text) in _summaries(True, found, started).items()}
        rewrite(README, {"machine": "\n".join(f"    {line}" for line in header), **shown})
    if options.plot is not None:
        picture.draw(options.plot, found.rows)


def _summaries(markdown: bool, found: Found, started: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return titles and tables by their names in the README, without those that nothing was measured for."""
    rows = found.rows
    cases = [row for row in rows if row["case"] != SHALLOWSPEED.name]
    title = "Times: medians of blocks; CPU time of the thread on one rank, wall clock of the slowest on several"
    shown = {}
    if cases:
        shown["speeds"] = (f"{title}; ratios with quartiles", tables.speeds(cases, markdown))
        shown["memory"] = ("Peak resident memory of a rank", tables.memory(cases, markdown))
    if speedups(rows):
        shown["several"] = ("Times as fast as one rank, same global batch, wall clock", tables.several(rows, markdown))
    if len(cases) < len(rows):
        shown["shallowspeed"] = ("ShallowSpeed's design beside nnmpi", tables.shallowspeed(rows, markdown))
    if found.growth:
        shown["growth"] = ("Resident memory of a rank over many steps", tables.growth(found.growth, markdown))
    if started:
        shown["start"] = ("From the command to the first step", tables.start(started, markdown))
    return shown


def _save(options: Options, removed: Mapping[str, str], found: Found, started: Sequence[Mapping[str, Any]]) -> None:
    if options.json is not None:
        content = {
            "header": collect(options, removed, found.facts),
            "rows": found.rows,
            "ratios": ratios(found.rows),
            "speedups": speedups(found.rows),
            "growth": found.growth,
            "start": list(started),
        }
        results.write(options.json, content)


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)
