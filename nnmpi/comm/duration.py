"""How long a collective takes on a machine, for up to thousands of ranks.

A step of a ring on three ranks; rank 1 comes to it late:

    rank 0   |=====|-----|=====|++|     receives from 2, waits for 1, sends to 1
    rank 1   ............|=====|++|     sends to 2 and receives from 0, both at once
    rank 2   |=====|-----|=====|++|     sends to 0, waits for 1, receives from 1
                         |     |  the arrivals are added (+; machine.add): the step is over
                         |     the step's last message has arrived
                         both ends have come to the step: the message (=) begins

- A long message begins when both ends have come to its step (rendezvous), one of at most
  EAGER_BYTES when its sender has, which then goes on; and, between nodes, when the links of both
  nodes are free (`machine.Links`). Its seconds are those of the link's curve: inside a node or
  across, in one direction or both.
- Chunks have the exact bytes that `shard.split` gives them.
- The messages of one step between two ranks are posted together, so they pay the latency once, and
  their bytes follow one another:

      seconds  =  alpha  +  the sum over messages of (curve(bytes) - alpha)
                  -----     -----------------------------------------------
                 latency    wire

  (Two short messages instead of one of the same bytes took half an alpha more between two ranks of
  one node, under Open MPI and MPICH alike, because there alpha is the processor's work; on a
  network alpha is the distance.)
- In a symmetric phase each rank's steps are rank 0's with the rank's number added to all ranks and
  chunks. On equal links all clocks are then equal, and rank 0's steps are enough
  (`_steps_of_all`): a ring of 4096 ranks has 8190 steps a rank, but 33 million messages. With more
  than `EXACT_RANKS` ranks this shortcut also serves several nodes; there a step takes as long as
  its slowest link.
- Groups of ranks that communicate at once share the links (`Machine.parts`).
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import cast

from nnmpi.base.custom import call_user
from nnmpi.base.errors import ScheduleError, check_int, number
from nnmpi.comm.collective import Algorithm, Chunks, Collective, Step, as_collective, runs
from nnmpi.comm.machine import EAGER_BYTES, INSTANT_S, Links, Machine
from nnmpi.comm.prove import Engine

ITEM_BYTES = 4  # of an element
# Up to this many ranks, unequal links are simulated message by message; above it, symmetric phases
# are priced by their slowest link.
EXACT_RANKS = 64


@lru_cache(maxsize=2**12)
def price(collective: Collective | Algorithm, size: int, nbytes: int, machine: Machine) -> float:
    """Return the seconds until a collective's last rank finishes; see `simulate_collective`.

    Example:
        >>> from nnmpi.comm.algorithms.ring import ring
        >>> from nnmpi.comm.duration import price
        >>> from nnmpi.comm.machine import Machine
        >>> machine = Machine.uniform(alpha_s=1e-5, beta_s=1e-9, gamma_s=0.0)
        >>> round(price(ring, 4, 2**20, machine) * 1e3, 3)  # ms: 6 latencies, 1.5 times the bytes
        1.633
    """
    return max(simulate_collective(collective, size, nbytes, machine))


def coefficients(collective: Collective, size: int) -> tuple[int, float, float]:
    """Return (latencies, buffers sent, buffers added) on the critical path of long messages.

    seconds = latencies x alpha + (sent x beta + added x gamma) x bytes of a buffer
    """
    nbytes = (EAGER_BYTES + ITEM_BYTES) * size * collective.contract.parts(size)
    latencies, sent, added = (
        price(collective, size, nbytes, Machine.uniform(*cost))
        for cost in ((1, 0), (0, 1 / nbytes), (0, 0, 1 / nbytes))
    )
    return round(latencies), sent, added


def simulate_collective(
    collective: Collective | Algorithm, size: int, nbytes: int, machine: Machine
) -> list[float]:
    """Return when each of `size` ranks finishes a collective over a buffer of `nbytes`, in seconds.

    Args:
        collective: a collective, or a bare function of (rank, size).
        size: number of ranks, at least 1.
        nbytes: the whole buffer of a rank, rounded up to whole elements of float32.
        machine: the costs of messages and sums, and the nodes of the ranks; with the nodes of
            several groups of `size` ranks, all begin at once.

    Raises:
        UsageError: for no ranks, or a machine with another number of them.
        ScheduleError: for a deadlock.
    """
    check_int("size", size)
    number("nbytes", nbytes)
    nodes = machine.nodes or machine.nodes_of(size)
    if len(nodes) % size:
        machine.nodes_of(size)  # raises
    collective = as_collective(collective)
    parts = collective.contract.parts(size)
    seconds = _Seconds(machine, nodes, size, -(-nbytes // ITEM_BYTES), parts)
    clocks = [0.0] * len(nodes)
    for phase in collective.phases:
        steps = _steps_of_all(phase, size) if seconds.may_be_in_lock_step else None
        if steps is not None:
            end_s = max(clocks) + sum(seconds.of_all(*_lengths(step)) for step in steps)
            clocks = [end_s] * len(nodes)
            continue
        states = seconds.run([call_user(phase, Step, rank, size) for rank in range(size)], clocks)
        for rank, state in enumerate(states):
            if not state.is_over:
                raise ScheduleError(
                    f"rank {rank} waits for ever in its step {state.at}; prove the algorithm first"
                )
        clocks = [state.clock for state in states]
    return clocks


@lru_cache(maxsize=2**8)
def buffers_sent(collective: Collective, size: int) -> Sequence[float]:
    """Return the buffers that each rank sends."""
    total = [0] * size
    for phase in collective.phases:
        ranks = range(1 if _steps_of_all(phase, size) else size)
        sent = [sum(len(step.send) for step in call_user(phase, Step, r, size)) for r in ranks]
        for rank in range(size):
            total[rank] += sent[rank % len(sent)]
    return [chunks / collective.contract.parts(size) for chunks in total]


@lru_cache(maxsize=32)  # the planner prices the same ones with other lengths
def _steps_of_all(phase: Algorithm, size: int) -> Sequence[Step] | None:
    """Return rank 0's steps if the phase is symmetric, else None.

    Three more ranks are compared: all 4096 would cost what the shortcut saves.
    """
    steps = call_user(phase, Step, 0, size)
    if any(step.to is None or step.from_ is None for step in steps):
        return None
    seen = [
        [_seen_from(rank, step, size) for step in call_user(phase, Step, rank, size)]
        for rank in (0, 1 % size, size // 2, size - 1)
    ]
    return steps if seen == seen[:1] * len(seen) else None


def _seen_from(rank: int, step: Step, size: int) -> list[object]:
    """Return a step with a rank's number subtracted from all ranks and chunks."""
    ends = [[] if end is None else [end] for end in (step.to, step.from_)]
    numbers = [[(item - rank) % size for item in some] for some in (*ends, step.send, step.recv)]
    return [*numbers, step.reduce]


