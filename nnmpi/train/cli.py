"""The command: from the words on the command line to a trained network. Every rank calls `main`.

Errors leave as exceptions. Those of this package carry one sentence and an exit status; the hook that `comm.start`
installs prints what all ranks raise once, and lets all of them end with the same status.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nnmpi.comm.group import Group
from nnmpi.command import HelpAsked
from nnmpi.train.config import Config
from nnmpi.train.folder import default_folder
from nnmpi.train.options import assemble, flatten
from nnmpi.train.parse import parse
from nnmpi.train.progress import Console
from nnmpi.train.root import on_root
from nnmpi.train.session import run


def main(words: Sequence[str], group: Group) -> None:
    """Train as the words say, or print the help. Collective.

    Raises:
        UsageError: on all ranks, for wrong options, data that does not fit the model, or a folder that is taken.
        NnmpiError: for everything else that has a sentence; see `session.run`.
    """
    console = Console(quiet=not group.is_root)
    config = read_options(words, group, console)
    if config is not None:
        run(config, group, console)


def read_options(words: Sequence[str], group: Group, console: Console) -> Config | None:
    """Return what rank 0 reads from the words and files, on every rank; None after printing the help. Collective.

    Raises:
        UsageError: on all ranks, when the options are wrong.
    """
    answer: dict[str, Any] = on_root(group, lambda: _read(words))
    if "help" in answer:
        console.say(answer["help"])
        return None
    return assemble(answer)


def _read(words: Sequence[str]) -> dict[str, Any]:
    """Return the options as JSON values with the run's folder settled, or the help."""
    try:
        config = parse(words)
    except HelpAsked as asked:
        return {"help": str(asked)}
    out = config.run.resume or config.run.out or default_folder(config)
    return flatten(replace(config, run=replace(config.run, out=out)))
