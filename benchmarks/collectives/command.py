"""The command: from the words on the command line to rows, on every rank."""

import os
from collections.abc import Sequence

from benchmarks.collectives import gloo, plot, results
from benchmarks.collectives.header import collect, lines
from benchmarks.collectives.measure import Measurement
from benchmarks.collectives.names import GLOO
from benchmarks.collectives.options import Options, parse
from benchmarks.collectives.prediction import Prediction
from nnmpi.backend.record import Backend
from nnmpi.backend.select import select
from nnmpi.comm.agree import agreed
from nnmpi.comm.group import Group
from nnmpi.command import HelpAsked
from nnmpi.launcher import read_launch
from nnmpi.train.progress import Console
from nnmpi.train.root import on_root


def main(words: Sequence[str], group: Group, backend: Backend | None = None) -> None:
    """Measure as the words say, or print the help. Collective.

    Args:
        words: the same on all ranks.
        backend: used instead of the one that the words name.

    Raises:
        UsageError: on all ranks, for wrong options, files that cannot be written, or a fit that does not belong here.
        DeviceError: on all ranks, when there is no device for --backend cupy.
        CommError: on all ranks, with --check, for a wrong result.
    """
    console = Console(quiet=not group.is_root)
    try:
        options = parse(words)
    except HelpAsked as asked:
        console.say(str(asked))
        return
    on_root(group, lambda: _check_files(options))
    if backend is None:
        with agreed(group):
            backend = select(options.backend, _local_rank())
    if GLOO in options.algorithms:
        with agreed(group):
            gloo.check_gloo(len(set(group.nodes())))
    prediction = Prediction.find(options, group, console)
    facts = collect(options, group, backend, prediction.name)
    console.say(*lines(facts, options, prediction.place))
    Measurement(options, group, backend, prediction, facts, console).run()


def _check_files(options: Options) -> None:
    """Find out before anything is measured whether the results can be written."""
    if options.json is not None:
        results.check_writable("--json", options.json)
    if options.plot is not None:
        plot.check_can_draw()
        results.check_writable("--plot", options.plot)


def _local_rank() -> int:
    """Return this rank's number on its node, which decides its device."""
    launch = read_launch(os.environ)
    return 0 if launch is None or launch.local_rank is None else launch.local_rank
