"""The command: case by case in every mode; prints tables, writes the file."""

import argparse
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import tables
from benchmarks.gpu.cases import CASES, MODES, TINY, CaseArrays
from benchmarks.gpu.facts import collect
from benchmarks.gpu.measure import Timing, makers, measure, ratios, reference
from benchmarks.harness import command, results
from benchmarks.harness.command import Parser, say
from benchmarks.harness.tables import labelled
from nnmpi.backend.backend import Backend
from nnmpi.backend.device import device_problem, select
from nnmpi.base.errors import DeviceError

PROGRAM = "python benchmarks/gpu"
DESCRIPTION = """Train the same models with nnmpi and with PyTorch eager on the same device, in
turns. The README beside the program describes the measurement."""


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status: 1 also if a contestant of nnmpi's failed."""

    def work() -> int:
        options = parse(words)
        problem = device_problem()
        if problem is not None:
            raise DeviceError(
                f"nothing can be measured, for this benchmark needs a device: {problem}"
            )
        return _run(options, select("cupy"))

    return command.run(PROGRAM, work)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options; with --check the cases are the tiny ones.

    Raises:
        UsageError: for an unknown name, or a value that cannot be used.
    """
    known = tuple(TINY if "--check" in words else CASES)
    parser = Parser(PROGRAM, description=DESCRIPTION, allow_abbrev=False)
    for option, names, what in (("--cases", known, "models"), ("--modes", MODES, "precisions")):
        read = command.list_of(command.one_of(*names))
        command.add_options(parser, (option, read, ",".join(names), what))
    add = parser.add_argument
    add("--without-torch", dest="torch", action="store_false", help="nnmpi alone")
    command.add_blocks(parser, block_s="0.1")
    add(
        "--check",
        action="store_true",
        help="tiny sizes, each part once, verified, no times worth keeping",
    )
    options = parser.parse_args(words)
    folder = os.environ.get("OUT")  # a remote machine's folder of results
    options.json = options.json or (folder and Path(folder, "gpu.json"))
    if options.check:
        options.rounds, options.block_s = 2, 0.0
    return options


def _run(options: argparse.Namespace, backend: Backend) -> int:
    """Measure, print, and write the file. Return 1 if a contestant of nnmpi's failed, else 0."""
    results.check_writable("--json", options.json)
    torch_device = _torch_device() if options.torch else None
    if options.torch and torch_device is None:
        say("PyTorch is not installed, or sees no device, so nnmpi runs alone")
    result: dict[str, Any] = {
        "facts": _facts(backend, torch_device),
        "checked_only": options.check,
        "rows": [],
    }
    say(labelled(result["facts"].items()))
    for name in options.cases:
        arrays = CaseArrays((TINY if options.check else CASES)[name])
        right = reference(arrays, backend, torch_device)
        for mode in options.modes:
            made = makers(arrays, mode, backend, torch_device)
            rows = measure(arrays, mode, made, right, Timing(options.rounds, options.block_s))
            result["rows"] += rows
            say(tables.contestants(rows, options.markdown))
        results.write(options.json, {**result, "ratios": ratios(result["rows"])})
    if ratios(result["rows"]):
        say(tables.speeds(result["rows"], options.markdown))
    ours = [row for row in result["rows"] if not row["name"].startswith("torch")]
    return int(any("failed" in row for row in ours))


def _torch_device() -> str | None:
    """Return PyTorch's device when it is installed and has one, else None."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else None


def _facts(backend: Backend, torch_device: str | None) -> dict[str, Any]:
    result = collect(backend)
    if torch_device is not None:
        import torch

        result["torch_cuda"] = torch.version.cuda
        result["torch_cudnn"] = torch.backends.cudnn.version()
    return result
