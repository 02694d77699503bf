"""Sums gradients over a group in buckets, while the backward pass still runs.

A bucket (see `buckets`) is launched once its gradients are final *and* all buckets before it have been launched. The
order is the same on every rank whatever the timing, so ranks cannot disagree. A launched bucket moves on whenever
another gradient is reported.

    backward     | layer 3 | layer 2    | layer 1  |
    bucket 0                 launch . . . poll . . . |
    bucket 1                              launch . . | finish: wait
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nnmpi.comm.agree import agreed
from nnmpi.comm.algorithms.registry import AUTO, NAMES
from nnmpi.comm.buckets import Bucket, Span, plan_buckets
from nnmpi.comm.buffers import Buffer, check_buffer
from nnmpi.comm.choose import Choice, choose
from nnmpi.comm.group import Group
from nnmpi.errors import CommError, UsageError

# Measured with a chain of ten 512 x 512 layers, batch 128, 10.6 MB of gradients, on one node with 2 cores of an AMD Zen
# 5: a step with buckets of 1 | 4 | 25 MB, native, lower decile in ms, summed at the end (and while backward runs).
#
#     2 ranks     Open MPI 5.0.11    26.6 | 25.8 | 25.3    (26.5 | 27.0 | 28.3)     without any exchange 23.5
#                 MPICH 5.0.2        25.5 | 25.2 | 25.5    (26.5 | 26.1 | 25.6)                          23.2
#     4 ranks     Open MPI           57.0 | 54.6 | 56.1    (60.7 | 60.4 | 60.1)                          48.4
#                 MPICH               114 | 60.5 | 56.0    (59.5 | 56.5 | 57.2)                          46.7
#
# Small buckets suffer where ranks share cores; from 4 MB on the size makes no difference that can be told from noise,
# and 4 MB leaves several buckets to send early on a real network. Inside a node nothing is gained by sending early: a
# core that computes has no time to copy.
BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Stage:
    """How a bucket gets from a device into its host buffer and back; both return when the copy is done.

    Attributes:
        to_host: called before the bucket is summed.
        from_host: called after it.
    """

    to_host: Callable[[Bucket], None]
    from_host: Callable[[Bucket], None]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one step's exchange was.

    Attributes:
        sync_s: seconds that this rank spent in the exchange.
        bytes: bytes of gradients that were summed (what goes over a link depends on the algorithm).
        calls: collectives that were run.
    """

    sync_s: float = 0.0
    bytes: int = 0
    calls: int = 0


