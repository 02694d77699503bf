"""The fitted cost model of this machine: measured once, saved, used to predict and choose.

    mpirun -n 4 nnmpi comm fit    ->  ~/.cache/nnmpi/fit-HOST-open-mpi-5.0.11-4-ranks.json

A fit holds for the number of ranks, the nodes and the MPI of its measurement. Collectives of steps
are predicted by simulating their steps on the fitted machine, so a new algorithm needs no new
measurement. MPI's native all-reduce and the one through shared memory have no visible steps: their
seconds are measured at several lengths.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nnmpi.base.errors import UsageError, counted
from nnmpi.base.files import cache_folder, foreign, read_json, rebuilt, write_json
from nnmpi.base.launcher import start_words
from nnmpi.base.units import format_bytes, format_seconds, parse_settings
from nnmpi.comm.algorithms.registry import (
    ALGORITHMS,
    NATIVE,
    SHARED,
    AlgorithmLike,
    find_collective,
    has_levels,
)
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.duration import price
from nnmpi.comm.machine import Curve, Link, Machine, blocks

FORMAT = 2
_FACTS = {"ranks": int, "nodes": tuple[int, ...], "mpi": str, "host": str, "date": str}
MAKE_ONE = "make one: mpirun -n RANKS nnmpi comm fit"


@dataclass(frozen=True)
class Fit:
    """Measured costs of messages, additions and complete all-reduces, for one number of ranks.

    Attributes:
        machine: links and adding.
        native: seconds of MPI's blocking all-reduce by bytes.
        native_started: seconds of the non-blocking one; MPI has other code for it.
        shared: seconds of the all-reduce through shared memory; None without shared memory.
        facts: "ranks", "nodes" (of each rank), "mpi", "host", "date"; "took": the least and the
            largest part of their predictions that all-reduces of steps took, if it was measured.
    """

    machine: Machine
    native: Curve
    native_started: Curve
    shared: Curve | None
    facts: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        """The number of ranks of the measurement."""
        return int(self.facts["ranks"])

    def describe_error(self) -> str:
        """Return how near the predictions are, or how to find out."""
        low, high = self.facts.get("took", (0, 0))
        if not high:
            return "how near is not known: nnmpi comm fit measures it"
        return f"all-reduces of steps took {low:.2f} to {high:.2f} of their predictions"

    def predict(
        self,
        algorithm: AlgorithmLike,
        nbytes: int,
        started: bool = False,
        operation: str = ALL_REDUCE.name,
    ) -> float:
        """Return the seconds of a collective of float32, by default an all-reduce.

        Args:
            algorithm: one of `registry.COLLECTIVES`; or "native" or "shared", which give the
                measured operation: an all-reduce, in a measured fit.
            nbytes: of the complete array.
            started: whether it is started and polled during computation, instead of blocking.
            operation: such as "broadcast".

        Raises:
            UsageError: for an unknown algorithm, or "shared" in a fit without shared memory.
        """
        if algorithm == NATIVE:
            return self.native_started(nbytes) if started else self.native(nbytes)
        if algorithm == SHARED:
            if self.shared is None:
                raise UsageError(
                    "this fit was made without shared memory and cannot predict the shared"
                    " all-reduce"
                )
            return self.shared(nbytes)
        collective = find_collective(operation, algorithm, self.machine.nodes_of(self.ranks))
        return price(collective, self.ranks, nbytes, self.machine)

    def to_json(self) -> dict[str, Any]:
        """Return all attributes as JSON values, except that lists are tuples."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Fit":
        """Return the fit of `to_json`'s values.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: for other values.
        """
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']}, not {FORMAT}")
        try:
            fit = rebuilt(cls, {name: item for name, item in value.items() if name != "format"})
        except UsageError as error:  # of a curve
            raise ValueError(str(error)) from None
        facts = {name: rebuilt(kind, fit.facts[name]) for name, kind in _FACTS.items()}
        if fit.ranks < 1 or len(facts["nodes"]) != fit.ranks:
            raise ValueError(f"it is of {fit.ranks} ranks on the nodes {facts['nodes']}")
        if "took" in fit.facts:
            rebuilt(tuple[float, float], fit.facts["took"])
        return fit


