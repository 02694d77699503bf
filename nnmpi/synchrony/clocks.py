"""How many steps each worker has done, and who may begin another."""


class Clocks:
    """The workers' clocks, as in Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server" (2013): a worker may begin a step if it is at most `bound` steps ahead of the slowest.

        steps     7   5   6         slowest 5
        lead      2   0   1         bound 1: workers 1 and 2 may begin a step, worker 0 waits for worker 1

    Args:
        workers: at least 1.

    Attributes:
        steps: the steps that each worker has done.
    """

    def __init__(self, workers: int) -> None:
        self.steps = [0] * workers

    @property
    def slowest(self) -> int:
        """The steps of the worker that has done fewest."""
        return min(self.steps)

    def lead(self, worker: int) -> int:
        """Return how many steps a worker is ahead of the slowest."""
        return self.steps[worker] - self.slowest

    def may_start(self, worker: int, bound: int | None) -> bool:
        """Return whether a worker may begin a step; with no bound it always may."""
        return bound is None or self.lead(worker) <= bound

    def done(self, worker: int) -> None:
        """Count one more step of a worker."""
        self.steps[worker] += 1
