"""A run's folder: its files, its lock, and writes that survive a kill.

runs/latest           a link to the newest run there
runs/digits-cnn-20260101-120000/
  config.json         the run's options
  metrics.jsonl       see metrics.py
  console.txt         the console output, and the sentence that ended the last start, if one did
  starts.jsonl        a line per start: command, time, host, versions, header
  finished.json       present if all ranks have reached the end: last step, results, hash of the
                      weights
  evaluation.json     the last result of `nnmpi evaluate`, with the confusion matrix
  faults.jsonl        the faults that ended starts, under `nnmpi run`
  flight/             after a stall: each rank's position, last operations and stacks
  checkpoints/        see checkpoint.py
  trace.json.gz       with --trace
  report.html         of `nnmpi report`
  torch.safetensors   of `nnmpi export`
  model.onnx          of `nnmpi export --format onnx`
  model/              with --model gpt or llama, at the end: as Hugging Face's transformers reads it
  tokenizer/          with a text: for `nnmpi.data.load_tokenizer`
"""

import errno
import os
import platform
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

from nnmpi.base.custom import is_foreign, names_in, short_name
from nnmpi.base.errors import DISK, CheckpointError, NnmpiError, UsageError, raised_as
from nnmpi.base.files import (
    LOCK_FILE,
    folder_atomically,
    foreign,
    json_text,
    opened_to_write,
    read_json,
    read_records,
    read_text,
    rebuilt,
    remove_folder,
    rename,
    sync_folder,
    write_atomically,
    write_json,
)
from nnmpi.data.readers import split_names
from nnmpi.data.tokenizer import Tokenizer, load_tokenizer
from nnmpi.models.pretrained import CONFIG
from nnmpi.train.config import FIT, Config, all_options, check
from nnmpi.train.signature import versions

CONFIG_FILE = "config.json"
RUNS, LATEST_RUN = Path("runs"), "latest"  # default parent of runs, and the link in it

FLIGHT_FILE = re.compile(r"rank-[0-9]+\.txt")

LAST_WORDS = "nnmpi: "  # before the sentence that ended a start, in console.txt


@dataclass(frozen=True)
class Start:
    """A line of starts.jsonl: how a run was started, and what its header says."""

    command: tuple[str, ...]
    ranks: int
    time: str = "?"
    host: str = "?"
    folder: str = "?"
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[tuple[str, str], ...] = ()


