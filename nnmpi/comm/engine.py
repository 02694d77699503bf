"""Goes through all ranks' steps against a clock: what happens when, message by message.

    rank 0   |--- message to 1 ---|            a message begins when both its ends have come to it (rendezvous)
    rank 1   ..|-- from 0 --------|+++|        its step is over when its messages are, and the sum is added (+)
    rank 2   |------- to 3 -------------|      then the rank comes to its next step

MPI treats long messages so; what gets through here cannot deadlock when MPI buffers short ones.

Messages are taken in the order in which they become ready, which is the order in which they queue for a link. The
clock may be seconds (`simulate`) or rounds (`prove`, `render`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from nnmpi.comm.steps import Step
from nnmpi.errors import ScheduleError


class Moment(Protocol):
    """A time in any measure, of which earlier and later are told apart."""

    def __lt__(self, other: Any, /) -> bool:
        """Whether this moment is before the other."""


T = TypeVar("T", bound=Moment)


class Carrier(Protocol[T]):
    """Does what messages and sums do, and says how long they take."""

    def carry(self, sender: int, receiver: int, out: Step, into: Step, ready: T) -> T:
        """Take the messages of `out`, which `into` receives, from one rank to another.

        Args:
            sender, receiver: the two ranks.
            out, into: the step of each.
            ready: when both had come to it. Calls come in the order of `turn`.

        Returns:
            When the messages have arrived.
        """

    def turn(self, ready: T) -> int:
        """Return a number that orders messages by when they are ready; of equals the lower sender is first."""

    def add(self, rank: int, step: Step, over: T) -> T:
        """Return when a rank has added what came in this step, whose messages had arrived at `over`."""


@dataclass(slots=True)
class RankState(Generic[T]):
    """How far one rank is.

    Attributes:
        steps: all that it does.
        clock: when it came to the step in which it is.
        over: when the last message of that step so far had arrived.
        at: the number of that step; the number of steps at the end.
        sending: the rank to which the step's messages still have to go, None when they have.
        receiving: the rank from which messages still have to come.
    """

    steps: Sequence[Step]
    clock: T
    over: T
    at: int = -1
    sending: int | None = None
    receiving: int | None = None

    @property
    def step(self) -> Step | None:
        """The step in which it is, None at the end."""
        return self.steps[self.at] if self.at < len(self.steps) else None

    def open(self) -> None:
        """Come to the next step."""
        self.at += 1
        self.over = self.clock
        if self.at < len(self.steps):
            step = self.steps[self.at]
            self.sending, self.receiving = step.to, step.from_

    @property
    def is_through(self) -> bool:
        """Whether the messages of its step have all arrived."""
        return self.at < len(self.steps) and self.sending is None and self.receiving is None


def run(steps: Sequence[Sequence[Step]], clocks: Sequence[T], carrier: Carrier[T]) -> list[RankState[T]]:
    """Go on until nothing moves any more, and return how far each rank came.

    Args:
        steps: those of each rank.
        clocks: when each rank begins.
        carrier: does what messages and sums do.

    Raises:
        ScheduleError: for a step that talks to a rank that there is not.
    """
    for rank, own in enumerate(steps):
        for index, step in enumerate(own):
            for partner in (step.to, step.from_):
                if partner is not None and (partner == rank or not 0 <= partner < len(steps)):
                    there = f"which is not another one of the {len(steps)} ranks"
                    raise ScheduleError(f"rank {rank}, step {index} talks to rank {partner}, {there}")
    states = [RankState(own, clock, clock) for own, clock in zip(steps, clocks, strict=True)]
    queue: list[tuple[int, int, int, T]] = []  # (turn, sender, receiver, ready)

    def meet(sender: int | None, receiver: int | None) -> None:
        """Queue what one sends to the other if both have come to it."""
        if sender is None or receiver is None:
            return
        source, target = states[sender], states[receiver]
        if source.sending == receiver and target.receiving == sender:
            ready = target.clock if source.clock < target.clock else source.clock
            heappush(queue, (carrier.turn(ready), sender, receiver, ready))

    def close(rank: int) -> None:
        """Leave the step in which a rank is if its messages are through; come to the next one that has any."""
        state = states[rank]
        while state.is_through:
            state.clock = carrier.add(rank, state.steps[state.at], state.over)
            state.open()
            # The last of two to come queues their message. This rank may be the last as sender and as receiver.
            meet(rank, state.sending)
            meet(state.receiving, rank)

    for state in states:
        state.open()
    for rank, state in enumerate(states):
        meet(rank, state.sending)  # all are in their first step, so each message is found by its sender, once
    for rank in range(len(states)):
        close(rank)  # a step without messages
    while queue:
        _, sender, receiver, ready = heappop(queue)
        source, target = states[sender], states[receiver]
        end = carrier.carry(sender, receiver, source.steps[source.at], target.steps[target.at], ready)
        source.sending = target.receiving = None
        for rank, state in ((sender, source), (receiver, target)):
            state.over = end if state.over < end else state.over
            close(rank)
    return states


def finish(steps: Sequence[Sequence[Step]], clocks: Sequence[T], carrier: Carrier[T]) -> list[T]:
    """Return when each rank has finished its steps.

    Args:
        steps, clocks, carrier: see `run`.

    Raises:
        ScheduleError: when the ranks wait for one another for ever; `prove` says where.
    """
    states = run(steps, clocks, carrier)
    for rank, state in enumerate(states):
        if state.step is not None:
            raise ScheduleError(f"rank {rank} waits for ever in its step {state.at}; prove the algorithm first")
    return [state.clock for state in states]
