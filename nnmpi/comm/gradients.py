"""Sums gradients over a group in buckets, during the backward pass or after it (`overlap`).

The gradients lie in flat buffers, in the order of the parameters' registration; a backward pass
finishes them from the end. A bucket is a contiguous range of one buffer, so no gradient is copied
(`plan_buckets`):

    buffer      | w0  b0 | w1  b1      | w2  b2 |
    buckets     | third  | second      | first  |         in this order on every rank

A bucket is launched once its gradients are final *and* all buckets before it have been launched. So
the order is the same on every rank whatever the timing. Launching buckets as they complete would
need an agreement of the ranks on the order, as Horovod's coordinator makes it. A launched bucket
advances whenever another gradient is reported (`BucketedAllReduce`).

    backward     | layer 3 | layer 2    | layer 1  |
    bucket 0                 launch . . . poll . . . |
    bucket 1                              launch . . | finish: wait
    hidden                        -----    -----               in flight while this rank computes
    exposed               --           ----     -    -------   this rank launches, polls, waits
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

import nnmpi.base.clock as clock
import nnmpi.base.shard as shard
import nnmpi.base.timeline as timeline
from nnmpi.base.custom import name_of
from nnmpi.base.errors import CommError, DeviceError, UsageError, check_int
from nnmpi.comm.agreement import agreed, require_equal
from nnmpi.comm.algorithms.registry import (
    ALGORITHMS,
    AUTO,
    NATIVE,
    SHARED,
    AlgorithmLike,
    find_collective,
)
from nnmpi.comm.buffers import CommBuffer, check_buffer, is_device
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.duration import buffers_sent
from nnmpi.comm.execution import Pending
from nnmpi.comm.fit import Choice
from nnmpi.comm.group import Group
from nnmpi.comm.prove import proved_steps
from nnmpi.comm.world import Traffic

# Measured milliseconds of a step (lower decile): ten 512 x 512 layers, batch 128, 10.6 MB of
# gradients, one node with 2 cores of an AMD Zen 5, native all-reduce, buckets of 1 | 4 | 25 MB,
# summed after the backward pass (and during it); the last column is a step without exchange.
#
#     2 ranks     Open MPI 5.0.11    26.6 | 25.8 | 25.3    (26.5 | 27.0 | 28.3)     23.5
#                 MPICH 5.0.2        25.5 | 25.2 | 25.5    (26.5 | 26.1 | 25.6)     23.2
#     4 ranks     Open MPI           57.0 | 54.6 | 56.1    (60.7 | 60.4 | 60.1)     48.4
#                 MPICH               114 | 60.5 | 56.0    (59.5 | 56.5 | 57.2)     46.7
#
# Small buckets suffer when ranks share cores. From 4 MB on the differences are noise, and 4 MB
# leaves several buckets to send early on a real network. Inside a node sending early gains nothing:
# the core that would copy the message is computing.
BUCKET_BYTES = 4 * 2**20

UNLIMITED_BYTES = 2**62  # one bucket for each flat buffer


GradientRange: TypeAlias = tuple[int, int, int]
"""(buffer, start, stop): the range of one parameter's gradient, in elements."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message.

    Attributes:
        buffer: the number of its flat buffer.
        start: its first element there.
        stop: the element behind its last one.
        spans: the numbers of its spans, in order of registration.
    """

    buffer: int
    start: int
    stop: int
    spans: tuple[int, ...]


COUNTED_RANKS = 64  # `sent_bytes` counts the steps of all ranks only up to this number


class BucketedAllReduce:
    """The sum of gradients over a group, step after step. Making one is collective.

    Args:
        group: the ranks whose gradients are summed. The exchange works on a duplicate, so that its
            messages never mix with others', such as those of a batch norm in the same backward
            pass.
        buffers: flat gradient buffers, 1-D NumPy or device arrays; the same lengths and dtypes on
            all ranks.
        spans: the range of each parameter's gradient, in order of registration.
        algorithm: "auto" means `fit.choose` for each bucket. Without shared memory, "shared"
            becomes "native", and the choice gives the reason.
        bucket_bytes: the longest bucket, unless a single gradient is longer. None: 4 MiB with
            `overlap`; without it one bucket for each buffer.
        overlap: whether buckets are launched as they become complete; otherwise all are summed in
            `finish`. None: True with ranks on several nodes or gradients on a device, False on the
            processors of one node.

    Attributes:
        overlap: whether buckets are launched as they become complete.
        buckets: in the order of launches.
        choices: the algorithm of each bucket, and the reason.

    Raises:
        UsageError: on all ranks, for an unknown algorithm, a bucket size below 1, spans out of
            order.
        CommError: on all ranks, when their buckets differ.
    """

    def __init__(
        self,
        group: Group,
        buffers: Sequence[CommBuffer],
        spans: Sequence[GradientRange],
        algorithm: AlgorithmLike = AUTO,
        bucket_bytes: int | None = None,
        overlap: bool | None = None,
    ) -> None:
        if overlap is None:
            # Inside a node the core that copies messages is the one that computes, unless a device
            # computes.
            on_device = any(is_device(buffer) for buffer in buffers)
            overlap = group.size > 1 and (on_device or not group.on_one_node())
        self.overlap = overlap
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES if overlap else UNLIMITED_BYTES
        with agreed(group):
            itemsizes = [check_buffer(buffer, low=True).itemsize for buffer in buffers]
            self.buckets = tuple(plan_buckets(spans, itemsizes, bucket_bytes))
            if algorithm not in (AUTO, NATIVE, SHARED):
                result = find_collective(ALL_REDUCE.name, algorithm)
                if not isinstance(algorithm, str):
                    proved_steps(result, group.size)
        require_equal(
            group,
            [
                f"a bucket of {bucket.stop - bucket.start} {buffers[bucket.buffer].dtype.name}"
                for bucket in self.buckets
            ],
            "the ranks would sum different gradients",
            "build the same model on every rank",
        )
        self._alone = group.size == 1
        self._outer, self._group = group, group.duplicate()
        parts = [buffers[bucket.buffer][bucket.start : bucket.stop] for bucket in self.buckets]
        self._lengths = [part.nbytes for part in parts]
        bound = [self._bind(part, algorithm, tag) for tag, part in enumerate(parts)]
        self._sums = [pending for pending, _ in bound]
        self.choices = tuple(choice for _, choice in bound)
        self._bytes = sum(self._lengths)
        self._predicted_s = sum(choice.predicted_s for choice in self.choices)
        self._home = {
            span: number for number, bucket in enumerate(self.buckets) for span in bucket.spans
        }
        self._reset()

    def _reset(self) -> None:
        self._reported: set[int] = set()
        self._missing = [len(bucket.spans) for bucket in self.buckets]
        self._launched = 0
        self._in_flight: deque[tuple[int, float, Pending]] = deque()  # (number, begin, sum)
        self._hidden_s = 0.0
        # when this rank resumed computing with messages in flight
        self._resumed_s: float | None = None

    @property
    def under_way(self) -> bool:
        """Whether gradients were reported since the last finished step."""
        return bool(self._reported)

    def ready(self, span: int) -> None:
        """Report a gradient as final; start the buckets that are complete, and poll the others.

        Args:
            span: the gradient's number in order of registration.

        Raises:
            CommError: for a gradient already reported in this step.
        """
        if span in self._reported:
            raise CommError(
                f"gradient {span} was reported final twice in one step; report it once, then call"
                " finish()"
            )
        self._reported.add(span)
        self._missing[self._home[span]] -= 1
        if self.overlap and not self._alone:
            begin = self._pause_computing()
            while self._launched < len(self.buckets) and not self._missing[self._launched]:
                self._launch()
            self._poll(begin)

    def sent_bytes(self) -> tuple[float, float] | None:
        """Return a step's bytes, of the busiest rank and in total; None if sums have no steps."""
        size, names = self._group.size, {choice.algorithm for choice in self.choices}
        if size > COUNTED_RANKS or not names <= ALGORITHMS.keys():
            return None
        shares = {
            name: np.array(buffers_sent(find_collective(ALL_REDUCE.name, name), size))
            for name in names
        }
        sent = [
            n * shares[choice.algorithm]
            for n, choice in zip(self._lengths, self.choices, strict=True)
        ]
        total = sum(sent, np.zeros(size))
        return float(total.max()), float(total.sum())

    def progress(self) -> None:
        """Drive started sums forward, for callers with work between gradients."""
        if self._in_flight:
            self._poll(self._pause_computing())

    def _poll(self, begin: float) -> None:
        """Poll all launched buckets, drop the finished ones, and resume computing."""
        for _ in range(len(self._in_flight)):
            item = self._in_flight.popleft()
            if item[2].poll():
                self._show(*item[:2])
            else:
                self._in_flight.append(item)
        now = clock.now()
        if now > begin and (trace := timeline.current()):
            trace.add("messages", "collective", timeline.REDUCE, begin, now)
        self._group.spend(now - begin)
        self._resumed_s = now if self._in_flight else None

    def finish(self) -> None:
        """End the step: return when all gradients are summed, reported or not. Once per step."""
        if self._alone:
            self._reported.clear()
            return
        self._pause_computing()
        if self.overlap:
            self._launch_up_to(len(self.buckets))
        else:
            for number, pending in enumerate(self._sums):
                with self._group.collective(f"bucket {number}"):
                    pending.run()
        self._group.count(
            Traffic(self._hidden_s, self._bytes, len(self.buckets), self._predicted_s)
        )
        self._reset()

    def free(self) -> None:
        """Free the exchange's communicator. Collective.

        After an interrupted step some ranks may have launched more buckets than others, and MPI
        would continue to write into their arrays. So all launch as many, wait, and discard the
        sums. They agree on the number through the original group: on the duplicate, all ranks must
        start its collectives in one order, and some of the sums are already started.
        """
        if self.overlap and not self._alone:
            self._launch_up_to(int(self._outer.max_floats([self._launched])[0]))
            self._reset()
        self._group.free()

    def _pause_computing(self) -> float:
        """Count the computation since `_poll` as hidden communication; return the time."""
        now = clock.now()
        if self._resumed_s is not None:
            self._hidden_s += now - self._resumed_s
            self._resumed_s = None
        return now

    def _bind(self, part: CommBuffer, name: AlgorithmLike, tag: int) -> tuple[Pending, Choice]:
        """Return a bucket's bound sum and its choice; collective."""
        group = self._group
        if name == AUTO:
            choice = group.choose(part, started=self.overlap)
        else:
            choice = Choice(
                name_of(name), "asked for", group.predict(name, part.nbytes, self.overlap)
            )
        try:
            return (
                group.bind(part, choice.algorithm if isinstance(name, str) else name, tag),
                choice,
            )
        except DeviceError as error:
            if choice.algorithm != SHARED:
                raise
            reason = f"instead of {choice.algorithm}: {error}"
            instead = Choice(NATIVE, reason, group.predict(NATIVE, part.nbytes, self.overlap))
            return group.bind(part, NATIVE, tag), instead

    def _launch_up_to(self, count: int) -> None:
        """Launch buckets up to this number; then wait for them in order.

        All are in flight before the first wait, so MPI's progress in it also serves the later ones.
        """
        begin = clock.now()
        while self._launched < count:
            self._launch()
        self._poll(begin)
        while self._in_flight:
            number, begin, pending = self._in_flight.popleft()
            with self._group.collective(f"bucket {number}", begin):
                pending.wait()
            self._show(number, begin)

    def _launch(self) -> None:
        pending = self._sums[self._launched]
        begin = clock.now()
        pending.start()
        self._in_flight.append((self._launched, begin, pending))
        self._launched += 1

    def _show(self, number: int, begin: float) -> None:
        if trace := timeline.current():
            trace.add(f"bucket {number}", "bucket", timeline.BUCKETS, begin, trace.clock())


