"""The launch agent: a small executable file that stands for ssh, so that mpirun can start processes on the hosts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmarks.netlab.host import ENTER, Host
from benchmarks.netlab.shell import LabError

_AGENT = """#!/bin/sh
# Stands for ssh: agent [-OPTION]... HOST COMMAND...    (options are ignored)
while :; do case $1 in -*) shift ;; *) break ;; esac; done
case $1 in
{cases}
*) echo "agent: there is no host $1 in this lab" >&2; exit 255 ;;
esac
shift
exec nsenter --target "$pid" {enter} --wd="$PWD" -- env TMPDIR="$tmp" sh -c "$*"
"""


def write_agent(folder: Path, hosts: Sequence[Host]) -> Path:
    """Write the agent for these hosts into the lab's folder and return its path.

    Raises:
        LabError: when the folder does not allow execution.
    """
    cases = "\n".join(
        f"{host.name} | {host.address}) pid={host.house_pid} tmp={shlex.quote(str(folder / host.name / 'tmp'))} ;;"
        for host in hosts
    )
    path = folder / "agent"
    path.write_text(_AGENT.format(cases=cases, enter=" ".join(f"--{kind}" for kind in ENTER)))
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise LabError(f"{folder} does not allow execution; set TMPDIR to a folder that does")
    return path
