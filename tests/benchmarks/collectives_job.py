"""Running the collectives' benchmark as a user does, in processes of its own."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.job import Ending, mpirun, run

LIMIT_S = 90.0
ROOT = Path(__file__).parents[2]


def bench(folder: Path, words: str, ranks: int = 1, is_lost: Callable[[], bool] = lambda: False) -> Ending:
    """Run the benchmark in the folder on so many ranks; 1 is without mpirun. The folder's modules can be imported."""
    start = mpirun(ranks) if ranks > 1 else []
    command = [*start, sys.executable, str(ROOT / "benchmarks" / "collectives"), *words.split()]
    environ = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return run(command, folder / "output", LIMIT_S, environ, is_lost=is_lost, cwd=folder)


def read(file: Path) -> dict[str, Any]:
    """Return the benchmark's JSON file."""
    content: dict[str, Any] = json.loads(file.read_text())
    return content
