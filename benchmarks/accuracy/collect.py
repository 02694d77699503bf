"""Puts the accuracies of finished runs into one JSON file, with their options and the machine's facts.

    python benchmarks/accuracy/collect.py results/mnist-plain.json runs/mnist-plain-0 runs/mnist-plain-1 ...

Reads the run folders of `nnmpi.train`, and those of `mnist_torch.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.machine import machine_facts  # noqa: E402

PLACES = ("data_dir", "out", "resume", "config")  # options that are paths of one machine


def accuracies(folder: Path) -> dict[str, Any]:
    """Return the final and the best test accuracy of a run, and those of all epochs.

    Raises:
        SystemExit: for a run that has not finished.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_epoch = {line["epoch"]: line["accuracy"] for line in lines if line["kind"] == "eval"}
    final = [line["accuracy"] for line in lines if line["kind"] == "test"]
    if not final:
        raise SystemExit(f"{folder} has not finished: there is no test in its metrics.jsonl")
    return {"final": final[-1], "best": max(by_epoch.values()), "epochs": list(by_epoch.values())}


def options(folder: Path) -> dict[str, Any]:
    """Return the resolved options of a run, without seed and paths."""
    found = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in found.items() if name not in (*PLACES, "seed")}


def seed(folder: Path) -> str:
    """Return the seed of a run."""
    return str(json.loads((folder / "config.json").read_text())["seed"])


def main() -> None:
    """Collect the runs, print the result, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    arguments = parser.parse_args()
    if any(options(folder) != options(arguments.runs[0]) for folder in arguments.runs):
        raise SystemExit("these runs differ in more than the seed; collect those of one recipe")
    runs = {seed(folder): accuracies(folder) for folder in arguments.runs}
    mean = {key: sum(run[key] for run in runs.values()) / len(runs) for key in ("final", "best")}
    for name, run in runs.items():
        print(f"seed {name}: final {100 * run['final']:.2f} %, best epoch {100 * run['best']:.2f} %")
    print(f"mean:   final {100 * mean['final']:.2f} %, best epoch {100 * mean['best']:.2f} %")
    content = {"machine": machine_facts(), "options": options(arguments.runs[0]), "runs": runs, "mean": mean}
    results.write(arguments.result, content)


if __name__ == "__main__":
    main()
