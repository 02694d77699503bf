"""The command: measures case by case, prints tables, writes the files."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import command, plots, results
from benchmarks.harness.command import say
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import labelled, rewrite
from benchmarks.training import tables
from benchmarks.training.cases import CASES
from benchmarks.training.contestants import SHARDED
from benchmarks.training.measure import Findings, measure
from benchmarks.training.rows import ratios, speedups
from nnmpi.backend.blas import read_cpu
from nnmpi.errors import UsageError

PROGRAM = "python benchmarks/training"
DESCRIPTION = """Train the same models with nnmpi and with PyTorch on the same cores, one thread per rank, in turns.
The README beside the program says how it is measured."""
README = Path(__file__).with_name("README.md")
WITHOUT = "PyTorch is not installed, so nnmpi runs alone; pip install torch==2.13.0 to compare"
EVERY, NONE = ",".join(CASES), "none"
CHECKED = "cnn,gpt-block,iris"
PROCESSORS: Mapping[str, str] = {
    "GenuineIntel": "an Intel processor, on which MKL takes the widest vectors that it finds",
    "AuthenticAMD": "an AMD processor, on which MKL runs AVX2 code: half of what Zen 5 can, and all that Zen 4 can",
}


def main(words: Sequence[str], removed: Mapping[str, str]) -> int:
    """Run the command; return its exit status.

    Args:
        words: of the command line.
        removed: the settings of the BLAS that were in the environment.
    """
    return command.run(PROGRAM, lambda: _run(parse(words), removed))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; what --check and the switches leave out has the value 0.

    Raises:
        HelpAsked: for --help.
        UsageError: for an unknown name, a value that cannot be used, or ranks that do not divide a batch.
    """
    parser = command.CommandParser(PROGRAM, DESCRIPTION)
    add = parser.add_argument
    add(
        "--ranks",
        type=command.each(command.positive),
        default=(1, 2),
        metavar="P,...",
        help="numbers of processes (default: 1,2)",
    )
    names = command.each(command.one_of(*CASES, NONE))
    add("--cases", type=names, metavar="A,B,...", help=f"models ({EVERY}), or {NONE}")
    add("--sharded", action="store_true", help="instead: ZeRO 3 beside dp, and PyTorch's FSDP2 beside its DDP")
    add("--without-torch", dest="torch", action="store_false", help="nnmpi alone")
    command.add_blocks(parser, block_s=0.2)
    add("--readme", action="store_true", help="replace the tables of the README beside the program")
    add("--plot", type=command.picture, metavar="FILE", help="draw the speeds: .png, .svg or .pdf")
    text = f"reduced: each part once, verified, no times worth keeping, and without --cases fewer of them ({CHECKED})"
    add("--check", action="store_true", help=text)
    options = parser.parse(words)
    cases = options.cases or tuple((CHECKED if options.check else EVERY).split(","))
    options.cases = tuple(name for name in cases if name != NONE)
    if options.sharded and 1 in options.ranks:
        raise UsageError("--sharded is for several ranks; give --ranks 2, say")
    if options.check:
        options.rounds, options.block_s = 2, 0.0
    for name in options.cases:
        for ranks in options.ranks:
            if CASES[name].batch % ranks:
                raise UsageError(f"--ranks {ranks} does not divide the batch of {name}, {CASES[name].batch}")
    return options


def _run(options: argparse.Namespace, removed: Mapping[str, str]) -> None:
    """Measure and print; write the files."""
    if options.plot is not None:
        plots.check_can_draw("--plot")
    results.check_writable("--plot", options.plot)
    results.check_writable("--json", options.json)
    torch = options.torch and importlib.util.find_spec("torch") is not None
    if options.torch and not torch:
        say(WITHOUT)
    found = Findings()
    for name in options.cases:
        measure(name, options, torch, found, lambda rows: say(tables.contestants(rows, options.markdown)))
        _save(options, removed, found)
    header = _header_lines(_header(options, removed, found.facts))
    say(header)
    for title, text in _summaries(options.markdown, found).values():
        say(f"{title}\n\n{text}")
    if options.readme:
        shown = {name: text for name, (_, text) in _summaries(True, found).items()}
        rewrite(README, {"machine": "\n".join(f"    {line}" for line in header.splitlines()), **shown})
    if options.plot is not None:
        tables.draw_speeds(options.plot, found.rows)


def _header(options: argparse.Namespace, removed: Mapping[str, str], facts: Mapping[str, str]) -> dict[str, Any]:
    """Return what ran, on what, by name; `facts` comes from the contestants."""
    return {
        "machine": {**machine_facts(), "vendor": read_cpu("vendor_id") or "unknown"},
        "ranks": list(options.ranks),
        "cases": list(options.cases),
        "rounds": options.rounds,
        "block_s": options.block_s,
        "checked_only": options.check,
        "removed": dict(removed),
        **facts,
    }


def _header_lines(header: Mapping[str, Any]) -> str:
    """Return the same in words."""
    machine = header["machine"]
    versions = [f"{name} {machine[name]}" for name in ("python", "numpy", "mpi4py", "torch") if name in machine]
    named = [
        ("taken", f"{machine['date']}: {machine['cpu']} ({machine['vendor']}), {machine['cores']} cores"),
        ("versions", ", ".join([*versions, *filter(None, [header.get("mpi")])])),
        ("threads", "1 per rank, in nnmpi and in PyTorch"),
        ("nnmpi's BLAS", header.get("blas", "unknown")),
    ]
    if "torch_capability" in header:
        words = PROCESSORS.get(machine["vendor"], "a processor for which MKL's choice is not known here")
        named += [
            ("PyTorch", f"{header['torch_blas']}; vectors of its own code: {header['torch_capability']}"),
            ("PyTorch's MKL", f"{words}. One that is made to use AVX-512 on AMD is not measured"),
        ]
    if header["removed"]:
        settings = ", ".join(f"{name}={value}" for name, value in header["removed"].items())
        named.append(("removed", f"{settings}, which would have made the BLAS compute for another processor"))
    return labelled(named)


def _summaries(markdown: bool, found: Findings) -> dict[str, tuple[str, str]]:
    """Return titles and tables by their names in the README, without those that nothing was measured for."""
    rows = found.rows
    title = "Times: medians of blocks; CPU time of the thread on one rank, wall clock of the slowest on several"
    shown = {}
    if any(row["group"] == SHARDED for row in rows):
        return {"sharded": (title, tables.sharded(rows, markdown))}
    if rows:
        shown["speeds"] = (f"{title}; ratios with quartiles", tables.speeds(rows, markdown))
        shown["memory"] = ("Peak resident memory of a rank", tables.memory(rows, markdown))
    if speedups(rows):
        shown["several"] = ("Times as fast as one rank, same global batch, wall clock", tables.several(rows, markdown))
    return shown


def _save(
    options: argparse.Namespace,
    removed: Mapping[str, str],
    found: Findings,
) -> None:
    content = {
        "header": _header(options, removed, found.facts),
        "rows": found.rows,
        "ratios": ratios(found.rows),
        "speedups": speedups(found.rows),
    }
    results.write(options.json, content)
