"""What a pass through a pipeline was on one rank: seconds, messages, and what each instruction did to memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nnmpi.backend.allocations import AllocationCount
from nnmpi.backend.memory_pool import ChunkPart, ChunkParts
from nnmpi.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind, parts
from nnmpi.schedule.schedule import Schedule

ENDS_FLIGHT = (Kind.B, Kind.I)  # after which a stage keeps nothing of a microbatch's ends


class InstructionBytes(NamedTuple):
    """What an instruction did to a rank's memory, in bytes.

    Attributes:
        net: that are there more after it.
        peak: the most that were there more.
        sent: of the message that it sent.
        held: of its arrays, which are kept until the next message of its kind is sent.
        alone: of these, what nothing else keeps.
    """

    net: int
    peak: int
    sent: int = 0
    held: int = 0
    alone: int = 0


@dataclass
class PassReport:
    """What one pass through the pipeline was on this rank.

    Attributes:
        microbatches: how many went through.
        samples: what was computed, and how many seconds each took.
        compute_s: seconds in which it computed.
        wait_s: seconds in which it waited for what other stages send: the bubble, and messages that take their time.
        transfer_s: seconds in which it sent, or waited for its last messages to leave.
        sent_bytes: bytes of activations and gradients that it sent.
        messages: how many arrays that were.
        peak_live: the most microbatches whose activations it held at once.
        total_s: from the first instruction to the last.
        bytes: what each instruction did to memory, where that is counted.
        count: where; its peak is that of all that was done since the pass.
        begin_bytes: counted before the first one.
    """

    microbatches: int = 0
    samples: list[tuple[Instruction, float]] = field(default_factory=list)
    compute_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0
    messages: int = 0
    peak_live: int = 0
    total_s: float = 0.0
    bytes: dict[Instruction, InstructionBytes] = field(default_factory=dict)
    count: AllocationCount | None = None
    begin_bytes: int = 0


_NOTHING = InstructionBytes(0, 0)


@dataclass(frozen=True)
class StageBytes:
    """What the instructions of stages do to memory for microbatches of so many rows.

    Attributes:
        units: by kind, stage, and whether it is the stage's first one that adds gradients. Of a forward `sent` is what
            goes to the next stage, and `alone` what of it nothing else keeps; of a backward likewise.
        begin: what there is of two microbatches before the first one.
        after: the most after the last one, on each stage's rank.
        recorded: what the same instructions, where they are recorded, take of the recordings' memory: so many bytes,
            or, negative, what is given back: ~i for the i-th that this microbatch took in this stage.
    """

    units: Mapping[tuple[Kind, int, bool], InstructionBytes]
    begin: int
    after: tuple[int, ...]
    recorded: Mapping[tuple[Kind, int, bool], Sequence[int]] = field(default_factory=dict)


def most_bytes(schedule: Schedule, rank: int, stages: Sequence[StageBytes]) -> int:
    """Return the most bytes that a rank's activations take in a pass.

    Args:
        schedule: with messages, see `schedule.lower`.
        rank: whose.
        stages: what each microbatch does.
    """
    done, flying = set[tuple[Kind, int]](), set[tuple[int, int | None]]()
    leaving: dict[tuple[Kind, int], tuple[int | None, InstructionBytes]] = {}
    coming: dict[tuple[Kind, int], list[int]] = {}
    for one in schedule.instructions(rank):
        if one.kind in RECEIVES and one.microbatch is not None:
            coming.setdefault((one.kind, one.stage), []).append(one.microbatch)

    def expect(kind: Kind, stage: int) -> int:
        waiting = coming[kind, stage]
        if not waiting:
            return 0
        number = waiting.pop(0)
        sent = (Kind.SEND_ACT, stage - 1, False) if kind is Kind.RECV_ACT else (Kind.SEND_GRAD, stage + 1, False)
        return stages[number].units[sent].sent

    begin = sum(each.begin for each in stages) // 2
    live = most = begin + sum(expect(*channel) for channel in coming)
    for item in schedule.programs[rank]:
        for one in parts(item):
            if one.kind in RECEIVES:
                live += expect(one.kind, one.stage)
            elif one.microbatch is not None and one.kind in COMPUTE | SENDS:
                place, flight = (one.kind, one.stage), (one.stage, one.microbatch)
                taken = stages[one.microbatch].units[*place, place not in done or one.kind in SENDS]
                done.add(place)
                most, live = max(most, live + taken.peak), live + taken.net
                if one.kind in SENDS:
                    number, before = leaving.get(place, (None, _NOTHING))
                    live -= before.alone if (one.stage, number) in flying else before.held
                    leaving[place] = one.microbatch, taken
                elif one.kind is Kind.F:
                    flying.add(flight)
                elif one.kind in ENDS_FLIGHT:
                    flying.discard(flight)
                    number, message = leaving.get((Kind.SEND_ACT, one.stage), (None, _NOTHING))
                    live += message.held - message.alone if number == one.microbatch else 0
            most = max(most, live)
    return max(most, *(stages[0].after[stage] for stage in schedule.stages_of(rank)))


def recorded_bytes(schedule: Schedule, rank: int, stages: Sequence[StageBytes]) -> int:
    """Return the memory of a rank's recorded pass, given the same as `most_bytes`; 0 where none is recorded."""
    pool, done = ChunkParts(), set[tuple[Kind, int]]()
    taken: dict[tuple[int, int], list[ChunkPart]] = {}
    for one in schedule.instructions(rank):
        if one.kind not in COMPUTE or one.microbatch is None:
            continue
        place, own = (one.kind, one.stage), taken.setdefault((one.stage, one.microbatch), [])
        for event in stages[one.microbatch].recorded.get((*place, place not in done), ()):
            if event < 0:
                pool.returned.append(own[~event])
            else:
                own.append(pool.take(event))
        done.add(place)
    return pool.size_bytes
