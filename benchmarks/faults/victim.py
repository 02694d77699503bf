"""A training with a fault in one rank: the train command with a model that contains the fault.

NNMPI_FAULT names the fault. It happens on rank GUILTY, in call CALL of a layer; its time is written
to NNMPI_FAULT_FILE.

    NNMPI_FAULT=kill NNMPI_FAULT_FILE=/tmp/at \\
        mpirun -n 4 python -m benchmarks.faults.victim <train options>
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from nnmpi.base.launcher import read_launch
from nnmpi.comm.world import WARNING_S

GUILTY, CALL = 1, 12
NAP_S = WARNING_S + 2.0  # of the slow rank: it is warned of
naps = [NAP_S] * 2
FOREVER_S = 10_000.0


def guilty():
    """Return whether this process is the rank with the fault."""
    launch = read_launch(os.environ)
    return launch is not None and launch.rank == GUILTY


def note():
    """Write the time of the fault's first occurrence."""
    with suppress(FileExistsError), Path(os.environ["NNMPI_FAULT_FILE"]).open("x") as stream:
        stream.write(str(time.time()))


def stop():
    """Stop this process; nothing continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(FOREVER_S)


def fill_disk():
    """Write into the run's file system until there is no room."""
    with suppress(OSError), (folder() / "filler").open("wb", buffering=0) as stream:
        while True:
            stream.write(b"\1" * 1024)


def folder():
    """Return the run's folder."""
    return Path(sys.argv[sys.argv.index("--out") + 1])


def disagree():
    """Call two collectives; the guilty rank in reverse order."""
    import numpy as np

    from nnmpi.comm.mpi.start import start

    group, array = start(), np.ones(1000)
    calls = [lambda: group.all_reduce(array, "ring"), lambda: group.broadcast(array)]
    for call in reversed(calls) if guilty() else calls:
        call()


def meet_alone():
    """Call a collective that the other ranks do not call."""
    import numpy as np

    from nnmpi.comm.mpi.start import start

    start().all_reduce(np.ones(1000), "ring")


def fail():
    """Raise an unexpected exception."""
    raise RuntimeError("a fault on purpose")


ACTS = {
    "raise": fail,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": stop,
    "asleep in a step": lambda: time.sleep(FOREVER_S),
    "wrong order of collectives": disagree,
    "extra collective": meet_alone,
    "full disk": fill_disk,
    "deleted folder": lambda: shutil.rmtree(folder(), ignore_errors=True),
}


def layer():
    """Return a layer that contains the fault."""
    from nnmpi import nn

    class Victim(nn.Module):
        """The identity, with the fault in call CALL."""

        def __init__(self):
            self.calls = 0

        def forward(self, x):
            """Return x."""
            self.calls += 1
            fault = os.environ["NNMPI_FAULT"]
            if fault == "slow by 20x" and guilty() and self.calls >= CALL and naps:
                note()
                time.sleep(naps.pop())
            if (
                self.calls == CALL
                and fault in ACTS
                and (guilty() or fault == "wrong order of collectives")
            ):
                # of reversed collectives, a pipeline's first stage may already wait before the
                # guilty rank gets here, so every rank writes the time
                note()
                ACTS[fault]()
            return x

    return Victim()


def build(shape, classes):
    """Return a network of four stages, with a faulty layer in each."""
    from nnmpi import nn

    if os.environ["NNMPI_FAULT"] == "asleep in build" and guilty():
        note()
        time.sleep(FOREVER_S)
    stages = [nn.Sequential(layer(), nn.Linear(8, 8)) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), *stages, layer(), nn.Linear(8, classes))


def main():
    """Train; faults before the start of MPI happen here."""
    if os.environ["NNMPI_FAULT"] == "stop at start-up":
        if guilty():
            stop()
        import nnmpi.train.cli  # noqa: F401

        note()  # from now on the others wait
    if os.environ["NNMPI_FAULT"] == "other data" and guilty():
        note()
        os.chdir("other")
    from nnmpi.train.__main__ import launch

    launch(["--model", f"{Path(__file__).resolve()}:build", *sys.argv[1:]])


if __name__ == "__main__":
    main()