class _Seconds(Engine):
    """Carries messages over a machine's links; clocks are in seconds.

    Args:
        machine: the costs.
        nodes: the node of each rank.
        size: ranks of a group.
        elements: length of the buffer.
        chunks: of the buffer.
    """

    def __init__(
        self, machine: Machine, nodes: tuple[int, ...], size: int, elements: int, chunks: int
    ) -> None:
        self._machine, self._nodes, self._size = machine, nodes, size
        # elements of a chunk; the first `_longer` chunks have one more
        self._short, self._longer = divmod(elements, chunks)
        self._links = Links(machine, len(nodes))
        ranks, count = len(nodes), len(set(nodes))
        # Whether symmetric steps have equal clocks, or nearly. Links are equal on one node, and
        # with a node per rank. Where some chunks are empty (`_short` 0) the clocks differ.
        self.may_be_in_lock_step = (count in (1, ranks) and self._short > 0) or ranks > EXACT_RANKS
        self._sent, self.of_all = cache(self._find_sent), cache(self._find_step)

    def carry(self, sender: int, receiver: int, step: Step, ready: float) -> float:
        """Return the arrival of the last message; without messages, the beginning."""
        sent, both_ways = self._sent(step.send), step.from_ is not None
        return self._links.carry(sender, receiver, ready, sent, both_ways) if sent else ready

    def leaves(self, step: Step) -> bool:
        return all(nbytes <= EAGER_BYTES for nbytes in self._sent(step.send))

    def turn(self, ready: float) -> int:
        return round(ready / INSTANT_S)

    def add(self, rank: int, step: Step, over: float) -> float:
        """Return when the arrivals have been added."""
        return over + sum(map(self._machine.add, self._sent(step.recv) if step.reduce else ()))

    def _find_sent(self, chunks: Chunks) -> tuple[int, ...]:
        """Return the bytes of each message that these chunks make."""
        short, longer = self._short, self._longer
        ends = [
            [short * at + min(at, longer) for at in (run.start, run.stop)] for run in runs(chunks)
        ]
        return tuple((stop - start) * ITEM_BYTES for start, stop in ends if stop > start)

    # ---- all ranks at once ----

    def _find_step(self, to: int, sent: Sequence[int], received: Sequence[int]) -> float:
        """Return the seconds of a step that all ranks do at once.

        Args:
            to: the rank to which rank 0 sends.
            sent: chunks of each message.
            received: chunks of each message that is added; empty when arrivals replace.
        """
        longest = (self._short + (self._longer > 0)) * ITEM_BYTES
        messages = tuple(longest * chunks for chunks in sent)
        size, nodes = self._size, self._nodes
        ends = [(nodes[at], nodes[at - at % size + (at + to) % size]) for at in range(len(nodes))]
        crossing = [(source, target) for source, target in ends if source != target]
        seconds = (
            0.0 if len(crossing) == len(ends) else sum(self._machine.message(False, True, messages))
        )
        if crossing:
            latency_s, wire_s = self._machine.message(True, True, messages)
            busiest = max(max(Counter(side).values()) for side in zip(*crossing, strict=True))
            # a latency passes under the bytes of others
            seconds = max(seconds, latency_s + wire_s, wire_s * busiest)
        return float(seconds + sum(self._machine.add(longest * chunks) for chunks in received))


def _lengths(step: Step) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    sent, received = (tuple(map(len, runs(chunks))) for chunks in (step.send, step.recv))
    return cast(int, step.to), sent, received if step.reduce else ()
