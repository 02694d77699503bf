"""Whether a lowered schedule is right, before any message is sent.

    each unit of work once, on its rank     a forward, a whole backward or both halves, for every stage and microbatch
    each message has its two ends           and none is there that nobody needs
    order on each rank                      receive, forward, send; forward, backward; all backwards, sum, update
    order on each channel                   messages are received in the order in which they are sent
    no live buffer is reused                whatever is read again is not overwritten before
    no deadlock                             with sends that are buffered, and with sends that wait for their receivers

The ranks' programs are enough for all of it: no clock is needed, since programs and messages are the only order.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from nnmpi.schedule.instruction import BACKWARD, SENDS, TRANSFERS, Instruction, Kind
from nnmpi.schedule.live import peak_activations
from nnmpi.schedule.message import Channel, Message, message_of
from nnmpi.schedule.places import Places
from nnmpi.schedule.play import Play, Player
from nnmpi.schedule.schedule import Schedule

Buffers: TypeAlias = Callable[[Instruction], Hashable]
"""Names the buffer that an instruction writes: a receive what comes, F its output, B and I the input's gradient."""


def own_buffers(one: Instruction) -> Hashable:
    """Return a buffer for each result of each microbatch."""
    return one


@dataclass(frozen=True, slots=True)
class Checked:
    """What a right schedule does.

    Attributes:
        peak_activations: per rank, how many it keeps at most (of one stage and microbatch each).
        messages: how many there are.
    """

    peak_activations: tuple[int, ...]
    messages: int


def check(schedule: Schedule, buffers: Buffers = own_buffers) -> Checked:
    """Return what a lowered schedule does, if it is right.

    Args:
        buffers: where results are written; by default each has a buffer of its own.

    Raises:
        ScheduleError: says what is wrong, and shows the programs with the place marked.
    """
    places = Places(schedule)
    _check_work(schedule, places)
    _check_order(schedule, places)
    _check_channels(schedule, places)
    _check_buffers(schedule, places, buffers)
    for rendezvous in (False, True):
        _check_progress(schedule, places, rendezvous)
    return Checked(
        tuple(peak_activations(schedule, rank) for rank in range(schedule.ranks)),
        sum(one.kind in SENDS for one in places.all),
    )


# ---- each unit once ----


def _check_work(schedule: Schedule, places: Places) -> None:
    """Refuse instructions that are missing, doubled, on a strange rank, or of no use."""
    wanted = set(_wanted(schedule, places))
    for one, found in places.all.items():
        if one not in wanted:
            size = f"{schedule.stages} stages, {schedule.microbatches} microbatches"
            places.fail(f"{one} has no place in a schedule of {size}", found)
        for place in found:
            if place.rank != schedule.rank_of(one.stage):
                home = f"stage {one.stage} lives on rank {schedule.rank_of(one.stage)}"
                places.fail(f"{one} stands on rank {place.rank}, but {home}", [place])
        if len(found) > 1:
            places.fail(f"{one} is done {len(found)} times; everything is done once", found)
    for one in sorted(wanted - places.all.keys(), key=str):
        rank = schedule.rank_of(one.stage)
        if one.kind in TRANSFERS:
            message = message_of(one)
            other = message.receive if one.kind in SENDS else message.send
            places.fail(f"{one} is missing on rank {rank}: {other} has no partner", places.all.get(other, []))
        places.fail(f"{one} is missing on rank {rank}", [])


def _wanted(schedule: Schedule, places: Places) -> Iterator[Instruction]:
    """Yield all that a schedule must have; whether backwards are halved, and when updates are, is its choice."""
    trains = schedule.trains
    is_async = any(one.kind is Kind.STEP and one.microbatch is not None for one in places.all)
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            yield Kind.F.at(stage, m)
            if trains:
                is_whole = Kind.B.at(stage, m) in places
                is_halved = Kind.I.at(stage, m) in places or Kind.W.at(stage, m) in places
                kinds = (Kind.I, Kind.W) if is_halved and not is_whole else (Kind.B,)
                yield from (kind.at(stage, m) for kind in kinds)
            if schedule.is_cut(stage):
                for message in _messages(stage, m, trains):
                    yield from (message.send, message.receive)
        if trains:
            updates = range(schedule.microbatches) if is_async else (None,)
            yield from (kind.at(stage, update) for update in updates for kind in (Kind.REDUCE, Kind.STEP))


def _messages(stage: int, microbatch: int, trains: bool) -> Iterator[Message]:
    """Yield the messages over the cut behind a stage."""
    yield Message(False, stage, stage + 1, microbatch)
    if trains:
        yield Message(True, stage + 1, stage, microbatch)


# ---- order ----


def _check_order(schedule: Schedule, places: Places) -> None:
    """Refuse instructions that stand before what they need."""
    for rank in range(schedule.ranks):
        for one in schedule.instructions(rank):
            for needed in _needs(schedule, one):
                if needed in places and places[needed].at >= places[one].at:
                    places.fail(f"{one} does not stand behind {needed}, which it needs", [places[one], places[needed]])


