"""The command: case by case in each mode; prints tables, writes the file."""

import argparse
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import tables
from benchmarks.gpu.cases import (
    BF16,
    CASES,
    COMPILED,
    COMPILES,
    MODES,
    OURS,
    PEERS,
    TF32,
    TINY,
    TORCH,
    Case,
)
from benchmarks.gpu.facts import collect
from benchmarks.gpu.measure import Timing, makers, measure
from benchmarks.gpu.train import LEAST_STEPS, measure_train, train_table
from benchmarks.harness import command, results
from benchmarks.harness.command import Parser, say
from benchmarks.harness.tables import labelled, rewrite
from nnmpi.backend.backend import Backend
from nnmpi.backend.device import device_problem, select
from nnmpi.base.errors import DeviceError, UsageError

PROGRAM = "python benchmarks/gpu"
DESCRIPTION = """Train the same models with nnmpi and with PyTorch on the same device, in turns. The
README beside the program describes the measurement."""
HERE = Path(__file__).parent
Unit = tuple[Case, str, tuple[str, ...]]


class OutOfTime(BaseException):
    """--limit-s is over. No contestant's error, so nothing that notes those catches it."""


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status: 1 also if a contestant of nnmpi's failed."""

    def work() -> int:
        options = parse(words)
        if options.readme is not None:
            return _rewrite(json.loads(options.readme.read_text()))
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
    check = "--check" in words
    cases = tuple(TINY if check else CASES)
    parser = Parser(PROGRAM, description=DESCRIPTION, allow_abbrev=False)
    for option, names, default, what in (
        ("--cases", cases, cases, "models"),
        ("--modes", MODES, (TF32, BF16), "precisions"),
        ("--without", (*OURS, *PEERS), (), "contestants that stay out"),
        ("--compile", cases, () if check else COMPILES, "models that torch.compile compiles"),
    ):
        read = command.list_of(command.one_of(*names))
        command.add_options(parser, (option, read, ",".join(default) or None, what))
    command.add_options(
        parser,
        ("--rounds", command.positive_count, "6", "blocks of each contestant"),
        ("--block-s", command.positive_seconds, "0.15", "seconds of a block, about"),
        ("--limit-s", command.positive_seconds, None, "seconds after which it ends, with its rows"),
        (
            "--train",
            command.positive_count,
            None,
            "steps of the train command, in place of the zoo",
        ),
        ("--data-dir", command.file, None, "folder of MNIST's files for --train; or random images"),
        ("--json", command.file, None, "file for everything, written after each case"),
        ("--readme", command.file, None, "such a file; its table replaces the documents'"),
    )
    add = parser.add_argument
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--check", action="store_true", help="tiny sizes, no times worth keeping; on any device")
    options = parser.parse_args(words)
    if options.train and options.train < LEAST_STEPS:
        raise UsageError(f"--train {options.train} is too few: give at least {LEAST_STEPS} steps")
    folder = os.environ.get("OUT")  # a remote machine's folder of results
    options.json = options.json or (folder and Path(folder, "gpu.json"))
    if options.check:
        options.rounds, options.block_s = 2, 1e-9
    return options


def units(options: argparse.Namespace) -> list[Unit]:
    """Return what is measured, in its order: models, precisions and contestants.

    All cases without torch.compile come first, for it may take a minute for each.
    """
    cases, out = TINY if options.check else CASES, options.without or ()
    quick = [name for name in (*OURS, TORCH) if name not in out]
    slow = [name for name in (COMPILED, *PEERS[1:]) if name not in out]
    first = [(cases[name], mode, tuple(quick)) for name in options.cases for mode in options.modes]
    compiled = [name for name in options.cases if name in (options.compile or ())]
    second = [
        (cases[name], mode, tuple(slow)) for mode in reversed(options.modes) for name in compiled
    ]
    return first + (second if set(slow) & set(PEERS) else [])


def _run(options: argparse.Namespace, backend: Backend) -> int:
    """Measure, print, and write the file; return the exit status."""
    results.check_writable("--json", options.json)
    torch_device = _torch_device(options.check)
    if torch_device is None:
        say("PyTorch is not installed, or sees no device, so nnmpi runs alone")
    result: dict[str, Any] = {
        "facts": _facts(backend, torch_device),
        "checked_only": options.check,
        "not_measured": [],
        "rows": [],
    }
    say(labelled(result["facts"].items()))
    timing = Timing(options.rounds, options.block_s)
    work = [] if options.train else units(options)
    try:
        with limited(options.limit_s):
            if options.train:
                result["train"] = measure_train(
                    options.train, options.data_dir, timing, backend, torch_device
                )
            for part, (case, mode, names) in enumerate(work):
                begin = time.perf_counter()
                rows = measure(case, mode, makers(case, mode, names, backend, torch_device), timing)
                result["rows"] += [{"part": part, **row} for row in rows]
                results.write(options.json, result)
                print(tables.progress(rows, time.perf_counter() - begin), flush=True)
    except OutOfTime:
        done = len({row["part"] for row in result["rows"]})
        result["not_measured"] = [f"{case.name} {mode}" for case, mode, _ in work[done:]]
        say(f"the time is over; not measured: {', '.join(result['not_measured']) or 'the command'}")
    results.write(options.json, result)
    if options.train:
        say(train_table(result.get("train", []), options.markdown))
    else:
        say(tables.zoo(result["rows"], options.markdown))
        say(tables.verdict(result["rows"]))
    ours = [row for row in [*result["rows"], *result.get("train", [])] if row["name"] not in PEERS]
    return int(any("failed" in row or "wrong" in row for row in ours))


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime inside of the block after some seconds, or when the process is to end."""

    def stop(number: int, frame: Any) -> None:
        raise OutOfTime

    signals = (signal.SIGALRM, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in signals]
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _rewrite(result: dict[str, Any]) -> int:
    """Put a file's table and verdict into the documents."""
    readme, taken = HERE / "results" / "README.md", tables.machine(result["facts"])
    if "train" in result:
        rewrite(readme, {"train": f"{taken}\n\n{train_table(result['train'], True)}"})
        return 0
    said = tables.verdict(result["rows"])
    rewrite(readme, {"zoo": f"{taken}\n\n{tables.zoo(result['rows'], True)}", "verdict": said})
    for name in ("README.md", "docs/gpu.md"):
        rewrite(HERE.parents[1] / name, {"verdict": said})
    return 0


def _torch_device(check: bool) -> str | None:
    """Return PyTorch's device when it is installed and has one, else None; the host for a check."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu" if check else None


def _facts(backend: Backend, torch_device: str | None) -> dict[str, Any]:
    result = collect(backend)
    if torch_device is not None:
        import torch

        result["torch_cuda"] = torch.version.cuda
        result["torch_cudnn"] = torch.backends.cudnn.version()
    return result
