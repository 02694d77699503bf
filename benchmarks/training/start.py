"""The time from a command to the end of its first step: mpirun with nnmpi beside torchrun with PyTorch."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.launch import environment
from benchmarks.harness.turns import summary
from nnmpi.errors import LaunchError
from nnmpi.run.launching import find_mpirun

LIMIT_S = 120.0
HERE, BARE, TORCHRUN = "mpirun, variables of scripts/", "mpirun, bare", "torchrun"


def measure(ranks: int, repeats: int, torch: bool) -> list[dict[str, Any]]:
    """Return a row for each way to start, interleaved.

    Args:
        ranks: of each start.
        repeats: of each way.
        torch: whether torchrun takes part.

    The variables that the scripts set keep Open MPI from looking for network cards, which one machine does not need.
    """
    ways = {name: [] for name in (HERE, BARE, *([TORCHRUN] if torch else []))}
    seconds: dict[str, list[float]] = ways
    for number in range(-1, repeats):  # the first time files come from the disk
        for name in ways:
            taken = _once(name, ranks)
            if number >= 0:
                seconds[name].append(taken)
    return [
        {
            "name": name,
            "ranks": ranks,
            **summary("start", found),
            "share_of_torchrun": median(found) / median(seconds[TORCHRUN]) if torch else None,
        }
        for name, found in seconds.items()
    ]


def _once(name: str, ranks: int) -> float:
    """Return the seconds until the last rank has done its first step."""
    script = Path(__file__).with_name("start_torch.py" if name == TORCHRUN else "start_nnmpi.py")
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as folder:
        begin = time.time()
        failure = _run(_words(name, ranks, [str(script), folder]), _environment(name))
        ends = [file.read_text() for file in Path(folder).iterdir()]
    # PyTorch's gloo now and then aborts when it is taken down: the steps had been done
    if len(ends) < ranks or (failure and name != TORCHRUN):
        raise LaunchError(failure or f"{script.name} reported {len(ends)} steps on {ranks} ranks")
    return max(map(float, ends)) - begin


def _words(name: str, ranks: int, script: Sequence[str]) -> list[str]:
    if name == TORCHRUN:
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone", *script]
    return [find_mpirun(), "-n", str(ranks), sys.executable, *script]


def _environment(name: str) -> dict[str, str]:
    found = environment()
    if name == BARE:
        for variable in ("OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_osc"):
            found.pop(variable, None)
    return found


def _run(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Run a command; return what went wrong, empty when nothing did."""
    try:
        done = subprocess.run(
            words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{' '.join(words[-3:])} took more than {LIMIT_S:g} s") from None
    if done.returncode == 0:
        return ""
    return f"{' '.join(words[-3:])} ended with status {done.returncode}: {done.stderr[-2000:].strip()}"