class Exchange:
    """The sum of gradients over a group, step after step. Making one is collective.

    Args:
        group: the ranks whose gradients are summed. The exchange works on a duplicate of it, so that its messages
            never meet those of others (say, of a batch norm in the same backward pass).
        buffers: flat gradient buffers, 1-D NumPy arrays; the same lengths and dtypes on all ranks.
        spans: where each parameter's gradient lies, in order of registration.
        algorithm: for every bucket; "auto" asks `choose` for each.
        bucket_bytes: the longest bucket, unless a single gradient is longer.
        overlap: whether buckets are launched as they become complete; otherwise all are summed in `finish`.
        stage: for gradients on a device: `buffers` are then their places in host memory.

    Attributes:
        buckets: in the order in which they are launched.
        choices: the algorithm of each bucket, and why.
        traffic: what the last finished step was.

    Raises:
        UsageError: on all ranks, for an unknown algorithm, a bucket size below 1, spans out of order.
        CommError: on all ranks, when their buckets differ.
    """

    def __init__(
        self,
        group: Group,
        buffers: Sequence[Buffer],
        spans: Sequence[Span],
        algorithm: str = AUTO,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        stage: Stage | None = None,
    ) -> None:
        with agreed(group):
            if algorithm not in NAMES:
                raise UsageError(f"there is no all-reduce algorithm {algorithm!r}; the names are {', '.join(NAMES)}")
            itemsizes = [check_buffer(buffer).itemsize for buffer in buffers]
            self.buckets = plan_buckets(spans, itemsizes, bucket_bytes)
        _check_same(group, self.buckets, buffers)
        self._alone = group.size == 1
        self._overlap = overlap
        self._stage = stage
        self._group = group.duplicate()
        parts = [buffers[bucket.buffer][bucket.start : bucket.stop] for bucket in self.buckets]
        self.choices = tuple(_choose(algorithm, part.nbytes, group.size) for part in parts)
        self._sums = [
            self._group.bind(part, choice.algorithm, tag)
            for tag, (part, choice) in enumerate(zip(parts, self.choices, strict=True))
        ]
        self._bytes = sum(part.nbytes for part in parts)
        self._home = {span: bucket.index for bucket in self.buckets for span in bucket.spans}
        self.traffic = Traffic()
        self._reset()

    def _reset(self) -> None:
        self._reported: set[int] = set()
        self._missing = [len(bucket.spans) for bucket in self.buckets]
        self._launched = 0
        self._flying: deque[Bucket] = deque()
        self._sync_s = 0.0

    @property
    def under_way(self) -> bool:
        """Whether gradients of a step were reported that is not finished."""
        return bool(self._reported)

    def ready(self, span: int) -> None:
        """Say that a gradient is final in this step; launches what has become complete and moves on what is launched.

        Args:
            span: the gradient's number in order of registration.

        Raises:
            CommError: when it was reported in this step before.
        """
        if span in self._reported:
            raise CommError(f"gradient {span} was reported final twice in one step; report it once, then call finish()")
        self._reported.add(span)
        self._missing[self._home[span]] -= 1
        if self._overlap and not self._alone:
            begin = time.perf_counter()
            self._launch_complete()
            self._poll()
            self._sync_s += time.perf_counter() - begin

    def finish(self) -> None:
        """End the step: return when all gradients are summed, also those never reported. One call per step."""
        begin = time.perf_counter()
        if not self._alone and self._overlap:
            self._launch_rest()
            self._wait()
        elif not self._alone:
            self._sum_all()
        calls = 0 if self._alone else len(self.buckets)
        spent = self._sync_s + time.perf_counter() - begin
        self._reset()
        self.traffic = Traffic(spent, self._bytes if calls else 0, calls)

    def free(self) -> None:
        """Give the exchange's communicator back to MPI. Collective."""
        self._group.free()

    def _launch_complete(self) -> None:
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            self._launch()

    def _launch_rest(self) -> None:
        while self._launched < len(self.buckets):
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._launched]
        if self._stage:
            self._stage.to_host(bucket)
        self._sums[bucket.index].start()
        self._launched += 1
        self._flying.append(bucket)

    def _poll(self) -> None:
        """Move all launched buckets on, and let go of those that are finished."""
        for _ in range(len(self._flying)):
            bucket = self._flying.popleft()
            if self._sums[bucket.index].poll():
                self._landed(bucket)
            else:
                self._flying.append(bucket)

    def _wait(self) -> None:
        """Wait for one after the other: a rank that waits for an earlier bucket is served by those further on."""
        while self._flying:
            bucket = self._flying.popleft()
            self._sums[bucket.index].wait()
            self._landed(bucket)

    def _sum_all(self) -> None:
        for bucket in self.buckets:
            if self._stage:
                self._stage.to_host(bucket)
            self._sums[bucket.index].run()
            self._landed(bucket)

    def _landed(self, bucket: Bucket) -> None:
        if self._stage:
            self._stage.from_host(bucket)


def _choose(algorithm: str, nbytes: int, size: int) -> Choice:
    return choose(nbytes, size) if algorithm == AUTO else Choice(algorithm, "asked for")


def _check_same(group: Group, plan: Sequence[Bucket], buffers: Sequence[Buffer]) -> None:
    """Make sure that all ranks will send the same messages."""
    own = [[bucket.start, bucket.stop, buffers[bucket.buffer].dtype.name] for bucket in plan]
    others = group.gather(own)
    different = [rank for rank, other in enumerate(others) if other != others[0]]
    if different:
        raise CommError(
            f"the ranks would sum different gradients: rank 0 has buckets of {_lengths(others[0])}, "
            f"rank {different[0]} of {_lengths(others[different[0]])}; build the same model on every rank"
        )


def _lengths(plan: Sequence[Sequence[int | str]]) -> str:
    """Name the first few buckets."""
    listed = ", ".join(f"{int(stop) - int(start)} {dtype}" for start, stop, dtype in plan[:4])
    return listed + (" ..." if len(plan) > 4 else "")
