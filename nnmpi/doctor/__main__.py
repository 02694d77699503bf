"""`python -m nnmpi.doctor [RUN]`: see `--help`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nnmpi.comm.start import start
from nnmpi.command import Parser, say
from nnmpi.doctor.diagnosis import diagnose
from nnmpi.doctor.machine import describe, find_faults, look
from nnmpi.doctor.selftest import Check, try_all
from nnmpi.errors import NnmpiError, counted
from nnmpi.threads import usable_cores

DESCRIPTION = """With RUN: what has become of a run, and what to do. Without: what this machine and its MPI are, what is
slow or wrong with them, and a test of collectives, shared memory, a pipeline and a checkpoint on all ranks:
mpirun -n 4 python -m nnmpi.doctor."""
WARNING_S, LIMIT_S = 10.0, 60.0  # of a wait in the test


class Unfit(NnmpiError):
    """A machine on which some part of nnmpi does not work; the text is the whole report."""


def main(words: Sequence[str]) -> str:
    """Return the diagnosis of a run, or of the machine.

    Raises:
        UsageError: when there is no run in the folder.
        LaunchError: when MPI cannot be started.
        Unfit: when a check failed.
    """
    parser = Parser("python -m nnmpi.doctor", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("run", nargs="?", metavar="RUN", type=Path, help="the folder of a run")
    options: argparse.Namespace = parser.parse_args(words)
    return str(diagnose(options.run)) if options.run is not None else examine()


def examine() -> str:
    """Return what there is to say of the machine. Collective.

    Raises:
        LaunchError, Unfit: see `main`.
    """
    group = start()
    group.comm.world.watch(WARNING_S, LIMIT_S)
    everyones = look(group)
    checks = try_all(group)
    faults = find_faults(everyones)
    lines = [*describe(everyones), "", *map(_show, checks), "", *(f"slow or wrong: {each}" for each in faults)]
    failed = [check for check in checks if check.problem]
    seconds = sum(check.seconds for check in checks)
    if failed:
        names = ", ".join(check.name for check in failed)
        raise Unfit("\n".join([*lines, f"NOT FIT: {len(failed)} of {len(checks)} checks failed: {names}"]))
    cores = min(usable_cores()[1], os.cpu_count() or 1)
    more = f"; messages are tried by: mpirun -n {max(2, cores)} python -m nnmpi.doctor" if group.size == 1 else ""
    slow = f", but {counted(len(faults), 'thing')} to mend (above)" if faults else ""
    return "\n".join([*lines, f"fit: {len(checks)} checks in {seconds:.1f} s, none failed{slow}{more}"])


def _show(check: Check) -> str:
    return f"{'FAILED' if check.problem else 'ok':<7}{check.seconds:6.2f} s  {check.name}" + (
        f": {check.problem}" if check.problem else ""
    )


if __name__ == "__main__":
    sys.exit(say(main))
