"""All ranks' steps played together as values: who holds which part of the sum, and where it stops.

Each chunk on each rank is the multiset of ranks whose parts have been added up in it. A message moves only when its
sender and its receiver have both come to it ("rendezvous"), which is how MPI treats long messages: what gets through
here cannot deadlock when MPI buffers short ones.

The sets are integers with a digit per rank (see `collective`), so that adding up chunks is adding integers. A part that
is counted too often is an error on the spot. `prove` judges what is left at the end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nnmpi.comm.collective import ALL_REDUCE, DIGIT_BITS, Contract, count
from nnmpi.comm.steps import Step
from nnmpi.comm.wording import name_ranks
from nnmpi.errors import ScheduleError


@dataclass(slots=True)
class Player:
    """One rank of the replay.

    Attributes:
        held: for each chunk, the ranks whose parts are in it, a digit each; 0 where nothing is.
        most: how often one rank's part may be in a chunk.
        written: for each chunk that was changed, the step that changed it last.
        at: the step it is in; the number of steps once it has finished.
        clock: the round in which it came to that step, when every message takes one round.
        sent: whether the step's message has left (true when there is none).
        received: whether the step's message has come (true when there is none).
    """

    rank: int
    steps: Sequence[Step]
    held: list[int]
    most: int = 1
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
        if step.reduce and not self.held[chunk]:
            raise ScheduleError(f"{self.name} adds chunk {chunk} from rank {step.from_} to nothing")
        total = self.held[chunk] + parts if step.reduce else parts
        often = [rank for rank in members(total) if count(total, rank) > self.most]
        if often:
            times = "twice" if self.most == 1 else f"more than {self.most} times"
            parts_of = name_ranks(often)
            raise ScheduleError(f"{self.name} adds chunk {chunk} from rank {step.from_} and counts {parts_of} {times}")
        self.held[chunk] = total
        self.written[chunk] = self.at


def replay(steps: Sequence[Sequence[Step]], contract: Contract = ALL_REDUCE) -> list[Player]:
    """Play the steps of all ranks until nothing moves any more, and return where every rank stands.

    Args:
        steps: one sequence per rank, over len(steps) chunks.
        contract: says what each rank has before.

    Raises:
        ScheduleError: for a chunk that gets a part too often, one that is sent or added to before anything is in it,
            and for chunks that differ at a message's two ends.
    """
    size = len(steps)
    players = [
        Player(rank, own, [contract.begins(rank, chunk, size) or 0 for chunk in range(size)], contract.most)
        for rank, own in enumerate(steps)
    ]
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
    if tuple(out.send) != tuple(into.recv):
        raise ScheduleError(
            f"{sender.name} sends chunks {list(out.send)} to {receiver.name}, which expects chunks {list(into.recv)}"
        )
    empty = [chunk for chunk in out.send if not sender.held[chunk]]
    if empty:
        raise ScheduleError(f"{sender.name} sends chunk {empty[0]} to rank {out.to} before anything is in it")
    receiver.arrived = tuple(sender.held[chunk] for chunk in out.send)
    sender.sent = receiver.received = True
    over = max(sender.clock, receiver.clock) + 1
    sender.done, receiver.done = max(sender.done, over), max(receiver.done, over)


def members(parts: int) -> list[int]:
    """Return the ranks whose parts are in."""
    return [rank for rank in range(-(-parts.bit_length() // DIGIT_BITS)) if count(parts, rank)]
