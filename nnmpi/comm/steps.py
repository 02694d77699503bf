"""What one rank does in a collective, as values: no MPI and no arrays here.

A collective over `size` ranks cuts the buffer into `size` chunks (`shard.split`), numbered 0..size-1. One rank's part
of it is a tuple of steps, done in order. In a step the rank sends some of its chunks to one rank and receives
chunks from one rank, both at once; the step is over when both have happened, and the next one begins.

    Step(to=1, send=(0,), from_=3, recv=(3,), reduce=True)

        chunk 0 ----> rank 1
        chunk 3 <---- rank 3, added to what this rank has in chunk 3

The same tuple is executed (`comm.execution`), proved (`comm.prove`), priced and simulated (`comm.simulate`)
and drawn (`comm.render`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from nnmpi.errors import ScheduleError

Chunks: TypeAlias = tuple[int, ...] | range
"""Chunk numbers in the order in which they travel; a range where there are thousands of neighbours."""


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange of a rank with at most two others.

    Attributes:
        to: the rank that gets the chunks `send`; None when nothing is sent.
        send: chunk numbers, in the order in which they travel.
        from_: the rank whose chunks `recv` arrive; None when nothing is received.
        recv: chunk numbers, in the order in which they travel.
        reduce: whether what arrives is added to the chunks (True) or replaces them (False).

    Raises:
        ScheduleError: for a partner without chunks, chunks without a partner, or a chunk named twice.
    """

    to: int | None = None
    send: Chunks = ()
    from_: int | None = None
    recv: Chunks = ()
    reduce: bool = False

    def __post_init__(self) -> None:
        """Refuse a step that means nothing."""
        for name, partner, chunks in (("send", self.to, self.send), ("recv", self.from_, self.recv)):
            if (partner is None) != (not chunks):
                raise ScheduleError(
                    f"a step needs a partner and chunks together, but {name} has {partner} and {chunks}"
                )
            if isinstance(chunks, list):
                object.__setattr__(self, name, tuple(chunks))
            if not isinstance(chunks, range) and len(set(chunks)) != len(chunks):
                raise ScheduleError(
                    f"a step names a chunk twice in {name}={chunks}; every chunk may travel once a step"
                )


Algorithm: TypeAlias = Callable[[int, int], tuple[Step, ...]]
"""`algorithm(rank, size)` returns that rank's steps; a pure function, with no steps at size 1."""


def runs(chunks: Chunks) -> tuple[range, ...]:
    """Join neighbouring chunk numbers into ranges: each range lies together in the buffer and is one message.

    runs((3, 0, 1))  ->  (range(3, 4), range(0, 2))
    """
    if isinstance(chunks, range) and chunks.step == 1:
        return (chunks,) if chunks else ()
    joined: list[range] = []
    for chunk in chunks:
        if joined and joined[-1].stop == chunk:
            joined[-1] = range(joined[-1].start, chunk + 1)
        else:
            joined.append(range(chunk, chunk + 1))
    return tuple(joined)
