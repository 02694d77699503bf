"""Ranks on the lab's hosts: how Open MPI and MPICH start them, and one job, watched until it has
ended.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.harness.launch import ROOT
from benchmarks.harness.launch import run_job as run_here
from benchmarks.netlab.lab import Lab, LabError
from nnmpi.errors import UsageError
from nnmpi.launching import find_mpirun

# Settings of the caller's that would mix with the lab's.
_FOREIGN = ("OMPI_", "OPAL_", "PRTE_", "PMIX_", "MPIR_", "MPICH_", "HYDRA_", "UCX_", "FI_")
FOUND = "netlab: "  # before each line in which a worker says what it has found
END = "end"

_OPEN_MPI = {
    # the head starts all hosts itself: a host that started others would look for a real ssh
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    # plain TCP: the layers above may find ways of their own
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    # Every host looks as if it had the machine for itself, so that waiting ranks would spin: 16 on
    # 2 cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # the hosts' only real card
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    # Without "put": with it, all of a message but its beginning is one piece, and the answer that
    # the other side's message waits for stands behind it in the queue: two hosts that send to each
    # other take turns.
    "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
    # Up to 1 MB a message leaves without asking. The question and its answer would wait behind the
    # 64 KB that the host's own message keeps in its link: 2.5 ms for each step of a ring at 100
    # Mbit/s.
    **{
        f"OMPI_MCA_btl_tcp_{name}": str(2**20)
        for name in ("eager_limit", "rndv_eager_limit", "max_send_size")
    },
}
# Of MPICH: the hosts' only real card; libfabric with its TCP, as the default, UCX, finds ways past
# the links.
_MPICH = {"HYDRA_LAUNCHER": "ssh", "HYDRA_IFACE": "eth0", "MPIR_CVAR_CH4_NETMOD": "ofi"}


def mpi_name() -> str:
    """Return the MPI that this Python finds and its version: "Open MPI 5.0.11"."""
    return run_here(None, 1, {})["mpi"]


def environment(agent: Path | None = None) -> dict[str, str]:
    """Return the environment of launchers and ranks: the caller's without its MPI settings, with
    the lab's.

    Args:
        agent: the launch agent; without one, the environment is for outside the lab.
    """
    saved = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    if agent is not None:
        saved |= {
            **_OPEN_MPI,
            **_MPICH,
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "HYDRA_LAUNCHER_EXEC": str(agent),
        }
    saved["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [saved.get("PYTHONPATH")])])
    for project in ("OMPI", "PRTE"):  # they refuse to run as root, which a lab cannot do without
        saved[f"{project}_ALLOW_RUN_AS_ROOT"] = saved[f"{project}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    saved["OMP_NUM_THREADS"] = saved["OPENBLAS_NUM_THREADS"] = "1"  # many ranks, few cores
    return saved


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE words as a mapping.

    Raises:
        UsageError: for a word without a name or an equals sign.
    """
    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise UsageError(f"{word!r} is not a setting; write NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def run_ranks(
    lab: Lab,
    mpi: str,
    hosts: int,
    settings: Mapping[str, str],
    words: Sequence[str],
    limit_s: float,
) -> Iterator[str]:
    """Run a Python program on the first hosts, one rank each, and yield the lines that it prints.

    Args:
        lab: that is up.
        mpi: what `mpi_name` returned.
        hosts: how many.
        settings: of the MPI library: MCA parameters, or MPICH's variables.
        words: of the program.
        limit_s: one that takes longer hangs; the lab is ended then.

    Raises:
        LabError: with what it said last, when it fails or hangs.
    """
    names, count, is_open = ",".join(lab.names[:hosts]), str(hosts), mpi.startswith("Open MPI")
    if is_open:
        start = ("--host", names, "-np", count, "--map-by", "ppr:1:node", "--bind-to", "none")
    else:
        start = ("-hosts", names, "-np", count, "-ppn", "1")
    more = {f"{'OMPI_MCA_' * is_open}{name}": value for name, value in settings.items()}
    process = subprocess.Popen(
        (*lab.enter_head(), find_mpirun(), *start, sys.executable, *words),
        env={**environment(lab.agent), **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a Ctrl-C at the terminal is for this process, which then takes down the lab
        start_new_session=True,
    )
    assert process.stdout is not None
    timer, text = Timer(limit_s, lab.end), [""]
    timer.start()
    try:
        for line in process.stdout:
            text.append(line)
            yield line
        if process.wait() != 0:
            raise LabError(
                f"{' '.join(words)} on {hosts} hosts ended with status {process.returncode}; "
                f"it said:\n{''.join(text[-15:])}"
            )
    finally:
        timer.cancel()


def run_job(
    lab: Lab,
    mpi: str,
    hosts: int,
    settings: Mapping[str, str],
    job: Mapping[str, Any],
    limit_s: float,
) -> Iterator[dict[str, Any]]:
    """Run the worker on the first hosts and yield each of its findings as it is made; arguments as
    of `run_ranks`.

    Raises:
        LabError: also when the ranks do not come to their end.
    """
    result, words = {}, ("-m", "benchmarks.netlab.worker", json.dumps(job))
    for line in run_ranks(lab, mpi, hosts, settings, words, limit_s):
        if line.startswith(FOUND):
            result = json.loads(line.removeprefix(FOUND))
            if result["kind"] != END:
                yield result
    if not result or result["kind"] != END:
        raise LabError(f"the job on {hosts} hosts did not come to its end")
