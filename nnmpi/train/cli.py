"""The command: from a command line to a trained network. Every rank calls `main`.

Options are merged in this order of precedence: defaults < resumed run < TOML file < command line.
The merged values are checked once.

Errors leave as exceptions. Those of this package carry one sentence and an exit status. The hook
that `comm.mpi.start` installs prints an error that all ranks raise once, and ends all ranks with
its status.
"""

import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from nnmpi.base.command import (
    Console,
    check_numbers,
    make_section,
    options_of,
    read_words,
    watch_alone,
)
from nnmpi.base.errors import HelpAsked, UsageError
from nnmpi.base.files import read_text
from nnmpi.base.launcher import read_launch
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.shutdown import exit_refused
from nnmpi.comm.mpi.start import start
from nnmpi.comm.world import LIMIT_S, WARNING_S
from nnmpi.compose.layout import Layout
from nnmpi.data.catalogue import NAMES
from nnmpi.train.computing import take_backend
from nnmpi.train.config import (
    ONLY_WITH,
    Config,
    all_options,
    assemble,
    check,
    flatten,
    plain,
    shown,
)
from nnmpi.train.folder import check_trust, default_folder, find_model, read_run
from nnmpi.train.loop import StopSignals, begin
from nnmpi.train.run import Run, open_run

T = TypeVar("T")

EXIT_LIMIT_S = 60.0  # all ranks end together: a rank that exits this long before others has failed

PROGRAM = "nnmpi train"
DESCRIPTION = """Train a network on MPI ranks: mpirun -n 4 nnmpi train [options].

Without options: a small convolutional network on the bundled digits."""

# Options that --help prints without `all`: those a newcomer needs.
FIRST = """
model hidden layers features dataset data_dir epochs max_steps batch_size optimizer lr weight_decay
lr_schedule clip dp pp tp pipeline microbatches zero allreduce sync slow network simulate seed out
resume verbose
"""
# Options that cannot change on resume: weights, data and sample order depend on them.
FIXED = """
model hidden activation dropout layers features heads experts experts_top experts_capacity context
dataset target tokenizer text_columns text_samples test_fraction normalize partition batch_size
optimizer loss dtype seed
"""


def launch(words: Sequence[str]) -> None:
    """Train on MPI's ranks, or with --simulate on simulated ranks.

    Raises:
        NnmpiError: see `run_on_ranks` and `main`.
    """

    def simulation() -> dict[str, Any]:
        config = parse(words)
        sync = config.sync
        return {
            "ranks": sync.simulate,
            "machine": sync.machine,
            "seed": config.run.seed,
            "cpu_factor": 0.0 if sync.slowness(0).minimum_s else 1.0,
        }

    run_on_ranks(words, main, simulation, StopSignals)


def parse_together(
    words: Sequence[str], parse: Callable[[Sequence[str]], T], group: Group
) -> tuple[Console, T]:
    """Return rank 0's console and the parsed command line. Collective.

    Raises:
        NnmpiError: of `parse`, on all ranks.
    """
    with agreed(group):
        return Console(quiet=not group.is_root), parse(words)


