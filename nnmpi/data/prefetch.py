"""Items made ahead of time by background threads, handed out in order. Knows nothing of data sets."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

WAKE_S = 0.5  # how often a waiting consumer looks whether its threads are still alive
JOIN_S = 5.0  # how long close() waits for the threads: one of them may be in the middle of an item


class Prefetch(Iterator[T], Generic[T]):
    """Iterates over make(i) for i in numbers, computed by `workers` threads at most `ahead` items in advance.

    Items come in the order of `numbers`, whoever makes them. An exception in make reaches the consumer at that item.
    The threads end when the items are used up, at close(), when the `with` block is left, when the iterator is
    garbage, or with the interpreter, whichever is first. With workers=0 the items are made when they are asked for.

    Args:
        make: returns the item of a number; called on the threads.
        numbers: of the items, in order.
        workers: threads.
        ahead: most items that are made before they are asked for.
    """

    def __init__(self, make: Callable[[int], T], numbers: range, *, workers: int = 1, ahead: int = 2) -> None:
        self._make, self._numbers = make, numbers
        self._position = 0
        self._shared: _Shared[T] | None = None
        if workers and numbers:  # else there is nothing to end
            self._shared = self._start(min(workers, len(numbers)), max(ahead, 1))

    def _start(self, workers: int, ahead: int) -> _Shared[T]:
        # The threads know the shared state and not the iterator, so that an abandoned iterator can be collected.
        shared = _Shared(self._make, self._numbers, ahead)
        shared.threads = [
            threading.Thread(target=shared.work, name=f"nnmpi-prefetch-{i}", daemon=True) for i in range(workers)
        ]
        self._finalizer = weakref.finalize(self, shared.end)
        for thread in shared.threads:
            thread.start()
        return shared

    def __next__(self) -> T:
        """Return the next item, waiting until it is made."""
        if self._position == len(self._numbers):
            self.close()
            raise StopIteration
        try:
            if self._shared is None:
                item = self._make(self._numbers[self._position])
            else:
                item = self._shared.take(self._position)
        except BaseException:
            self.close()
            raise
        self._position += 1
        return item

    def close(self) -> None:
        """Stop the threads and drop what they made. May be called more than once."""
        self._position = len(self._numbers)
        if self._shared is not None:
            self._finalizer()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Shared(Generic[T]):
    """What the threads and the consumer share; everything that changes is guarded by one condition."""

    def __init__(self, make: Callable[[int], T], numbers: range, ahead: int) -> None:
        self.threads: list[threading.Thread] = []
        self._make = make
        self._numbers = numbers
        self._stopped = False
        self._ahead = ahead
        self._claimed = 0  # positions below this are made or being made
        self._taken = 0  # positions below this are with the consumer
        self._made: dict[int, tuple[T | None, BaseException | None]] = {}
        self._changed = threading.Condition()

    def work(self) -> None:
        """Make items until there are no more, one fails, or the consumer stops. Runs in a thread."""
        while (position := self._claim()) is not None:
            try:
                made: tuple[T | None, BaseException | None] = (self._make(self._numbers[position]), None)
            except BaseException as error:  # whatever it is, it belongs to the consumer
                made = (None, error)
            with self._changed:
                if not self._stopped:
                    self._made[position] = made
                self._changed.notify_all()
            if made[1] is not None:
                return

    def _claim(self) -> int | None:
        with self._changed:
            while not self._stopped and self._claimed < len(self._numbers):
                if self._claimed < self._taken + self._ahead:
                    self._claimed += 1
                    return self._claimed - 1
                self._changed.wait()
            return None

    def take(self, position: int) -> T:
        """Return the item at this position, or raise what making it raised."""
        with self._changed:
            while position not in self._made:
                if not any(thread.is_alive() for thread in self.threads):
                    raise RuntimeError(f"the threads ended before item {position} was made")
                self._changed.wait(WAKE_S)
            item, error = self._made.pop(position)
            self._taken = position + 1
            self._changed.notify_all()
        if error is not None:
            raise error
        return item  # type: ignore[return-value]

    def end(self) -> None:
        """Stop the threads and wait for them, but not for ever, and not when a collection runs this in one of them."""
        with self._changed:
            self._stopped = True
            self._made.clear()
            self._changed.notify_all()
        if threading.current_thread() in self.threads:
            return
        deadline_s = time.monotonic() + JOIN_S
        for thread in self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
