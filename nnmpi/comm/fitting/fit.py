"""The cost model's numbers for the machine at hand: measured once, kept in a file, used to predict and to choose.

    mpirun -n 4 python -m nnmpi.comm fit        ->  ~/.cache/nnmpi/fit-HOST-open-mpi-5.0.11-4-ranks.json

A fit holds for the ranks, nodes and MPI that it was made with. What is made of messages is predicted by simulating its
steps on the fitted machine. What is not made of messages that could be looked at (MPI's own all-reduce, the one through
shared memory) was measured as it is, at several lengths.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE, SHARED, How, find_collective
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.machine import Curve, Machine
from nnmpi.comm.simulate import price
from nnmpi.errors import NnmpiError, UsageError, counted
from nnmpi.files import cache_folder, write_atomically
from nnmpi.reading import read_json
from nnmpi.units import format_bytes, format_seconds

FORMAT = 1
COMMAND = "mpirun -n {ranks} python -m nnmpi.comm fit"


@dataclass(frozen=True)
class Fit:
    """What messages, sums and whole all-reduces cost on a machine, for one number of ranks.

    Attributes:
        machine: links and adding.
        native: seconds of MPI's own all-reduce by bytes, as a blocking call.
        native_started: the same, started and then waited for, which is another code in MPI.
        shared: seconds of the all-reduce through shared memory; None where there is none.
        facts: "ranks", "nodes" (of each rank), "mpi", "host", "date".
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
        return price(collective, self.ranks, nbytes, self.machine)

    def fits(self, ranks: int, nodes: list[int], mpi: str) -> bool:
        """Return whether it was made for so many ranks, on these nodes (one number per rank), with this MPI library."""
        return (self.ranks, list(self.facts["nodes"]), self.facts["mpi"]) == (ranks, nodes, mpi)

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
        if facts["ranks"] < 1 or len(facts["nodes"]) != facts["ranks"]:
            raise ValueError(f"it is of {facts['ranks']} ranks on the nodes {facts['nodes']}")
        shared = value["shared"]
        return cls(
            machine=Machine.from_json(value["machine"]),
            native=Curve.from_json(value["native"]),
            native_started=Curve.from_json(value["native_started"]),
            shared=None if shared is None else Curve.from_json(shared),
            facts=facts,
        )


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


# ---- a fit in words ----

EXAMPLES = (4, 1024, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
LONG_BYTES = 2**20


def describe_fit(fit: Fit, sizes: Sequence[int] = EXAMPLES) -> Iterator[str]:
    """Yield lines: latency and bandwidth of each link, and what each all-reduce is predicted to take."""
    machine = fit.machine
    yield _describe(fit.ranks, list(fit.facts["nodes"]), fit.facts["mpi"])
    for name, link in (("inside a node", machine.inside), ("between nodes", machine.across)):
        for way, curve in () if link is None else (("one way", link.one_way), ("both ways", link.both_ways)):
            alpha_s, beta_s = curve.alpha_s, curve.beta(LONG_BYTES)
            yield f"messages {name}, {way}: latency {format_seconds(alpha_s)}, {1e9 * beta_s:.3f} ns/B at 1 MiB"
    yield f"adding: {1e9 * machine.add(LONG_BYTES) / LONG_BYTES:.3f} ns/B at 1 MiB"
    yield ""
    yield f"{'predicted':17}" + "".join(f"{format_bytes(nbytes):>11}" for nbytes in sizes)
    for how in (NATIVE, *([SHARED] if fit.shared is not None else []), *ALGORITHMS):
        seconds = [format_seconds(fit.predict(how, nbytes), digits=3) for nbytes in sizes]
        yield f"{how:17}" + "".join(f"{each:>11}" for each in seconds)
