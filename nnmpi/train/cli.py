"""The command: from a command line to a trained network. Every rank calls `main`.

Options are merged in this order of precedence: defaults < resumed run < TOML file < command line.
The merged values are checked once.

Errors leave as exceptions. Those of this package carry one sentence and an exit status. The hook
that `comm.mpi.start` installs prints an error that all ranks raise once, and ends all ranks with
its status.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf, prod
from pathlib import Path
from typing import Any

from nnmpi.base.command import Console, as_words, flag_of, read_words
from nnmpi.base.errors import UsageError
from nnmpi.base.files import read_toml
from nnmpi.base.launcher import (
    check_temporary_folder,
    idle_cores,
    python_words,
    read_launch,
)
from nnmpi.base.wings import offered
from nnmpi.comm.agreement import on_root
from nnmpi.comm.algorithms.registry import AUTO
from nnmpi.comm.group import Group
from nnmpi.comm.synchrony.sync import NEEDS
from nnmpi.data.catalogue import NAMES
from nnmpi.data.readers import split_names
from nnmpi.models.pretrained import model_named
from nnmpi.train.config import (
    Config,
    all_options,
    assemble,
    check,
    flatten,
    having,
    plain,
    read_on_root,
)
from nnmpi.train.derived import with_adapter
from nnmpi.train.folder import (
    check_trust,
    default_folder,
    find_model,
    read_run,
    refuse_of_program,
)
from nnmpi.train.session import begin

PROGRAM = "nnmpi train"
DESCRIPTION = """Train a network on MPI ranks: mpirun -n 4 nnmpi train, or nnmpi train --ranks 4.

Without options: a small convolutional network on the bundled digits."""

# Options that --help prints without `all`: those a newcomer needs.
FIRST = """
model hidden layers features dataset data_dir epochs max_steps batch_size optimizer lr weight_decay
lr_schedule clip ranks dp pp tp pipeline microbatches zero allreduce sync network simulate seed out
resume verbose
"""
RANKS = ("--ranks", "-n")
# Options that cannot change on resume: weights, data and sample order depend on them.
FIXED = """
model hidden activation dropout layers features heads kv_heads theta tied experts experts_top
experts_capacity context lora lora_alpha lora_targets lora_dropout base_dtype
dataset target tokenizer text_columns text_samples test_fraction stratify sample_weight normalize
partition
shuffle_block batch_size optimizer loss class_weights dtype seed sum compress best_by
"""


def main(words: Sequence[str], group: Group) -> None:
    """Train with the options of a command line. Collective.

    Args:
        words: of the command line.
        group: all ranks.

    Raises:
        HelpAsked: on all ranks, for -h or --help.
        NnmpiError: on all ranks; UsageError for wrong options, data that do not fit the model, or a
            folder with another run. See `session.begin` and `Loop.run`.
    """
    made = list[Path]()
    try:
        config = read_options(words, group, made)
        console = Console(quiet=config.run.quiet or not group.is_root)
        with begin(config, group, console, words) as loop:
            loop.run()
        on_root(group, console.finish)
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()  # fails unless it is empty, as after a refused run


def read_options(words: Sequence[str], group: Group, made: list[Path] | None = None) -> Config:
    """Return rank 0's options on every rank. Collective.

    Rank 0 alone reads files: the folder's default name has a time, and other nodes may lack them.

    Args:
        words: of the command line; only rank 0's count.
        group: all ranks of the run.
        made: on rank 0, gets the folder that is made for a run without --out.

    Raises:
        HelpAsked: on all ranks, for -h or --help.
        UsageError: on all ranks, when the options are wrong.
    """

    def read() -> Config:
        config = parse(words)
        run, pretrained = config.run, config.model.pretrained
        model, out = pretrained and find_model(pretrained), run.resume or run.out
        if config.model.adapter is not None and run.resume is None:
            if config.model.lora is not None:
                raise UsageError(
                    f"--adapter {config.model.adapter} has a rank of its own; leave --lora out"
                )
            config = config.having(
                **vars(with_adapter(having(config.model, {"pretrained": model})))
            )
        if out is None:
            out = default_folder(config)
            if made is not None:
                made.append(out)
        return config.having(out=out, pretrained=model)

    return read_on_root(group, read)


def parse(words: Sequence[str]) -> Config:
    """Return the configuration of a command line, with the TOML file and the resumed run it names.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations, an unreadable file, or a missing run.
    """
    given = read_words(words, list(all_options().values()), PROGRAM, DESCRIPTION, FIRST.split())
    given = (read_file(given["config"]) if given.get("config") else {}) | given
    resumed = (
        read_run(given["resume"], f"--resume {given['resume']}") if given.get("resume") else {}
    )
    if resumed:
        refuse_of_program(given["resume"], resumed)
        check_trust(given["resume"], resumed, given, given.get("trust"))
    # a new --sync drops the options that belong to the run's old one
    outdated = NEEDS.keys() if "sync" in given else ()
    saved = {name: value for name, value in resumed.items() if name not in outdated}
    values = saved | given
    if values.get("pretrained") and "model" not in values:
        values["model"] = model_named(find_model(Path(values["pretrained"])))
    config = assemble(values)
    refuse_changes(config, resumed)
    return config


def rank_command(words: Sequence[str]) -> list[str]:
    """Return the command by which --ranks are started; empty for a single one.

    Raises:
        UsageError: under a launcher, and for wrong options.
        LaunchError: without mpirun.
    """
    config, launch = parse(words), read_launch(os.environ)
    if launch is not None:
        raise UsageError(
            f"--ranks starts the ranks, and {launch.name} has started {launch.size}; leave one of"
            " them out"
        )
    ranks, layout, batch = config.run.ranks, config.parallel, config.optimization.batch_size
    if ranks == AUTO:
        replica, most = prod(layout.shape[1:]), inf if batch == "full" else batch
        copies = min(idle_cores() // replica, most) if layout.dp == AUTO else layout.dp
        ranks = replica * max(1, int(copies))
    if ranks is None or ranks == 1:
        return []
    launcher = offered("find_launcher")(ranks, ())
    if launcher.kind == "Open MPI":
        check_temporary_folder()
    start = launcher.command(ranks, {})
    return [*start, *python_words(), "-m", "nnmpi.train", *without(RANKS, words)]


def without(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the words without these options and their values; names are spelled with dashes."""
    result, drops = [], False
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            drops = word.partition("=")[0].replace("_", "-") in names
        if not drops:
            result.append(word)
    return result


