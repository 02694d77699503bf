"""The engine that runs all ranks' steps without MPI, and the proof of a collective by it.

    rank 0   ..|--- to 1 ---|            a message begins when both its ends are ready (rendezvous)
    rank 1   ..|-- from 0 --|+++|        a step is over when its messages are, and the sum is added
    rank 2   |------- to 3 -----------|  then the rank comes to its next step

MPI does the same with long messages; short ones leave at once (`Engine.leaves`). Steps that pass a
proof, where all wait, cannot deadlock when MPI buffers short messages either. Messages are served
in the order in which they become ready, which is their order in a link's queue. A subclass gives a
message its effect and its duration: `PartialSums` works with values, in rounds; `duration` with
seconds.

In a proof a message carries, for each chunk, the count of each rank's contributions to it. At the
end each chunk on each rank must hold what the contract promises (in an all-reduce every rank's
contribution exactly once), with no message left over. A run on arrays of numbers would show a wrong
sum, but not the rank whose contribution is missing or doubled.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count as count_up
from typing import Any

from nnmpi.base.errors import ScheduleError, name_ranks
from nnmpi.comm.collective import (
    ALL_REDUCE,
    DIGIT_BITS,
    Algorithm,
    Chunks,
    Collective,
    Contract,
    Step,
    Steps,
    all_parts,
    as_collective,
    count,
    runs,
)


@dataclass(slots=True)
class RankState:
    """Progress of one rank.

    Attributes:
        steps: all its steps.
        clock: the beginning of its current step, in any ordered measure.
        over: the arrival of that step's last message so far.
        first: the first rank of its group, whose steps count from there.
        at: the number of that step; the number of steps at the end.
        sending: the receiver of the step's pending messages; None when they are complete.
        receiving: the sender of pending messages; None when they are complete.
    """

    steps: Sequence[Step]
    clock: Any
    over: Any
    first: int = 0
    at: int = -1
    sending: int | None = None
    receiving: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.at >= len(self.steps)

    @property
    def step(self) -> Step:
        """Its current step."""
        return self.steps[self.at]

    def open(self) -> None:
        """Enter the next step."""
        self.at += 1
        self.over = self.clock
        if not self.is_over:
            self.sending, self.receiving = (
                None if partner is None else partner + self.first
                for partner in (self.step.to, self.step.from_)
            )


class Engine:
    """Walks through all ranks' steps.

    Attributes:
        states: of the ranks in the present run.
    """

    states: list[RankState]

    def carry(self, sender: int, receiver: int, step: Step, ready: Any) -> Any:
        """Carry the messages of the sender's step, and return their arrival.

        Calls come in the order of `turn`.

        Args:
            ready: the time at which the sender had entered the step, and unless the messages leave
                at once, the receiver its own.
        """
        raise NotImplementedError

    def leaves(self, step: Step) -> bool:
        """Return whether a step's messages leave at once: their sender waits for nobody."""
        return False

    def turn(self, ready: Any) -> Any:
        """Return the key that orders ready messages; ties go to the lower sender."""
        return ready

    def add(self, rank: int, step: Step, over: Any) -> Any:
        """Return the time at which a rank has added this step's arrivals, complete at `over`."""
        return over

    def run(self, steps: Sequence[Sequence[Step]], clocks: Sequence[Any]) -> list[RankState]:
        """Run until no message is ready, and return the state of each rank.

        Args:
            steps: of each rank of a group.
            clocks: the start of each rank, of one group or of several.

        Raises:
            ScheduleError: for a step with a partner outside the ranks.
        """
        _check_partners(steps)
        size = len(steps)
        self.states = [
            RankState(steps[rank % size], clock, clock, rank - rank % size)
            for rank, clock in enumerate(clocks)
        ]
        run = _EngineRun(self)
        for act in (run.enter, run.advance):
            for rank in range(len(self.states)):
                act(rank)
        run.finish()
        return self.states


def _check_partners(steps: Sequence[Sequence[Step]]) -> None:
    """Refuse a step with a partner outside of the ranks, and with the rank itself.

    Raises:
        ScheduleError: with the step.
    """
    size = len(steps)
    for rank, local in enumerate(steps):
        for number, step in enumerate(local):
            for partner in (step.to, step.from_):
                if partner is not None and (partner == rank or not 0 <= partner < size):
                    there = f"rank {partner}, but the ranks are 0..{size - 1}"
                    who = "itself" if partner == rank else there
                    raise ScheduleError(f"rank {rank}, step {number} talks to {who}")


