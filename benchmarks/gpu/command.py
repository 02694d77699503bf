"""The command: ceilings first, then case by case in every mode; prints tables, writes the file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import ceilings, digits, mnist, tables
from benchmarks.gpu.cases import CASES, MNIST, TINY, target
from benchmarks.gpu.facts import collect
from benchmarks.gpu.measure import Timing, makers, measure, ratios, reference
from benchmarks.gpu.options import PROGRAM, Options, parse
from benchmarks.gpu.subject import Subject
from benchmarks.training.results import check_writable, write
from nnmpi.backend.device import device_problem
from nnmpi.backend.record import Backend
from nnmpi.backend.select import select
from nnmpi.errors import DeviceError, NnmpiError

CHECK_ROWS, CHECK_EPOCHS, DATA_WORKERS = (160, 40), 2, (0, 4)


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit status: 1 also when a contestant failed or was wrong."""
    try:
        options = parse(words)
        problem = device_problem()
        if problem is not None:
            raise DeviceError(f"nothing can be measured, for this benchmark needs a device: {problem}")
        return run(options, select("cupy"))
    except NnmpiError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def run(options: Options, backend: Backend) -> int:
    """Measure and print; write the file. Return 1 if nnmpi failed somewhere, else 0."""
    if options.json is not None:
        check_writable("--json", options.json)
    torch_device = _torch_device() if options.torch else None
    if options.torch and torch_device is None:
        _say("PyTorch is not installed, or sees no device, so nnmpi runs alone")
    sizes = ceilings.SMALL if options.check else ceilings.Sizes()
    found: dict[str, Any] = {"facts": _facts(backend, torch_device), "checked_only": options.check, "rows": []}
    found["ceilings"] = {
        "products": ceilings.products(backend, torch_device, sizes),
        "copies": ceilings.copies(backend, sizes),
    }
    backend.release_memory()
    _say("\n".join(f"{name + ':':<22} {value}" for name, value in found["facts"].items()))
    _say(tables.ceilings(found["ceilings"], options.markdown))
    for name in options.cases:
        if name == MNIST:
            _mnist(options, backend, torch_device, found)
        else:
            _case(name, options, backend, torch_device, found)
        _save(options.json, found)
    shown = tables.speeds(found["rows"], options.markdown)
    if shown:
        _say(shown)
    ours = [row for row in found["rows"] if not row["name"].startswith("torch")]
    return int(any("failed" in row for row in ours))


def _case(name: str, options: Options, backend: Backend, torch_device: str | None, found: dict[str, Any]) -> None:
    subject = Subject((TINY if options.check else CASES)[name])
    right = reference(subject, backend, torch_device)
    timing = Timing(options.rounds, options.block_s)
    for mode in options.modes:
        rows = measure(subject, mode, makers(subject, mode, backend, torch_device), right, timing)
        found["rows"] += rows
        _say(tables.contestants(rows, found["ceilings"], options.markdown))


def _mnist(options: Options, backend: Backend, torch_device: str | None, found: dict[str, Any]) -> None:
    rows = CHECK_ROWS if options.check else digits.ROWS
    task = mnist.Task(*digits.load(options.data_dir, rows), CHECK_EPOCHS if options.check else mnist.EPOCHS)
    taken = [mnist.ours(task, backend, compiled) for compiled in (False, True)]
    if torch_device is not None:
        taken += [mnist.theirs(task, torch_device, workers) for workers in DATA_WORKERS]
    found[MNIST] = taken
    _say(tables.mnist(taken, options.markdown))
    ratio = mnist.ratio(taken)
    if ratio is not None:
        found["mnist_ratio"] = {**ratio, "target": target(MNIST, "float32")}
        _say(f"all epochs, PyTorch / nnmpi: {ratio['total']:.2f} (target: {target(MNIST, 'float32'):.1f})")


def _torch_device() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    from benchmarks.gpu.theirs import available

    return available()


def _facts(backend: Backend, torch_device: str | None) -> dict[str, Any]:
    found = collect(backend)
    if torch_device is not None:
        import torch

        found["torch_cuda"], found["torch_cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    return found


def _save(file: Path | None, found: dict[str, Any]) -> None:
    if file is not None:
        write(file, {**found, "ratios": ratios(found["rows"])})


def _say(text: str) -> None:
    print(f"{text}\n", flush=True)
