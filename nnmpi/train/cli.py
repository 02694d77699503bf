"""The command: from the words on the command line to a trained network. Every rank calls `main`.

Options come in layers, and the stronger one wins: defaults < resumed run < file < command line. Every check happens
once, on the values that will be used.

Errors leave as exceptions. Those of this package carry one sentence and an exit status; the hook that `comm.mpi.start`
installs prints what all ranks raise once, and lets all of them end with the same status.
"""

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.shutdown import exit_refused
from nnmpi.comm.mpi.start import start, watch_alone
from nnmpi.comm.world import LIMIT_S, WARNING_S
from nnmpi.command import HelpAsked, read_words
from nnmpi.data.catalogue import NAMES
from nnmpi.errors import UsageError, shortened
from nnmpi.launcher import read_launch
from nnmpi.reading import read_json, read_text
from nnmpi.train.config import Config, all_options, assemble, check, flatten
from nnmpi.train.folder import CONFIG_FILE, default_folder, find_model
from nnmpi.train.log import Console
from nnmpi.train.loop import StopSignals
from nnmpi.train.session import run

T = TypeVar("T")

# Options that left nnmpi, with their defaults: a run that has another value cannot be resumed.
REMOVED: Mapping[str, Any] = {
    **dict.fromkeys(("split", "overlap", "fused_update", "convolution", "tied"), "auto"),
    **dict.fromkeys(("bucket_mb", "pace", "shift_pixels", "loader_threads")),
    **dict.fromkeys(("check_weights", "dedicated_servers", "staleness_lr", "nesterov", "plot"), False),
    **dict.fromkeys(("backup", "sync_warmup_epochs", "pace_ms", "simulation_seed", "eval_steps", "save_steps"), 0),
    "sp_attention": "ulysses",
    "recompute": "never",
    "fit": "kept",
    "neighbours": "ring",
    "servers": None,
    "straggler": "",
    "only_classes": "",
    "normalize": True,
    "lr_scaling": "none",
    "base_batch": 32,
    "grad_accum": 1,
    "step_epochs": 10.0,
    "step_factor": 0.1,
    "print_every": 5.0,
    "trace_steps": 20,
    "keep": 3,
    "stall_warning": 10.0,
}

PROGRAM = "python -m nnmpi.train"
DESCRIPTION = """Train a network on MPI ranks: mpirun -n 4 python -m nnmpi.train [options].

Without options: a small convolutional network on the bundled digits."""

# What a run cannot change when it goes on: its weights, its data and its order of samples hang on these.
FIXED = (
    *(
        "model",
        "hidden",
        "activation",
        "dropout",
        "layers",
        "features",
        "heads",
        "context",
        "dataset",
        "target",
        "tokenizer",
        "text_columns",
        "text_samples",
        "test_fraction",
        "normalize",
        "partition",
    ),
    *("batch_size", "optimizer", "loss", "dtype", "seed"),
)

# In which world a run goes on is said anew: it may begin in one and go on in the other.
SIMULATION = ("simulate", "network")

# What belongs to another option, and is left out when a run goes on with another value of that one.
DETAILS = {
    "sync": (*("staleness", "local_steps"),),
}


def launch(words: Sequence[str]) -> None:
    """Train on the ranks that MPI has started, or with --simulate on simulated ones.

    Raises:
        NnmpiError: see `start_ranks` and `main`.
    """

    def simulation() -> dict[str, Any]:
        config = parse(words)
        sync = config.sync
        cpu_factor = 0.0 if sync.slowness(0).minimum_s else 1.0
        return {
            "ranks": sync.simulate,
            "machine": sync.machine,
            "seed": config.run.seed,
            "cpu_factor": cpu_factor,
        }

    start_ranks(words, main, simulation, StopSignals)


def ask(words: Sequence[str], parse: Callable[[Sequence[str]], T], group: Group) -> tuple[Console, T | None]:
    """Return where a command prints, and what its words ask for; None after help, which is printed. Collective.

    Raises:
        NnmpiError: on all ranks, as `parse` does.
    """
    console = Console(quiet=not group.is_root)
    with agreed(group):
        try:
            return console, parse(words)
        except HelpAsked as asked:
            console.say(str(asked))
            return console, None


