"""How a command begins that opens a run, or that shares options with training."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from nnmpi.base.command import (
    SimulatedConfig,
    Switch,
    flag_of,
    make_section,
    options_of,
    read_words,
    require,
)
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import run_on_ranks
from nnmpi.compose.layout import Degrees, Layout
from nnmpi.data.readers import is_table
from nnmpi.models.pretrained import model_named
from nnmpi.train.computing import make_backend
from nnmpi.train.config import Config
from nnmpi.train.folder import find_model
from nnmpi.train.run import Run, open_run


@dataclass(frozen=True)
class WeightsConfig:
    """The weights of a run."""

    best: bool = False
    """Use the best evaluation's weights, which --keep-best saved, instead of the last ones."""
    weights: Path | None = None
    """Use the weights of a PyTorch state_dict instead: a .safetensors file with the names of nnmpi
    export (default: the run's).
    """
    trust: bool = False
    """Execute your code, FILE.py:NAME, that the run names."""


@dataclass(frozen=True)
class TableForm:
    """The form of tables other than the run's."""

    header: Switch = "auto"
    """Whether the first line of a table names its columns. auto: as in the run's table."""
    decimal: Literal["auto", ".", ","] = "auto"
    """Decimal mark of a table. auto: that of the run's table."""

    def having(self, run: Run) -> dict[str, Any]:
        """Return the options of data, by name, that a table is read with."""
        data = run.config.data
        return {
            "header": data.header if self.header == "auto" else self.header == "on",
            "decimal": data.decimal if self.decimal == "auto" else self.decimal,
        }

    def check(self, path: Path) -> None:
        """Refuse the options for what is no table.

        Raises:
            UsageError: with the option.
        """
        for name in ("header", "decimal"):
            require(
                getattr(self, name) == "auto" or is_table(path) or path.is_dir(),
                f"{path} is no table; leave {flag_of(name)} out",
            )


@dataclass(frozen=True)
class OpeningConfig(SimulatedConfig, Degrees, WeightsConfig):
    """Weights and layout."""

    backend: Literal["auto", "numpy", "cupy"] = "auto"
    """Array library. auto: CuPy if a CUDA device is usable, else NumPy."""

    def __post_init__(self) -> None:
        SimulatedConfig.__post_init__(self)
        Degrees.__post_init__(self)

    def open(self, folder: Path, group: Group) -> Run:
        """Open the run, with its model distributed over the ranks. Collective.

        Raises:
            NnmpiError: on all ranks; see `open_run`.
        """
        backend = make_backend(self.backend, group)
        layout = Layout(self.dp, self.pp, self.tp, self.sp)
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
        lambda: {"ranks": sum(getattr(item, "simulate", None) or 0 for item in parse(words))},
    )


def read_with_train_options(
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
    found = dict[str, Any]()
    if given.get("pretrained"):  # its config.json says of which model it is
        folder = find_model(Path(given["pretrained"]))
        found = {"model": model_named(folder), **given, "pretrained": folder}
    config = Config().having(**defaults | given | found)
    return *(make_section(section, read) for section in sections), config, given
