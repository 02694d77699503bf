"""Commands of the system: run one, and say in one sentence what went wrong."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from nnmpi.errors import NnmpiError, UsageError

TOOLS = ("ip", "tc", "unshare", "nsenter")


class LabError(NnmpiError):
    """The lab could not be made, or something in it failed."""


def check_machine(user: int | None = None, path: str | None = None) -> None:
    """Return if a lab can be made here.

    Args:
        user: the user's number; that of this process unless given.
        path: where to look for the tools; $PATH unless given.

    Raises:
        UsageError: for a user who is not root, and when tools are missing.
    """
    if (os.geteuid() if user is None else user) != 0:
        raise UsageError(
            "a lab is made of network namespaces, which only root may make; run the same command as root, "
            "for example with sudo, or in a virtual machine of your own"
        )
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} cannot be found; install iproute2 (ip, tc) and util-linux (unshare, nsenter)"
        )


def call(command: Sequence[str]) -> str:
    """Run a short command to its end and return what it printed.

    Raises:
        LabError: with the command and its complaint, when its status is not 0.
    """
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode:
        complaint = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[0]
        raise LabError(f"'{' '.join(command)}' failed: {complaint}")
    return done.stdout