class _EngineRun:
    """One run of an engine: its messages, and how ranks go on by them.

    Args:
        engine: says when messages are ready, and how long they take; its states go on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._states = engine, engine.states
        # messages to be carried: (turn, sender, number, receiver, ready, step)
        self._queue: list[tuple[Any, int, int, int, Any, Step]] = []
        self._numbers = count_up()
        # by (sender, receiver): messages that were posted and not received; arrivals
        self._posted: Counter[tuple[int, int]] = Counter()
        self._arrived: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)

    def _post(self, sender: int, receiver: int, ready: Any) -> None:
        self._posted[sender, receiver] += 1
        turn, step = self._engine.turn(ready), self._states[sender].step
        heappush(self._queue, (turn, sender, next(self._numbers), receiver, ready, step))

    def _post_if_met(self, sender: int | None, receiver: int | None) -> None:
        """Post the messages between two ranks if both are in the step that exchanges them."""
        if sender is None or receiver is None or self._posted[sender, receiver]:
            return
        source, target = self._states[sender], self._states[receiver]
        if source.sending == receiver and target.receiving == sender:
            self._post(sender, receiver, max(source.clock, target.clock))

    def enter(self, rank: int) -> None:
        """Enter a rank's next step; its messages may leave at once."""
        state = self._states[rank]
        state.open()
        if state.sending is not None and self._engine.leaves(state.step):
            self._post(rank, state.sending, state.clock)
            state.sending = None

    def advance(self, rank: int) -> None:
        """Take a rank through its steps as far as their messages are complete."""
        state = self._states[rank]
        while not state.is_over:
            source = state.receiving
            if source is not None and self._arrived[source, rank]:
                state.over = max(state.over, self._arrived[source, rank].popleft())
                self._posted[source, rank] -= 1
                state.receiving = None
            if state.sending is not None or state.receiving is not None:
                # the later of two ranks posts their message
                self._post_if_met(rank, state.sending)
                self._post_if_met(state.receiving, rank)
                return
            state.clock = self._engine.add(rank, state.step, state.over)
            self.enter(rank)

    def finish(self) -> None:
        """Carry messages as long as any is ready."""
        engine = self._engine
        while self._queue:
            _, sender, _, receiver, ready, step = heappop(self._queue)
            end = engine.carry(sender, receiver, step, ready)
            self._arrived[sender, receiver].append(end)
            if not engine.leaves(step):
                source = self._states[sender]
                source.sending, source.over = None, max(source.over, end)
            for rank in (sender, receiver):
                self.advance(rank)


# ---- the proof ----


@dataclass(slots=True)
class ProvedMessage:
    """One message of a proof.

    Attributes:
        sender, receiver: the ranks.
        chunks: the chunks that it carries.
        reduce: whether they are added at the receiver.
        clock: (rounds, chunks) along the path that leads to its end.
        after: the parts in the receiver's chunks after the message.
    """

    sender: int
    receiver: int
    chunks: Chunks
    reduce: bool
    clock: tuple[int, int]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Proof:
    """Rounds and messages of a proved collective.

    Attributes:
        size: number of ranks.
        rounds: rounds until the last rank is done; every message takes one, and links are not
            shared.
        sent: the messages of all ranks, in the order of their beginnings.
    """

    size: int
    rounds: int
    sent: tuple[ProvedMessage, ...]

    def __str__(self) -> str:
        return f"proved for {self.size} ranks: {self.rounds} rounds, {self.messages} messages"

    @property
    def messages(self) -> int:
        """How many messages are sent (neighbouring chunks travel as one)."""
        return sum(len(runs(item.chunks)) for item in self.sent)

    @property
    def chunk_transfers(self) -> int:
        """How many chunks are sent."""
        return sum(len(item.chunks) for item in self.sent)


