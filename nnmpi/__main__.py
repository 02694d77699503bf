"""`nnmpi COMMAND`: run a command; without one, list them.

The current folder may come from somebody else, so it is not on the path of modules: a file in it
such as random.py is not imported. (`python -m nnmpi COMMAND` does the same work, but there Python
itself puts the folder first.) Code that an option names is found by `base.custom`.
"""

import sys
from runpy import run_module

from nnmpi.base.command import say
from nnmpi.base.errors import UsageError
from nnmpi.commands.table import find_command, list_commands


def main() -> None:
    """Run the command that the command line names."""
    name, *words = sys.argv[1:] or [""]
    try:
        module = find_command(name)
    except UsageError:
        sys.exit(say(list_commands))
    sys.argv = [f"nnmpi {name}", *words]
    run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
