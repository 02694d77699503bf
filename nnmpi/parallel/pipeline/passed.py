"""What a pass through a pipeline was on one rank: seconds, messages, and what each instruction did to memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nnmpi.backend.allocations import AllocationCount
from nnmpi.schedule.instruction import Instruction


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