def start_ranks(
    words: Sequence[str],
    program: Callable[[Sequence[str], Group], None],
    simulation: Callable[[], dict[str, Any]],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Call a command's program on the ranks that MPI has started, or with --simulate on simulated ones.

    Args:
        words: of the command line.
        program: is given the words, and the group.
        simulation: returns the arguments of `simulate`, as the words have them; 0 ranks for those of MPI.
        around: entered while ranks are simulated.

    Raises:
        LaunchError, UsageError: as `comm.mpi.start.start`, and for --simulate under a launcher of several processes.
    """
    if any(word.partition("=")[0] == "--simulate" for word in words):
        watch_alone()
        started = read_launch(os.environ)
        try:
            options = simulation()
        except HelpAsked as asked:
            return Console(quiet=started is not None and started.rank > 0).say(str(asked))
        if options["ranks"]:
            if started is not None and started.size > 1:
                raise UsageError(
                    f"--simulate runs all ranks in one process, and {started.name} has started {started.size}"
                )
            from nnmpi.comm.simulated.simulated_world import simulate  # of no use to ranks of MPI

            with around(), exit_refused():
                simulate(partial(program, words), **options)
            return None
    group = start()
    group.comm.world.watch(WARNING_S, LIMIT_S)  # none waits for ever from now on
    with exit_refused():
        return program(words, group)


def main(words: Sequence[str], group: Group) -> None:
    """Train as the words say, or print the help. Collective.

    Args:
        words: of the command line.
        group: all ranks.

    Raises:
        UsageError: on all ranks, for wrong options, data that does not fit the model, or a folder that is taken.
        NnmpiError: for everything else that has a sentence; see `session.run`.
    """
    console = Console(quiet=not group.is_root)
    config = read_options(words, group, console)
    if config is not None:
        if config.run.quiet:
            console.silence()
        run(config, group, console, words)


def read_options(words: Sequence[str], group: Group, console: Console) -> Config | None:
    """Return what rank 0 reads from the words and files, on every rank; None after printing the help. Collective.

    Args:
        words: of the command line, without the program; only rank 0's count.
        group: all ranks of the run.
        console: prints the help.

    Raises:
        UsageError: on all ranks, when the options are wrong.
    """

    def read() -> dict[str, Any]:
        try:
            config = parse(words)
        except HelpAsked as asked:
            return {"help": str(asked)}
        out = config.run.resume or config.run.out or default_folder(config)
        config = replace(config, run=replace(config.run, out=out))
        if config.model.pretrained is not None:
            config = replace(config, model=replace(config.model, pretrained=find_model(config.model.pretrained)))
        return flatten(config)

    answer: dict[str, Any] = on_root(group, read)
    if "help" in answer:
        console.say(answer["help"])
        return None
    return assemble(answer)


def parse(words: Sequence[str]) -> Config:
    """Return the configuration for these command-line words.

    With --resume the run's own config.json is the layer above the defaults and its `resume` is the run's folder.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations, a file that cannot be read, or a run that is not there.
    """
    given = read_given(words)
    resumed = read_run(given["resume"], f"--resume {given['resume']}") if given.get("resume") else {}
    outdated = {detail for name, details in DETAILS.items() if name in given for detail in details}
    kept = {name: value for name, value in resumed.items() if name not in outdated}
    config = assemble(kept | given)
    _refuse_changes(config, resumed)
    return config


def read_given(words: Sequence[str], folder: Path = Path()) -> dict[str, Any]:
    """Return the options on a command line, and in the file that it names, by name.

    Args:
        words: of the command line, without the program.
        folder: where the command was given.

    Errors are those of `parse`.
    """
    given = read_words(words, list(all_options().values()), PROGRAM, DESCRIPTION)
    return (read_file(folder / given["config"]) if given.get("config") else {}) | given


def read_run(folder: Path, named: str) -> dict[str, Any]:
    """Return the options that a run was started with, from its folder.

    Raises:
        UsageError: when the folder holds no run, or its config.json cannot be read.
    """
    file = folder / CONFIG_FILE
    try:
        there = file.is_file()
    except OSError as error:  # in a folder that may not be entered
        reason = error.strerror or error
        raise UsageError(f"{named} cannot be read ({reason}); give the folder of a run that can") from None
    if not there:
        raise UsageError(f"{named}: there is no run ({file} is missing); give the folder of a run")
    try:
        flat = read_json(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    if not isinstance(flat, dict):
        raise UsageError(f"{file} cannot be read: it holds no options by name")
    for name in ("blas", "blas_threads"):  # were written as the run had chosen them
        flat.pop(name, None)
    gone = {name: flat.pop(name) for name in REMOVED if name in flat and name not in all_options()}
    for name, value in gone.items():
        if value != REMOVED[name]:
            raise UsageError(
                f"{file} has {name} {shortened(str(value))}, an option that left nnmpi (CHANGELOG.md says what is "
                "written instead); go on with the version of nnmpi that began the run"
            )
    values = check(flat, str(file))
    left_out = {"out", "resume", "config", "quiet", *SIMULATION}
    return {name: value for name, value in values.items() if name not in left_out}


def read_file(file: Path) -> dict[str, Any]:
    """Return the options in a TOML file.

    Raises:
        UsageError: when it cannot be read, or holds what is no option or belongs on the command line.
    """
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} cannot be read: {error}; give a TOML file") from None
    try:
        flat = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of TOML, of a number's digits, of lists within lists
        raise UsageError(f"--config {file} is not TOML that can be read: {error}") from None
    for name in ("config", "resume", "simulate"):
        if name in flat:
            raise UsageError(f"{file}: {name} belongs on the command line, not into a file")
    return check(flat, str(file))


def _refuse_changes(config: Config, resumed: Mapping[str, Any]) -> None:
    """Refuse options that a resumed run cannot change."""
    given = flatten(config)
    for name in FIXED:
        before = resumed.get(name, given[name])
        before = list(before) if isinstance(before, tuple) else before
        if before != given[name] and not (name == "dataset" and _is_moved(str(before), given[name])):
            flag = all_options()[name].flag
            raise UsageError(
                f"--resume {given['resume']}: the run has {flag} {_show(before)}, which cannot become "
                f"{_show(given[name])}; leave {flag} out, or start a new run with another --out"
            )


def _is_moved(before: str, now: str) -> bool:
    """Return whether both are paths of a file with the same name: data may lie elsewhere when a run goes on."""
    return not {before, now} & {*NAMES} and Path(before).name == Path(now).name


def _show(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value) or "unset"
