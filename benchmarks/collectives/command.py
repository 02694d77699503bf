"""The command: from the words on the command line to rows, on every rank, size by size."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from benchmarks.collectives import gloo
from benchmarks.collectives.contestants import CollectiveCall, Field
from benchmarks.collectives.options import GLOO, parse
from benchmarks.collectives.prediction import Prediction
from benchmarks.collectives.rows import TABLE, CallTimes, build_rows, content, draw
from benchmarks.collectives.timing import Interrupted, MpiRanks, gather, nothing, take
from benchmarks.harness import plots, results
from benchmarks.harness.launch import describe
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import labelled
from nnmpi.backend.backend import Backend
from nnmpi.backend.device import select
from nnmpi.comm.agreement import PeriodicCheck, agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.command import HelpAsked
from nnmpi.errors import CommError, counted
from nnmpi.launcher import read_launch
from nnmpi.train.log import Console
from nnmpi.train.loop import StopSignals
from nnmpi.units import format_bytes

# The settings that decide how many threads a rank has, and how MPI sends. (Open MPI's launcher sets many more itself.)
SETTINGS = ("OMP_", "OPENBLAS_", "MKL_", "MPIR_CVAR_", "UCX_", "FI_") + tuple(
    f"OMPI_MCA_{part}" for part in ("btl", "mtl", "pml", "osc", "coll", "mpi_")
)


def main(words: Sequence[str], group: Group, backend: Backend | None = None) -> None:
    """Measure as the words say, or print the help. Collective.

    Args:
        words: the same on all ranks.
        group: all ranks.
        backend: used instead of the one that the words name.

    Raises:
        UsageError: on all ranks, for wrong options, files that cannot be written, or a fit that does not belong here.
        DeviceError: on all ranks, when there is no device for --backend cupy.
        CommError: on all ranks, with --check, for a wrong result.
        SystemExit: on all ranks, after SIGINT or SIGTERM on any, once the place of the rows is printed.
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
    header = _header(options, group, backend, prediction.name)
    console.say(_header_lines(header, options, prediction.place))
    SizeSweep(options, group, backend, prediction, header, console).run()


def _check_files(options: argparse.Namespace) -> None:
    """Find out before anything is measured whether the results can be written."""
    results.check_writable("--json", options.json)
    if options.plot is not None:
        plots.check_can_draw("--plot")
        results.check_writable("--plot", options.plot)


def _local_rank() -> int:
    """Return this rank's number on its node, which decides its device."""
    launch = read_launch(os.environ)
    return 0 if launch is None or launch.local_rank is None else launch.local_rank


