"""Going through the sizes: time, print, write, one size after the other."""

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.collectives import plot, results
from benchmarks.collectives.field import Field
from benchmarks.collectives.gloo import start_gloo, stop_gloo
from benchmarks.collectives.names import GLOO
from benchmarks.collectives.options import Options
from benchmarks.collectives.prediction import Prediction
from benchmarks.collectives.ranks import MpiRanks
from benchmarks.collectives.rows import Row, build_rows, line, title
from benchmarks.collectives.timing import Interrupted, gather, nothing, take
from benchmarks.collectives.verify import Verifier
from nnmpi.backend.record import Backend
from nnmpi.comm.agree import agreed
from nnmpi.comm.group import Group
from nnmpi.train.progress import Console
from nnmpi.train.signals import Stop


class Measurement:
    """One run of the benchmark.

    Attributes:
        rows: what has been measured so far, the same on all ranks.
    """

    def __init__(
        self,
        options: Options,
        group: Group,
        backend: Backend,
        prediction: Prediction,
        facts: Mapping[str, Any],
        console: Console,
    ) -> None:
        """Do nothing yet."""
        self._options, self._group, self._backend = options, group, backend
        self._prediction, self._facts, self._console = prediction, facts, console
        self._ranks = MpiRanks(group)
        self.rows: list[Row] = []

    def run(self) -> None:
        """Measure all sizes; the file holds the rows so far after each. Collective.

        Raises:
            CommError: with --check, for a wrong result.
            SystemExit: on all ranks, after SIGINT or SIGTERM on any, when it is said where the rows are.
        """
        if GLOO in self._options.algorithms:
            start_gloo(self._group)
        try:
            with Stop(self._group) as stop:
                self._go_through(stop)
        except Interrupted as error:
            where = f" and in {self._options.json}" if self._options.json else ""
            self._console.say(f"interrupted; {len(self.rows)} rows were finished, which stand above{where}")
            sys.exit(128 + int(error.args[0]))
        if GLOO in self._options.algorithms:
            stop_gloo()

    def _go_through(self, stop: Stop) -> None:
        options, console = self._options, self._console
        console.say("", title())
        for number, nbytes in enumerate(options.sizes, start=1):
            rows = self._measure(nbytes, stop)
            self.rows += rows
            console.say(*map(line, rows))
            self._save(finished=number == len(options.sizes))
        if options.plot is not None and self._group.is_root:
            plot.draw(options.plot, self._facts, self.rows)
            console.say(f"drawn: {options.plot}")

    def _measure(self, nbytes: int, stop: Stop) -> list[Row]:
        """Return the rows of one size. Collective."""
        options = self._options
        field = Field(options, self._group, self._backend, self._prediction, nbytes)
        self._console.say(*field.missing)
        verify = Verifier(self._group, nbytes, options.dtype) if options.check else nothing
        own = take(field.entries, self._ranks, options.iterations, options.budget_s, verify, stop.asked)
        stamps = gather(own, self._ranks)
        field.free()
        names = [entry.name for entry in field.entries]
        predicted = {name: self._prediction.seconds(field.chosen.get(name, name), nbytes) for name in names}
        return build_rows(
            names,
            stamps,
            nbytes,
            options.operation,
            one_clock=self._facts["nodes"] == 1,
            predicted_s={name: seconds for name, seconds in predicted.items() if seconds is not None},
            chosen=field.chosen,
        )

    def _save(self, finished: bool) -> None:
        """Write the rows so far. Collective: a full disk is an error on all ranks."""
        with agreed(self._group):
            if self._options.json is not None and self._group.is_root:
                results.write(self._options.json, self._facts, self.rows, finished)
