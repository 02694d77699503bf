"""The cost model's numbers for the machine at hand: measured once, kept in a file, used to predict and to choose.

    mpirun -n 4 python -m nnmpi.comm fit        ->  ~/.cache/nnmpi/fit-HOST-open-mpi-5.0.11-4-ranks.json

A fit holds for the ranks, nodes and MPI that it was made with. What is made of messages is predicted by simulating its
steps on the fitted machine. What is not made of messages that could be looked at (MPI's own all-reduce, the one through
shared memory) was measured as it is, at several lengths.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from nnmpi.comm.algorithms.registry import NATIVE, SHARED, How, find_collective
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.machine import Curve, Machine
from nnmpi.comm.simulate import simulate_collective
from nnmpi.errors import NnmpiError, UsageError, counted
from nnmpi.files import cache_folder, write_atomically
from nnmpi.reading import check_ordinary, read_json

FORMAT = 1
LONGEST_S = 1e-3  # of a short message inside a node, and of a handshake: more is the scheduler's time, not theirs
LEAST_S_PER_BYTE = 1e-13
NEAR = 4  # lengths within this factor are on both sides of a handshake
OLD_DAYS = 180  # after which what was measured and kept counts no more: drivers, kernels and machines change
COMMAND = "mpirun -n {ranks} python -m nnmpi.comm fit"


@dataclass(frozen=True)
class Fit:
    """What messages, sums and whole all-reduces cost on a machine, for one number of ranks.

    Attributes:
        machine: links and adding.
        native: seconds of MPI's own all-reduce by bytes, as a blocking call.
        native_started: the same, started and then waited for, which is another code in MPI.
        shared: seconds of the all-reduce through shared memory; None where there is none.
        facts: "ranks", "nodes" (of each rank), "mpi", "host", "cpu", "cores", "date" and more.
    """

    machine: Machine
    native: Curve
    native_started: Curve
    shared: Curve | None
    facts: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        """The number of ranks that it holds for."""
        return int(self.facts["ranks"])

    def predict(self, algorithm: How, nbytes: int, started: bool = False, operation: str = ALL_REDUCE.name) -> float:
        """Return the seconds that a collective of float32 will take, by default an all-reduce.

        Args:
            algorithm: one of `registry.COLLECTIVES`; or "native" or "shared", of the operation that they were measured
                of: an all-reduce, in a fit of `comm.fitting`.
            nbytes: of the whole array.
            started: whether it is started and polled, under computation, and not a blocking call.
            operation: such as "broadcast".

        Raises:
            UsageError: for an unknown algorithm, or "shared" where there was no shared memory.
        """
        if algorithm == NATIVE:
            return self.native_started(nbytes) if started else self.native(nbytes)
        if algorithm == SHARED:
            if self.shared is None:
                raise UsageError("this fit was made without shared memory and cannot predict the shared all-reduce")
            return self.shared(nbytes)
        collective = find_collective(operation, algorithm, self.machine.nodes)
        return simulate_collective(collective, self.ranks, nbytes, self.machine).seconds

    def fits(self, ranks: int, nodes: list[int], mpi: str) -> bool:
        """Return whether it was made for so many ranks, on these nodes (one number per rank), with this MPI library."""
        return (self.ranks, list(self.facts["nodes"]), self.facts["mpi"]) == (ranks, nodes, mpi)

    def check(self, ranks: int, nodes: list[int], mpi: str, source: str = "the fit") -> None:
        """Raise unless it was made for these ranks, on these nodes, with this MPI.

        Args:
            ranks: how many.
            nodes: the node of each.
            mpi: the library's name and version.
            source: what the error calls the fit.

        Raises:
            UsageError: says what differs and how a right one is made.
        """
        if not self.fits(ranks, nodes, mpi):
            made = _describe(self.ranks, list(self.facts["nodes"]), self.facts["mpi"])
            raise UsageError(
                f"{source} was made with {made}, but this run has {_describe(ranks, nodes, mpi)}; "
                f"make one for it: {COMMAND.format(ranks=ranks)}"
            )

    def doubt(self) -> str:
        """Return what cannot be true of a machine, but of one that was busy with other work; empty if there is nothing.

        A short message inside a node takes microseconds, a handshake a few times as long, and no memory moves bytes
        in no time.
        """
        link = self.machine.inside
        for words, curve in (("one way", link.one_way), ("both ways", link.both_ways)):
            (first, short_s), (last, long_s) = curve.points[0], curve.points[-1]
            each_s = (long_s - short_s) / (last - first) if last > first else inf
            if each_s < LEAST_S_PER_BYTE:
                return f"messages {words} of {first:.0f} and of {last:.0f} bytes take the same {long_s:.2g} s"
            if short_s > LONGEST_S:
                return f"a message {words} of {first:.0f} bytes takes {short_s:.2g} s inside a node"
            for (less, before_s), (more, after_s) in pairwise(curve.points):
                step_s = after_s - before_s - NEAR * each_s * (more - less)
                if step_s > LONGEST_S and more <= NEAR * less:
                    return f"from {less:.0f} to {more:.0f} bytes a message {words} takes {step_s:.2g} s more"
        return ""

    @property
    def age_days(self) -> float:
        """How old it is."""
        try:
            made = datetime.fromisoformat(self.facts["date"])
        except ValueError:
            return inf
        return (datetime.now(UTC) - made.replace(tzinfo=UTC)).total_seconds() / 86400

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "format": FORMAT,
            "facts": dict(self.facts),
            "machine": self.machine.to_json(),
            "native": self.native.to_json(),
            "native_started": self.native_started.to_json(),
            "shared": None if self.shared is None else self.shared.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Fit":
        """Return the fit that `to_json` gave the values of.

        Raises:
            KeyError, TypeError, ValueError: for values that are none.
        """
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']}, not {FORMAT}")
        facts = {**value["facts"], "ranks": int(value["facts"]["ranks"]), "nodes": list(value["facts"]["nodes"])}
        _check_facts(facts)
        shared = value["shared"]
        return cls(
            machine=Machine.from_json(value["machine"]),
            native=Curve.from_json(value["native"]),
            native_started=Curve.from_json(value["native_started"]),
            shared=None if shared is None else Curve.from_json(shared),
            facts=facts,
        )


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raise a ValueError for facts that cannot be those of a fit."""
    if facts["ranks"] < 1 or len(facts["nodes"]) != facts["ranks"]:
        raise ValueError(f"it is of {facts['ranks']} ranks on the nodes {facts['nodes']}")
    for name in ("mpi", "host", "date"):
        if not isinstance(facts.get(name), str):
            raise ValueError(f"it does not say its {name}")


