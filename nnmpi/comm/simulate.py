"""How long a collective takes on a machine, for up to thousands of ranks.

    rank 0   ........|=======|+++|              .    .            steps in order, as `steps` and `execution` have them:
    rank 1   ----------------|=======|+++|      .    .            - waits for the other end, = message under way,
               .  .                    .         .    .            + adds what came (machine.add)
    rank 2   ====================|-----.---|     .    .
               .  .                    .         .    over, and added
               .  both ends have come to it:     the step's last message has arrived
               .  the message begins             (here the one from rank 0)
               rank 0 waits for rank 1

- A message begins when both ends have come to its step (as MPI sends long ones), and, between nodes, when the links of
  both nodes are free (`links`). What it costs is said by the link's curve for one way or both, by where its ends are
  and what they do; slow nodes take their factor more.
- Chunks have the exact bytes that `shard.split` gives them; empty ones send nothing, and a step in which nothing
  travels is left out.
- The messages of one step between two ranks are posted together, so they pay the latency once, and their bytes follow
  one another:

      seconds  =  alpha  +  the sum over messages of (curve(bytes) - alpha)
                  -----     -----------------------------------------------
                 latency    wire

  (Two short messages instead of one of the same bytes took half an alpha more between two ranks of one node, under Open
  MPI and MPICH alike, because there alpha is the processor's work; on a network alpha is the distance.)
- Where every rank does what rank 0 does, with its own number added to all ranks and chunks, and all are alike, all
  clocks are equal: rank 0's steps are enough (`_in_lock_step`). 4096 ranks take 8190 steps of a ring, which are 33
  million messages. With more than `EXACT_RANKS` this is done on several nodes, too: there a step takes as long as its
  slowest link.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from nnmpi.comm.collective import Algorithm, Chunks, Collective, Step, as_collective, runs
from nnmpi.comm.machine import INSTANT_S, Curve, Links, Machine
from nnmpi.comm.prove import finish
from nnmpi.custom import ask
from nnmpi.errors import UsageError

EXACT_RANKS = 64  # up to which ranks that are not alike are simulated message by message, whatever they do


def price(collective: Collective | Algorithm, size: int, nbytes: int, machine: Machine, itemsize: int = 4) -> float:
    """Return the seconds until the last rank has finished a collective; see `simulate_collective`."""
    return max(simulate_collective(collective, size, nbytes, machine, itemsize))


def simulate_collective(
    collective: Collective | Algorithm, size: int, nbytes: int, machine: Machine, itemsize: int = 4
) -> list[float]:
    """Return when each of `size` ranks finishes a collective over a buffer of `nbytes`, in seconds.

    Args:
        collective: what they do.
        size: number of ranks, at least 1.
        nbytes: the whole buffer of a rank, rounded up to whole elements.
        machine: what messages and sums cost, where the ranks are, whose links are slow.
        itemsize: bytes of an element.

    Raises:
        UsageError: for no ranks, or a machine with another number of them.
        ScheduleError: when the ranks wait for one another for ever.
    """
    if size < 1 or nbytes < 0 or itemsize < 1:
        raise UsageError(f"{size} ranks with {nbytes} bytes in elements of {itemsize} cannot be simulated")
    seconds = _Seconds(machine, machine.places(size), ChunkBytes.of(nbytes, size, itemsize))
    clocks = [0.0] * size
    for phase in as_collective(collective).phases:
        steps = _steps_of_all(phase, size) if seconds.may_be_in_lock_step else None
        if steps is not None:
            clocks = [max(clocks) + sum(map(seconds.of_all, steps))] * size
        else:
            everyones = [seconds.chunks.travelling(ask(phase, Step, rank, size)) for rank in range(size)]
            clocks = finish(everyones, clocks, seconds)
    return clocks


@lru_cache(maxsize=32)  # the planner asks for the same ones with other lengths
def _steps_of_all(phase: Algorithm, size: int) -> Sequence[Step] | None:
    """Return rank 0's steps where every rank's are those with its number added; else None. Some ranks are looked at."""
    steps = ask(phase, Step, 0, size)
    if any(step.to is None or step.from_ is None or (step.to + step.from_) % size for step in steps):
        return None  # then what it sends to k ranks on comes from k ranks back
    for rank in {1, size // 2, size - 1}:
        own = ask(phase, Step, rank % size, size)
        if [_moved(step, -rank, size) for step in own] != [_moved(step, 0, size) for step in steps]:
            return None
    return steps


def _moved(step: Step, by: int, size: int) -> tuple[object, ...]:
    """Return what a step does, with a number added to all ranks and chunks."""
    moved = [[(number + by) % size for number in (*partner, *chunks)] for partner, chunks in _ends(step)]
    return *moved, step.reduce


def _ends(step: Step) -> Iterable[tuple[Sequence[int], Chunks]]:
    for partner, chunks in ((step.to, step.send), (step.from_, step.recv)):
        yield () if partner is None else (partner,), chunks


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
        """Return the chunks of a buffer of `nbytes`, rounded up to whole elements."""
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

    def travelling(self, steps: Iterable[Step]) -> list[Step]:
        """Return one rank's steps without chunks that are empty, as `execution` does them."""
        if self.short:
            return list(steps)
        found = []
        for step in steps:
            sends, recvs = (tuple(c for c in chunks if c < self.longer) for chunks in (step.send, step.recv))
            if sends or recvs:
                to, from_ = step.to if sends else None, step.from_ if recvs else None
                found.append(Step(to, sends, from_, recvs, step.reduce))
        return found


