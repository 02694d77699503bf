"""The folder of a lab: its record, the hosts' temporary files and logs, and the launch agent.

nnmpi-netlab-NAME/
    lab.json        what was made: processes, hosts, rate
    hosts           /etc/hosts of every host
    agent           stands for ssh
    h0/log  h0/tmp  one folder per host
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.netlab.shell import LabError
from nnmpi.errors import UsageError

_PREFIX = "nnmpi-netlab-"


class State:
    """The folder of the lab of this name, in the folder for temporary files; it need not exist.

    Raises:
        UsageError: for a name that is not letters, digits and dashes.
    """

    def __init__(self, name: str) -> None:
        if not name.replace("-", "").isalnum():
            raise UsageError(f"a lab's name is made of letters, digits and dashes, not {name!r}")
        self.name = name
        self.folder = Path(tempfile.gettempdir()) / f"{_PREFIX}{name}"

    @classmethod
    def all(cls) -> Iterator[State]:
        """Yield every lab that has a folder."""
        for folder in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
            yield cls(folder.name.removeprefix(_PREFIX))

    def create(self) -> None:
        """Make the folder, for this user only.

        Raises:
            UsageError: when there is one.
        """
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError as error:
            raise UsageError(
                f"there is a lab named {self.name} already ({self.folder}); take it down, or choose another --name"
            ) from error

    def exists(self) -> bool:
        """Return whether the folder is there.

        Raises:
            LabError: when something is there that no lab has made: it is left alone.
        """
        try:
            found = self.folder.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
            raise LabError(f"{self.folder} was not made by a lab; remove it yourself, or choose another --name")
        return True

    def write(self, record: dict[str, Any]) -> None:
        """Replace the record; a reader sees the old one or the new one."""
        new = self.folder / "lab.json.new"
        new.write_text(json.dumps(record))
        new.replace(self.folder / "lab.json")

    def read(self) -> dict[str, Any]:
        """Return the record; empty when there is none."""
        try:
            record: dict[str, Any] = json.loads((self.folder / "lab.json").read_text())
        except FileNotFoundError:
            return {}
        return record

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
