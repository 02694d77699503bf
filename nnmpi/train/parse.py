"""From command-line words to a configuration: defaults < resumed run < file < command line.

The weaker layers become words in front of the user's own, since the last of several equal options wins; so every
check happens once, on the values that will be used. This module neither prints nor exits.
"""

import argparse
import contextlib
import io
import json
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

from nnmpi.command import HelpAsked
from nnmpi.data.catalogue import NAMES
from nnmpi.errors import UsageError
from nnmpi.train.config import Config
from nnmpi.train.diagnose import diagnose, flatten_box
from nnmpi.train.options import arguments, check, flatten, hints, kinds, option, switches
from nnmpi.train.switch import spell_out

PROGRAM = "python -m nnmpi.train"
CONFIG_FILE = "config.json"
DESCRIPTION = """Train a network on MPI ranks: mpirun -n 4 python -m nnmpi.train [options].

Without options: a small convolutional network on the bundled digits."""

# What a run cannot change when it goes on: its weights, its data and its order of samples hang on these.
FIXED = (
    *("model", "hidden", "activation", "dropout", "dataset", "test_fraction", "normalize", "partition"),
    *("batch_size", "optimizer", "dtype", "seed"),
)


# What belongs to another option, and is left when a run goes on with another value of that one.
DETAILS = {
    "sync": (
        *("staleness", "local_steps", "servers", "dedicated_servers", "backup", "neighbours", "staleness_lr"),
        "sync_warmup_epochs",
    ),
    "virtual_workers": ("network",),
}


def parse(words: Sequence[str]) -> Config:
    """Return the configuration for these command-line words.

    With --resume the run's own config.json is the layer above the defaults and `run.resume` is the run's folder.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations, a file that cannot be read, or a run that is not there.
    """
    words = spell_out(words, switches())
    early = _early(words)
    _refuse_empty_paths(words)
    layers: list[str] = []
    resumed: dict[str, Any] = {}
    in_file = _file_options(Path(early.config)) if early.config and not early.help else {}
    if early.resume and not early.help:
        resumed = run_options(Path(early.resume))
        layers += arguments(_without_details(resumed, in_file, words))
    layers += arguments(in_file)
    config = _read([*layers, *words])
    _refuse_changes(config, resumed)
    return config


def run_options(folder: Path) -> dict[str, Any]:
    """Return the options that a run was started with, from its folder.

    Raises:
        UsageError: when the folder holds no run, or its config.json cannot be read.
    """
    file = folder / CONFIG_FILE
    try:
        there = file.is_file()
    except OSError as error:  # in a folder that may not be entered
        reason = error.strerror or error
        raise UsageError(f"--resume {folder} cannot be read ({reason}); give the folder of a run that can") from None
    if not there:
        raise UsageError(f"--resume {folder}: there is no run ({file} is missing); give the folder of a run")
    try:
        flat = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if not isinstance(flat, dict):
        raise UsageError(f"{file} cannot be read: it holds no options by name")
    values = check(flat, str(file))
    return {name: value for name, value in values.items() if name not in ("out", "resume", "config")}


def _without_details(resumed: dict[str, Any], in_file: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return a resumed run's options without those that belong to one that is given anew."""
    given = {word.partition("=")[0] for word in words} | {option(name) for name in in_file}
    left = {detail for name, details in DETAILS.items() if option(name) in given for detail in details}
    return {name: value for name, value in resumed.items() if name not in left}


def _early(words: Sequence[str]) -> argparse.Namespace:
    """Return the options that say where other options come from; what is wrong with them tyro will say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("-h", "--help", action="store_true")
    return parser.parse_known_args(list(words))[0]


def _refuse_empty_paths(words: Sequence[str]) -> None:
    """Refuse paths without a character (an unset variable of a script): Python would take them for this folder."""
    for name, (_, hint) in hints().items():
        if Path in kinds(hint):
            word = option(name)
            if f"{word}=" in words or (word, "") in pairwise(words):
                raise UsageError(f"{word} is empty; give a path, or leave {word} out")


def _file_options(file: Path) -> dict[str, Any]:
    """Return the options in a TOML file, checked by name and type."""
    try:
        if file.exists() and not file.is_file():  # /dev/zero has no end, and a pipe may have none
            raise UsageError(f"--config {file} is not an ordinary file; give a TOML file")
        flat = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {file} is not TOML: {error}") from None
    for name in ("config", "resume"):
        if name in flat:
            raise UsageError(f"{file}: {name} belongs on the command line, not into a file")
    return check(flat, str(file))


def _read(words: Sequence[str]) -> Config:
    """Return what tyro makes of the words, with its printing and exiting turned into exceptions."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return tyro.cli(
                Config, config=(tyro.conf.OmitArgPrefixes,), args=list(words), prog=PROGRAM, description=DESCRIPTION
            )
    except SystemExit as ended:
        if not ended.code:
            raise HelpAsked("\n".join(map(str.rstrip, out.getvalue().rstrip().split("\n")))) from None
        raise UsageError(_own_error(ended) or diagnose(words) or flatten_box(err.getvalue())) from None


def _own_error(ended: BaseException) -> str | None:
    """Return the text of a section's own UsageError behind tyro's exit, if that is what ended it."""
    cause: BaseException | None = ended
    while cause is not None:
        if isinstance(cause, UsageError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _refuse_changes(config: Config, resumed: dict[str, Any]) -> None:
    """Refuse options that a resumed run cannot change."""
    given = flatten(config)
    for name in FIXED:
        before = resumed.get(name, given[name])
        before = list(before) if isinstance(before, tuple) else before
        if before != given[name] and not (name == "dataset" and _moved(str(before), given[name])):
            raise UsageError(
                f"--resume {given['resume']}: the run has {option(name)} {_shown(before)}, which cannot become "
                f"{_shown(given[name])}; leave {option(name)} out, or start a new run with another --out"
            )


def _moved(before: str, now: str) -> bool:
    """Return whether both are paths of a file with the same name: data may lie elsewhere when a run goes on."""
    return not {before, now} & {*NAMES} and Path(before).name == Path(now).name


def _shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