def plan_buckets(
    spans: Sequence[GradientRange], itemsizes: Sequence[int], limit_bytes: int
) -> tuple[Bucket, ...]:
    """Group the spans of each buffer, from its end backwards, into buckets of at most limit_bytes.

    A longer span is a bucket by itself. A gap between two spans of a bucket belongs to the bucket.

    Args:
        spans: in order of registration, which is also their order within each buffer.
        itemsizes: bytes per element of each buffer.
        limit_bytes: at least 1.

    Returns:
        The buckets in the order in which a backward pass, from the last parameter to the first,
        completes them.

    Raises:
        UsageError: for spans that overlap or are out of order, and for a limit below 1.
    """
    check_int("bucket_bytes", limit_bytes)
    ranges = [
        result
        for buffer, item in enumerate(itemsizes)
        for result in _ranges(spans, buffer, item, limit_bytes)
    ]
    ranges.sort(key=lambda members: -members[0])
    return tuple(
        Bucket(*spans[members[0]][:2], spans[members[-1]][2], tuple(members)) for members in ranges
    )


def _ranges(
    spans: Sequence[GradientRange], buffer: int, itemsize: int, limit_bytes: int
) -> list[list[int]]:
    """Return the numbers of one buffer's spans, grouped; each group in order of registration."""
    numbers = [i for i, span in enumerate(spans) if span[0] == buffer]
    end = 0
    for i in numbers:
        _, start, stop = spans[i]
        if not end <= start <= stop:
            raise UsageError(
                f"gradient {i} is at {start}..{stop} of buffer {buffer}, but it must begin at or"
                f" after {end}"
            )
        end = stop
    numbers.reverse()
    sizes = [(spans[i][2] - spans[i][1]) * itemsize for i in numbers]
    return [sorted(numbers[k] for k in group) for group in shard.buckets(sizes, limit_bytes)]
