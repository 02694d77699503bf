"""What the commands that use a run have in common: where it is, which weights, and how they lie on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nnmpi.comm.group import Group
from nnmpi.command import options_of, read_words
from nnmpi.compose.layout import Layout
from nnmpi.errors import UsageError
from nnmpi.train.cli import start_ranks
from nnmpi.train.config import Config, at_least_one, check_positions, not_negative
from nnmpi.train.device import take_backend
from nnmpi.trained.run import TrainedRun, open_run


@dataclass(frozen=True)
class PlaceConfig:
    """Which weights, and where they compute."""

    best: bool = False
    """Take the weights with the best evaluation, which --keep-best has kept, and not the last ones."""
    weights: Path | None = None
    """Take the weights of a state_dict of PyTorch's, a .safetensors with the names of python -m nnmpi.export, and not
    the run's (default: the run's)."""
    dp: int | None = None
    """Replicas that share the samples (default: what is missing to the number of ranks)."""
    pp: int = 1
    """Ranks in each pipeline, which have the layers one after the other."""
    tp: int = 1
    """Ranks that share out each layer."""
    sp: int = 1
    """Ranks that share out the positions of each sequence (of gpt)."""
    backend: Literal["auto", "numpy", "cupy"] = "auto"
    """Array library; auto: CuPy where a CUDA device can be used, NumPy elsewhere."""
    simulate: int = 0
    """Run so many ranks in this process, without MPI."""

    def __post_init__(self) -> None:
        """Check the values."""
        at_least_one("--pp", self.pp)
        at_least_one("--tp", self.tp)
        at_least_one("--sp", self.sp)
        if self.dp is not None:
            at_least_one("--dp", self.dp)
        not_negative("--simulate", self.simulate)

    def open(self, folder: Path, group: Group, check: Callable[[Config], None] = lambda config: None) -> TrainedRun:
        """Return the run, with its model on the ranks. Collective.

        Raises:
            NnmpiError: on all ranks; see `open_run`.
        """
        backend = take_backend(self.backend, group, group.local_rank())
        layout = Layout(self.dp, self.pp, self.tp, sp=self.sp)

        def fits(config: Config) -> None:
            check_positions(config.model.model, self.sp)
            check(config)

        return open_run(folder, group, layout, backend, self.best, self.weights, fits)


def launch(
    words: Sequence[str],
    parse: Callable[[Sequence[str]], tuple[Any, ...]],
    main: Callable[[Sequence[str], Group], None],
) -> None:
    """Do a command on the ranks that MPI has started, or with --simulate on simulated ones.

    Args:
        words: of the command line.
        parse: returns what they ask for; see `read_command`.
        main: does it.

    Raises:
        NnmpiError: see `train.cli.start_ranks` and `main`.
    """

    def simulation() -> dict[str, Any]:
        return {"ranks": next((each.simulate for each in parse(words) if isinstance(each, PlaceConfig)), 0)}

    start_ranks(words, main, simulation)


def read_command(
    names: str, program: str, description: str, sections: Sequence[type[Any]], words: Sequence[str]
) -> tuple[Any, ...]:
    """Return the paths that a command was given, and after them its sections of options.

    Args:
        names: what the paths are, such as "RUN FILE".
        program, description: for --help.
        sections: dataclasses of options, of which no two have one of a name.
        words: of the command line.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names or values, and another number of paths.
    """
    options = [options_of(section) for section in sections]
    known = [each for part in options for each in part]
    read_words([word for word in words if word in ("-h", "--help")], known, program, description)
    paths, rest = _take_paths(words, names)
    given = read_words(rest, known, program, description)
    values = ({each.name: given[each.name] for each in part if each.name in given} for part in options)
    return *paths, *(section(**own) for section, own in zip(sections, values, strict=True))


def _take_paths(words: Sequence[str], names: str) -> tuple[list[Path], list[str]]:
    """Return the paths that stand before the options, and the other words."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    wanted = len(names.split())
    if count != wanted:
        raise UsageError(f"give {names} first and then the options, not {' '.join(words[:count]) or 'options alone'}")
    return [Path(word) for word in words[:count]], list(words[count:])
