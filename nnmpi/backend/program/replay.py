"""A program of calls, and the memory in which it is replayed."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from operator import itemgetter

import numpy as np

from nnmpi.backend.array import Array, empty
from nnmpi.backend.memory import return_freed_memory
from nnmpi.backend.program.call import Allocation, ArrayRef, Call
from nnmpi.backend.program.compare import Comparison
from nnmpi.backend.program.plan import lifetimes, plan
from nnmpi.backend.program.record import CallList
from nnmpi.base.errors import UsageError
from nnmpi.base.picture import Bar, Picture
from nnmpi.base.wings import Drawn

# mapped memory begins at a page; small blocks there would compete for the same cache lines
LEAST_MAPPED_BYTES = 128 * 1024


class Arena:
    """A block of memory for programs that are replayed one at a time.

    Attributes:
        memory: bytes; another array when it has grown.
    """

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    @property
    def size_bytes(self) -> int:
        """The memory's size."""
        return self.memory.nbytes

    def reserve(self, count_bytes: int) -> None:
        """Grow to a size."""
        if count_bytes > self.size_bytes:
            self.memory = np.empty(0, np.uint8)  # the old one is freed first
            self.memory = _aligned(count_bytes)

    def free(self) -> None:
        """Let go of the memory; programs get it again when they are replayed."""
        self.memory = np.empty(0, np.uint8)


class StepProgram(Drawn):
    """The calls of a recorded step.

    Args:
        recorded: the calls in their order.
        arena: for the results.
    """

    def __init__(self, recorded: CallList, arena: Arena) -> None:
        self._recorded, self._arena = recorded, arena
        # what somebody else holds now, for good: the plan places what nobody holds
        self._held = recorded.held()
        self._memory: Array | None = None
        self._bound: tuple[Callable[[], object], ...] = ()

    @property
    def calls(self) -> Sequence[Call]:
        """The calls in their order."""
        return self._recorded.calls

    @cached_property
    def _plan(self) -> tuple[dict[Allocation, int], int]:
        """The results' places, and the size of their memory."""
        return plan(self.calls)

    @property
    def size_bytes(self) -> int:
        """The size of the results' memory."""
        return self._plan[1]

    def replay(self) -> None:
        """Repeat the calls."""
        if self._memory is not self._arena.memory:
            self._bind()
        errors = self._recorded.errors  # which operations want to hear of
        with np.errstate(**errors) if errors else nullcontext():
            for call in self._bound:
                call()

    def release(self) -> None:
        """Let go of the memory until the next replay."""
        self._bound, self._memory = (), None

    def picture(self) -> Picture:
        """Return the picture of the results' memory.

        A row is a place, by its first byte. A bar is a result, from its first call to its last.

        Raises:
            UsageError: for a program whose results have no place.
        """
        places, _ = self._plan
        if not places:
            raise UsageError(
                "this program's calls write no results of their own: none can be drawn"
            )
        lives = lifetimes(self.calls)
        edge = len(str(self.size_bytes))
        bars = [
            Bar(f"{start:{edge}}", begin, end + 1, "a result", f"%{allocation.number}")
            for allocation, start in sorted(places.items(), key=itemgetter(1))
            for begin, end in (lives[allocation],)
        ]
        title = f"{self.size_bytes} bytes: the results from each byte on, while they live"
        return Picture(title, "calls", bars)

    def difference(self, other: StepProgram) -> str:
        """Return the first difference to the program of another version of the step, or nothing.

        Arrays from outside, such as weights, count as the same in the order of their use.
        """
        return Comparison(self._recorded, other._recorded, is_same_step=False).difference()

    def _bind(self) -> None:
        self._bound = ()
        places, size_bytes = self._plan
        return_freed_memory()  # to the system: what recordings took of malloc's, replays do not
        self._arena.reserve(size_bytes)
        self._memory = self._arena.memory
        arrays: dict[ArrayRef, Array] = {}

        def place(ref: ArrayRef) -> Array:
            array = arrays.get(ref)
            if array is None:
                allocation = ref.allocation
                held = self._held.get(allocation)
                if held is None:
                    array = ref.over(self._arena.memory, places[allocation])
                else:
                    is_writable, held.flags.writeable = held.flags.writeable, True
                    array = ref.over(held.ravel(order="K").view(np.uint8), 0)
                    held.flags.writeable = is_writable  # to its holder
                arrays[ref] = array
            return array

        self._bound = tuple([call.bound(place) for call in self.calls])

    def __str__(self) -> str:
        lines = [f"{i:5}  {call}" for i, call in enumerate(self.calls)]
        return "\n".join((*lines, f"{len(lines)} calls, {self.size_bytes} bytes for results"))


def _aligned(count_bytes: int) -> Array:
    """Return bytes that begin at a cache line.

    Large blocks are mapped, not taken from malloc: a block outlives the other allocations of the
    recording, and would leave holes among them that stay unused. Pages of 2 MB, as NumPy asks for
    in its own large arrays, take 2 to 3 % off a step of a convolutional network.
    """
    if count_bytes >= LEAST_MAPPED_BYTES:
        memory = mmap.mmap(-1, count_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # another system, or a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)
    return empty(np, (count_bytes,), np.uint8)
