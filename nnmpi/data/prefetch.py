"""Items made ahead of time by background threads, handed out in order. Knows nothing of data sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T], Generic[T]):
    """Iterates over make(i) for i in numbers, computed by `workers` threads at most `ahead` items in advance.

    Items come in the order of `numbers`, whoever makes them. An exception in make reaches the consumer at that item.
    The threads end when the items are used up, at close(), when the `with` block is left, or when the iterator is
    garbage. With workers=0 the items are made when they are asked for.
    """

    def __init__(self, make: Callable[[int], T], numbers: range, *, workers: int = 1, ahead: int = 2) -> None:
        self._make, self._numbers = make, iter(numbers)
        self._coming: deque[Future[T]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        if workers and numbers:
            self._pool = ThreadPoolExecutor(min(workers, len(numbers)), "nnmpi-prefetch")
            self._submit(max(ahead, 1))

    def _submit(self, count: int) -> None:
        assert self._pool is not None
        self._coming += [self._pool.submit(self._make, number) for number in islice(self._numbers, count)]

    def __next__(self) -> T:
        """Return the next item, waiting until it is made."""
        try:
            if self._pool is None:
                return self._make(next(self._numbers))
            if not self._coming:
                raise StopIteration
            item = self._coming.popleft().result()
        except BaseException:
            self.close()
            raise
        self._submit(1)
        return item

    def close(self) -> None:
        """Stop the threads and drop what they made. May be called more than once."""
        self._numbers = iter(())
        self._coming.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