class RunFolder:
    """The paths in a run's folder; see the module.

    A new run begins only where none of these names is taken, except by a report or an export: see
    `check_free`. So whatever has one of them later was made by the run, and a start that is refused
    may remove it: see `withdraw`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.config, self.metrics = path, path / CONFIG_FILE, path / "metrics.jsonl"
        self.console, self.starts, self.faults = (
            path / "console.txt",
            path / "starts.jsonl",
            path / "faults.jsonl",
        )
        self.finished, self.checkpoints = path / "finished.json", path / "checkpoints"
        self.evaluation = path / "evaluation.json"
        self.tokenizer, self.model = path / "tokenizer", path / "model"
        self.adapter, self.merged = path / "adapter", path / "merged"
        self.lock, self.flight = path / LOCK_FILE, path / "flight"
        self.trace, self.page = path / "trace.json.gz", path / "report.html"
        self.torch = path / "torch.safetensors"
        self.onnx = path / "model.onnx"
        # What this start has made, and what it has replaced, for `withdraw`.
        self._made_folders: list[Path] = []
        self._made_files: list[Path] = []
        self._before: dict[Path, bytes] = {}
        self._has_lock_file = True  # from a start before
        self._has_reopened = False
        self._linked_before: str | None = None  # where runs/latest led to, if this start moved it
        self._has_linked = False

    @property
    def _unfinished(self) -> Path:
        return self.path / f".{self.finished.name}.tmp"

    @property
    def entries(self) -> list[Path]:
        """All that a run's folder may have."""
        return [
            item for item in vars(self).values() if isinstance(item, Path) and item != self.path
        ]

    def check_links(self) -> None:
        """Refuse links among the run's files: what is written to one could land anywhere.

        A job that is ending may remove files meanwhile.

        Raises:
            UsageError: with the link and the remedy.
        """
        for entry in self.entries:
            # not rglob, which raises for a folder that is gone
            below = (Path(at, name) for at, *names in os.walk(entry) for name in chain(*names))
            for file in chain([entry], below):
                if file.is_symlink():
                    raise UsageError(
                        f"{file} is a link, which may lead out of the run's folder; put what it"
                        " leads to in its place, or copy the run by cp -rL"
                    )

    def check_free(self) -> None:
        """Check that a new run may be written here, before any work is done.

        The folder may have other files, but none with the name of one that the run will write, or
        that would be read as the run's.

        Raises:
            UsageError: for a folder with a run or such a file, a file in its place, and a path that
                the system refuses.
        """
        with self._explain_errors():
            self.check_links()
            for file in (self.config, self.metrics, self.checkpoints):
                if file.exists():
                    raise UsageError(
                        f"--out {self.path} already holds a run ({file.name}); continue it with"
                        f" --resume {self.path}, or give another folder"
                    )
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"--out {self.path} is a file; give a folder")
            if taken := [file.name for file in self._written() if file.exists()]:
                names = ", ".join(taken)
                raise UsageError(
                    f"--out {self.path} has {names}, which a run would write there, too; move"
                    f" {'it' if len(taken) == 1 else 'them'} away, or give another folder"
                )

    def _written(self) -> list[Path]:
        """Return what a run will write, or read as its own, except what may be of starts before.

        Those that ended before there was a config.json have left an empty lock file, and reports of
        a stall. `nnmpi run` notes its faults by itself.
        """
        result = [self.config, self.metrics, self.checkpoints, self.console, self.starts]
        result += [self.finished, self.evaluation, self.trace, self.tokenizer, self.model]
        result += [self.adapter]
        with suppress(FileNotFoundError):
            lock = self.lock.stat()
            if lock.st_size or not stat.S_ISREG(lock.st_mode):
                result.append(self.lock)
        with suppress(FileNotFoundError, NotADirectoryError):
            if not all(FLIGHT_FILE.fullmatch(item.name) for item in self.flight.iterdir()):
                result.append(self.flight)
        return result

    def make(self) -> None:
        """Create the folder if it is missing.

        Raises:
            UsageError: when it cannot be created.
        """
        with self._explain_errors():
            missing = [item for item in (self.path, *self.path.parents) if not item.exists()]
            for item in reversed(missing):
                with suppress(FileExistsError):  # another job was faster
                    item.mkdir()
                    self._made_folders.append(item)
            sync_folder(self.path.parent)
            self._has_lock_file = self.lock.exists()

    def claim(self) -> None:
        """Check again that a new run may be written here, which is now locked.

        From here on, what has the name of a run's file is this start's.

        Raises:
            UsageError: see `check_free`; another job may have been faster.
        """
        self.check_free()
        self._made_files += [self.config, self.metrics, self.console, self.starts, self.tokenizer]
        self._made_files += [self.trace, *([] if self._has_lock_file else [self.lock])]
        self._made_folders.append(self.checkpoints)  # removed if it is empty

    def remember(self) -> None:
        """Remember what a start that resumes the run will replace or remove, for `withdraw`.

        Raises:
            UsageError: when it cannot be read.
        """
        with self._explain_errors():
            for file in (self.config, self.metrics):
                if file.is_file():
                    self._before[file] = file.read_bytes()

    def reopen(self) -> None:
        """Take finished.json away, as the run goes on.

        It gets the name under which the next one is prepared, so that `withdraw` can put the very
        file back: `nnmpi run` sees by the file whether a start has finished the run.
        """
        with suppress(FileNotFoundError):
            rename(self.finished, self._unfinished.name, self.path)
            self._has_reopened = True

    def keep_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Save a text's tokenizer, or check that a resumed run has the same one.

        Raises:
            UsageError: for another tokenizer than the saved one, and when it cannot be written.
        """
        if tokenizer is None:
            return
        if not self.tokenizer.is_dir():
            with self._explain_errors(), folder_atomically(self.tokenizer) as temporary:
                tokenizer.save(temporary)
        elif load_tokenizer(self.tokenizer).identity != tokenizer.identity:
            raise UsageError(
                f"{self.path} was started with another tokenizer, in {self.tokenizer}: the text or"
                " the tokenizer's files have changed since; start a new run, or restore them"
            )

    def create(self, options: Mapping[str, Any]) -> None:
        """Write config.json.

        Args:
            options: of the run, as `flatten` returns them.

        Raises:
            UsageError: when it cannot be written.
        """
        with self._explain_errors():
            write_json(self.config, {**options, "resume": None})

    def note_error(self, error: NnmpiError) -> None:
        """Append the sentence that ended a start to console.txt, for `nnmpi doctor`."""
        line = f"{LAST_WORDS}{error}\n"
        with suppress(OSError, ValueError):
            # not where the folder was withdrawn, or on another node
            if self.starts.exists() and not read_text(self.console).endswith(line):
                with opened_to_write(self.console, "a") as stream:
                    stream.write(line)

    def note_start(
        self,
        words: Sequence[str],
        ranks: int,
        library: str,
        facts: Sequence[tuple[str, str]],
    ) -> None:
        """Append a line to starts.jsonl, and link runs/latest; disk errors are ignored.

        Args:
            words: of the command line.
            ranks: their number.
            library: name and version of MPI.
            facts: the header's lines.
        """
        with suppress(OSError):
            start = Start(
                ("nnmpi", "train", *words),
                ranks,
                time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                platform.node(),
                str(Path.cwd()),
                {**versions(), "mpi": library},
                tuple(facts),
            )
            with opened_to_write(self.starts, "a") as stream:
                stream.write(json_text(asdict(start)) + "\n")
            self._link()

    def _link(self) -> None:
        """Let runs/latest lead to this run; what has this name and is no link stays."""
        link = RUNS / LATEST_RUN
        if self.path.parent != RUNS or self.path.is_symlink():
            return
        if link.is_symlink():
            self._linked_before = os.readlink(link)
        elif link.exists():
            return
        _replace_link(link, self.path.name)
        self._has_linked = True

    def withdraw(self) -> None:
        """Remove what this start has made, and restore what it has replaced, as it was refused.

        What is only added to, such as console.txt of a resumed run, stays.
        """
        link = RUNS / LATEST_RUN
        with suppress(OSError):
            if self._has_linked and os.readlink(link) == self.path.name:  # no run began meanwhile
                if self._linked_before is None:
                    link.unlink()
                else:
                    _replace_link(link, self._linked_before)
        for entry in self._made_files:
            if entry.is_dir():
                remove_folder(entry, self.path)
            else:
                with suppress(OSError):
                    entry.unlink()
        for file, content in self._before.items():
            with suppress(OSError):
                if not file.is_file() or file.read_bytes() != content:
                    write_atomically(file, content, self.path)
        if self._has_reopened:
            with suppress(OSError):
                rename(self._unfinished, self.finished.name, self.path)
        for folder in reversed(self._made_folders):
            with suppress(OSError):  # it has other files
                folder.rmdir()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"--out {self.path} cannot be written"
            if error.errno in (*DISK, errno.EIO):  # of the disk, not of the command
                with raised_as(CheckpointError, what, "make room there"):
                    raise
            with raised_as(UsageError, what, "give a writable folder"):
                raise


def _replace_link(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)


# {option: (a value's former name, its name today)}: runs of before go on
RENAMED: Mapping[str, tuple[str, str]] = {"allreduce": ("ps", "star")}


def read_run(folder: Path, named: str) -> dict[str, Any]:
    """Return a run's options from its config.json, without those that each start sets again.

    Args:
        folder: of the run.
        named: the folder or its option, for messages.

    Raises:
        UsageError: for a folder without a run, and for an unreadable config.json.
    """
    file = folder / CONFIG_FILE
    with raised_as(UsageError, f"{named} cannot be read", "give a readable run"):
        is_run = file.is_file()
    RunFolder(folder).check_links()
    if not is_run:
        raise UsageError(f"{named}: there is no run ({file} is missing); give the folder of a run")
    with foreign(file, UsageError):
        flat = {**read_json(file)}
    for name in flat:
        if name not in all_options():
            raise UsageError(
                f"{file} has {name}, an option that nnmpi has removed (CHANGELOG.md names its"
                " replacement); continue with the version of nnmpi that started the run"
            )
    for name, (old, new) in RENAMED.items():
        if flat.get(name) == old:
            flat[name] = new
    values = check(flat, str(file))
    # --simulate is among them: a run may begin in simulation and resume on real ranks, or the
    # reverse.
    left_out = "out resume trust config quiet ranks simulate network stop_after"
    return {name: value for name, value in values.items() if name not in left_out.split()}


def read_starts(folder: RunFolder) -> list[Start]:
    """Return a run's starts, the first one first; none without starts.jsonl.

    Raises:
        UsageError: with the file, for one that no run writes.
    """
    if not folder.starts.exists():
        return []
    with foreign(folder.starts, UsageError, "not as runs write it"):
        return [rebuilt(Start, record) for record in read_records(folder.starts)]


def resume_words(folder: Path, ranks: int = 1) -> str:
    """Return the words that resume a run, for a shell: "--resume runs/mine --ranks 4".

    Args:
        folder: of the run.
        ranks: to start; 1 where the caller's command starts them.
    """
    name = str(folder)
    # after "=" a name may begin with a dash
    text = f"--resume={quote(name)}" if name.startswith("-") else f"--resume {quote(name)}"
    return f"{text} --ranks {ranks}" if ranks > 1 else text


def code_of(options: Mapping[str, Any]) -> str:
    """Return the options of a run that name code outside of nnmpi: "--model net.py:build"."""
    return ", ".join(
        f"{all_options()[name].flag} {item}"
        for name, value in options.items()
        for item in names_in(value)
        if is_foreign(item)
    )


def check_trust(
    folder: Path, options: Mapping[str, Any], given: Mapping[str, Any], trust: bool | None
) -> None:
    """Refuse a run that names code outside nnmpi, unless the user trusts it.

    A run's folder is data, which people share: opening one must not execute code unasked.

    Args:
        folder: of the run, for the message.
        options: of the run.
        given: options of the command line, which take the place of the run's.
        trust: the option --trust.

    Raises:
        UsageError: with the code, and the option to trust it.
    """
    code = code_of({name: value for name, value in options.items() if name not in given})
    if code and not trust:
        raise UsageError(
            f"{folder} names code outside of nnmpi, {code}, which would be executed; if you trust"
            " whoever made the run, give --trust, or nnmpi.load(run, trust=True)"
        )


def refuse_of_program(folder: Path, options: Mapping[str, Any]) -> None:
    """Refuse a run of `nnmpi.fit`, whose model only its program has.

    Raises:
        UsageError: with what to do.
    """
    if options.get("dataset") == FIT:
        raise UsageError(
            f"{folder} is a run of nnmpi.fit, whose model and data a program has given; call"
            f" nnmpi.fit(..., checkpoint={str(folder)!r}) there again: it goes on, or if the run is"
            " finished, returns the result"
        )


def find_model(pretrained: Path) -> Path:
    """Return the folder in Hugging Face's format: the given one, or the one in a run's folder.

    Raises:
        UsageError: for another folder, and for a run without such a model.
    """
    run = RunFolder(pretrained)
    if run.model.is_dir():
        return run.model
    if run.adapter.is_dir():
        raise UsageError(
            f"--pretrained {pretrained} has adapters alone; write the model that they make by nnmpi"
            f" export {pretrained} --merge, and give {run.merged}; or go on with them by --adapter"
            f" {run.adapter} and their own --pretrained"
        )
    if run.metrics.is_file():
        raise UsageError(
            f"--pretrained {pretrained} is a run without a model, which --model gpt or llama writes"
            f" at its end; finish it with --resume {pretrained}, or give another"
        )
    if not (pretrained / CONFIG).is_file():
        raise UsageError(
            f"--pretrained {pretrained} has no {CONFIG}; give a finished run of --model gpt or"
            " llama, or a folder that Hugging Face's transformers wrote"
        )
    return pretrained


def default_folder(config: Config, runs: Path = RUNS) -> Path:
    """Create and return an empty folder runs/DATASET-MODEL-TIME, numbered if it exists.

    The folder is created at once, so that jobs started in the same second get different ones.

    Raises:
        UsageError: when the folder cannot be created.
    """
    data = Path(split_names(short_name(config.data.dataset))[0]).stem
    stem = f"{data}-{short_name(config.model.model)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (runs / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 10_000))
    with raised_as(
        UsageError, f"the folder {runs} cannot be written", "give another one with --out"
    ):
        runs.mkdir(parents=True, exist_ok=True)
        for name in names:
            with suppress(FileExistsError):
                name.mkdir()
                return name
    raise AssertionError("as many runs in a second")
