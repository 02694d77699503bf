"""Proof, without MPI, that a collective is right for a number of ranks.

All ranks' steps are worked off together as values (`engine`): a message carries, for each chunk, the
set of ranks whose parts have been added up in it. At the end each chunk on each rank must hold what the contract
promises (in an all-reduce every rank's part exactly once), with no message left over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from nnmpi.comm.agreement import name_ranks
from nnmpi.comm.collective import (
    ALL_REDUCE,
    DIGIT_BITS,
    Algorithm,
    Collective,
    Contract,
    Step,
    as_collective,
    count,
    runs,
)
from nnmpi.errors import ScheduleError

# Goes through all ranks' steps against a clock: what happens when, message by message.
#
#     rank 0   |--- message to 1 ---|            a message begins when both its ends have come to it (rendezvous)
#     rank 1   ..|-- from 0 --------|+++|        its step is over when its messages are, and the sum is added (+)
#     rank 2   |------- to 3 -------------|      then the rank comes to its next step
#
# MPI treats long messages so; what gets through here cannot deadlock when MPI buffers short ones.
#
# Messages are taken in the order in which they become ready, which is the order in which they queue for a link. The
# clock may be seconds (`simulate`) or rounds (`prove`, `render`).


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


State: TypeAlias = RankState[int]  # its clock counts rounds: every message takes one


@dataclass(frozen=True, slots=True)
class Proof:
    """What a proved collective does.

    Attributes:
        size: number of ranks, and of chunks.
        rounds: time until the last rank is done, when every message takes one round and none is in another's way.
        messages: messages sent by all ranks together (neighbouring chunks travel as one).
        chunk_transfers: chunks sent by all ranks together.
    """

    size: int
    rounds: int
    messages: int
    chunk_transfers: int


def prove(algorithm: Collective | Algorithm, size: int, contract: Contract | None = None) -> Proof:
    """Return the proof that `algorithm` leaves every rank with what its contract promises.

    Args:
        algorithm: gives the steps of each rank.
        size: number of ranks, at least 1.
        contract: of a bare function of (rank, size), which is an all-reduce by default; a `Collective` has its own.

    Raises:
        ScheduleError: names rank, step and chunk of a fault: a part that is missing or counted twice, a message that
            nobody receives or sends, chunks that differ at its two ends, a deadlock, a chunk overwritten while it is
            sent.
    """
    if size < 1:
        raise ScheduleError(f"there is nothing to prove for {size} ranks; give at least 1")
    collective = as_collective(algorithm, contract)
    return prove_steps([collective(rank, size) for rank in range(size)], collective.contract)


@cache
def check_proof(collective: Collective, size: int) -> None:
    """Prove a collective, once for each number of ranks: what is to run on real ranks must not hang there.

    Raises:
        ScheduleError: see `prove`.
    """
    steps = [collective(rank, size) for rank in range(size)]
    try:
        prove_steps(steps, collective.contract)
    except ScheduleError as error:
        raise ScheduleError(f"{collective.name} with {size} ranks is no {collective.contract.name}: {error}") from None


def prove_steps(steps: Sequence[Sequence[Step]], contract: Contract = ALL_REDUCE) -> Proof:
    """Return the proof for steps that are given outright, one sequence per rank. See `prove`."""
    for rank, own in enumerate(steps):
        for index, step in enumerate(own):
            _check_step(f"rank {rank}, step {index}", step, len(steps))
    sums = PartialSums(contract, len(steps))
    states = run(steps, [0] * len(steps), sums)
    _check_finished(states)
    sums.check()
    return Proof(
        size=len(steps),
        rounds=max(state.clock for state in states),
        messages=sum(len(runs(step.send)) for own in steps for step in own),
        chunk_transfers=sum(len(step.send) for own in steps for step in own),
    )


class PartialSums:
    """Carries messages as values, one round each: for every chunk on every rank, the ranks whose parts are in it.

    The sets of ranks are integers with a digit per rank (see `collective`), so that adding up chunks is adding
    integers. What is wrong on the spot raises at once; `check` judges what is left at the end.

    Attributes:
        held: by rank and chunk, the parts that are in it; 0 where nothing is.
        written: by rank and chunk, the step that changed it last.
        at: by rank, the step in which it is.
        arrived: by rank, the parts that have come in this step, chunk by chunk.
    """

    def __init__(self, contract: Contract, size: int) -> None:
        self.contract, self.size = contract, size
        self.held = [[contract.begins(rank, chunk, size) or 0 for chunk in range(size)] for rank in range(size)]
        self.written: list[dict[int, int]] = [{} for _ in range(size)]
        self.at = [0] * size
        self.arrived: list[tuple[int, ...]] = [()] * size

    def carry(self, sender: int, receiver: int, out: Step, into: Step, ready: int) -> int:
        """Take a message along if it is what the receiver expects."""
        if tuple(out.send) != tuple(into.recv):
            raise ScheduleError(
                f"{self._name(sender)} sends chunks {list(out.send)} to {self._name(receiver)}, which expects chunks "
                f"{list(into.recv)}"
            )
        parts = tuple(self.held[sender][chunk] for chunk in out.send)
        if 0 in parts:
            empty = out.send[parts.index(0)]
            raise ScheduleError(f"{self._name(sender)} sends chunk {empty} to rank {receiver} before anything is in it")
        self.arrived[receiver] = parts
        return ready + 1

    def turn(self, ready: int) -> int:
        """Return the round."""
        return ready

    def add(self, rank: int, step: Step, over: int) -> int:
        """Store what came, when both messages of the step are through: adding takes no time here."""
        for chunk, parts in zip(step.recv, self.arrived[rank], strict=True):
            self._store(rank, step, chunk, parts)
        self.at[rank] += 1
        self.arrived[rank] = ()
        return over

    def _store(self, rank: int, step: Step, chunk: int, parts: int) -> None:
        what = f"{self._name(rank)} adds chunk {chunk} from rank {step.from_}"
        if step.reduce and not self.held[rank][chunk]:
            raise ScheduleError(f"{what} to nothing")
        total = self.held[rank][chunk] + parts if step.reduce else parts
        most = self.contract.most
        often = [each for each in _members(total) if count(total, each) > most]
        if often:
            times = "twice" if most == 1 else f"more than {most} times"
            raise ScheduleError(f"{what} and counts {name_ranks(often)} {times}")
        self.held[rank][chunk] = total
        self.written[rank][chunk] = self.at[rank]

    def check(self) -> None:
        """Refuse a chunk that at the end is not what the contract says."""
        for rank, held in enumerate(self.held):
            for chunk, parts in enumerate(held):
                wanted = self.contract.ends(rank, chunk, self.size)
                if wanted is not None and parts != wanted:
                    last = self.written[rank].get(chunk)
                    when = "never written" if last is None else f"last written in step {last}"
                    difference = _difference(parts, wanted, self.size)
                    raise ScheduleError(f"rank {rank} ends {difference} in chunk {chunk} ({when})")

    def _name(self, rank: int) -> str:
        return f"rank {rank}, step {self.at[rank]}"


def _members(parts: int) -> list[int]:
    """Return the ranks whose parts are in."""
    return [rank for rank in range(-(-parts.bit_length() // DIGIT_BITS)) if count(parts, rank)]


def _difference(parts: int, wanted: int, size: int) -> str:
    """Return what is missing, or too much, in words."""
    missing = [rank for rank in range(size) if count(parts, rank) < count(wanted, rank)]
    if missing:
        return f"without the part of {name_ranks(missing)}"
    return f"with the part of {name_ranks([r for r in range(size) if count(parts, r) > count(wanted, r)])} too often"


def _check_step(where: str, step: Step, size: int) -> None:
    """Refuse a step that is wrong whatever the other ranks do."""
    for chunk in (*step.send, *step.recv):
        if not 0 <= chunk < size:
            raise ScheduleError(f"{where} names chunk {chunk}, but {size} ranks have the chunks 0..{size - 1}")
    torn = sorted(set(step.send) & set(step.recv))
    if torn and not step.reduce:  # what is added waits in scratch until the send is over; what replaces does not
        raise ScheduleError(f"{where} sends chunk {torn[0]} to rank {step.to} while rank {step.from_} overwrites it")


def _check_finished(states: Sequence[State]) -> None:
    """Refuse ranks that wait for ever: first for a message that can never come, else for one another."""
    stuck = [rank for rank, state in enumerate(states) if state.step is not None]
    for rank in stuck:
        _check_wanted(rank, states)
    if stuck:
        raise ScheduleError(f"deadlock: {_circle(stuck[0], states)}")


def _check_wanted(rank: int, states: Sequence[State]) -> None:
    """Refuse a message that the other end has no step for, now or later."""
    state = states[rank]
    step = state.step
    assert step is not None
    if state.sending is not None:
        other = states[state.sending]
        if all(later.from_ != rank for later in other.steps[other.at :]):
            raise ScheduleError(
                f"unmatched message: rank {rank}, step {state.at} sends chunks {list(step.send)} to rank {step.to}, "
                f"which has no step left that receives from rank {rank}"
            )
    if state.receiving is not None:
        other = states[state.receiving]
        if all(later.to != rank for later in other.steps[other.at :]):
            raise ScheduleError(
                f"unmatched message: rank {rank}, step {state.at} waits for chunks {list(step.recv)} from rank "
                f"{step.from_}, which has no step left that sends to rank {rank}"
            )


def _circle(rank: int, states: Sequence[State]) -> str:
    """Follow who waits for whom until a rank comes twice, and tell that circle."""
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        state = states[rank]
        awaited = state.receiving if state.sending is None else state.sending
        assert awaited is not None
        rank = awaited
    return ", ".join(_wait(each, states[each]) for each in path[path.index(rank) :])


def _wait(rank: int, state: State) -> str:
    step = state.step
    assert step is not None
    if state.sending is None:
        return f"rank {rank}, step {state.at} waits for chunks {list(step.recv)} from rank {step.from_}"
    return f"rank {rank}, step {state.at} waits to send chunks {list(step.send)} to rank {step.to}"
