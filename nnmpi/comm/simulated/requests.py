"""What a simulated rank has started, and the mistakes that can be seen in it.

MPI forbids what is named here and mostly says nothing: numbers are wrong sometimes, or a job hangs. The same mistakes
are found on real jobs by MUST (Hilbrich et al., 2009); where all ranks are in one process, looking is enough.

    a buffer is given to two requests at once, one of which writes it
    an array is changed while it is being sent
    a message is longer or shorter than what it is received into
    somebody ends without having waited for what it started; nobody receives a message
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nnmpi.comm.simulated.scheduler import Lines, SimulatedRank, describe_lines
from nnmpi.errors import CommError


@dataclass(eq=False)
class SimulatedRequest:
    """Something that a rank has started.

    Attributes:
        owner: the rank.
        what: it is, in words.
        lines: where it was started.
        missing: returns the ranks, by number, without which it does not become complete now.
        memory: the bytes that it reads or writes.
        writes: whether it writes them.
        checksum: of `memory` when it was started, if it reads that; else None.
        complete: whether it is.
        complete_s: when it became so, by simulated time.
        withdraw: takes it back, if nothing has met it yet.
    """

    owner: SimulatedRank
    what: str
    lines: Lines
    missing: Callable[[], Sequence[int]] = tuple
    memory: NDArray[np.uint8] | None = None
    writes: bool = False
    checksum: int | None = None
    complete: bool = False
    complete_s: float = 0.0
    withdraw: Callable[[], None] | None = None


def checksum(memory: NDArray[np.uint8] | None) -> int:
    """Return a number that changes when the bytes do, nearly always: the sum of their 8-byte words."""
    if memory is None:
        return 0
    whole = memory.size - memory.size % 8
    return int(memory[:whole].view(np.uint64).sum()) + int.from_bytes(memory[whole:].tobytes(), "little")


def address(memory: NDArray[np.uint8]) -> tuple[int, int]:
    """Return where an array's bytes begin and end."""
    begin = memory.__array_interface__["data"][0]
    return begin, begin + memory.nbytes


class OpenRequests:
    """What one rank has started and not yet waited for.

    Attributes:
        receives: how many of them write memory.
    """

    def __init__(self) -> None:
        self._open: dict[SimulatedRequest, tuple[int, int]] = {}
        self.receives = 0

    def add(self, request: SimulatedRequest) -> None:
        """Note a request.

        Raises:
            CommError: when its memory is in use by another one, and one of the two writes.
        """
        begin, end = address(request.memory) if request.memory is not None else (0, 0)
        if begin < end:
            for other, (low, high) in self._open.items():
                if begin < high and low < end and (request.writes or other.writes):
                    use = "writes" if other.writes else "reads"
                    raise CommError(
                        f"rank {request.owner.number} gives its {request.what} memory "
                        f"({describe_lines(request.lines)}) that its {other.what} still {use} "
                        f"({describe_lines(other.lines)}); wait for that one first"
                    )
        self._open[request] = begin, end
        self.receives += request.writes

    def close(self, request: SimulatedRequest) -> None:
        """Note that a request was waited for.

        Raises:
            CommError: when what it sent was changed meanwhile.
        """
        if self._open.pop(request, None) is None:
            return
        self.receives -= request.writes
        if request.checksum is not None and request.checksum != checksum(request.memory):
            raise CommError(
                f"rank {request.owner.number} changed an array while its {request.what} read it "
                f"({describe_lines(request.lines)}); wait for the request before the array is written"
            )
        request.memory = None  # whoever still knows the request does not keep the array

    def left(self) -> Iterable[SimulatedRequest]:
        """Return what was never waited for."""
        return list(self._open)


@dataclass(eq=False)
class SimulatedMessage:
    """A message under way.

    Attributes:
        request: of its sender.
        nbytes: its length.
        data: a copy, if it left at once; None while its sender's memory is read when it arrives.
        ready_s: when it was sent.
        both_ways: whether its sender was receiving then.
        there: whether it has arrived at its end, received or not.
        receive: the request that it is for, once there is one.
    """

    request: SimulatedRequest
    nbytes: int
    data: NDArray[np.uint8] | None
    ready_s: float
    both_ways: bool
    there: bool = False
    receive: SimulatedRequest | None = None


@dataclass(eq=False)
class MessageQueue:
    """The messages with one tag from one rank to another: sends that no receive has met, and the other way round.

    Attributes:
        sends, receives: in the order in which they were started.
        last_s: when the last message so far arrived; none may be there before it.
    """

    sends: deque[SimulatedMessage] = field(default_factory=deque)
    receives: deque[SimulatedRequest] = field(default_factory=deque)
    last_s: float = 0.0


def refuse_length(message: SimulatedMessage, receive: SimulatedRequest) -> CommError:
    """Return the error for a message that is not as long as what it is received into."""
    assert receive.memory is not None
    return CommError(
        f"rank {message.request.owner.number} sends {message.nbytes} bytes ({describe_lines(message.request.lines)}), "
        f"which rank {receive.owner.number} receives into {receive.memory.nbytes} ({describe_lines(receive.lines)}); "
        "give both the same length"
    )
