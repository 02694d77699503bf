"""Collects the accuracies of finished runs in one JSON file, with their options and the machine's
facts.

    python benchmarks/accuracy/collect.py results/mnist-plain.json runs/mnist-plain-*

With --key loss it takes the losses. Reads the run folders of `nnmpi.train`, and those of
`mnist_torch.py` and `gpt_torch.py`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.machine import machine_facts  # noqa: E402

PATHS = ("data_dir", "out", "resume", "config")  # options that are paths of one machine


def figures(folder: Path, key: str) -> dict[str, Any]:
    """Return the final and the best test accuracy or loss of a run, and those of its evaluations.

    Raises:
        SystemExit: for an unfinished run.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_epoch = {line["epoch"]: line[key] for line in lines if line["kind"] == "eval"}
    final = [line[key] for line in lines if line["kind"] == "test"]
    if not final:
        raise SystemExit(f"{folder} has not finished: there is no test in its metrics.jsonl")
    best = (min if key == "loss" else max)([*by_epoch.values(), final[-1]])
    return {"final": final[-1], "best": best, "epochs": list(by_epoch.values())}


def options(folder: Path) -> dict[str, Any]:
    """Return the resolved options of a run, without seed and paths; of the data set's path only the
    name.
    """
    result = json.loads((folder / "config.json").read_text())
    if "dataset" in result:
        result["dataset"] = Path(result["dataset"]).name
    return {name: value for name, value in result.items() if name not in (*PATHS, "seed")}


def seed(folder: Path) -> str:
    """Return the seed of a run."""
    return str(json.loads((folder / "config.json").read_text())["seed"])


def main() -> None:
    """Collect the runs, print the result, and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--key", choices=("accuracy", "loss"), default="accuracy")
    arguments = parser.parse_args()
    if any(options(folder) != options(arguments.runs[0]) for folder in arguments.runs):
        raise SystemExit("these runs differ in more than the seed; collect those of one recipe")
    runs = {seed(folder): figures(folder, arguments.key) for folder in arguments.runs}
    mean = {key: sum(run[key] for run in runs.values()) / len(runs) for key in ("final", "best")}
    for name, run in {**{f"seed {name}": run for name, run in runs.items()}, "mean": mean}.items():
        text = (
            f"{run[key]:.4f}" if arguments.key == "loss" else f"{100 * run[key]:.2f} %"
            for key in mean
        )
        print("{}: final {}, best {}".format(name, *text))
    content = {
        "machine": machine_facts(),
        "options": options(arguments.runs[0]),
        "runs": runs,
        "mean": mean,
    }
    results.write(arguments.result, content)


if __name__ == "__main__":
    main()