def read_file(file: Path) -> dict[str, Any]:
    """Return the options in a TOML file.

    Raises:
        UsageError: for an unreadable file, unknown options, and options for the command line only.
    """
    try:
        flat = read_toml(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {file} cannot be read: {error}; give a TOML file") from None
    for name in ("config", "resume", "trust", "ranks", "simulate"):
        if name in flat:
            raise UsageError(f"{file}: {name} belongs on the command line, not in a file")
    return check(flat, str(file))


def _without_folder(dataset: str) -> tuple[str, tuple[str, ...]]:
    """Return the file of a data set, without its folder, and the names in it."""
    path, names = split_names(dataset)
    return Path(path).name, names


def refuse_changes(config: Config, resumed: Mapping[str, Any]) -> None:
    """Refuse options that a resumed run cannot change; a data set's file may have moved."""
    if not resumed:
        return
    given, defaults = flatten(config), flatten(Config())
    for name in FIXED.split():
        before = plain(resumed.get(name, defaults[name]))  # of a run that is older than the option
        paths = {str(before), str(given[name])}
        has_moved = (
            name == "dataset"
            and len({_without_folder(path) for path in paths}) == 1
            and not paths & {*NAMES}
        )
        if before != given[name] and not has_moved:
            was, now = (
                f"no {flag_of(name)}" if value is None else as_words(name, value)
                for value in (before, given[name])
            )
            raise UsageError(
                f"--resume {given['resume']}: the run has {was}, which cannot change to {now};"
                " leave it out, or start a new run with another --out"
            )
    outer = [
        (item["outer_lr"], item["outer_momentum"]) != (1, 0)
        for item in ({**given, **resumed}, given)
    ]
    if outer[0] != outer[1]:
        raise UsageError(
            f"--resume {given['resume']}: the run {'is' if outer[0] else 'is not'} trained by"
            " DiLoCo, and cannot change; leave --sync, --outer-lr and --outer-momentum out, or"
            " start a new run with another --out"
        )
