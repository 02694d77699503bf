"""The links of the nodes: who may use them when, if several messages want to.

A link carries one message out and one message in at a time, for as long as its bytes take (not during its latency).
Messages get it in the order in which they become ready, at the same picosecond the lower sender first:

    ready      a    b c                        a, b and c leave the same node
    link out   |-- a --|-- b --|-- c --|
    there               .a      .b      .c     each its latency after its last byte has left

A message waits until both links are free, that of the node it leaves and that of the node it enters.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

# Moments closer than this are the same: the last digits of sums must not decide who goes first.
INSTANT_S = 1e-12
# A message that the sums below would delay by less than this part of the time did not wait: that is rounding.
_ROUNDING = 1e-13


@dataclass(slots=True)
class _Direction:
    """One direction of every node's link."""

    free: Floats  # when the last message so far is through
    latest: Floats  # when the last one to get it had become ready

    @classmethod
    def of(cls, nodes: int) -> "_Direction":
        return cls(np.zeros(nodes), np.full(nodes, -np.inf))


@dataclass(slots=True)
class Links:
    """The links of so many nodes, all free at first.

    Attributes:
        nodes: how many nodes there are.
        waited_s: seconds that messages have waited for links, all together.
        out_of_turn: messages that were ready before one that got their link earlier. Called in order of `ready`,
            `send` never makes any; `send_round` may, since it does not know of messages of later rounds (there, one
            that became ready at the same moment counts too).
    """

    nodes: int
    waited_s: float = 0.0
    out_of_turn: int = 0
    _out: _Direction = field(init=False)
    _in: _Direction = field(init=False)

    def __post_init__(self) -> None:
        """Free all links."""
        self._out, self._in = _Direction.of(self.nodes), _Direction.of(self.nodes)

    def send(self, source: int, target: int, ready: float, wire: float) -> float:
        """Let one message of `wire` seconds pass between two nodes; return when it begins.

        A message that waits for the other node's link keeps its own node's link until then: those behind it wait too,
        even for nodes that are free (head-of-line blocking).

        Args:
            source, target: the nodes that it leaves and enters.
            ready: seconds at which both ranks have come to it.
            wire: seconds for which it takes both links.
        """
        out, into = self._out, self._in
        begin = float(max(ready, out.free[source], into.free[target]))
        out.free[source] = into.free[target] = begin + wire
        self.waited_s += begin - ready
        self.out_of_turn += bool(ready + INSTANT_S < max(out.latest[source], into.latest[target]))
        out.latest[source] = max(ready, out.latest[source])
        into.latest[target] = max(ready, into.latest[target])
        return begin

    def send_round(self, source: Ints, target: Ints, ready: Floats, wire: Floats) -> Floats:
        """Let many messages pass, of which none depends on another; return when each begins.

        Args:
            source: (messages,) the node that each leaves.
            target: (messages,) the node that each enters.
            ready: (messages,) seconds.
            wire: (messages,) seconds.
        """
        out, into = self._out, self._in
        begin = np.maximum(ready, np.maximum(out.free[source], into.free[target]))
        queues = [queue for queue in (_queue(source, ready), _queue(target, ready)) if queue is not None]
        waiting = bool(queues)
        while waiting:  # a queue at one end delays messages at the other; soon nothing changes any more
            waiting = False
            for queue in queues:
                delayed = _pass(queue, begin, wire)
                more = delayed > begin + _ROUNDING * np.abs(begin)
                waiting = waiting or bool(more.any())
                begin = np.where(more, delayed, begin)
        self.waited_s += float((begin - ready).sum())
        self.out_of_turn += int((ready - INSTANT_S < np.maximum(out.latest[source], into.latest[target])).sum())
        for nodes, direction in ((source, out), (target, into)):
            np.maximum.at(direction.free, nodes, begin + wire)
            np.maximum.at(direction.latest, nodes, ready)
        return begin


def _queue(nodes: Ints, ready: Floats) -> Ints | None:
    """Return the messages that wait at each node, in order, a row per node, filled up with -1; None for one each."""
    counts = np.bincount(nodes)
    if counts.max(initial=0) < 2:
        return None
    by_time = np.argsort(np.rint(ready / INSTANT_S), kind="stable")
    order = by_time[np.argsort(nodes[by_time], kind="stable")]
    queue = np.full((counts.size, counts.max()), -1)
    queue[np.arange(counts.max()) < counts[:, None]] = order
    return queue


def _pass(queue: Ints, begin: Floats, wire: Floats) -> Floats:
    """Return when the messages begin at the earliest if each waits for those before it in its queue.

    The i-th begins at the largest of begin[j] + wire[j] + ... + wire[i-1], for j = 0..i.
    """
    there = queue >= 0
    taken = np.where(there, wire[queue], 0.0).cumsum(axis=1)
    taken -= np.where(there, wire[queue], 0.0)  # what lies before each
    last = np.maximum.accumulate(np.where(there, begin[queue] - taken, -np.inf), axis=1) + taken
    delayed = begin.copy()
    delayed[queue[there]] = last[there]
    return delayed
