"""Items made ahead of time by background threads, handed out in order. Knows nothing of data sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T], Generic[T]):
    """Iterates over make(i) for i in numbers, computed by `workers` threads at most `ahead` items in advance.

    Items come in the order of `numbers`, whoever makes them. An exception in make reaches the consumer at that item.
    The threads end when the items are used up, at close(), when the `with` block is left, or when the iterator is
    garbage. With workers=0 the items are made when they are asked for.

    Args:
        finish: applied to each item by the thread that asks for it; None for nothing.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        numbers: range,
        *,
        workers: int = 1,
        ahead: int = 2,
        finish: Callable[[T], T] | None = None,
    ) -> None:
        self._make, self._numbers, self._finish = make, iter(numbers), finish
        self._coming: deque[Future[T]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        if workers and numbers:
            self._pool = ThreadPoolExecutor(min(workers, len(numbers)), "nnmpi-prefetch")
            self._submit(self._pool, max(ahead, 1))

    def _submit(self, pool: ThreadPoolExecutor, count: int) -> None:
        self._coming += [pool.submit(self._make, number) for number in islice(self._numbers, count)]

    def __next__(self) -> T:
        """Return the next item, waiting until it is made."""
        try:
            if self._pool is None:
                item = self._make(next(self._numbers))
            elif self._coming:
                item = self._coming.popleft().result()
                self._submit(self._pool, 1)
            else:
                raise StopIteration
            return item if self._finish is None else self._finish(item)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop what was made, and let the threads end; an item that hangs is not waited for. May be called again."""
        self._numbers = iter(())
        self._coming.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
