"""`nnmpi COMMAND`: run a command; without one, list them. `python -m nnmpi COMMAND` is the same."""

import os
import sys
from contextlib import suppress
from runpy import run_module

from nnmpi.base.command import say
from nnmpi.base.errors import UsageError
from nnmpi.commands.table import find_command, list_commands


def main() -> None:
    """Run the command that the command line names."""
    if not sys.flags.safe_path:
        with suppress(OSError):  # the folder is gone
            sys.path[0] = os.getcwd()  # as `python -m` does; a script begins with its own folder
    name, *words = sys.argv[1:] or [""]
    try:
        module = find_command(name)
    except UsageError:
        sys.exit(say(list_commands))
    sys.argv = [f"nnmpi {name}", *words]
    run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
