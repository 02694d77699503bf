"""Steps in bytes: what travels when a collective's chunks are those of a buffer of known length.

    steps, 4 ranks            Step(to=1, send=(0, 2, 3), from_=3, recv=(1,), reduce=True)
    6 elements of 4 bytes     chunks of 8, 8, 4, 4 bytes
    move                      Move(to=1, sends=(8, 8), from_=3, recvs=(8,), reduce=True)      2 and 3 are one message

A chunk without elements sends nothing, and a step in which nothing travels is left out, as in `execute`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from nnmpi.comm.steps import Chunks, Step, runs


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a rank; see `steps.Step`.

    Attributes:
        to: the rank that gets `sends`; None when nothing is sent.
        sends: the bytes of each message to it.
        from_: the rank that `recvs` come from; None when nothing is received.
        recvs: the bytes of each message from it.
        reduce: whether what arrives is added.
    """

    to: int | None
    sends: tuple[int, ...]
    from_: int | None
    recvs: tuple[int, ...]
    reduce: bool

    @property
    def both(self) -> bool:
        """Whether something goes and something comes."""
        return self.to is not None and self.from_ is not None


@dataclass(frozen=True, slots=True)
class Lengths:
    """The bytes of `size` chunks of a buffer, cut as `shard.split` cuts it, without a list of them.

    Attributes:
        size: number of chunks.
        short: bytes of a short chunk.
        longer: how many chunks, the first ones, have an element more.
        itemsize: bytes of an element.
    """

    size: int
    short: int
    longer: int
    itemsize: int
    _seen: dict[Chunks, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, nbytes: int, size: int, itemsize: int) -> "Lengths":
        """Return the chunks of a buffer of nbytes, rounded up to whole elements."""
        short, longer = divmod(-(-nbytes // itemsize), size)
        return cls(size, short * itemsize, longer, itemsize)

    def before(self, chunk: int) -> int:
        """Return where a chunk begins, in bytes; before(size) is the end of the buffer."""
        return chunk * self.short + min(chunk, self.longer) * self.itemsize

    def messages(self, chunks: Chunks) -> tuple[int, ...]:
        """Return the bytes of the messages in which these chunks travel."""
        found = self._seen.get(chunks)
        if found is None:
            each = (self.before(run.stop) - self.before(run.start) for run in runs(chunks))
            found = self._seen[chunks] = tuple(nbytes for nbytes in each if nbytes)
        return found

    def moves(self, steps: Iterable[Step]) -> list[Move]:
        """Return one rank's steps in bytes."""
        found = []
        for step in steps:
            sends, recvs = self.messages(step.send), self.messages(step.recv)
            if sends or recvs:
                to, from_ = step.to if sends else None, step.from_ if recvs else None
                found.append(Move(to, sends, from_, recvs, step.reduce))
        return found
