"""What a pass through a pipeline was on one rank: seconds and messages."""

from dataclasses import dataclass, field

from nnmpi.schedule.instruction import Instruction


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