def prove(algorithm: Collective | Algorithm, size: int, contract: Contract | None = None) -> Proof:
    """Prove that a collective leaves every rank with the result that its contract promises.

    Args:
        algorithm: a collective, or a bare function of (rank, size).
        size: number of ranks, at least 1.
        contract: the contract of a bare function, an all-reduce by default; a `Collective` has its
            own.

    Raises:
        ScheduleError: names rank, step and chunk of a fault: a contribution that is missing or
            counted twice, a message without receiver or sender, chunks that differ at its two
            ends, a deadlock, a chunk overwritten while it is sent.

    Example:
        >>> from nnmpi.comm.prove import prove
        >>> from nnmpi.comm.algorithms.ring import ring
        >>> print(prove(ring, size=5))  # a wrong collective raises an error with rank and chunk
        proved for 5 ranks: 8 rounds, 40 messages
    """
    if size < 1:
        raise ScheduleError(f"there is nothing to prove for {size} ranks; give at least 1")
    collective = as_collective(algorithm, contract)
    return prove_steps([collective(rank, size) for rank in range(size)], collective.contract)


@cache
def proved_steps(collective: Collective, size: int) -> tuple[Steps, ...]:
    """Return a collective's steps by rank after proving them, once for each number of ranks.

    Real ranks run exactly the proved steps, so that they cannot hang. A user's function called a
    second time may return other steps.

    Raises:
        ScheduleError: see `prove`.
    """
    steps = tuple(collective(rank, size) for rank in range(size))
    try:
        prove_steps(steps, collective.contract)
    except ScheduleError as error:
        raise ScheduleError(
            f"{collective.name} with {size} ranks is not a correct {collective.contract.name}:"
            f" {error}"
        ) from None
    return steps


def prove_steps(steps: Sequence[Sequence[Step]], contract: Contract = ALL_REDUCE) -> Proof:
    """Prove explicit steps, one sequence per rank; see `prove`."""
    chunks = contract.chunks(len(steps))
    for rank, local in enumerate(steps):
        for index, step in enumerate(local):
            for chunk in (*step.send, *step.recv):
                if not 0 <= chunk < chunks:
                    raise ScheduleError(
                        f"rank {rank}, step {index} names chunk {chunk}, but {len(steps)} ranks"
                        f" have the chunks 0..{chunks - 1}"
                    )
    sums = PartialSums(contract, len(steps))
    states = sums.run(steps, [(0, 0)] * len(steps))
    _check_finished(states)
    sums.check()
    return Proof(len(steps), max(state.clock[0] for state in states), tuple(sums.sent))


