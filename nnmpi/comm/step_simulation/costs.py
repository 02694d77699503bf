"""Steps in bytes, and what their messages and sums cost on a machine.

    steps, 4 ranks            Step(to=1, send=(0, 2, 3), from_=3, recv=(1,), reduce=True)
    6 elements of 4 bytes     chunks of 8, 8, 4, 4 bytes
    transfer                  Transfer(to=1, sends=(8, 8), from_=3, recvs=(8,), reduce=True)   2 and 3 are one message

A chunk without elements sends nothing, and a step in which nothing travels is left out, as in `comm.execution`.

The messages of one step between two ranks are posted together (`comm.execution`), so they pay the latency once, and
their bytes follow one another:

    seconds  =  alpha  +  the sum over messages of (curve(bytes) - alpha)
                -----     -----------------------------------------------
               latency    wire

(Two short messages instead of one of the same bytes took half an alpha more between two ranks of one node, under Open
MPI and MPICH alike, because there alpha is the processor's work; on a network alpha is the distance, and they travel
together.)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from nnmpi.comm.machine import Curve, Machine
from nnmpi.comm.steps import Chunks, Step, runs


@dataclass(frozen=True, slots=True)
class Transfer:
    """One step of a rank in bytes; see `steps.Step`.

    Attributes:
        to: the rank that gets `sends`; None when nothing is sent.
        sends: the bytes of each message to it.
        from_: the rank that `recvs` come from; None when nothing is received.
        recvs: the bytes of each message from it.
        reduce: whether what arrives is added.
    """

    to: int | None
    sends: tuple[int, ...]
    from_: int | None
    recvs: tuple[int, ...]
    reduce: bool

    @property
    def both(self) -> bool:
        """Whether something goes and something comes."""
        return self.to is not None and self.from_ is not None


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The bytes of `size` chunks of a buffer, cut as `shard.split` cuts it, without a list of them.

    Attributes:
        size: number of chunks.
        short: bytes of a short chunk.
        longer: how many chunks, the first ones, have an element more.
        itemsize: bytes of an element.
    """

    size: int
    short: int
    longer: int
    itemsize: int
    _seen: dict[Chunks, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, nbytes: int, size: int, itemsize: int) -> "ChunkBytes":
        """Return the chunks of a buffer.

        Args:
            nbytes: of the whole buffer, rounded up to whole elements.
            size: number of chunks.
            itemsize: bytes of an element.
        """
        short, longer = divmod(-(-nbytes // itemsize), size)
        return cls(size, short * itemsize, longer, itemsize)

    def before(self, chunk: int) -> int:
        """Return where a chunk begins, in bytes; before(size) is the end of the buffer."""
        return chunk * self.short + min(chunk, self.longer) * self.itemsize

    def messages(self, chunks: Chunks) -> tuple[int, ...]:
        """Return the bytes of the messages in which these chunks travel."""
        found = self._seen.get(chunks)
        if found is None:
            each = (self.before(run.stop) - self.before(run.start) for run in runs(chunks))
            found = self._seen[chunks] = tuple(nbytes for nbytes in each if nbytes)
        return found

    def transfers(self, steps: Iterable[Step]) -> list[Transfer]:
        """Return one rank's steps in bytes."""
        found = []
        for step in steps:
            sends, recvs = self.messages(step.send), self.messages(step.recv)
            if sends or recvs:
                to, from_ = step.to if sends else None, step.from_ if recvs else None
                found.append(Transfer(to, sends, from_, recvs, step.reduce))
        return found


Cost: TypeAlias = tuple[float, float]
"""(latency, wire) in seconds: a link is taken for `wire` only, and the messages have arrived after both."""


@dataclass(slots=True)
class Costs:
    """What messages and sums cost on one machine with so many ranks.

    Raises:
        UsageError: when the machine does not have that many ranks.
    """

    machine: Machine
    size: int
    nodes: tuple[int, ...] = field(init=False)
    _costs: dict[tuple[bool, bool, bool, tuple[int, ...]], Cost] = field(init=False, default_factory=dict)
    _adding: dict[tuple[int, ...], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Look where the ranks are."""
        self.nodes = self.machine.places(self.size)

    def message(self, sender: int, receiver: int, out: Transfer, into: Transfer) -> Cost:
        """Return what the messages of a step cost.

        Args:
            sender, receiver: the two ranks.
            out: the sender's step.
            into: the receiver's, which gets these messages. Either end may do something in the other direction as well.
        """
        machine, nodes = self.machine, self.nodes
        across = nodes[sender] != nodes[receiver]
        key = across, out.both, into.both, out.sends
        if key not in self._costs:
            link = machine.link(across)
            curves = {link.both_ways if both else link.one_way for both in (out.both, into.both)}
            self._costs[key] = max((_cost(curve, out.sends) for curve in curves), key=sum)
        latency, wire = self._costs[key]
        if machine.slow_ranks:
            latency *= max(machine.slow_ranks.get(rank, 1.0) for rank in (sender, receiver))
        if across and machine.slow_nodes:
            wire *= max(machine.slow_nodes.get(nodes[rank], 1.0) for rank in (sender, receiver))
        return latency, wire

    def adding(self, rank: int, step: Transfer) -> float:
        """Return the seconds that a rank takes to add what a step brought; 0 when it replaces or brings nothing."""
        if not step.reduce or not step.recvs:
            return 0.0
        if step.recvs not in self._adding:
            self._adding[step.recvs] = sum(self.machine.add(nbytes) for nbytes in step.recvs)
        return self._adding[step.recvs] * self.machine.slow_ranks.get(rank, 1.0)


def _cost(curve: Curve, messages: tuple[int, ...]) -> Cost:
    return curve.alpha_s, sum(curve(nbytes) - curve.alpha_s for nbytes in messages)
