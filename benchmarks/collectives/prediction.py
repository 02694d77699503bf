"""The times that the cost model predicts for the rows, from a fit that was made before, or now, or from none."""

import argparse
from pathlib import Path

from benchmarks.collectives.options import ALL_REDUCE
from benchmarks.harness import results
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.algorithms.registry import COLLECTIVES, NATIVE, SHARED
from nnmpi.comm.fitting.fit import Fit, default_file, load_fit, save_fit
from nnmpi.comm.fitting.measure import facts, measure
from nnmpi.comm.group import Group
from nnmpi.errors import UsageError
from nnmpi.train.log import Console

NO_FIT = "no fit"


class Prediction:
    """Predicts times from a fitted model, or nothing without one.

    Args:
        operation: the collective.
        fit: the model; None for one that predicts nothing.
        place: its file in words.

    Attributes:
        fit: the model.
        name: the fit in words.
        place: its file in words, for the screen: paths of one machine are no part of a result.
    """

    def __init__(self, operation: str, fit: Fit | None = None, place: str = "") -> None:
        self.fit, self._operation = fit, operation
        self.name = NO_FIT
        self.place = place
        if fit is not None:
            self.name = f"of {fit.facts['date']}, {fit.ranks} ranks under {fit.facts['mpi']}"

    @classmethod
    def find(cls, options: argparse.Namespace, group: Group, console: Console) -> "Prediction":
        """Return the predictions of the fit that the options ask for. Collective.

        Without --fit it is the one that was kept for this machine, these ranks and this MPI, if there is one.

        Args:
            options: of the command line.
            group: all ranks.
            console: speaks on rank 0.

        Raises:
            UsageError: on all ranks, for a file that is no fit or was made with other ranks or another MPI, and for
                --refit with a single rank.
        """
        here = facts(group)
        usual = on_root(group, lambda: str(default_file(here)))
        file = options.fit or (Path(usual) if usual else None)
        if options.refit:
            return cls(options.operation, _make(file, group, console), f" ({file})" if file else "")
        if file is None or not (options.fit or on_root(group, file.exists)):
            return cls(options.operation)
        try:
            fit = Fit.from_json(on_root(group, lambda: load_fit(file).to_json()))
            fit.check(group.size, group.nodes(), here["mpi"], str(file))
        except UsageError as error:
            if options.fit:
                raise
            console.say(f"the kept fit is not used: {error}")
            return cls(options.operation)
        return cls(options.operation, fit, f" ({file})")

    def seconds(self, algorithm: str, nbytes: int) -> float | None:
        """Return the time of one call, None where the model says nothing."""
        if self.fit is None or (self._operation, algorithm) not in COLLECTIVES and algorithm not in (NATIVE, SHARED):
            return None
        if algorithm == SHARED and self.fit.shared is None or algorithm == NATIVE and self._operation != ALL_REDUCE:
            return None
        return self.fit.predict(algorithm, nbytes, operation=self._operation)


def _make(file: Path | None, group: Group, console: Console) -> Fit:
    """Return a fit that is made now, after keeping it in the file. Collective."""
    console.say(f"fitting the model, about half a minute; it will be kept in {file}")
    on_root(group, lambda: _check(file))
    fit = measure(group, lambda text: console.say(f"  {text}"))
    with agreed(group):
        if group.is_root and file is not None:
            save_fit(fit, file)
    return fit


def _check(file: Path | None) -> None:
    """Find out before the measuring whether the fit can be kept; missing folders are made then."""
    if file is not None and file.parent.is_dir():
        results.check_writable("--fit", file)