class PartialSums(Engine):
    """Messages as values, one round each: the contributions in each chunk of each rank.

    Contributions are integers with a digit per rank (see `collective`), so that adding chunks is
    adding integers. A local fault raises at once; `check` compares the end with the contract. The
    clock counts (rounds, chunks); adding takes no time.

    Attributes:
        held: by rank and chunk, the parts in it; 0 for an empty chunk.
        written: by rank and chunk, the step that changed it last.
        arrived: by rank, the message and parts received in this step.
        sent: all messages so far.
    """

    def __init__(self, contract: Contract, size: int) -> None:
        self.contract, self.size = contract, size
        # with the room added, the top bit of a digit is set if it is more than `contract.most`
        top = 1 << DIGIT_BITS - 1
        ones = all_parts(size)
        self._room, self._tops = (ones * item for item in (top - 1 - contract.most, top))
        self.sent: list[ProvedMessage] = []
        chunks = range(contract.chunks(size))
        self.held = [
            [contract.begins(rank, chunk, size) or 0 for chunk in chunks] for rank in range(size)
        ]
        self.written: list[dict[int, int]] = [{} for _ in range(size)]
        self.arrived: dict[int, tuple[ProvedMessage, tuple[int, ...]]] = {}

    def carry(
        self, sender: int, receiver: int, step: Step, ready: tuple[int, int]
    ) -> tuple[int, int]:
        """Carry a message if its chunks are those that the receiver expects."""
        into = self.states[receiver].step
        if tuple(step.send) != tuple(into.recv):
            raise ScheduleError(
                f"{self._name(sender)} sends chunks {list(step.send)} to"
                f" {self._name(receiver)}, which expects chunks {list(into.recv)}"
            )
        parts = tuple(self.held[sender][chunk] for chunk in step.send)
        for chunk, held in zip(step.send, parts, strict=True):
            if not held:
                raise ScheduleError(
                    f"{self._name(sender)} sends chunk {chunk} to rank {receiver} before it has"
                    " any data"
                )
        clock = ready[0] + 1, ready[1] + len(step.send)
        message = ProvedMessage(sender, receiver, step.send, into.reduce, clock)
        self.arrived[receiver] = message, parts
        self.sent.append(message)
        return clock

    def turn(self, ready: tuple[int, int]) -> int:
        """Return the round, the first number of the clock."""
        return ready[0]

    def add(self, rank: int, step: Step, over: tuple[int, int]) -> tuple[int, int]:
        """Store the arrivals when both messages of the step are complete."""
        if rank in self.arrived:
            message, everything = self.arrived.pop(rank)
            torn = sorted(set(step.send) & set(step.recv))
            if torn and not step.reduce:
                # `execution` receives into scratch before it adds, but in place when it replaces
                raise ScheduleError(
                    f"{self._name(rank)} sends chunk {torn[0]} to rank {step.to} while rank"
                    f" {step.from_} overwrites it"
                )
            message.after = tuple(map(partial(self._store, rank, step), step.recv, everything))
        return over

    def _store(self, rank: int, step: Step, chunk: int, parts: int) -> int:
        if step.reduce and not self.held[rank][chunk]:
            raise ScheduleError(f"{self._adds(rank, step, chunk)}, but has no data in it yet")
        total = self.held[rank][chunk] + parts if step.reduce else parts
        if total + self._room & self._tops:
            most = self.contract.most
            often = [other for other in range(self.size) if count(total, other) > most]
            times = "twice" if most == 1 else f"more than {most} times"
            raise ScheduleError(
                f"{self._adds(rank, step, chunk)} and counts {name_ranks(often)} {times}"
            )
        self.held[rank][chunk] = total
        self.written[rank][chunk] = self.states[rank].at
        return total

    def check(self) -> None:
        """Refuse a chunk that does not end as the contract says."""
        for rank, held in enumerate(self.held):
            for chunk, parts in enumerate(held):
                expected = self.contract.ends(rank, chunk, self.size)
                if expected is not None and parts != expected:
                    last = self.written[rank].get(chunk)
                    when = "never written" if last is None else f"last written in step {last}"
                    difference = _difference(parts, expected, self.size)
                    raise ScheduleError(f"rank {rank} ends {difference} in chunk {chunk} ({when})")

    def _adds(self, rank: int, step: Step, chunk: int) -> str:
        return f"{self._name(rank)} adds chunk {chunk} from rank {step.from_}"

    def _name(self, rank: int) -> str:
        return named_step(rank, self.states[rank])


def named_step(rank: int, state: RankState) -> str:
    """Return a rank's current step as text."""
    return f"rank {rank}, step {state.at}"


def _difference(parts: int, expected: int, size: int) -> str:
    """Return the missing or superfluous ranks as text."""
    missing = [rank for rank in range(size) if count(parts, rank) < count(expected, rank)]
    if missing:
        return f"without the part of {name_ranks(missing)}"
    often = [rank for rank in range(size) if count(parts, rank) > count(expected, rank)]
    return f"with the part of {name_ranks(often)} too often"


def _check_finished(states: Sequence[RankState]) -> None:
    """Refuse a deadlock: first report a message that can never come, else the circle of waits."""
    stuck = [rank for rank, state in enumerate(states) if not state.is_over]
    for rank in stuck:
        state = states[rank]
        for partner, end, verb in (
            (state.sending, "from_", "receives from"),
            (state.receiving, "to", "sends to"),
        ):
            if partner is None:
                continue
            other = states[partner]
            if all(getattr(step, end) != rank for step in other.steps[other.at :]):
                wait = _wait(rank, state, end == "from_")
                raise ScheduleError(
                    f"unmatched message: {wait}, which has no step left that {verb} rank {rank}"
                )
    if stuck:
        path, rank = [], stuck[0]
        while rank not in path:  # follow the waits until a rank comes twice
            path.append(rank)
            state = states[rank]
            awaited = state.receiving if state.sending is None else state.sending
            assert awaited is not None
            rank = awaited
        circle = path[path.index(rank) :]
        waits = ", ".join(
            _wait(item, states[item], states[item].sending is not None) for item in circle
        )
        raise ScheduleError(f"deadlock: {waits}")


def _wait(rank: int, state: RankState, sends: bool) -> str:
    step, where = state.step, f"{named_step(rank, state)} waits"
    if sends:
        return f"{where} to send chunks {list(step.send)} to rank {step.to}"
    return f"{where} for chunks {list(step.recv)} from rank {step.from_}"
