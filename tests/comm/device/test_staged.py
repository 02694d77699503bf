"""Device arrays through host memory: every collective, by every algorithm, gives what it gives with host arrays.

The double's copies arrive when somebody waits for them, so a result that was not waited for would be rubbish here.
"""

import importlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from nnmpi.backend.precision import bfloat16
from nnmpi.comm.algorithms.registry import ALGORITHMS, AUTO, COLLECTIVES, NATIVE, SHARED
from nnmpi.comm.buffers import Buffer, check_device
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, NEIGHBOUR_AVERAGE, REDUCE_SCATTER
from nnmpi.comm.device.copies import copy_streams_of, put, room_like
from nnmpi.comm.device.coroutine import EventWait
from nnmpi.comm.device.staged import PIECE_BYTES, Staged
from nnmpi.comm.execution import NativeExecution
from nnmpi.comm.gradients import BucketExchange
from nnmpi.comm.group import Group
from nnmpi.errors import CommError, DtypeError, ShapeError
from nnmpi.shard import part
from tests.device.library import load
from tests.harness.refusals import told

EVERY = [NATIVE, SHARED, *ALGORITHMS, AUTO]
WAYS = [key for key in COLLECTIVES if key[0] not in (ALL_REDUCE.name, NEIGHBOUR_AVERAGE.name)]


WAYS += [(what, NATIVE) for what in (REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name)]


