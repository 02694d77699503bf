"""What one rank of a pipeline does at one moment, as a value that can be compared, printed and read back.

    2F0             stage 2, forward of microbatch 0
    3RECV_GRAD1     stage 3 gets the gradient of its output of microbatch 1
    0REDUCE         stage 0, gradients of the whole step

Nothing here knows of ranks: an instruction's stage is the stage, on the rank that executes it, that it is done for.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
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
