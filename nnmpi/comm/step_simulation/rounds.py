"""Works a symmetric phase off for all ranks at once, round by round, with NumPy.

In such a phase every rank does in its step k what rank 0 does, with ranks and chunks shifted by its own number. So the
steps of rank 0 tell everything, and a round is a handful of sums over arrays with an entry per rank:

    rank           0          1          2          3
    clock          5          5          6          5
    ready          5    -->   6    -->   6    -->   6    --> (to 0)     when the right neighbour has come to it as well
    there          5 + cost   6 + cost   6 + cost   6 + cost
    clock          the later of what it sent and what came, and the time to add

4096 ranks take 8190 rounds of a ring, which are 33 million messages, in seconds. The result is that of `engine`, but
for links that several ranks share where ranks are so far apart in time that a message of a later round is ready before
one of an earlier round: here the earlier round goes first. `Links.out_of_turn` counts these messages. Where it counted
any, 16 to 128 ranks strewn over nodes of 4 or 8 were done after 0.87 to 1.14 of the exact time; where it counted none,
the times were the same. (When neighbouring ranks share a node, only one of them uses its link in a round: it counts
none.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.machine import Curve, Machine
from nnmpi.comm.step_simulation.costs import ChunkBytes
from nnmpi.comm.step_simulation.links import Floats, Ints, Links
from nnmpi.comm.steps import Chunks, Step

_Kind = TypeVar("_Kind", bound=np.generic)


def in_rounds(steps: Sequence[Step], size: int) -> bool:
    """Return whether rank 0's steps, shifted, meet round by round: what it sends to k ranks on comes from k back."""
    return all(step.to is not None and step.from_ is not None and (step.to + step.from_) % size == 0 for step in steps)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A round for all ranks: what each sends to the one that lies its shift ahead, and what it adds."""

    full: NDArray[np.bool_]  # whether there is anything to send
    whole: bool  # whether everybody has something
    cost: Floats
    wire: Floats
    target: Ints  # the node of the receiver
    crossing: Ints  # the senders whose messages leave their node
    messages: int
    adding: Floats | float


@dataclass(slots=True)
class Rounds:
    """A machine and a buffer, ready to work rounds off.

    Attributes:
        machine: what things cost.
        chunks: those of the buffer.
        links: the nodes' links, with what has used them so far.
        messages: how many messages were sent.
    """

    machine: Machine
    chunks: ChunkBytes
    links: Links
    messages: int = 0
    _bounds: Ints = field(init=False)
    _nodes: Ints = field(init=False)
    _slow: Floats | None = field(init=False)
    _slow_link: Floats | None = field(init=False)
    _prepared: dict[tuple[int, int, int, bool] | None, _Prepared] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Lay out what belongs to each rank."""
        size = self.chunks.size
        around = [self.chunks.before(chunk) for chunk in range(size + 1)]
        self._bounds = np.array([*around, *(around[-1] + bound for bound in around[1:])])  # twice around
        self._nodes = np.array(self.machine.places(size))
        slow_ranks, slow_nodes = self.machine.slow_ranks, self.machine.slow_nodes
        self._slow = np.array([slow_ranks.get(rank, 1.0) for rank in range(size)]) if slow_ranks else None
        self._slow_link = np.array([slow_nodes.get(n, 1.0) for n in self._nodes.tolist()]) if slow_nodes else None

    def work_off(self, steps: Sequence[Step], clock: Floats) -> Floats:
        """Return when each rank has finished.

        Args:
            steps: those of rank 0, for which `in_rounds` holds.
            clock: (size,) when each rank begins.
        """
        for step in steps:
            clock = self._round(step, clock)
        return clock

    def _round(self, step: Step, clock: Floats) -> Floats:
        assert step.to is not None
        shift, prepared = step.to, self._prepare(step, step.to)
        ready = np.maximum(clock, _shifted(clock, shift))
        begin = self._through_links(ready, prepared, shift)
        end = begin + prepared.cost
        if prepared.whole:
            over = np.maximum(end, _shifted(end, -shift))
        else:
            end = np.where(prepared.full, end, -np.inf)
            over = np.maximum(clock, np.maximum(end, _shifted(end, -shift)))
        self.messages += prepared.messages
        return over + prepared.adding

    def _prepare(self, step: Step, shift: int) -> "_Prepared":
        """Return what does not depend on the clock; it is the same in all rounds with single chunks that are alike."""
        send, recv = _circular(step.send, self.chunks.size), _circular(step.recv, self.chunks.size)
        single = all(last - first == 1 for first, last in send + recv)
        key = (shift, len(send), len(recv), step.reduce) if single and self.chunks.longer == 0 else None
        if key in self._prepared:
            return self._prepared[key]
        pieces = self._pieces(send)
        full = np.asarray(sum(pieces)) > 0
        latency, wire = self._cost(pieces, full, shift)
        target = _shifted(self._nodes, shift)
        crossing = np.flatnonzero((self._nodes != target) & full)
        messages = int(sum(np.count_nonzero(piece) for piece in pieces))
        adding = self._adding(self._pieces(recv)) if step.reduce else 0.0
        prepared = _Prepared(full, bool(full.all()), latency + wire, wire, target, crossing, messages, adding)
        if key is not None:
            self._prepared[key] = prepared
        return prepared

    def _pieces(self, chunk_runs: Sequence[tuple[int, int]]) -> list[Ints]:
        """Return the bytes of the messages that each rank has for these chunks of rank 0; 0 where there is none."""
        size, pieces = self.chunks.size, []
        for first, last in chunk_runs:
            starts = (np.arange(size) + first) % size
            stops = starts + (last - first)
            pieces.append(self._bounds[np.minimum(stops, size)] - self._bounds[starts])
            if last - first > 1:
                pieces.append(self._bounds[np.maximum(stops, size)] - self._bounds[size])  # what runs over the end
        return pieces

    def _cost(self, pieces: list[Ints], full: NDArray[np.bool_], shift: int) -> tuple[Floats, Floats]:
        """Return latency and wire seconds of what each rank sends. See `costs.Costs`."""
        size = self.chunks.size
        across = self._nodes != _shifted(self._nodes, shift)
        both = full & _shifted(full, -shift)  # it sends and receives
        ends = both, _shifted(both, shift)
        latency, wire = np.zeros(size), np.zeros(size)
        for apart, where in ((False, ~across), (True, across)):
            link = self.machine.link(apart)
            found = where & full
            for curve, used in ((link.both_ways, ends[0] | ends[1]), (link.one_way, ~(ends[0] & ends[1]))):
                chosen = found & used
                if not chosen.any():
                    continue
                bytes_s = sum(np.where(piece > 0, curve(piece) - curve.alpha_s, 0.0) for piece in pieces)
                chosen &= curve.alpha_s + bytes_s > latency + wire
                latency, wire = np.where(chosen, curve.alpha_s, latency), np.where(chosen, bytes_s, wire)
        if self._slow is not None:
            latency = latency * np.maximum(self._slow, _shifted(self._slow, shift))
        if self._slow_link is not None:
            factor = np.maximum(self._slow_link, _shifted(self._slow_link, shift))
            wire = np.where(across, wire * factor, wire)
        return latency, wire

    def _through_links(self, ready: Floats, prepared: "_Prepared", shift: int) -> Floats:
        """Return when each message begins: when it is ready, or when the links are free."""
        crossing = prepared.crossing
        if not crossing.size:
            return ready
        begin = ready.copy()
        begin[crossing] = self.links.send_round(
            self._nodes[crossing], prepared.target[crossing], ready[crossing], prepared.wire[crossing]
        )
        return begin

    def _adding(self, pieces: list[Ints]) -> Floats:
        add: Curve = self.machine.add
        seconds = sum((np.where(piece > 0, add(piece), 0.0) for piece in pieces), np.zeros(self.chunks.size))
        return seconds if self._slow is None else seconds * self._slow


def _shifted(array: NDArray[_Kind], by: int) -> NDArray[_Kind]:
    """Return the array in which each rank has the entry of the rank that lies `by` ahead."""
    by %= array.size
    return np.concatenate((array[by:], array[:by]))


def _circular(chunks: Chunks, size: int) -> list[tuple[int, int]]:
    """Join neighbouring chunks, the first being the last one's neighbour: (3, 0, 1) of 4 -> [(3, 6)]."""
    if isinstance(chunks, range) and chunks.step == 1:
        return [(chunks.start, chunks.stop)]
    joined: list[tuple[int, int]] = []
    for chunk in chunks:
        if joined and joined[-1][1] % size == chunk:
            joined[-1] = joined[-1][0], joined[-1][1] + 1
        else:
            joined.append((chunk, chunk + 1))
    return joined