def _needs(schedule: Schedule, one: Instruction) -> Iterator[Instruction]:
    """Yield what must be done on the same rank before an instruction, as far as it is there."""
    stage, m = one.stage, one.microbatch
    alone = schedule.ranks == 1  # then the neighbouring stages are here, and no message orders them
    if one.kind is Kind.F:
        yield Kind.RECV_ACT.at(stage, m)
        yield from [Kind.F.at(stage - 1, m)] * alone
    elif one.kind in (Kind.B, Kind.I):
        yield from (Kind.F.at(stage, m), Kind.RECV_GRAD.at(stage, m))
        yield from [Kind.B.at(stage + 1, m), Kind.I.at(stage + 1, m)] * alone
    elif one.kind is Kind.W:
        yield Kind.I.at(stage, m)
    elif one.kind is Kind.SEND_ACT:
        yield Kind.F.at(stage, m)
    elif one.kind is Kind.SEND_GRAD:
        yield from (Kind.B.at(stage, m), Kind.I.at(stage, m))
    elif one.kind is Kind.REDUCE:
        summed = range(schedule.microbatches) if m is None else (m,)
        yield from (kind.at(stage, each) for each in summed for kind in (Kind.B, Kind.W))
    elif one.kind is Kind.STEP:
        yield Kind.REDUCE.at(stage, m)


def _check_channels(schedule: Schedule, places: Places) -> None:
    """Refuse messages that are received in another order than they are sent."""
    ends: tuple[dict[Channel, list[Message]], ...] = ({}, {})
    for rank in range(schedule.ranks):
        for one in schedule.instructions(rank):
            if one.kind in TRANSFERS:
                message = message_of(one)
                ends[one.kind in SENDS].setdefault(message.channel(schedule.ranks), []).append(message)
    received, sent = ends
    for channel, messages in sent.items():
        for number, (out, into) in enumerate(zip(messages, received[channel], strict=True)):
            if out != into:
                where = f"message {number} from rank {channel[0]} to rank {channel[1]}"
                sentence = f"{where} is sent by {out.send}, but received by {into.receive}; both ends need one order"
                places.fail(sentence, [places[out.send], places[into.receive]])


# ---- buffers ----


def _check_buffers(schedule: Schedule, places: Places, buffers: Buffers) -> None:
    """Refuse a result that is written where something lies that is still to be read."""
    for rank in range(schedule.ranks):
        held: dict[Hashable, tuple[Instruction, Instruction]] = {}  # buffer -> who wrote it last, who reads it last
        for one in schedule.instructions(rank):
            if one.kind not in _READERS:
                continue
            buffer = buffers(one)
            if buffer in held:
                before, reader = held[buffer]
                if places[reader].at >= places[one].at:
                    sentence = (
                        f"{one} overwrites the buffer in which the result of {before} lies, before {reader} has read "
                        "it; give each microbatch a buffer of its own"
                    )
                    places.fail(sentence, [places[before], places[one], places[reader]])
            readers = [reader for reader in _reads(schedule, one) if reader in places]
            held[buffer] = one, max(readers, key=lambda reader: places[reader].at, default=one)


_READERS = {
    Kind.RECV_ACT: (Kind.F, *BACKWARD),
    Kind.RECV_GRAD: tuple(BACKWARD),
    Kind.F: (Kind.SEND_ACT, *BACKWARD),
    Kind.B: (Kind.SEND_GRAD,),
    Kind.I: (Kind.SEND_GRAD,),
}  # who reads, in the same stage, what an instruction has written


def _reads(schedule: Schedule, one: Instruction) -> Iterator[Instruction]:
    """Yield who may read what an instruction writes."""
    yield from (kind.at(one.stage, one.microbatch) for kind in _READERS[one.kind])
    if schedule.ranks == 1 and one.kind is Kind.F:
        yield from (kind.at(one.stage + 1, one.microbatch) for kind in _READERS[Kind.RECV_ACT])
    if schedule.ranks == 1 and one.kind in (Kind.B, Kind.I):
        yield from (kind.at(one.stage - 1, one.microbatch) for kind in _READERS[Kind.RECV_GRAD])


# ---- deadlock ----


def _check_progress(schedule: Schedule, places: Places, rendezvous: bool) -> None:
    """Refuse ranks that wait for one another for ever."""
    play = Play(schedule, lambda one: 0.0, rendezvous)
    if not play.stuck:
        return
    circle: list[Player] = []
    player = play.stuck[0]
    while player not in circle:
        circle.append(player)
        player = play.players[_partner(play, player, schedule.ranks)]
    circle = circle[circle.index(player) :]
    told = [f"rank {each.rank} in {play.waiting(each)[0]}" for each in circle]
    how = "when sends wait for their receivers" if rendezvous else "even when sends are buffered"
    marked = [places[one] for each in circle for one in play.waiting(each)[:1]]
    places.fail(f"deadlock {how}: {', '.join(told)}: each waits for the next, the last for the first", marked)


def _partner(play: Play, player: Player, ranks: int) -> int:
    """Return the rank that a stuck rank waits for first."""
    waiting = play.waiting(player)[0]
    sender, receiver, _ = message_of(waiting).channel(ranks)
    return receiver if waiting.kind in SENDS else sender