def load_fit(file: Path) -> Fit:
    """Return the fit in a file.

    Raises:
        UsageError: for a missing file, or one that holds no fit.
    """
    with foreign(file, UsageError, f"not a readable fit; {MAKE_ONE}"):
        return Fit.from_json(read_json(file))


def save_fit(fit: Fit, file: Path) -> None:
    """Write a fit atomically; folders are made.

    Raises:
        OSError: when it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, fit.to_json())


def default_file(facts: Mapping[str, Any], name: str = "fit") -> Path:
    """Return the cache file of a fit with these facts.

    Raises:
        UsageError: see `cache_folder`.
    """
    nodes = len(set(facts["nodes"]))
    text = f"{name}-{facts['host']}-{facts['mpi']}-{facts['ranks']}-ranks" + (
        f"-{nodes}-nodes" if nodes > 1 else ""
    )
    return cache_folder() / (re.sub(r"[^a-z0-9.]+", "-", text.lower()) + ".json")


# ---- a network as text: the values of --network, in all commands ----

NETWORK = "alpha_us=10,gbit=10"  # the default of commands that need a cost of messages
NETWORK_HELP = """numbers, such as alpha_us=50,gbit=10 or alpha=5e-5,beta=8e-10,gamma=1e-10
(seconds; gamma per byte added), and per_node=8,inside_gbit=80 for nodes of several ranks; fit: as
measured here; or the file of a fit"""


def find_network_fit(text: str, ranks: int | None) -> Fit | None:
    """Return the fit of a --network value, a file or "fit" for this number of ranks, or None.

    Raises:
        UsageError: for a file that is no fit.
    """
    if text == "fit":
        files = sorted(
            cache_folder().glob(f"fit-*-{ranks or '*'}-ranks*.json"),
            key=lambda file: file.stat().st_mtime,
        )
        return load_fit(files[-1]) if files else None
    return load_fit(Path(text)) if text.endswith(".json") or Path(text).is_file() else None


def missing_fit(ranks: int, nodes: int = 1) -> UsageError:
    """Return the error for a missing fit, with the ways to get one."""
    return UsageError(
        f"there is no fit of {counted(ranks, 'rank')} on {counted(nodes, 'node')}; make one with"
        f" {start_words(ranks)} nnmpi comm fit, or give the cost of messages, such as {NETWORK}"
    )


def parse_network(text: str, ranks: int, per_node: int = 1) -> Machine:
    """Return the machine of a --network value; see `NETWORK_HELP`. Omitted parts cost nothing.

        alpha_us=50,gbit=10                      links between nodes, and by default inside one
        alpha=5e-5,beta=8e-10,gamma=1e-10        the same in seconds: per message, per byte sent,
                                                 per byte added
        gbit=10,per_node=8,inside_gbit=80        nodes of 8 ranks each, which share the node's link
        fit, nodes.json                          as measured by `nnmpi comm fit`

    Args:
        text: the value.
        ranks: number of ranks.
        per_node: ranks on a node, unless the text gives `per_node`.

    Raises:
        UsageError: for other text, which explains the syntax, or for a missing fit.
    """
    fit = find_network_fit(text, ranks)
    if fit is not None and fit.ranks == ranks:
        return fit.machine
    if fit is not None or text == "fit":
        raise missing_fit(ranks)
    values = parse_settings(text)
    wrong = not re.search("alpha|beta|gbit", " ".join(values)) or not all(
        0 <= x < math.inf for x in values.values()
    )
    if not wrong and 0 not in (values.get(name) for name in ("gbit", "inside_gbit", "per_node")):
        count, gamma_s = values.pop("per_node", per_node), values.pop("gamma", 0.0)
        across = _take_link(values, "")
        inside = (
            _take_link(values, "inside_")
            if any(name.startswith("inside_") for name in values)
            else across
        )
        if not values and count % 1 == 0:  # a value left over has an unknown name
            machine = Machine(inside, add=Curve.line(0.0, gamma_s))
            return (
                machine
                if count >= ranks
                else replace(machine, across=across, nodes=blocks(ranks, int(count)))
            )
    raise UsageError(f"network {text!r} is not understood; give {' '.join(NETWORK_HELP.split())}")


def describe_network(text: str) -> str:
    """Return a network's text, with a note when it has no latency."""
    return f"{text} (no latency)" if "=" in text and "alpha" not in text else text