@dataclass(slots=True)
class _Seconds:
    """Carries messages over a machine's links, in seconds; see `engine.Carrier`."""

    machine: Machine
    nodes: tuple[int, ...]
    chunks: ChunkBytes
    _links: Links = field(init=False)
    _messages: dict[tuple[bool, bool, bool, tuple[int, ...]], tuple[float, float]] = field(
        init=False, default_factory=dict
    )
    _steps: dict[tuple[int | None, int, int, bool], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._links = Links(max(self.nodes) + 1)

    def carry(self, sender: int, receiver: int, out: Step, into: Step, ready: float) -> float:
        """Return when the messages have arrived."""
        machine, nodes = self.machine, self.nodes
        across = nodes[sender] != nodes[receiver]
        latency_s, wire_s = self._message(across, _is_both(out), _is_both(into), self.chunks.messages(out.send))
        if across:
            if machine.slow_nodes:
                wire_s *= max(machine.slow_nodes.get(nodes[rank], 1.0) for rank in (sender, receiver))
            ready = self._links.send(nodes[sender], nodes[receiver], ready, wire_s)
        return ready + (latency_s + wire_s)

    def turn(self, ready: float) -> int:
        """Return the instant."""
        return round(ready / INSTANT_S)

    def add(self, rank: int, step: Step, over: float) -> float:
        """Return when what came has been added."""
        if not step.reduce or not step.recv:
            return over
        return over + sum(self.machine.add(nbytes) for nbytes in self.chunks.messages(step.recv))

    def _message(self, across: bool, out: bool, into: bool, messages: tuple[int, ...]) -> tuple[float, float]:
        """Return (latency, wire) in seconds: a link is taken for `wire` only, and messages are there after both."""
        key = across, out, into, messages
        if key not in self._messages:
            link = self.machine.link(across)
            curves = {link.both_ways if both else link.one_way for both in (out, into)}
            self._messages[key] = max((_cost(curve, messages) for curve in curves), key=sum)
        return self._messages[key]

    # ---- all ranks at once ----

    @property
    def may_be_in_lock_step(self) -> bool:
        """Whether ranks that do the same have equal clocks, or nearly."""
        machine, size, places = self.machine, len(self.nodes), len(set(self.nodes))
        alike = not machine.slow_nodes and places in (1, size)
        return (alike and self.chunks.short > 0) or size > EXACT_RANKS

    def of_all(self, step: Step) -> float:
        """Return the seconds of a step that all ranks do at once, from rank 0's step."""
        key = step.to, len(step.send), len(step.recv), step.reduce
        if key not in self._steps:
            self._steps[key] = self._of_all(step)
        return self._steps[key]

    def _of_all(self, step: Step) -> float:
        assert step.to is not None
        nodes, machine, chunks = self.nodes, self.machine, self.chunks
        longest = chunks.short + (chunks.itemsize if chunks.longer else 0)
        messages = tuple(longest * len(run) for run in runs(step.send))
        source, target = np.array(nodes), np.roll(nodes, -step.to)
        crossing = source != target
        seconds = 0.0 if crossing.all() else sum(self._message(False, True, True, messages))
        if crossing.any():
            latency_s, wire_s = self._message(True, True, True, messages)
            slow = np.array([machine.slow_nodes.get(node, 1.0) for node in range(source.max() + 1)])
            busiest = max((slow * np.bincount(ends[crossing], minlength=slow.size)).max() for ends in (source, target))
            # a latency passes under the bytes of others
            seconds = max(seconds, latency_s + wire_s * slow.max(), wire_s * busiest)
        adding = sum(machine.add(longest * len(run)) for run in runs(step.recv)) if step.reduce else 0.0
        return float(seconds + adding)


def _is_both(step: Step) -> bool:
    return step.to is not None and step.from_ is not None


def _cost(curve: Curve, messages: tuple[int, ...]) -> tuple[float, float]:
    return curve.alpha_s, sum(curve(nbytes) - curve.alpha_s for nbytes in messages)
