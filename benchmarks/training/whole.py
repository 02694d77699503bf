"""Whole commands, from the shell's call to its return: `nnmpi train` beside a plain
PyTorch script.

    python benchmarks/training/whole.py              # iris and digits, on 1 and 2 ranks, 5 times
    python benchmarks/training/whole.py --cases mnist --data-dir DIR --repeats 1
    python benchmarks/training/whole.py --torch-python VENV/bin/python   # a Python with PyTorch

nnmpi runs with its defaults, and writes metrics, checkpoints and hashes. The script is
`whole_torch.py`, with a DataLoader, and torchrun for several ranks. One thread per rank; the
commands alternate, and the least time of each counts.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np  # noqa: E402

from benchmarks.harness.command import (  # noqa: E402
    Parser,
    add_options,
    file,
    list_of,
    one_of,
    positive_count,
    run,
)
from benchmarks.harness.launch import environment  # noqa: E402
from benchmarks.harness.machine import machine_facts  # noqa: E402
from nnmpi import data  # noqa: E402
from nnmpi.lab.launching import find_mpirun  # noqa: E402

LIMIT_S = 1200.0


class Run(NamedTuple):
    """A training, as options of both commands."""

    model: str
    epochs: int
    batch_size: int
    more: tuple[str, ...] = ()  # nnmpi's options for the model of PyTorch's script


RUNS = {
    "iris": Run("mlp", 100, 64, ("--hidden", "50")),
    "digits": Run("cnn", 20, 32),
    "mnist": Run("cnn", 3, 64),
}


def commands(
    name: str, ranks: int, options: argparse.Namespace, folder: Path
) -> dict[str, list[str]]:
    """Return the two commands of a case."""
    run = RUNS[name]
    shared = [
        "--epochs",
        str(options.epochs or run.epochs),
        "--batch-size",
        str(run.batch_size),
        "--out",
    ]
    words = ["--dataset", name, "--model", run.model, *run.more, *shared, str(folder / "run")]
    words += ["--data-dir", str(options.data_dir)] if options.data_dir and name == "mnist" else []
    ours = [sys.executable, "-m", "nnmpi.train", *words]
    script = [
        str(Path(__file__).with_name("whole_torch.py")),
        str(folder / f"{name}.npz"),
        run.model,
    ]
    script += [*shared, str(folder / "weights.pt")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return {
        "nnmpi": [find_mpirun(), "-n", str(ranks), *ours] if ranks > 1 else ours,
        "PyTorch": [options.torch_python, *(torchrun if ranks > 1 else []), *script],
    }


def write_data(name: str, folder: Path, data_dir: Path | None) -> None:
    """Write a data set for PyTorch's script; images as bytes, as in their files."""
    arrays = {}
    for part, result in zip(
        ("train", "test"), data.load(name, data_dir if name == "mnist" else None), strict=True
    ):
        x = result.rows(np.arange(len(result)))
        arrays[f"x_{part}"] = (255 * x[..., 0]).round().astype(np.uint8) if x.ndim == 4 else x
        arrays[f"y_{part}"] = result.y
    np.savez(folder / f"{name}.npz", **arrays)


def take(command: Sequence[str], folder: Path) -> tuple[float, str]:
    """Return the seconds of a command, and the last test accuracy that it prints."""
    # With this variable a checkout would be compiled at each start, while packages installed by
    # pip have their bytecode.
    environ = {
        name: value for name, value in environment().items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with status {done.returncode}:"
            f" {done.stderr[-2000:].strip()}"
        )
    lines = [line for line in done.stdout.splitlines() if "test accuracy" in line]
    return seconds, lines[-1].partition("test accuracy ")[2].partition(" (")[0]


def main() -> None:
    """Print a line for each case."""
    parser = Parser(description=__doc__)
    add_options(
        parser,
        ("--cases", list_of(one_of(*RUNS)), "iris,digits", f"of {', '.join(RUNS)}"),
        ("--ranks", list_of(positive_count), "1,2", "numbers of processes"),
        ("--epochs", positive_count, None, "of each run (default: 100, 20 and 3)"),
        ("--repeats", positive_count, "5", "of each command"),
        ("--torch-python", str, sys.executable, "the Python that has PyTorch"),
        ("--data-dir", file, None, "folder with MNIST's files"),
    )
    options = parser.parse_args()
    print(machine_facts()["cpu"])
    columns = ("case", "ranks", "nnmpi, s", "PyTorch, s", "nnmpi / PyTorch", "test accuracy")
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
    for name, ranks in product(options.cases, options.ranks):
        seconds: dict[str, list[float]] = {"nnmpi": [], "PyTorch": []}
        accuracies: dict[str, str] = {}
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory(prefix="nnmpi-") as temporary:
                folder = Path(temporary)
                write_data(name, folder, options.data_dir)
                for who, command in commands(name, ranks, options, folder).items():
                    taken, accuracies[who] = take(command, folder)
                    seconds[who].append(taken)
        ours, theirs = min(seconds["nnmpi"]), min(seconds["PyTorch"])
        times = (
            f"{ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {' / '.join(accuracies.values())}"
        )
        print(f"| {name} | {ranks} | {times} |", flush=True)


if __name__ == "__main__":
    sys.exit(run("whole.py", main))