def run_on_ranks(
    words: Sequence[str],
    program: Callable[[Sequence[str], Group], Any],
    simulation: Callable[[], dict[str, Any]] = lambda: {"ranks": 0},
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Call program(words, group) on MPI's ranks, or with --simulate on simulated ranks.

    One rank prints requested help.

    Args:
        words: of the command line.
        program: to run; its result is returned.
        simulation: returns the arguments of `simulate`; with 0 ranks, MPI's are used.
        around: a context around simulated ranks.

    Raises:
        LaunchError, UsageError: of `comm.mpi.start.start`, and for --simulate under mpirun.
        NnmpiError: of the program.
    """
    launch = read_launch(os.environ)
    quiet = launch is not None and launch.rank > 0
    try:
        if any(word.partition("=")[0] == "--simulate" for word in words):
            watch_alone()
            options = simulation()
            if options["ranks"]:
                if launch is not None and launch.size > 1:
                    raise UsageError(
                        f"--simulate runs all ranks in one process, and {launch.name} has started"
                        f" {launch.size}"
                    )
                # imported here: MPI's ranks start without it
                from nnmpi.comm.simulated.simulated_world import simulate

                with around(), exit_refused():
                    return simulate(partial(program, words), **options)
        group = start(None if "NNMPI_EXIT_LIMIT_S" in os.environ else EXIT_LIMIT_S)
        quiet = not group.is_root
        group.comm.world.watch(WARNING_S, LIMIT_S)  # from here on, a deadlock ends the job
        with exit_refused():
            return program(words, group)
    except HelpAsked as request:
        return Console(quiet).finish(str(request))


def main(words: Sequence[str], group: Group) -> None:
    """Train with the options of a command line. Collective.

    Args:
        words: of the command line.
        group: all ranks.

    Raises:
        HelpAsked: on all ranks, for -h or --help.
        NnmpiError: on all ranks; UsageError for wrong options, data that do not fit the model, or a
            folder with another run. See `loop.begin` and `Loop.run`.
    """
    config = read_options(words, group)
    console = Console(quiet=config.run.quiet or not group.is_root)
    try:
        with begin(config, group, console, words) as loop:
            loop.run()
    finally:
        if group.is_root and config.run.out is not None:
            with suppress(OSError):
                config.run.out.rmdir()  # fails unless it is empty, as after a refused run


def read_options(words: Sequence[str], group: Group) -> Config:
    """Return rank 0's options on every rank. Collective.

    Rank 0 alone reads files: the folder's default name has a time, and other nodes may lack them.

    Args:
        words: of the command line; only rank 0's count.
        group: all ranks of the run.

    Raises:
        HelpAsked: on all ranks, for -h or --help.
        UsageError: on all ranks, when the options are wrong.
    """

    def read() -> dict[str, Any]:
        config = parse(words)
        config = config.having(out=config.run.resume or config.run.out or default_folder(config))
        if config.model.pretrained is not None:
            config = config.having(pretrained=find_model(config.model.pretrained))
        return flatten(config)

    return assemble(on_root(group, read))


def parse(words: Sequence[str]) -> Config:
    """Return the configuration of a command line, with the TOML file and the resumed run it names.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations, an unreadable file, or a missing run.
    """
    given = read_words(words, list(all_options().values()), PROGRAM, DESCRIPTION, FIRST.split())
    given = (read_file(Path(given["config"])) if given.get("config") else {}) | given
    resumed = (
        read_run(given["resume"], f"--resume {given['resume']}") if given.get("resume") else {}
    )
    if resumed:
        check_trust(Path(given["resume"]), resumed, given, given.get("trust"))
    # a new --sync drops the options that belong to the run's old one
    outdated = ONLY_WITH["sync"].keys() if "sync" in given else ()
    saved = {name: value for name, value in resumed.items() if name not in outdated}
    config = assemble(saved | given)
    _refuse_changes(config, resumed)
    return config


def read_file(file: Path) -> dict[str, Any]:
    """Return the options in a TOML file.

    Raises:
        UsageError: for an unreadable file, unknown options, and options for the command line only.
    """
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} cannot be read: {error}; give a TOML file") from None
    try:
        flat = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError: bad TOML, or a number of too many digits; RecursionError: deeply nested lists
        raise UsageError(f"--config {file} is not valid TOML: {error}") from None
    for name in ("config", "resume", "trust", "simulate"):
        if name in flat:
            raise UsageError(f"{file}: {name} belongs on the command line, not in a file")
    return check(flat, str(file))


def _refuse_changes(config: Config, resumed: Mapping[str, Any]) -> None:
    """Refuse options that a resumed run cannot change; a data set's file may have moved."""
    given = flatten(config)
    for name in FIXED.split():
        before = plain(resumed.get(name, given[name]))
        paths = {str(before), str(given[name])}
        has_moved = (
            name == "dataset"
            and len({Path(path).name for path in paths}) == 1
            and not paths & {*NAMES}
        )
        if before != given[name] and not has_moved:
            option = all_options()[name]
            was, now = (
                f"{option.flag} {shown(value)}"
                if not isinstance(value, bool)
                else option.flag
                if value
                else option.negation
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


# ---- commands that open a run ----


@dataclass(frozen=True)
class OpeningConfig:
    """Weights and layout."""

    best: bool = False
    """Use the best evaluation's weights, which --keep-best saved, instead of the last ones."""
    weights: Path | None = None
    """Use the weights of a PyTorch state_dict instead: a .safetensors file with the names of nnmpi
    export (default: the run's).
    """
    dp: int | None = None
    """Data-parallel replicas, which share the samples (default: as many as the ranks allow)."""
    pp: int = 1
    """Pipeline stages, one per rank."""
    tp: int = 1
    """Ranks that share each layer."""
    sp: int = 1
    """Ranks that share the positions of each sequence, for gpt."""
    backend: Literal["auto", "numpy", "cupy"] = "auto"
    """Array library. auto: CuPy if a CUDA device is usable, else NumPy."""
    trust: bool = False
    """Execute your code, FILE.py:NAME, that the run names."""
    simulate: int = 0
    """Run this many ranks in one process, without MPI."""

    def __post_init__(self) -> None:
        check_numbers(self, "dp pp tp sp", 1)
        check_numbers(self, "simulate", 0)

    def open(self, folder: Path, group: Group) -> Run:
        """Open the run, with its model distributed over the ranks. Collective.

        Raises:
            NnmpiError: on all ranks; see `open_run`.
        """
        backend = take_backend(self.backend, group)
        layout = Layout(self.dp, self.pp, self.tp, sp=self.sp)
        return open_run(folder, group, layout, backend, self.best, self.weights, self.trust)


def launch_command(
    parse: Callable[[Sequence[str]], tuple[Any, ...]],
    main: Callable[[Sequence[str], Group], Any],
) -> Any:
    """Run this process's command on MPI's ranks, or with --simulate on simulated ranks.

    Args:
        parse: see `read_command`; one of its results may have `simulate`.
        main: the command, collective; its result is returned.

    Raises:
        NnmpiError: see `run_on_ranks` and `main`.
    """
    words = sys.argv[1:]
    return run_on_ranks(
        words,
        main,
        lambda: {"ranks": sum(getattr(item, "simulate", 0) for item in parse(words))},
    )


def read_shared(
    words: Sequence[str],
    sections: Sequence[type[Any]],
    shared: Mapping[type[Any], str],
    program: str,
    description: str,
    different: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[Any, ...]:
    """Return a command's sections, its Config of shared options, and the shared options given.

    Args:
        words: of the command line.
        sections: the command's own dataclasses of options.
        shared: {section of the train command: names of the options that apply here, "" for all}.
        program, description: for --help.
        different: {option: (default, help)}, where they differ from those of training.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names or values.
    """
    mine = [item for section in sections for item in options_of(section)]
    others = [
        replace(item, **different.get(item.name, {}))
        for section, names in shared.items()
        for item in options_of(section)
        if not names or item.name in names.split()
    ]
    read = read_words(words, [*mine, *others], program, description)
    given = {item.name: read[item.name] for item in others if item.name in read}
    defaults = {
        item.name: item.default for item in others if "default" in different.get(item.name, {})
    }
    config = Config().having(**defaults | given)
    return *(make_section(section, read) for section in sections), config, given
