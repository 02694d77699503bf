"""How many steps each worker has done, and who may begin another."""


class Clocks:
    """The workers' clocks, as in Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server" (2013): a worker may begin a step if it is at most `bound` steps ahead of the slowest.

        steps     7   5   6         slowest 5
        lead      2   0   1         bound 1: workers 1 and 2 may begin a step, worker 0 waits for worker 1

    Args:
        workers: at least 1.

    Attributes:
        steps: the steps that each worker has done, or counts as having done (see `meet`).
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

    def meet(self, bound: int | None) -> None:
        """Begin to keep a bound at a meeting: forgive what no run with this bound could have made anybody fall behind.

        Without it, after a time with a larger bound, everybody would wait until the slowest has caught up alone.
        A worker has waited with a lead of bound + 1 at the most; under bound 0 all have done the same when they meet.
        """
        if bound is not None:
            least = max(self.steps) - (bound + 1 if bound else 0)
            self.steps[:] = [max(steps, least) for steps in self.steps]

    def done(self, worker: int) -> None:
        """Count one more step of a worker."""
        self.steps[worker] += 1