class SizeSweep:
    """Goes through the sizes: time, print, write, one size after the other.

    Args:
        options: what is measured.
        group: all ranks.
        backend: where the buffers lie.
        prediction: what the model says.
        header: what ran, on what, for the files.
        console: speaks on rank 0.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        group: Group,
        backend: Backend,
        prediction: Prediction,
        header: Mapping[str, Any],
        console: Console,
    ) -> None:
        self._options, self._group, self._backend = options, group, backend
        self._prediction, self._header, self._console = prediction, header, console
        self._ranks, self._check = MpiRanks(group), PeriodicCheck(group)
        self._rows: list[CallTimes] = []  # the same on all ranks

    def run(self) -> None:
        """Measure all sizes; the file holds the rows so far after each. Collective.

        Raises:
            CommError: with --check, for a wrong result.
            SystemExit: after a signal.
        """
        with_gloo = GLOO in self._options.algorithms
        if with_gloo:
            gloo.start_gloo(self._group)
        try:
            with StopSignals() as stop:
                self._go_through(stop)
        except Interrupted as error:
            where = f" and in {self._options.json}" if self._options.json else ""
            self._console.say(f"interrupted; {len(self._rows)} rows were finished, which stand above{where}")
            sys.exit(128 + int(error.args[0]))
        if with_gloo:
            gloo.stop_gloo()

    def _go_through(self, stop: StopSignals) -> None:
        options, console = self._options, self._console
        console.say("", TABLE.head())
        for number, nbytes in enumerate(options.sizes, start=1):
            rows = self._measure(nbytes, stop)
            self._rows += rows
            console.say(*map(TABLE.line, rows))
            with agreed(self._group):  # a full disk is an error on all ranks
                if self._group.is_root:
                    results.write(options.json, content(self._header, self._rows, number == len(options.sizes)))
        if options.plot is not None and self._group.is_root:
            draw(options.plot, self._header, self._rows)
            console.say(f"drawn: {options.plot}")

    def _ask(self, stop: StopSignals, round_s: float) -> int:
        """Return the signal that any rank got, 0 for none; collective."""
        return max(map(int, self._check.gather(stop.noted(), round_s) or [0]))

    def _measure(self, nbytes: int, stop: StopSignals) -> list[CallTimes]:
        """Return the rows of one size. Collective."""
        options = self._options
        field = Field(options, self._group, self._backend, self._prediction.fit, nbytes)
        self._console.say(*field.missing)
        verify = Verifier(self._group, nbytes, options.dtype) if options.check else nothing
        own = take(field.calls, self._ranks, options.iterations, options.budget_s, verify, partial(self._ask, stop))
        stamps = gather(own, self._ranks)
        field.free()
        names = [call.name for call in field.calls]
        predicted = {name: self._prediction.seconds(field.chosen.get(name, name), nbytes) for name in names}
        return build_rows(
            names,
            stamps,
            nbytes,
            options.operation,
            one_clock=self._header["nodes"] == 1,
            predicted_s={name: seconds for name, seconds in predicted.items() if seconds is not None},
            chosen=field.chosen,
        )


class Verifier:
    """Compares what each call leaves in the buffers with what it must be. Collective, like the calls.

    Args:
        group: all ranks.
        nbytes: the length of the buffer, for the error.
        dtype: of its elements.
    """

    def __init__(self, group: Group, nbytes: int, dtype: str) -> None:
        self._group, self._ranks = group, MpiRanks(group)
        self._buffer = f"{format_bytes(nbytes)} of {dtype}"

    def __call__(self, contestant: CollectiveCall, number: int) -> None:
        """Return if all ranks have the right result of a call.

        Raises:
            CommError: on all ranks, with the first rank that has not, the algorithm, the size and the first element.
        """
        wrong = contestant.first_wrong(number)
        # one number of each rank, many times a second; words only when there is something to say
        if not self._ranks.gather_floats(np.array([wrong is not None], np.float64)).any():
            return
        everyones = self._group.gather(None if wrong is None else asdict(wrong))
        rank, first = next((rank, each) for rank, each in enumerate(everyones) if each is not None)
        raise CommError(
            f"rank {rank} of {self._group.size} has a wrong result of {contestant.name} with {self._buffer}, call "
            f"{number}: element {first['index']} is {first['found']:.9g} and must be {first['expected']:.9g}"
        )


def _header(options: argparse.Namespace, group: Group, backend: Backend, fit: str) -> dict[str, Any]:
    """Return what ran, on what, by name, as JSON values; `fit` is the model in words. Collective."""
    found = describe(group)
    return {
        "operation": options.operation,
        "algorithms": list(options.algorithms),
        "dtype": options.dtype,
        "backend": f"{backend.name} on {backend.device}",
        "checked": options.check,
        "ranks": group.size,
        "nodes": found.nodes,
        "affinity": group.gather(_affinity()),
        "mpi": found.mpi,
        "blas": f"{found.blas}, {counted(found.threads, 'thread')} per rank",
        "pins": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
        "warnings": list(found.warnings),
        "machine": machine_facts(),
        "fit": fit,
    }


def _header_lines(header: Mapping[str, Any], options: argparse.Namespace, fit_place: str) -> str:
    """Return the same in words, with the place of the fit, which is no part of a result."""
    machine, nodes = header["machine"], header["nodes"]
    settings = ", ".join(f"{name}={value}" for name, value in header["pins"].items())
    how = f"{options.iterations} rounds" if options.iterations else f"{options.budget_s:g} s"
    sizes = f"{format_bytes(options.sizes[0])} to {format_bytes(options.sizes[-1])}"
    verified = "verified" if options.check else "not verified (--check)"
    named = [
        ("collective", f"{options.operation} of {options.dtype}, {header['backend']}"),
        ("sizes", f"{sizes}, {how} each; results {verified}"),
        ("ranks", f"{header['ranks']} on {counted(nodes, 'node')}, {header['mpi']}"),
        ("processor", f"{machine['cpu']}; cores {_cores(header['affinity'])}"),
        ("threads", header["blas"]),
        ("settings", settings or "none"),
        ("fit", header["fit"] + fit_place),
        *(("warning", text) for text in header["warnings"]),
    ]
    return labelled(named)


def _affinity() -> list[int]:
    """Return the numbers of the cores that this rank may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _cores(affinity: list[list[int]]) -> str:
    """Return the cores of all ranks in words."""
    if not affinity[0]:
        return "unknown"
    if all(each == affinity[0] for each in affinity):
        return f"{_numbers(affinity[0])} ({len(affinity[0])}) for every rank, not bound"
    return "; ".join(f"{_numbers(cores)} for rank {rank}" for rank, cores in enumerate(affinity))


def _numbers(cores: list[int]) -> str:
    """Return numbers in words, neighbours joined: "0-3, 8"."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and spans[-1][-1] == core - 1:
            spans[-1] = [spans[-1][0], core]
        else:
            spans.append([core, core])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
