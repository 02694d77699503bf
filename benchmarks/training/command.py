"""The command: measures case by case, prints tables, writes the files."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import command, results
from benchmarks.harness.command import Parser, positive_count, say
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import labelled, rewrite
from benchmarks.training import tables
from benchmarks.training.cases import CASES
from benchmarks.training.measure import Row, compare, measure
from nnmpi.backend.blas import read_cpu
from nnmpi.base.errors import UsageError

PROGRAM = "python benchmarks/training"
DESCRIPTION = """Train the same models with nnmpi and with PyTorch on the same cores, one thread per
rank, in turns. The README beside the program describes the measurement."""
README = Path(__file__).with_name("README.md")
WITHOUT = "PyTorch is not installed, so nnmpi runs alone; pip install torch==2.13.0 to compare"
EVERY, CHECKED = ",".join(CASES), "cnn,gpt-block,iris"


def main(words: Sequence[str], removed: Mapping[str, str]) -> int:
    """Run the command; return its exit status.

    Args:
        words: of the command line.
        removed: BLAS settings that were removed from the environment.
    """
    return command.run(PROGRAM, lambda: _run(parse(words), removed))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options.

    Raises:
        UsageError: for an unknown name, a value that cannot be used, or ranks that do not divide a
            batch.
    """
    parser = Parser(PROGRAM, description=DESCRIPTION)
    names = command.list_of(command.one_of(*CASES))
    command.add_options(
        parser,
        ("--ranks", command.list_of(positive_count), "1,2", "numbers of processes"),
        ("--cases", names, None, f"models ({EVERY})"),
    )
    add = parser.add_argument
    add("--without-torch", dest="torch", action="store_false", help="nnmpi alone")
    command.add_blocks(parser, block_s="0.2")
    add("--readme", action="store_true", help="replace the tables of the README beside the program")
    text = (
        "reduced: each part once, verified, no times worth keeping, and without --cases fewer of"
        f" them ({CHECKED})"
    )
    add("--check", action="store_true", help=text)
    options = parser.parse_args(words)
    options.cases = options.cases or (CHECKED if options.check else EVERY).split(",")
    if options.check:
        options.rounds, options.block_s = 2, 0.0
    for name in options.cases:
        for ranks in options.ranks:
            if CASES[name].batch % ranks:
                raise UsageError(
                    f"--ranks {ranks} does not divide the batch of {name}, {CASES[name].batch}"
                )
    return options


def _run(options: argparse.Namespace, removed: Mapping[str, str]) -> None:
    """Measure and print; write the files."""
    results.check_writable("--json", options.json)
    torch = options.torch and importlib.util.find_spec("torch") is not None
    if options.torch and not torch:
        say(WITHOUT)
    rows: list[Row] = []
    facts: dict[str, str] = {}
    machine = {**machine_facts(), "vendor": read_cpu("vendor_id") or "unknown"}
    for name in options.cases:
        for result in measure(name, options, torch, facts):
            rows += result
            say(tables.contestants(result, options.markdown))
            content = {
                "machine": machine,
                "removed": removed,
                "facts": facts,
                "checked_only": options.check,
            }
            results.write(options.json, {**content, "rows": rows, "fastest": compare(rows)})
    versions = [
        f"{package} {machine[package]}"
        for package in ("python", "numpy", "mpi4py", "torch")
        if package in machine
    ]
    header = labelled(
        [
            (
                "taken",
                (
                    f"{machine['date']}: {machine['cpu']} ({machine['vendor']}), {machine['cores']}"
                    " cores"
                ),
            ),
            ("versions", ", ".join([*versions, *filter(None, [facts.get("mpi")])])),
            ("threads", "1 per rank, in nnmpi and in PyTorch"),
            ("nnmpi's BLAS", facts.get("blas", "unknown")),
            (
                "PyTorch",
                (
                    f"{facts.get('torch_blas')}; vectors of its own code:"
                    f" {facts.get('torch_capability')}"
                ),
            ),
            (
                "removed",
                ", ".join(f"{key}={value}" for key, value in removed.items())
                or "no settings of the BLAS",
            ),
        ]
    )
    say(header)
    say(f"Medians of blocks, ratios with quartiles\n\n{tables.speeds(rows, options.markdown)}")
    say(f"Peak resident memory of a rank\n\n{tables.memory(rows, options.markdown)}")
    if options.readme:
        machine_lines = "\n".join(f"    {line}" for line in header.splitlines())
        shown = {"speeds": tables.speeds(rows, True), "memory": tables.memory(rows, True)}
        rewrite(README, {"machine": machine_lines, **shown})
