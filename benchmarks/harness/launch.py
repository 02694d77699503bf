"""Start ranks from a program that is not one, and return what they measure.

suite            run_job("benchmarks.tensor.memory", 4, settings)
 |  mpirun -n 4 python -m benchmarks.harness.launch benchmarks.tensor.memory SETTINGS RESULT
each rank        benchmarks.tensor.memory.measure(group, settings)
 |  rank 0 writes RESULT
suite            {"ranks": 4, "mpi": ..., "blas": ..., "rows": what `measure` returned on rank 0}
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import threadpoolctl

from nnmpi.backend.blas import blas_pool, find_older, name_blas
from nnmpi.base.errors import LaunchError, counted
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.start import start
from nnmpi.lab.launching import find_mpirun

ROOT = Path(__file__).resolve().parents[2]
# Open MPI sometimes starts no process and reports this error: the command may be repeated.
NOT_STARTED = "The PMIx server's listener thread failed to start"

# As in scripts/environment: more ranks than cores, on one machine. MPICH ignores these.
_VARIABLES = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mtl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
}
_ROOT_VARIABLES = {  # both refuse root by default
    f"{project}_ALLOW_RUN_AS_ROOT{word}": "1"
    for project in ("OMPI", "PRTE")
    for word in ("", "_CONFIRM")
}


@dataclass(frozen=True)
class Description:
    """The libraries and ranks of a run.

    Attributes:
        mpi: the MPI library and its version, such as "Open MPI 5.0.11".
        ranks: processes in the group.
        nodes: number of nodes.
        blas: the BLAS that NumPy uses, such as "openblas 0.3.30 (SkylakeX)".
        threads: BLAS threads per rank.
        warnings: sentences on avoidable slowness.
    """

    mpi: str
    ranks: int
    nodes: int
    blas: str
    threads: int
    warnings: tuple[str, ...]


def describe(group: Group) -> Description:
    """Return this rank's libraries, and the ranks and nodes of the group. Collective."""
    on_node = group.node()
    nodes = sum(group.gather(int(on_node.is_root)))
    on_node.free()
    pool = blas_pool(threadpoolctl.threadpool_info())
    warning = find_older()
    return Description(
        mpi=group.comm.world.library,
        ranks=group.size,
        nodes=nodes,
        blas=name_blas(pool),
        threads=int(pool.get("num_threads", 1)),
        warnings=(warning,) if warning else (),
    )


def run_job(
    module: str | None, ranks: int, settings: Mapping[str, Any], limit_s: float = 1200.0
) -> dict[str, Any]:
    """Run a module's `measure(group, settings)` on `ranks` ranks, one thread each.

    Args:
        module: full name; None: measure nothing, and report MPI and BLAS alone.
        ranks: how many.
        settings: JSON values.
        limit_s: a job that takes longer counts as hung, and is killed.

    Returns:
        "ranks"; "mpi" and "blas" as text; "rows", the result of `measure` on rank 0.

    Raises:
        LaunchError: if there is no mpirun, or the job fails or takes too long; with the end of its
            output.
    """
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as folder:
        file = Path(folder) / "result.json"
        # -P: the folder in which the command was started must not hide modules
        start = [sys.executable, "-P", "-m", "benchmarks.harness.launch"]
        status, output = run_ranks(
            ranks, [*start, module or "", json.dumps(settings), str(file)], limit_s
        )
        if status != 0 or not file.exists():
            raise LaunchError(
                f"{module} on {ranks} ranks ended with status {status}; it said:"
                f" {output[-2000:].strip()}"
            )
        return json.loads(file.read_text())


def run_ranks(ranks: int, words: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run a command on `ranks` ranks; return its status and output. At the limit the job is killed.

    A launcher that could not start anything is retried once.

    Args:
        ranks: how many.
        words: the command of each rank.
        limit_s: seconds.

    Raises:
        LaunchError: if there is no mpirun, or at the limit.
    """
    status, output = _run_once(ranks, words, limit_s)
    return _run_once(ranks, words, limit_s) if NOT_STARTED in output else (status, output)


def _run_once(ranks: int, words: Sequence[str], limit_s: float) -> tuple[int, str]:
    with tempfile.TemporaryFile() as sink:
        # A file: a stray rank could hold a pipe open forever.
        process = spawn([find_mpirun(), "-n", str(ranks), *words], sink, environment())
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"{' '.join(words[1:5])} took more than {limit_s:g} s on {ranks} ranks"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # mpirun, which ends its ranks
                process.wait()
        sink.seek(0)
        return status, sink.read().decode(errors="replace")


def spawn(words: Sequence[str], sink: Any, env: Mapping[str, str], **more: Any) -> Any:
    """Start a command in a session of its own, without input, its output and errors in `sink`.

    Ctrl-C at the terminal then reaches the benchmark alone, which ends the command.
    """
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
        **more,
    )


def environment(
    inherited: Mapping[str, str] = os.environ, settings: Mapping[str, str] = _VARIABLES
) -> dict[str, str]:
    """Return the environment of ranks: one thread each, and this checkout in PYTHONPATH.

    Args:
        inherited: the caller's variables, which override `settings`.
        settings: of MPI.
    """
    paths = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    root = _ROOT_VARIABLES if os.geteuid() == 0 else {}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**settings, **root, **inherited, **threads, "PYTHONPATH": paths}


def _job(module: str, settings: str, result: str) -> None:
    """Run a rank of `run_job`."""
    group = start()
    libraries = describe(group)
    rows = import_module(module).measure(group, json.loads(settings)) if module else None
    if group.is_root:
        blas = f"{libraries.blas}, {counted(libraries.threads, 'thread')}"
        content = {"ranks": group.size, "mpi": libraries.mpi, "blas": blas, "rows": rows}
        Path(result).write_text(json.dumps(content))


if __name__ == "__main__":
    _job(*sys.argv[1:])