LENGTHS = [0, 1, 3, 7919, PIECE_BYTES // 4 + 3]


def values(rank: int, n: int, dtype: Any = np.float32) -> Buffer:
    """Return a rank's numbers."""
    found: Buffer = np.random.default_rng(rank).standard_normal(n).astype(dtype)
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_sum_has_the_bits_that_it_has_on_the_host(group: Group, algorithm: str, n: int) -> None:
    """Piece by piece, as the order in which ranks are added depends on a piece's length."""
    host = values(group.rank, n)
    device = load().asarray(host)
    group.all_reduce(device, algorithm)
    chosen = group.devices().choose(device, persistent=False).algorithm if algorithm == AUTO else algorithm
    for start in range(0, n, PIECE_BYTES // 4):
        group.all_reduce(host[start : start + PIECE_BYTES // 4], chosen)
    assert group.gather(device.get().tobytes() == host.tobytes()) == [True] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("n", [0, 5, 40009])
@pytest.mark.parametrize("algorithm", EVERY)
def test_a_bound_sum_runs_again_and_again(group: Group, algorithm: str, n: int) -> None:
    device = load().empty(n, np.float32)
    bound = group.bind(device, algorithm, 3)
    right = []
    for turn in range(4):
        device[...] = load().asarray(values(group.rank, n) * 8 // 1 + turn)
        total = np.sum([values(rank, n) * 8 // 1 + turn for rank in range(group.size)], axis=0, dtype=np.float32)
        if turn % 2:
            bound.run()
        else:
            bound.start()
            while not bound.poll():
                pass
        right.append(bool(np.array_equal(device.get(), total)))
    bound.free()
    assert group.gather(right) == [[True] * 4] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize(("operation", "algorithm"), WAYS)
def test_every_collective_keeps_its_contract(group: Group, operation: str, algorithm: str, n: int) -> None:
    whole = [np.random.default_rng(rank).integers(-9, 9, n).astype(np.float32) for rank in range(group.size)]
    own, where = part(n, group.size, group.rank), slice(None)
    if operation == REDUCE_SCATTER.name:
        where = slice(own.start, own.stop)
        wanted = np.sum(whole, axis=0, dtype=np.float32)[where]
    elif operation == BROADCAST.name:
        wanted = whole[0]
    else:
        parts = [part(n, group.size, rank) for rank in range(group.size)]
        wanted = np.concatenate([each[c.start : c.stop] for each, c in zip(whole, parts, strict=True)])
    device = load().asarray(whole[group.rank])
    bound = group.bind(device, algorithm, 5, operation)
    bound.run()
    first = bool(np.array_equal(device[where].get(), wanted))
    device[...] = load().asarray(whole[group.rank])
    bound.start()
    bound.wait()
    bound.free()
    assert group.gather([first, bool(np.array_equal(device[where].get(), wanted))]) == [[True, True]] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (PIECE_BYTES // 4 + 1, 2)])
def test_any_rank_broadcasts_any_shape(group: Group, shape: tuple[int, ...], root: int) -> None:
    device = load().full(shape, group.rank + 1, dtype=np.float32)
    group.broadcast(device, root % group.size)
    assert group.gather(bool((device.get() == root % group.size + 1).all())) == [True] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", [NATIVE, "ring", "tree", "ps", SHARED, AUTO])
def test_half_precision_is_added_in_float32_and_rounded_once(
    group: Group, algorithm: str, kind: str, where: str
) -> None:
    dtype = np.dtype(np.float16) if kind == "float16" else bfloat16()
    every = [values(rank, 1001, dtype) for rank in range(group.size)]
    every[-1][7] = np.nan
    wide = every[group.rank].astype(np.float32)
    group.all_reduce(wide, AUTO if algorithm == AUTO else algorithm)
    array: Any = every[group.rank].copy() if where == "host" else load().asarray(every[group.rank])
    group.all_reduce(array, algorithm)
    found = array if where == "host" else array.get()
    same = np.array_equal(found.astype(np.float32), wide.astype(dtype).astype(np.float32), equal_nan=True)
    assert group.gather([found.dtype == dtype, bool(same), bool(np.isnan(found[7]))]) == [[True] * 3] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("operation", [ALL_GATHER.name, BROADCAST.name])
def test_half_precision_moves_as_it_is(group: Group, operation: str, where: str) -> None:
    every = [values(rank, 11, bfloat16()) for rank in range(group.size)]
    parts = [part(11, group.size, rank) for rank in range(group.size)]
    gathered = np.concatenate([each[c.start : c.stop] for each, c in zip(every, parts, strict=True)])
    array: Any = every[group.rank].copy() if where == "host" else load().asarray(every[group.rank])
    group.bind(array, NATIVE, 2, operation).run()
    found = array if where == "host" else array.get()
    wanted = gathered if operation == ALL_GATHER.name else every[0]
    assert group.gather(found.tobytes() == wanted.tobytes()) == [True] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.uint16, np.int64])
def test_other_dtypes(group: Group, dtype: Any) -> None:
    device = load().asarray(np.arange(101).astype(dtype))
    group.all_reduce(device, "ring")
    assert group.gather(bool((device.get() == np.arange(101).astype(dtype) * group.size).all())) == [True] * group.size


@pytest.mark.mpi
def test_neighbours_are_averaged(group: Group) -> None:
    host = values(group.rank, 50)
    device = load().asarray(host)
    group.average_neighbours(device)
    group.average_neighbours(host)
    assert group.gather(device.get().tobytes() == host.tobytes()) == [True] * group.size


@pytest.mark.mpi
def test_pieces_take_turns_in_two_buffers(group: Group) -> None:
    device = load().asarray(values(group.rank, 1003))
    taken = copy_streams_of(load()).pool.bytes
    staged = Staged(
        device,
        lambda host: NativeExecution(host, group.comm),
        ALL_REDUCE.name,
        group.rank,
        group.size,
        piece_bytes=400,
    )
    assert len(staged._pieces) == 11
    assert len({id(piece.block) for piece in staged._pieces}) == 2
    staged.start()
    while not staged.poll():
        pass
    staged.free()
    total = np.sum([values(rank, 1003) for rank in range(group.size)], axis=0, dtype=np.float64)
    assert group.gather(bool(np.allclose(device.get(), total, atol=1e-5))) == [True] * group.size
    assert copy_streams_of(load()).pool.bytes - taken <= 2 * 4096


@pytest.mark.mpi
def test_sums_started_before_their_values_are_there(group: Group) -> None:
    """What the computing stream is still to write counts: the copy to the host waits for it."""
    xp = load()
    pinned = copy_streams_of(xp).pool.take(4000).view(1000, np.float32)
    pinned[...] = values(group.rank, 1000)
    device = xp.zeros(1000, np.float32)
    pending = group.bind(device, NATIVE, 4)
    compute = xp.cuda.Stream(non_blocking=True)
    device.set(pinned, stream=compute)
    with compute:
        pending.start()
        while not pending.poll():
            pass
        found = device.get()
    total = np.sum([values(rank, 1000) for rank in range(group.size)], axis=0, dtype=np.float64)
    assert group.gather(bool(np.allclose(found, total, atol=1e-5))) == [True] * group.size


@pytest.mark.mpi
def test_what_was_still_to_be_read_is_not_overwritten(group: Group) -> None:
    """A copy to the device waits for what the computing stream has yet to read there."""
    xp = load()
    pinned = copy_streams_of(xp).pool.take(40).view(10, np.float32)
    device = xp.full(10, 7, dtype=np.float32)
    compute = xp.cuda.Stream(non_blocking=True)
    device.get(out=pinned, stream=compute, blocking=False)
    room = room_like(device, 10)
    room[...] = 3
    with compute:
        put(room, device)
        found = device.get()
    assert group.gather([pinned.tolist(), found.tolist()]) == [[[7.0] * 10, [3.0] * 10]] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", [NATIVE, "ring"])
def test_buckets_meet_whatever_the_order_in_which_their_copies_arrive(
    group: Group, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """MPI pairs its own collectives by the order of their starts, and these wait for copies."""
    xp, buckets, length = load(), 12, 16
    arrive = np.random.default_rng(group.rank)
    done = xp.cuda.Event.done.fget
    monkeypatch.setattr(xp.cuda.Event, "done", property(lambda event: bool(arrive.integers(2)) and done(event)))
    spans = [(0, i * length, (i + 1) * length) for i in range(buckets)]
    device, wrong = xp.empty(buckets * length, np.float32), 0
    exchange = BucketExchange(group, [device], spans, algorithm, bucket_bytes=4 * length, overlap=True)
    for turn in range(5):
        device[...] = xp.asarray(np.arange(buckets * length, dtype=np.float32) * (group.rank + 1 + turn))
        for number in reversed(range(buckets)):
            exchange.ready(number)
        exchange.finish()
        factor = sum(rank + 1 + turn for rank in range(group.size))
        wrong += not np.array_equal(device.get(), np.arange(buckets * length, dtype=np.float32) * factor)
    exchange.free()
    assert len(exchange.buckets) == buckets
    assert group.gather(wrong) == [0] * group.size


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["started", "bound before", "blocking", "broadcast"])
def test_a_staged_sum_never_meets_that_of_a_host_array(group: Group, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Its copy has arrived before the other starts on the first rank, and after that on the others."""
    xp, late = load(), group.rank > 0
    done = xp.cuda.Event.done.fget
    monkeypatch.setattr(xp.cuda.Event, "done", property(lambda event: not late and done(event)))
    whole = group.duplicate()
    device, host = xp.full(16, 1 + group.rank, dtype=np.float32), np.full(16, 100 + group.rank, np.float32)
    bound = whole.bind(host, NATIVE, 1, BROADCAST.name if way == "broadcast" else ALL_REDUCE.name)
    staged = whole.start_all_reduce(device, NATIVE)
    for _ in range(3):
        staged.poll()
    if way == "started":
        bound = whole.start_all_reduce(host)
    elif way == "blocking":
        bound.run()
    else:
        bound.start()
    assert whole.gather(group.rank) == list(range(group.size))
    late = False
    left = [staged, bound]
    while left:
        left = [each for each in left if not each.poll()]
    ranks = sum(range(group.size))
    wanted = [group.size + ranks, 100 if way == "broadcast" else 100 * group.size + ranks]
    whole.free()
    assert (
        group.gather([set(device.get().tolist()), set(host.tolist())] == [{x} for x in wanted]) == [True] * group.size
    )


@pytest.mark.mpi
def test_the_staged_ones_give_their_communicator_back(group: Group) -> None:
    whole = group.duplicate()
    whole.all_reduce(load().ones(5, np.float32))
    whole.broadcast(load().ones(5, np.float32))
    comm = whole.devices()._comm
    whole.free()
    assert comm is None if group.size == 1 else comm.mpi == MPI.COMM_NULL


@pytest.mark.mpi
def test_several_in_flight_are_polled_in_any_order(group: Group) -> None:
    arrays = [load().asarray(values(group.rank, n)) for n in (7, 3001, 100, 0, 50, 50, 50)]
    names = [*["ring", "tree"] * 2, *[NATIVE] * 3]
    pending = [group.bind(array, name, tag) for tag, (array, name) in enumerate(zip(arrays, names, strict=True))]
    for each in pending:
        each.start()
    left = pending[::-1] if group.rank % 2 else list(pending)
    while left:
        left = [each for each in left if not each.poll()]
    totals = [np.sum([values(rank, len(a)) for rank in range(group.size)], axis=0) for a in arrays]
    right = [bool(np.allclose(a.get(), total, atol=1e-5)) for a, total in zip(arrays, totals, strict=True)]
    assert group.gather(right) == [[True] * len(arrays)] * group.size


@pytest.mark.mpi
def test_a_second_start_is_refused(group: Group) -> None:
    pending = group.bind(load().ones(1000, np.float32), "ring", 6)
    pending.start()
    refused = told(CommError, pending.start) != ""
    pending.wait()
    assert group.gather(refused) == [group.size > 1] * group.size


@pytest.mark.mpi
def test_ranks_with_different_device_arrays_are_told(group: Group) -> None:
    if group.size > 1:
        with pytest.raises(CommError, match="3 elements of float32"):
            group.all_reduce(load().ones(3 + group.is_root, np.float32))


@pytest.mark.parametrize(
    ("array", "error", "words"),
    [
        (lambda xp: xp.ones((2, 2)), ShapeError, "1-D"),
        (lambda xp: xp.ones(6)[::2], ShapeError, "gaps"),
        (lambda xp: xp.ones(3, dtype=np.complex64), DtypeError, "complex64"),
        (lambda xp: [1.0], DtypeError, "not list"),
    ],
)
def test_arrays_that_cannot_be_summed(array: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_device(array(load()))


@pytest.mark.mpi
def test_sums_that_are_started_again_wait_for_no_later_run(group: Group) -> None:
    """One is over and runs again, while that after it has not been asked since."""
    arrays = [load().ones(40, np.float32) for _ in range(2)]
    first, second = (group.bind(array, NATIVE, tag) for tag, array in enumerate(arrays))
    first.start()
    second.start()
    first.wait()
    first.start()
    first.wait()
    second.wait()
    found = [array.get().tolist() for array in arrays]
    assert group.gather(found) == [[[float(group.size) ** 2] * 40, [float(group.size)] * 40]] * group.size


# What a collective that plays itself waits for.


class Lost(RuntimeError):
    """What waiting for an event raises on a device that is lost."""


class Mark:
    """An event of which one can only say how the device answers."""

    ptr = 7
    done = False

    def synchronize(self) -> None:
        raise Lost


@pytest.mark.parametrize(("status", "come"), [(0, True), (600, False)])
def test_an_event_is_asked_for(monkeypatch: pytest.MonkeyPatch, status: int, come: bool) -> None:
    monkeypatch.setattr(load().cuda.runtime, "eventQuery", lambda ptr: status)
    assert EventWait(Mark()).poll() is come


def test_a_lost_device_is_not_polled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event's `done` is False then too."""
    monkeypatch.setattr(load().cuda.runtime, "eventQuery", lambda ptr: 700)
    with pytest.raises(Lost):
        EventWait(Mark()).poll()


def test_the_doubles_events_come_when_their_copies_have() -> None:
    cupy: Any = load()
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    assert EventWait(event).poll()
    source, out = cupy.arange(3), importlib.import_module("cupyx").empty_pinned(3, "int64")
    source.get(stream=stream, out=out, blocking=False)
    event.record(stream)
    assert not EventWait(event).poll()
    EventWait(event).wait()
    assert EventWait(event).poll() and out.tolist() == [0, 1, 2]
