"""Starting a command, on several ranks or plainly, so that nothing of it outlives its time
limit.
"""

import os
import subprocess
import time
from dataclasses import dataclass

POLL_S = 0.02
TERM_S = 5.0

# Open MPI: to run as root, with more ranks than cores, and, on one machine, without the second that
# its search for network cards takes. Who waits for a message sleeps a little between two looks:
# ranks that spin, even those that yield, take the cores from the others and from the runs beside
# them. MPICH ignores them all.
LAUNCH_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mtl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "10000",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
        status: the exit status, negative for a signal; None when it was killed at the limit.
        output: all that it printed.
        seconds: how long it took.
    """

    status: int | None
    output: str
    seconds: float


def mpirun(ranks):
    """Return the beginning of a command that starts `ranks` ranks, as the supervisor's does."""
    from nnmpi.lab.launching import (
        find_mpirun,  # here: the harness's help needs nothing but Python
    )

    return [find_mpirun(), "-n", str(ranks)]


def run(
    command,
    output,
    limit_s,
    environ=None,
    on_output=lambda text: None,
    is_lost=lambda: False,
    cwd=None,
    once_more=True,
):
    """Run the command in a session of its own, without input, its output in a file; kill all of it
    at the limit.

    The output goes to a file because a stray rank can hold a pipe open for ever.

    Args:
        command: program and arguments.
        output: the file for stdout and stderr.
        limit_s: when to kill it.
        environ: variables to add to this process's, None to remove one.
        on_output: called with new output while the job runs.
        is_lost: asked while the job runs; true means that it is to be killed now.
        cwd: the working directory.
        once_more: whether a launcher that could not start anything is asked again.
    """
    from benchmarks.harness.launch import NOT_STARTED  # late: see `mpirun`

    variables = {**LAUNCH_VARIABLES, **os.environ, **(environ or {})}
    begin = time.monotonic()
    with output.open("wb") as sink, output.open("rb") as source:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in variables.items() if value is not None},
            start_new_session=True,
            cwd=cwd,
        )
        status = None
        try:
            while (
                (status := process.poll()) is None
                and time.monotonic() - begin < limit_s
                and not is_lost()
            ):
                on_output(source.read().decode(errors="replace"))
                time.sleep(POLL_S)
        finally:
            _end(process)
        on_output(source.read().decode(errors="replace"))
    ending = Ending(status, output.read_text(errors="replace"), time.monotonic() - begin)
    if NOT_STARTED in ending.output and once_more:
        return run(command, output, limit_s, environ, on_output, is_lost, cwd, once_more=False)
    return ending


def _end(process):
    """End the process, if it still runs, and whatever it left in its session."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TERM_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    from nnmpi.lab.launching import kill  # late: see `mpirun`

    kill(process.pid)
