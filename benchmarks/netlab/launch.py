"""Ranks on the lab's hosts: the settings with which Open MPI and MPICH start them, and one job."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.harness import launch
from benchmarks.netlab.lab import Lab, LabError
from nnmpi.base.errors import UsageError
from nnmpi.lab.launching import find_mpirun

# Prefixes of the caller's settings that would mix with the lab's.
_FOREIGN = ("OMPI_", "OPAL_", "PRTE_", "PMIX_", "MPIR_", "MPICH_", "HYDRA_", "UCX_", "FI_")
RESULT = "netlab: "  # prefix of a worker's lines that hold a measurement
END = "end"

_OPEN_MPI = {
    # The head starts all hosts itself: a host that started others would look for a real ssh.
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    # Plain TCP: higher layers could bypass the links.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    # Open MPI takes each host for a machine without oversubscription, and its waiting ranks spin:
    # 16 on 2 cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # the hosts' only real interface
    "OMPI_MCA_btl_tcp_if_include": "eth0",
    # Without "put". With it, a message but for its beginning is one fragment, and the
    # acknowledgement that the peer's message waits for queues behind it: two hosts that send to
    # each other take turns.
    "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
    # Eager up to 1 MB. A rendezvous would wait behind the 64 KB that the host's own message holds
    # in its link: 2.5 ms for each step of a ring at 100 Mbit/s.
    **{
        f"OMPI_MCA_btl_tcp_{name}": str(2**20)
        for name in ("eager_limit", "rndv_eager_limit", "max_send_size")
    },
}
# MPICH: the hosts' only real interface; libfabric's TCP, because the default, UCX, bypasses the
# links.
_MPICH = {"HYDRA_LAUNCHER": "ssh", "HYDRA_IFACE": "eth0", "MPIR_CVAR_CH4_NETMOD": "ofi"}


def mpi_name() -> str:
    """Return this Python's MPI library and its version: "Open MPI 5.0.11"."""
    return launch.run_job(None, 1, {})["mpi"]


def environment(agent: Path | None = None) -> dict[str, str]:
    """Return the environment of launchers and ranks: the caller's without its MPI settings, with
    the lab's.

    Args:
        agent: the launch agent; without one, the environment is for outside the lab.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    settings = {}
    if agent is not None:
        agents = dict.fromkeys(("PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC"), str(agent))
        settings = {**_OPEN_MPI, **_MPICH, **agents}
    return launch.environment(inherited, settings)


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
        lab: a running one.
        mpi: the result of `mpi_name`.
        hosts: how many.
        settings: of the MPI library: MCA parameters, or MPICH's variables.
        words: of the program.
        limit_s: a program that takes longer counts as hung; then the lab is ended.

    Raises:
        LabError: with the end of its output, if it fails or hangs.
    """
    names, count, is_open = ",".join(lab.names[:hosts]), str(hosts), mpi.startswith("Open MPI")
    if is_open:
        start = ("--host", names, "-np", count, "--map-by", "ppr:1:node", "--bind-to", "none")
    else:
        start = ("-hosts", names, "-np", count, "-ppn", "1")
    more = {f"{'OMPI_MCA_' * is_open}{name}": value for name, value in settings.items()}
    process = launch.spawn(
        (*lab.enter_head(), find_mpirun(), *start, sys.executable, *words),
        subprocess.PIPE,
        {**environment(lab.agent), **more},
        text=True,
    )
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
    """Run the worker on the first hosts and yield each measurement as it is made; arguments as of
    `run_ranks`.

    Raises:
        LabError: also if the ranks do not reach their end.
    """
    result, words = {}, ("-m", "benchmarks.netlab.worker", json.dumps(job))
    for line in run_ranks(lab, mpi, hosts, settings, words, limit_s):
        if line.startswith(RESULT):
            result = json.loads(line.removeprefix(RESULT))
            if result["kind"] != END:
                yield result
    if not result or result["kind"] != END:
        raise LabError(f"the job on {hosts} hosts did not come to its end")