def _take_link(values: dict[str, float], prefix: str) -> Link:
    """Remove a link's numbers from `values` and return the link.

    A number given in both units, such as alpha and alpha_us, stays behind; the caller refuses it.
    """
    alpha, beta = prefix + "alpha", prefix + "beta"
    alpha_s = values.pop(alpha) if alpha in values else values.pop(f"{alpha}_us", 0.0) / 1e6
    beta_s = (
        values.pop(beta) if beta in values else 8 / (1e9 * values.pop(f"{prefix}gbit", math.inf))
    )
    return Link.line(alpha_s, beta_s)


# ---- a fit as text ----

EXAMPLES = (4, 1024, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
LONG_BYTES = 2**20


def describe_fit(fit: Fit) -> Iterator[str]:
    """Yield lines with the latency and bandwidth of links, and predicted all-reduce times."""
    machine = fit.machine
    yield (
        f"{fit.ranks} ranks on {counted(len(set(fit.facts['nodes'])), 'node')} under"
        f" {fit.facts['mpi']}"
    )
    for name, link in (("inside a node", machine.inside), ("between nodes", machine.across)):
        for direction, curve in (
            () if link is None else (("one way", link.one_way), ("both ways", link.both_ways))
        ):
            alpha_s, beta_s = curve.alpha_s, curve.beta(LONG_BYTES)
            yield (
                f"messages {name}, {direction}: latency {format_seconds(alpha_s)},"
                f" {1e9 * beta_s:.3f} ns/B at 1 MiB"
            )
    yield f"adding: {1e9 * machine.add(LONG_BYTES) / LONG_BYTES:.3f} ns/B at 1 MiB"
    yield fit.describe_error()
    yield ""
    yield f"{'predicted':17}" + "".join(f"{format_bytes(nbytes):>11}" for nbytes in EXAMPLES)
    for algorithm in (NATIVE, *([SHARED] if fit.shared is not None else []), *ALGORITHMS):
        seconds = [format_seconds(fit.predict(algorithm, nbytes), digits=3) for nbytes in EXAMPLES]
        yield f"{algorithm:17}" + "".join(f"{item:>11}" for item in seconds)


# The all-reduce of "auto": the one with the least predicted time, or a rule without a fit.
#
# Every rank must choose the same, so nothing is measured here. A resumed run must choose as before,
# because another algorithm adds in another order and changes the last bits: checkpoints hold the
# choices.
#
#     bytes of a bucket --> predicted seconds of each candidate --> the least, and the runners-up

# Without a fit. A ring moves the fewest bytes but takes 2(N-1) steps, so the criterion is the
# length of a step's message, one N-th of the array. Measured speed of the ring relative to the
# blocking native call (and to the non-blocking one, which runs under a backward pass); one node,
# 2 cores of an AMD Zen 5, Open MPI 5.0.11 | MPICH 5.0.2, float32, buffers refilled, calls
# interleaved:
#
#     array       2 ranks                        4 ranks, two to a core
#     256 KB      1.3 | 1.0   (1.4 | 1.0)        0.7 | 0.5   (1.1 | 0.4)
#     1 MB        1.2 | 1.1   (1.5 | 1.1)        0.7 | 0.8   (1.0 | 0.8)
#     2 MB        1.1 | 1.0   (2.0 | 1.0)        0.8 | 1.2   (1.0 | 1.0)
#     4 MB        1.2 | 1.2   (1.8 | 1.0)        0.8 | 1.1   (1.0 | 1.0)
#     16 MB       0.9 | 1.0   (2.1 | 1.0)        1.0 | 1.2   (1.3 | 1.2)
#     64 MB       3.3 | 3.0   (7.8 | 3.1)        2.4 | 2.3   (3.5 | 2.4)
#
# From messages of 512 KB on (arrays of 1 MB with 2 ranks, 2 MB with 4) the ring is at least level,
# except in one column, in which ranks share cores and wait for their turn at each step. On links of
# 100 Mbit/s Open MPI's native all-reduce took twice as long.
RING_CHUNK_BYTES = 2**19
SHARED_BYTES = 2**12  # shared memory overtakes the native all-reduce at 1 to 4 KB

DIGITS = 3  # of the predictions in a reason

MOST_RANKS = 1024  # above it, simulating all candidates would take longer than it can save


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen algorithm, the reason as text, and its predicted seconds (NaN without a fit)."""

    algorithm: str
    reason: str
    predicted_s: float = math.nan


def choose(
    nbytes: int, size: int, fit: Fit | None = None, shared: bool = False, started: bool = False
) -> Choice:
    """Return the algorithm for summing nbytes over size ranks; deterministic.

    Args:
        fit: of this machine with these ranks.
        shared: whether the array lies in a node's shared memory.
        started: whether it will be started and polled during computation, instead of blocking.
    """
    if size == 1:
        return Choice(NATIVE, "one rank has nothing to add", 0.0)
    if fit is None or size > MOST_RANKS:
        return _by_rule(nbytes, size, shared)
    seconds = {name: fit.predict(name, nbytes, started) for name in _candidates(fit, shared)}
    order = sorted(seconds, key=lambda name: seconds[name])[:3]
    text = {name: format_seconds(seconds[name], DIGITS) for name in order}
    best, *others = order
    against = ", ".join(f"{name} {text[name]}" for name in others)
    if against:
        against = f", against {against}"
    return Choice(
        best, f"predicted {text[best]} for {format_bytes(nbytes)}{against}", seconds[best]
    )


def _by_rule(nbytes: int, size: int, shared: bool) -> Choice:
    """Return the choice without a fit, right on most machines."""
    if shared:
        if nbytes < SHARED_BYTES:
            return Choice(
                NATIVE,
                f"{format_bytes(nbytes)} are too few for shared memory (below {SHARED_BYTES} B)",
            )
        return Choice(SHARED, f"shared memory is the fastest from {format_bytes(SHARED_BYTES)} on")
    chunk = nbytes // size
    if chunk < RING_CHUNK_BYTES:
        return Choice(
            NATIVE,
            f"a ring's messages would be {chunk} bytes, too short (below {RING_CHUNK_BYTES})"
            " to pay",
        )
    return Choice(
        "ring",
        f"a ring moves the fewest bytes, in messages of {chunk} (long enough from"
        f" {RING_CHUNK_BYTES})",
    )


def _candidates(fit: Fit, shared: bool) -> list[str]:
    """Return the algorithms that may be taken; native comes first, so that it wins ties.

    Those of steps are the ones whose rows say so, see `Collective.automatic`.
    On one node no algorithm of messages comes near shared memory. Messages from shared memory would
    also take longer than predicted: the fit was measured in ordinary memory, which has larger
    pages. So they are no candidates there.
    """
    nodes = fit.machine.nodes_of(fit.ranks)
    of_steps = [
        name
        for name, item in ALGORITHMS.items()
        if item.automatic is not None and item.automatic(nodes)
    ]
    if shared and fit.shared is not None:
        return [NATIVE, SHARED, *(of_steps if has_levels(nodes) else ())]
    return [NATIVE, *of_steps]