def load_fit(file: Path) -> Fit:
    """Return the fit in a file.

    Raises:
        UsageError: when there is none, or what is there is no fit.
    """
    try:
        return Fit.from_json(read_json(file))
    except OSError as error:
        raise UsageError(
            f"the fit {file} cannot be read ({error.strerror or error}); make one: {COMMAND.format(ranks='RANKS')}"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, NnmpiError) as error:
        raise UsageError(
            f"{file} is no fit ({type(error).__name__}: {error}); make one: {COMMAND.format(ranks='RANKS')}"
        ) from None


def check_place(file: Path) -> None:
    """Make sure that a fit can be written there; folders are made, nothing else stays.

    Raises:
        OSError: when it cannot.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    check_ordinary(file)
    with tempfile.NamedTemporaryFile(dir=file.parent):
        pass


def save_fit(fit: Fit, file: Path) -> None:
    """Write a fit, whole or not at all; folders are made.

    Raises:
        OSError: when it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(fit.to_json(), indent=1).encode() + b"\n")


def default_file(facts: Mapping[str, Any]) -> Path:
    """Return where a fit with these facts is kept for reuse.

    Raises:
        UsageError: as `cache_folder`.
    """
    nodes = len(set(facts["nodes"]))
    words = f"fit-{facts['host']}-{facts['mpi']}-{facts['ranks']}-ranks" + (f"-{nodes}-nodes" if nodes > 1 else "")
    return cache_folder() / (re.sub(r"[^a-z0-9.]+", "-", words.lower()) + ".json")


def _describe(ranks: int, nodes: list[int], mpi: str) -> str:
    """Return ranks, nodes and MPI in words."""
    count = len(set(nodes))
    return f"{ranks} ranks on {counted(count, 'node')} under {mpi}"
