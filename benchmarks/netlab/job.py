"""One mpirun across the lab, watched until it has ended and every rank has proved that it came to the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.launch import LIBRARIES, environment, find_launcher
from benchmarks.netlab.shell import LabError

_ROOT = Path(__file__).resolve().parents[2]


def run_job(
    lab: Lab, library: str, hosts: int, settings: Mapping[str, str], job: Mapping[str, Any], limit_s: float
) -> Iterator[dict[str, Any]]:
    """Run the worker on the first hosts, one rank each, and yield each of its findings as it is made.

    Args:
        library: a name of `LIBRARIES`.
        settings: of the MPI library.
        job: what the worker reads.
        limit_s: a job that takes longer hangs.

    Raises:
        LabError: when the job fails, hangs, or a rank does not come to its end.
    """
    folder = lab.state.folder / "job"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    mpi = LIBRARIES[library]
    names = [host.name for host in lab.hosts[:hosts]]
    start = mpi.command(find_launcher(mpi), names)
    variables = {f"{mpi.prefix}{name}": value for name, value in settings.items()}
    worker = (sys.executable, "-m", "benchmarks.netlab.worker", str(folder / "job.json"))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            (*lab.enter_head(), *start, *worker),
            env={**environment(os.environ, lab.agent, [_ROOT]), **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the terminal is for this process, which then takes down the lab
        )
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
