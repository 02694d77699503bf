"""All ranks' steps played together as values: who holds which part of the sum, and where it stops.

Each chunk on each rank is the set of ranks whose parts have been added up in it. A message moves only when its sender
and its receiver have both come to it ("rendezvous"), which is how MPI treats long messages: what gets through here
cannot deadlock when MPI buffers short ones.

The sets are integers with one bit per rank. That is enough for a multiset: a part that would be counted twice is an
error on the spot, so no set ever needs to count further than one. `prove` judges what is left at the end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nnmpi.comm.steps import Step
from nnmpi.comm.wording import name_ranks
from nnmpi.errors import ScheduleError


@dataclass(slots=True)
class Player:
    """One rank of the replay.

    Attributes:
        held: for each chunk, the ranks whose parts are in it, one bit each.
        written: for each chunk that was changed, the step that changed it last.
        at: the step it is in; the number of steps once it has finished.
        clock: the round in which it came to that step, when every message takes one round.
        sent: whether the step's message has left (true when there is none).
        received: whether the step's message has come (true when there is none).
    """

    rank: int
    steps: Sequence[Step]
    held: list[int]
    written: dict[int, int] = field(default_factory=dict)
    at: int = 0
    clock: int = 0
    sent: bool = False
    received: bool = False
    done: int = 0  # the round in which the step's last message so far was over
    arrived: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Come to the first step."""
        self._open()

    @property
    def step(self) -> Step | None:
        """The step it is in, None at the end."""
        return self.steps[self.at] if self.at < len(self.steps) else None

    @property
    def name(self) -> str:
        """Rank and step in words."""
        return f"rank {self.rank}, step {self.at}" if self.step else f"rank {self.rank} after its last step"

    def _open(self) -> None:
        step = self.step
        self.sent = step is None or step.to is None
        self.received = step is None or step.from_ is None
        self.done, self.arrived = self.clock, ()

    def close(self) -> bool:
        """Leave the step if both its messages are through; return whether it was left."""
        step = self.step
        if step is None or not (self.sent and self.received):
            return False
        for chunk, parts in zip(step.recv, self.arrived, strict=True):
            self._store(step, chunk, parts)
        self.at, self.clock = self.at + 1, self.done
        self._open()
        return True

    def _store(self, step: Step, chunk: int, parts: int) -> None:
        twice = self.held[chunk] & parts if step.reduce else 0
        if twice:
            parts_of = name_ranks(members(twice))
            raise ScheduleError(f"{self.name} adds chunk {chunk} from rank {step.from_} and counts {parts_of} twice")
        self.held[chunk] = self.held[chunk] | parts if step.reduce else parts
        self.written[chunk] = self.at


def replay(steps: Sequence[Sequence[Step]]) -> list[Player]:
    """Play the steps of all ranks until nothing moves any more, and return where every rank stands.

    Args:
        steps: one sequence per rank; `held` begins with each rank's own part in each of len(steps) chunks.

    Raises:
        ScheduleError: for a chunk that gets a part twice, and for chunks that differ at a message's two ends.
    """
    size = len(steps)
    players = [Player(rank, own, [1 << rank] * size) for rank, own in enumerate(steps)]
    look = deque(players)
    while look:
        player = look.popleft()
        step = player.step
        if step is None:
            continue
        if step.to is not None:
            _deliver(player, players[step.to])
        if step.from_ is not None:
            _deliver(players[step.from_], player)
        for rank in {rank for rank in (player.rank, step.to, step.from_) if rank is not None}:
            if players[rank].close():
                look.append(players[rank])
    return players


def _deliver(sender: Player, receiver: Player) -> None:
    """Move the message from one to the other if both have come to it."""
    out, into = sender.step, receiver.step
    if out is None or into is None or sender.sent or receiver.received:
        return
    if out.to != receiver.rank or into.from_ != sender.rank:
        return
    if out.send != into.recv:
        raise ScheduleError(
            f"{sender.name} sends chunks {list(out.send)} to {receiver.name}, which expects chunks {list(into.recv)}"
        )
    receiver.arrived = tuple(sender.held[chunk] for chunk in out.send)
    sender.sent = receiver.received = True
    over = max(sender.clock, receiver.clock) + 1
    sender.done, receiver.done = max(sender.done, over), max(receiver.done, over)


def members(parts: int) -> list[int]:
    """Return the ranks in a set of one bit per rank."""
    return [rank for rank in range(parts.bit_length()) if parts >> rank & 1]
