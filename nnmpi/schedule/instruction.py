"""What one rank of a pipeline does at one moment, as a value that can be compared, printed and read back.

    2F0             stage 2, forward of microbatch 0
    3RECV_GRAD1     stage 3 gets the gradient of its output of microbatch 1
    0REDUCE         stage 0, gradients of the whole step

An instruction's stage is the stage, on the rank that executes it, that it is done for.

A message between two stages has two transfers as its ends:

    stage 1, rank 1:  1SEND_ACT0    ----  activation of microbatch 0  --->    2RECV_ACT0     stage 2, rank 2
    stage 1, rank 1:  1RECV_GRAD0   <---  gradient of microbatch 0  -----     2SEND_GRAD0    stage 2, rank 2

Messages of one sort from one rank to another arrive in the order in which they were sent: they make a channel.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from nnmpi.errors import ScheduleError


class Kind(StrEnum):
    """What is done for stage s and microbatch m.

    F           the forward of s on m; in the last stage with the loss
    B           the whole backward of s on m: gradients of its input and of its weights
    I           the first half of B: the gradient of the input, which the stage before waits for
    W           the second half of B: the gradients of the weights, which nobody waits for
    SEND_ACT    send the output of s to s+1
    RECV_ACT    get the input of s from s-1
    SEND_GRAD   send the gradient of the input of s to s-1
    RECV_GRAD   get the gradient of the output of s from s+1
    REDUCE      the gradients of s are final: begin their sum over the replicas, and go on at once
    STEP        wait for that sum, and update the weights of s

    REDUCE and STEP have no microbatch where they are of all microbatches together.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the name that the zero-bubble paper's readers know
    W = "W"
    SEND_ACT = "SEND_ACT"
    RECV_ACT = "RECV_ACT"
    SEND_GRAD = "SEND_GRAD"
    RECV_GRAD = "RECV_GRAD"
    REDUCE = "REDUCE"
    STEP = "STEP"

    def at(self, stage: int, microbatch: int | None = None) -> "Instruction":
        """Return the instruction of this kind: `Kind.F.at(2, 0)` is "2F0"."""
        return Instruction(self, stage, microbatch)


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_ACT, Kind.SEND_GRAD})
RECEIVES = frozenset({Kind.RECV_ACT, Kind.RECV_GRAD})
TRANSFERS = SENDS | RECEIVES

_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d*)", re.ASCII)


@dataclass(frozen=True, order=True, slots=True)
class Instruction:
    """One thing to do.

    Attributes:
        kind: what.
        stage: for which stage, 0 being the one that gets the data.
        microbatch: for which microbatch; None for REDUCE and STEP of all microbatches together.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        """Return the text form, such as "2F0"."""
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        """Return the instruction whose text form this is.

        Raises:
            ScheduleError: for a text that is none.
        """
        found = _TEXT.fullmatch(text)
        if found is None or found[2] not in Kind.__members__:
            kinds = " ".join(Kind)
            raise ScheduleError(f"{text!r} is no instruction; write stage, kind, microbatch like 2F0 (kinds: {kinds})")
        return cls(Kind(found[2]), int(found[1]), int(found[3]) if found[3] else None)


@dataclass(frozen=True, slots=True)
class Together:
    """Transfers that are posted together and waited for together, such as a send to and a receive from one neighbour.

    Raises:
        ScheduleError: for no parts, or a part that is no transfer.
    """

    parts: tuple[Instruction, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be posted."""
        wrong = [part for part in self.parts if part.kind not in TRANSFERS]
        if wrong or not self.parts:
            what = f"{wrong[0]} is none" if wrong else "there is none"
            raise ScheduleError(f"only transfers are posted together, but {what}")

    def __str__(self) -> str:
        """Return the text form, such as "(0SEND_ACT1 0RECV_GRAD0)"."""
        return f"({' '.join(map(str, self.parts))})"


Item: TypeAlias = Instruction | Together
"""What stands in a program."""


def parts(item: Item) -> tuple[Instruction, ...]:
    """Return the instructions of an item: itself, or those that are posted together."""
    return item.parts if isinstance(item, Together) else (item,)


Channel: TypeAlias = tuple[int, int, bool]
"""(sending rank, receiving rank, is gradient)."""


@dataclass(frozen=True, order=True, slots=True)
class Message:
    """What goes over one cut between neighbouring stages.

    Attributes:
        is_gradient: whether it goes backward.
        sender: the stage that sends it.
        receiver: the stage that gets it.
        microbatch: of which microbatch it is.
    """

    is_gradient: bool
    sender: int
    receiver: int
    microbatch: int | None

    @property
    def send(self) -> Instruction:
        """The sender's end."""
        return Instruction(Kind.SEND_GRAD if self.is_gradient else Kind.SEND_ACT, self.sender, self.microbatch)

    @property
    def receive(self) -> Instruction:
        """The receiver's end."""
        return Instruction(Kind.RECV_GRAD if self.is_gradient else Kind.RECV_ACT, self.receiver, self.microbatch)

    def channel(self, ranks: int) -> Channel:
        """Return the channel that keeps it in order with others."""
        return self.sender % ranks, self.receiver % ranks, self.is_gradient


def message_of(transfer: Instruction) -> Message:
    """Return the message that a transfer is an end of.

    Raises:
        ValueError: for another kind of instruction.
    """
    if transfer.kind not in TRANSFERS:
        raise ValueError(f"{transfer} is no transfer")
    is_gradient = transfer.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD)
    there = transfer.stage + (1 if transfer.kind in (Kind.SEND_ACT, Kind.RECV_GRAD) else -1)
    ends = (transfer.stage, there) if transfer.kind in SENDS else (there, transfer.stage)
    return Message(is_gradient, *ends, transfer.microbatch)


PAPER_UNITS: Mapping[Kind, int] = MappingProxyType({Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1})
"""What things take in the figures of the papers, and wherever no better is known: a whole backward takes two, since it
multiplies two matrices (for inputs, for weights) where a forward multiplies one."""
