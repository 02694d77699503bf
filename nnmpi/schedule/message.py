"""A message between two stages, and the two transfers that are its ends.

    stage 1, rank 1:  1SEND_ACT0    ----  activation of microbatch 0  --->    2RECV_ACT0     stage 2, rank 2
    stage 1, rank 1:  1RECV_GRAD0   <---  gradient of microbatch 0  -----     2SEND_GRAD0    stage 2, rank 2

Messages of one sort from one rank to another arrive in the order in which they were sent: they make a channel.
"""

from dataclasses import dataclass
from typing import TypeAlias

from nnmpi.schedule.instruction import SENDS, TRANSFERS, Instruction, Kind

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
