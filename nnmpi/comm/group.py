"""Groups: ranks that sum, gather and exchange arrays.

A strategy gets the group of its own axis and cannot see other ranks. So strategies combine without
code for one another, and a mistake in one cannot reach the messages of another. Everything here
is collective unless it says otherwise: all ranks of the group call it, in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import blake2b
from itertools import accumulate, product
from math import nan, prod
from typing import Any, cast

import numpy as np

import nnmpi.base.clock as clock
import nnmpi.base.timeline as timeline
from nnmpi.backend.array import Shape, is_array, namespace, plain
from nnmpi.backend.precision import is_low
from nnmpi.base.errors import CommError, DeviceError, DtypeError, NnmpiError, ShapeError, UsageError
from nnmpi.comm.agreement import Communicator, agree, require_equal
from nnmpi.comm.algorithms.pairwise import pairwise
from nnmpi.comm.algorithms.registry import (
    AUTO,
    NAMES,
    NATIVE,
    SHARED,
    AlgorithmLike,
    find_collective,
)
from nnmpi.comm.buffers import (
    CommBuffer,
    as_bytes,
    check_buffer,
    check_contiguous,
    cuda_aware,
    from_host,
    is_device,
    pieces,
    put,
    room_like,
    to_host,
)
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    Collective,
    Step,
)
from nnmpi.comm.execution import Execution, NativeExecution, Pending, halved, staged, widened
from nnmpi.comm.fit import Choice, Fit, choose
from nnmpi.comm.machine import Machine
from nnmpi.comm.node import SharedMemory
from nnmpi.comm.node_sum import SharedSum
from nnmpi.comm.point_to_point import BLOCKING_TAG, send_and_receive
from nnmpi.comm.prove import proved_steps
from nnmpi.comm.world import Comm, Traffic

simulated_ranks: ContextVar["Group | None"] = ContextVar("nnmpi_simulated_ranks", default=None)

COLLECTIVE = "collective"  # the category of collectives in a timeline


class Group(Communicator):
    """A communicator: ranks 0..size-1, their collectives and their private messages.

    Args:
        comm: a communicator of these ranks, of this package or of mpi4py.
        private: whether `comm` has no other user. If it has, the group works on a duplicate, so
            that messages of both never mix.

    Attributes:
        fit: the measured fit by which "auto" chooses (see `fit.Fit`); None for a rule of thumb.
        turns: of its operations in graphs (see `tensor.turns`); None before the first one.

    Example:
        >>> def program(group):
        ...     x = np.arange(3.0) + group.rank
        ...     group.all_reduce(x, "ring")
        ...     return x.tolist(), group.gather(group.rank ** 2)
        >>> nnmpi.simulate(program, 2)
        [([1.0, 3.0, 5.0], [0, 1]), ([1.0, 3.0, 5.0], [0, 1])]
    """

    def __init__(self, comm: Comm | Any, private: bool = False) -> None:
        super().__init__(_find_world(comm), private)
        self.fit: Fit | None = None
        self._memory: SharedMemory | None = None
        self._compared: set[Collective] = set()  # users' collectives, equal on all ranks
        self.turns: Any = None

    def duplicate(self) -> "Group":
        """Return a group of the same ranks with its own message context and shared memory."""
        twin = Group(self.comm)
        twin.fit, twin._nodes = self.fit, self._nodes
        if self._memory is not None and not self._memory.closed:
            with suppress(DeviceError):
                # no memory for its barriers: `memory()` raises the error when it is needed
                twin._memory = self._memory.twin(twin)
        return twin

    def memory(self) -> SharedMemory:
        """Return the memory shared by each node's ranks; the same object until it is freed.

        Collective when the memory is new.

        Raises:
            DeviceError: on all ranks, when one of their nodes has no shared memory.
        """
        if self._memory is None or self._memory.closed:
            self._memory = SharedMemory(self)
        return self._memory

    def free(self) -> None:
        """Free the communicators; MPI libraries have a limited number. Shared arrays stay."""
        if self._memory is not None:
            self._memory.close()
        if self.turns is not None:
            self.turns.close()
        super().free()

    # ---- sums ----

    def all_reduce(
        self, array: CommBuffer, algorithm: AlgorithmLike = NATIVE, check: bool = True
    ) -> None:
        """Replace the array on every rank by its sum over the ranks; the same bits everywhere.

        Args:
            array: (n,) C-contiguous, float32, float64 or integers; n and dtype the same on all
                ranks. When a sum of 8-bit integers overflows, "native" may saturate; the other
                algorithms wrap around. float16 and bfloat16 are added in float32, and rounded once;
                by "native" and "auto" they are sent as 16 bits, by the others as float32. A device
                array is ready for work queued on the current stream afterwards.
            algorithm: a name in `registry.NAMES`, such as "auto", "native" or "ring"; or a function
                of your own, (rank, size) -> steps, proved before its first run.
            check: compare n and dtype over the ranks first, by an exchange of a few bytes; without
                it ranks with different arrays may wait for ever.

        Raises:
            ShapeError: for an array that is not 1-D, contiguous and writeable.
            DtypeError: for another dtype.
            CommError: with `check`, on all ranks, when their arrays differ.
            UsageError: for an unknown algorithm.
            ScheduleError: on all ranks, for a function of your own that is no all-reduce; it names
                the fault.
        """
        self._run(array, algorithm, ALL_REDUCE.name, check)
        self.count_sum(array.nbytes, algorithm)

    def reduce_scatter(
        self, array: CommBuffer, algorithm: AlgorithmLike = NATIVE, check: bool = True
    ) -> None:
        """Replace this rank's chunk by its sum over the ranks; other chunks become undefined.

        Args:
            array: as in `all_reduce`; rank r's chunk is number r of `shard.split(n, size)`.
            algorithm: "native", "ring" or "tree".
            check: as in `all_reduce`.

        Raises:
            ShapeError, DtypeError, CommError, UsageError: as in `all_reduce`.
        """
        self._run(array, algorithm, REDUCE_SCATTER.name, check)

    def all_gather(
        self, array: CommBuffer, algorithm: AlgorithmLike = NATIVE, check: bool = True
    ) -> None:
        """Replace every other rank's chunk of the array by that rank's values of it.

        Args:
            array: as in `reduce_scatter`.
            algorithm: "native", "ring" or "tree".
            check: as in `all_reduce`.

        Raises:
            ShapeError, DtypeError, CommError, UsageError: as in `all_reduce`.
        """
        self._run(array, algorithm, ALL_GATHER.name, check)

    def bind(
        self,
        array: CommBuffer,
        algorithm: AlgorithmLike = NATIVE,
        tag: int = 0,
        operation: str = ALL_REDUCE.name,
    ) -> Pending:
        """Return a collective bound to this array, in place, that can be started many times.

        Args:
            array: as in `all_reduce`.
            algorithm: as in `all_reduce`; for other operations a name in `registry.COLLECTIVES`, or
                "native".
            tag: 0..16383, the same on all ranks; different for collectives in flight at once.
            operation: "all-reduce", "reduce-scatter", "all-gather", "broadcast" (from rank 0), or
                "neighbour-average" (the weighted sum, undivided).

        Raises:
            UsageError: for another tag, operation or algorithm.
            ShapeError: as in `all_reduce`.
            DtypeError: as in `all_reduce`.
        """
        if not 0 <= tag <= BLOCKING_TAG:
            raise UsageError(f"tag {tag} is not one of 0..{BLOCKING_TAG - 1}")
        self.comm.check_open()
        if operation == ALL_TO_ALL.name:
            raise UsageError("an all-to-all does not work in place; call ops.all_to_all")
        array = check_buffer(array, low=True)
        if is_low(array.dtype) and operation in (ALL_GATHER.name, BROADCAST.name):
            array = array.view(np.uint16)  # moved and not added: any type of 2 bytes will do
        elif is_low(array.dtype):
            if operation == ALL_REDUCE.name and algorithm in (AUTO, NATIVE):
                if is_device(array) and not cuda_aware():
                    return staged(array, lambda host: halved(host, self.comm, tag))
                return halved(array, self.comm, tag)
            return widened(array, lambda wide: self.bind(wide, algorithm, tag, operation))
        if algorithm == AUTO and operation == ALL_REDUCE.name:
            algorithm = self.choose(array).algorithm
        if is_device(array) and (algorithm == SHARED or not cuda_aware()):
            return staged(array, lambda host: self.bind(host, algorithm, tag, operation))
        if algorithm == NATIVE:
            return NativeExecution(array, self.comm, operation)
        if algorithm == SHARED and operation == ALL_REDUCE.name:
            return SharedSum(array, self.memory(), tag)
        collective = find_collective(operation, algorithm)
        if collective.takes_nodes:
            collective = collective.on(self.nodes())
        steps = (
            collective(self.rank, self.size)
            if isinstance(algorithm, str)
            else self._proved(collective)
        )
        return Execution(steps, array, self.comm, tag, collective.contract.parts(self.size))

    @property
    def machine(self) -> Machine | None:
        """The machine simulated, or else fitted; None without either."""
        return self.comm.world.machine or (None if self.fit is None else self.fit.machine)

    @contextmanager
    def collective(
        self,
        name: str,
        arrived_s: float | None = None,
        category: str = COLLECTIVE,
        nbytes: int | None = None,
    ) -> Iterator[None]:
        """Time a collective and show it in a trace: the wait for the last rank, the exchange.

        Args:
            name: of the collective; all ranks run collectives with one name in the same order.
            arrived_s: when this rank began it, if not now.
            category: see `timeline.TraceEvent`; any other is an exchange of layers, which is
                counted.
            nbytes: of the exchanged arrays.
        """
        self.comm.check_open()
        world, trace, begin = self.comm.world, timeline.current(), clock.now()
        before_s, before = world.collective_s, world.traffic
        try:
            yield
        finally:
            end = clock.now()
            world.collective_s = before_s + end - begin  # a nested collective counts once
            if category != COLLECTIVE and world.traffic is before:  # a nested sum counts itself
                self.count(Traffic(0.0, nbytes or 0, 1, nan))
            if trace is not None:
                ranks = f"{name} of {self.comm.members}"
                arrived_s = begin if arrived_s is None else arrived_s
                trace.add(
                    name,
                    category,
                    timeline.REDUCE,
                    begin,
                    end,
                    None if nbytes is None else {"bytes": nbytes},
                    collective=ranks,
                    arrived_s=arrived_s,
                )

    def count_sum(self, nbytes: int, algorithm: AlgorithmLike = NATIVE) -> None:
        """Count one blocking all-reduce; none on a single rank."""
        if self.size > 1:
            self.count(Traffic(0.0, nbytes, 1, self.predict(algorithm, nbytes)))

    def predict(self, algorithm: AlgorithmLike, nbytes: int, started: bool = False) -> float:
        """Return the fit's seconds for an all-reduce; NaN without a fit.

        Args:
            algorithm: as in `all_reduce`.
            nbytes: the array's length in bytes.
            started: whether it is started and polled, instead of blocking.
        """
        if self.size == 1:
            return 0.0
        fit = self.fit
        if fit is None or algorithm not in NAMES or (algorithm == SHARED and fit.shared is None):
            return nan
        return fit.predict(algorithm, nbytes, started)

    def spend(self, seconds: float) -> None:
        """Add seconds in which this rank drove collectives under way (not collective)."""
        self.comm.world.collective_s += seconds

    def count(self, traffic: Traffic) -> None:
        """Add to this rank's communication, `World.traffic` (not collective)."""
        world = self.comm.world
        world.traffic = world.traffic.plus(traffic)

    def _run(
        self, array: CommBuffer, algorithm: AlgorithmLike, operation: str, check: bool
    ) -> None:
        with self.collective(operation):
            if check:
                self.check_same(array, operation)
            self.bind(array, algorithm, BLOCKING_TAG, operation).run()

    def _proved(self, collective: Collective) -> Sequence[Step]:
        """Return this rank's steps of a user's collective; at first all ranks compare theirs."""
        steps = proved_steps(collective, self.size)
        if collective not in self._compared:
            require_equal(
                self,
                [blake2b(repr(steps).encode(), digest_size=16).hexdigest()],
                f"the ranks were given different steps by {collective.name}",
                "let it depend only on rank and size",
                show=None,
            )
            self._compared.add(collective)
        return steps[self.rank]

    def choose(self, array: CommBuffer, started: bool = False) -> Choice:
        """Return the algorithm that "auto" means for this array, and why; the same on all ranks.

        Shared memory is a candidate only if the array was allocated there on all ranks: see
        `memory`.

        Args:
            started: whether it will be started and polled, instead of a blocking call.
        """
        if is_device(array) and cuda_aware():
            return Choice(NATIVE, "MPI takes device arrays")
        memory = (
            None
            if self._memory is None or self._memory.closed or is_device(array)
            else self._memory
        )
        shared = memory is not None and memory.locate(array) is not None
        return choose(array.nbytes, self.size, self.fit, shared, started)

    def check_same(self, array: CommBuffer, call: str = ALL_REDUCE.name) -> None:
        """Raise unless all ranks have an array of the same length and dtype that can be summed.

        Args:
            call: the collective that the array is for, the same on all ranks.

        Raises:
            CommError, ShapeError, DtypeError: see `_check_call`.
        """
        self._check_call(call, _describe(array), lambda: check_buffer(array, low=True))

    def _check_call(self, call: str, arrays: str, check: Callable[[], object]) -> None:
        """Raise unless all ranks make the same call on the same arrays. Collective.

        MPI itself does not notice different arrays: it hangs, or mixes up bytes.

        Args:
            call, arrays: as text.
            check: raises if this rank's arrays are unsuitable.

        Raises:
            CommError: on all ranks; names each call and its ranks.
            NnmpiError: of `check`, on all ranks, when some have unsuitable arrays.
        """
        wrong: NnmpiError | None = None
        try:
            check()
        except NnmpiError as error:
            wrong = error
        digest = blake2b(f"{call}: {arrays} {wrong}".encode(), digest_size=10).digest()
        # Equal on all ranks if the sum is this rank's own times their number: other digests with
        # such a sum are a chance of 2^-80. To gather all of them took n^2 numbers. The texts travel
        # only on failure.
        own = [int.from_bytes(part, "big") for part in (digest[:5], digest[5:])]
        total = np.array(own, np.int64)  # 40 bits, so that a sum fits
        self.comm.allreduce(total)
        if total.tolist() != [self.size * number for number in own]:
            problems = (
                "the ranks are in different collectives",
                "a collective needs the same array on every rank, but these differ",
            )
            agree(self, wrong)
            require_equal(self, [call, arrays], lambda number: problems[number])
        if wrong is not None:
            raise wrong

    # ---- parts of any lengths; device arrays go through host memory ----

    def all_gather_v(
        self, local: CommBuffer, counts: Sequence[int], check: bool = True
    ) -> list[CommBuffer]:
        """Return every rank's part, in rank order, on every rank. Collective.

            counts (3, 1, 2)       rank 0  a a a          a a a b c c     all ranks
                                   rank 1  b       -->
                                   rank 2  c c

        Args:
            local: (counts[rank],) this rank's part; of one dtype on all ranks.
            counts: every rank's length, the same on all ranks; a part may be empty.
            check: as in `all_reduce`, of the counts and dtypes.

        Raises:
            ShapeError: when this rank's part has another length, or is not 1-D and contiguous.
            CommError: with `check`, on all ranks, when counts or dtypes differ.
        """
        self._check_parts(ALL_GATHER.name, local, counts, self._own_count(counts), check)
        everything = room_like(local, sum(counts))
        sizes = [count * local.itemsize for count in counts]
        self.comm.allgatherv(as_bytes(to_host(local)), as_bytes(everything), sizes)
        stops = list(accumulate(counts))
        full = from_host(everything, namespace(local))
        return [full[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]

    def reduce_scatter_v(
        self, parts: CommBuffer, counts: Sequence[int], check: bool = True
    ) -> CommBuffer:
        """Return this rank's part of the sum over the ranks. Collective.

        Args:
            parts: (sum of counts,) this rank's contribution to every rank's part, in rank order.
                float16 and bfloat16 are added in float32.
            counts: every rank's length, the same on all ranks; a part may be empty.
            check: as in `all_reduce`, of the counts and dtypes.

        Raises:
            ShapeError: when `parts` has another length, or is not 1-D and contiguous.
            CommError: with `check`, on all ranks, when counts or dtypes differ.
        """
        self._own_count(counts)
        self._check_parts(REDUCE_SCATTER.name, parts, counts, sum(counts), check)
        if is_low(parts.dtype):
            wide = parts.astype(np.float32)
            return self.reduce_scatter_v(wide, counts, check=False).astype(parts.dtype)
        local = room_like(parts, counts[self.rank])
        self.comm.reduce_scatter(to_host(parts), local, list(counts))
        return from_host(local, namespace(parts))

    def all_to_all_v(
        self,
        parts: Sequence[CommBuffer],
        shapes: Sequence[Shape],
        name: str = "all-to-all",
        category: str = COLLECTIVE,
        check: bool = True,
    ) -> list[CommBuffer]:
        """Send each rank its array; return the received ones, of the given shapes. Collective.

        The messages are those of `algorithms.pairwise`, all posted at once in the order of its
        rounds. Empty arrays make no messages.

        Args:
            parts: the array for each rank, of any shape; this rank's own is returned itself.
            shapes: the shape of the array from each rank.
            name, category: of the exchange in a timeline.
            check: compare the shapes and dtypes of both ends first, by an exchange of values.

        Raises:
            CommError: with `check`, on all ranks, when two ends differ.
        """
        if check:
            self._check_ends(parts, shapes)
        parts = [plain(part) for part in parts]
        xp, steps = namespace(parts[0]), pairwise(self.rank, self.size)
        sends = [
            (step.to, xp.ascontiguousarray(parts[step.to])) for step in steps if step.to is not None
        ]
        received = [
            parts[r] if r == self.rank else xp.empty(shape, parts[0].dtype)
            for r, shape in enumerate(shapes)
        ]
        receives = [(step.from_, received[step.from_]) for step in steps if step.from_ is not None]
        with self.collective(name, None, category, sum(item.nbytes for _, item in sends)):
            send_and_receive(
                self, *([(r, item) for r, item in some if item.size] for some in (sends, receives))
            )
        return received

    def _check_ends(self, parts: Sequence[CommBuffer], shapes: Sequence[Shape]) -> None:
        """Raise on all ranks unless each part is what its receiver expects. Collective."""
        sent = [
            "a masked array"
            if isinstance(part, np.ma.MaskedArray)
            else _form(part.shape, part.dtype)
            for part in parts
        ]
        awaited = [_form(shape, parts[0].dtype) for shape in shapes if parts]
        by_rank = self.gather([sent, awaited])
        for rank, lists in enumerate(by_rank):
            if any(len(item) != self.size for item in lists):
                raise CommError(
                    f"rank {rank} gives {len(lists[0])} parts and {len(lists[1])} shapes to an"
                    f" all-to-all of {self.size} ranks; give one for each"
                )
        for (rank, (parts_sent, _)), (to, (_, expected)) in product(enumerate(by_rank), repeat=2):
            if parts_sent[to] != expected[rank]:
                raise CommError(
                    f"rank {rank} sends {parts_sent[to]} to rank {to}, which expects"
                    f" {expected[rank]}; give both ends the same shape and dtype, without gaps"
                )

    def _own_count(self, counts: Sequence[int]) -> int:
        """Return this rank's length; refuse lengths of more or fewer ranks."""
        if len(counts) != self.size:
            raise ShapeError(
                f"{len(counts)} counts for {self.size} ranks; give the length of each rank's part"
            )
        return counts[self.rank]

    def _check_parts(
        self, call: str, array: CommBuffer, counts: Sequence[int], length: int, check: bool
    ) -> None:
        if not check:
            return self._check_length(array, length)
        dtype = getattr(array, "dtype", type(array).__name__)
        arrays = f"{list(counts)} elements of {dtype}"
        return self._check_call(call, arrays, lambda: self._check_length(array, length))

    def _check_length(self, array: CommBuffer, length: int) -> None:
        if check_buffer(array, low=True).size != length:
            raise ShapeError(
                f"rank {self.rank} of {self.size} has {array.size} elements, but its count is"
                f" {length}; give an array of that length"
            )

    # ---- values ----

    def broadcast(self, array: CommBuffer, root: int = 0, check: bool = True) -> None:
        """Replace the array on every rank by root's values.

        Args:
            array: any shape, C-contiguous, any dtype but object; shape and dtype the same on all
                ranks.
            root: the source's rank.
            check: as in `all_reduce`, of the shapes and dtypes.

        Raises:
            ShapeError: for an array with gaps, or a read-only one.
            DtypeError: for an object array, or no array.
            UsageError: for a root that is none of the ranks.
            CommError: with `check`, on all ranks, when their arrays or roots differ.
        """
        if check:
            form = f"{np.shape(array)} " if np.ndim(array) != 1 else ""
            self._check_call(
                f"{BROADCAST.name} from rank {root}",
                f"{form}{_describe(array)}",
                lambda: self._check_broadcast(array, root),
            )
        else:
            self._check_broadcast(array, root)
        if is_device(array):
            flat = as_bytes(array)
            host = to_host(flat)
            self.broadcast(host, root, check=False)
            return put(host, flat)
        for piece in pieces(as_bytes(array)):
            self.comm.broadcast(piece, root)
        return None

    def _check_broadcast(self, array: CommBuffer, root: int) -> None:
        self.check_root(root)
        if not is_array(array):
            raise DtypeError(
                f"broadcast works on arrays, not {type(array).__name__}; group.share(value) sends"
                " other values"
            )
        check_contiguous(array)


def _form(shape: Shape, dtype: Any) -> str:
    return f"{tuple(map(int, shape))} of {dtype}" if prod(shape) else "nothing"


def _describe(array: Any) -> str:
    return f"{array.size} elements of {array.dtype}" if is_array(array) else type(array).__name__


def _find_world(comm: Any) -> Comm:
    """Return a communicator with the interface of `comm.world`; wrap one of mpi4py's."""
    comm = getattr(comm, "_wire", comm)  # of mpi4py's stand-in on simulated ranks
    if hasattr(comm, "world"):
        return cast(Comm, comm)
    # imported here, because it loads MPI; a user of mpi4py has loaded it already
    from nnmpi.comm.mpi.mpi_world import wrap

    return wrap(comm)
