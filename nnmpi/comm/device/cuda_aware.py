"""Whether MPI can be given device pointers. A wrong yes is a segmentation fault, so the answer is no until known.

Asked in this order, on every rank, and all must say yes:

    1. the user: NNMPI_CUDA_AWARE=0 or 1 (auto, the default, asks on)
    2. MPI itself (see `nnmpi.comm.mpi.mpi_world`)
    3. no

Even then a process of its own tries it first, on each node: if that dies, the answer is no.
"""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from nnmpi.comm.communicator import Communicator
from nnmpi.comm.world import World
from nnmpi.errors import UsageError

VARIABLE = "NNMPI_CUDA_AWARE"
ANSWERS = ("auto", "0", "1")
PROBE_LIMIT_S = 60
# What a launcher tells its processes: without it the child is an MPI job of its own.
LAUNCHERS = ("OMPI_COMM_WORLD_", "OMPI_APP_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_")


@dataclass(frozen=True)
class Awareness:
    """Whether MPI takes device pointers, and why, as half a sentence."""

    aware: bool
    reason: str


def detect(group: Communicator, environ: Mapping[str, str] | None = None) -> Awareness:
    """Return what holds for all ranks of the group. Collective.

    Raises:
        UsageError: on all ranks, for a word of the user's that is none of ANSWERS.
    """
    environ = os.environ if environ is None else environ
    word = group.gather(environ.get(VARIABLE, "auto"))
    for rank, each in enumerate(word):
        if each not in ANSWERS:
            raise UsageError(f"{VARIABLE} is {each!r} on rank {rank}; give one of {', '.join(ANSWERS)}")
    own = ask(group.comm.world, environ)
    everyones = [Awareness(*answer) for answer in group.gather([own.aware, own.reason])]
    refusal = next((answer for answer in everyones if not answer.aware), None)
    if refusal is not None:
        return refusal
    node = group.node()
    failure = probe() if node.is_root else None
    node.free()
    failures = [text for text in group.gather(failure) if text is not None]
    if failures:
        return Awareness(False, f"{own.reason}, but a process that tried it {failures[0]}")
    return Awareness(True, f"{own.reason}, and a process that tried it got its bytes back")


def ask(world: World, environ: Mapping[str, str]) -> Awareness:
    """Return what this rank finds, without trying it."""
    word = environ.get(VARIABLE, "auto")
    if word != "auto":
        return Awareness(word == "1", f"{VARIABLE}={word}")
    return Awareness(*world.cuda_support())


@functools.cache
def probe() -> str | None:
    """Try in a child process to send device memory by MPI; return what went wrong, None if nothing did."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    command = [sys.executable, "-m", "nnmpi.comm.device"]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=PROBE_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {PROBE_LIMIT_S} s"
    except OSError as error:
        return f"could not be started ({error})"
    if done.returncode == 0 and "right" in done.stdout:
        return None
    if done.returncode < 0:
        return f"died of {signal.Signals(-done.returncode).name}"
    last = (done.stderr.strip().splitlines() or ["no word"])[-1]
    return f"ended with status {done.returncode} ({last})"
