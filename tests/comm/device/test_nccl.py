"""Collectives by NCCL, over a double that writes down what it is asked for and finds what NCCL would hang at."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nnmpi.backend.precision import bfloat16
from nnmpi.comm.algorithms.registry import NCCL
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, NEIGHBOUR_AVERAGE, REDUCE_SCATTER
from nnmpi.comm.device.nccl import CODES, Nccl, library, refuse_shared_cards
from nnmpi.comm.gradients import BucketExchange
from nnmpi.comm.group import Group
from nnmpi.errors import CommError, DeviceError, DtypeError, UsageError
from nnmpi.shard import part
from tests.device.library import load


@pytest.fixture
def double(group: Group) -> Iterator[Any]:
    """A card for each rank; the double's record, empty."""
    settings = load().cuda.runtime.settings()
    devices, current = settings.devices, settings.current
    settings.devices, settings.current = group.size, group.rank
    found = library(load())
    found.RECORD.__init__()
    yield found
    settings.devices, settings.current = devices, current


def whole(rank: int, n: int, dtype: Any = np.float32) -> Any:
    """Return a rank's whole numbers."""
    return np.random.default_rng(rank).integers(0, 9, n).astype(dtype)


@pytest.mark.mpi
@pytest.mark.parametrize("n", [0, 1, 5, 12, 7919])
@pytest.mark.parametrize("operation", [ALL_REDUCE.name, REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name])
def test_every_collective_keeps_its_contract(group: Group, double: Any, operation: str, n: int) -> None:
    every = [whole(rank, n) for rank in range(group.size)]
    parts = [part(n, group.size, rank) for rank in range(group.size)]
    own = parts[group.rank]
    device = load().asarray(every[group.rank])
    twin = group.duplicate()
    bound = twin.bind(device, NCCL, 0, operation)
    bound.start()
    while not bound.poll():
        pass
    total = np.sum(every, axis=0, dtype=np.float32)
    where = slice(own.start, own.stop) if operation == REDUCE_SCATTER.name else slice(None)
    wanted = {
        ALL_REDUCE.name: total,
        REDUCE_SCATTER.name: total[own.start : own.stop],
        ALL_GATHER.name: np.concatenate([each[c.start : c.stop] for each, c in zip(every, parts, strict=True)]),
        BROADCAST.name: every[0],
    }[operation]
    right = bool(np.array_equal(device[where].get(), wanted))
    calls = list(double.RECORD.calls)
    twin.free()
    equal = n % group.size == 0 or operation in (ALL_REDUCE.name, BROADCAST.name)
    assert all(call.depth == (0 if equal else 1) for call in calls)
    assert double.RECORD.ended == ["destroy"]
    assert double.RECORD.depth == 0
    assert group.gather(right) == [True] * group.size
    sequence = [[call.name, call.count, call.dtype, call.op, call.root] for call in calls]
    assert group.gather(sequence) == [sequence] * group.size
    assert len(sequence) == (0 if n == 0 else 1 if equal else min(n, group.size))


@pytest.mark.mpi
def test_the_computing_stream_waits_for_the_result_and_the_host_does_not(group: Group, double: Any) -> None:
    """What is computed after `wait` sees the sum although nobody has waited for the device."""
    xp = load()
    device = xp.ones(1000, np.float32)
    twin = group.duplicate()
    bound = twin.bind(device, NCCL)
    bound.start()
    before = float(device._host[0])
    bound.wait()
    doubled = (device * 2).get()
    twin.free()
    assert (
        group.gather([before, float(doubled[0]), float(doubled[-1])])
        == [[1.0, 2.0 * group.size] * 1 + [2.0 * group.size]] * group.size
    )
    stream = {call.stream for call in double.RECORD.calls}
    assert len(stream) == 1
    assert stream != {xp.cuda.get_current_stream().ptr}


@pytest.mark.mpi
def test_buckets_go_to_one_stream_in_one_order_while_backward_runs(group: Group, double: Any) -> None:
    xp = load()
    spans = [(0, 0, 300), (0, 300, 310), (0, 310, 2310), (0, 2310, 2317), (0, 2317, 7317)]
    buffer = xp.asarray(whole(group.rank, 7317))
    exchange = BucketExchange(group, [buffer], spans, NCCL, 4000, overlap=True)
    launched = []
    for span in reversed(range(5)) if group.is_root else range(5):
        exchange.ready(span)
        launched.append(len(double.RECORD.calls))
    exchange.finish()
    total = np.sum([whole(rank, 7317) for rank in range(group.size)], axis=0, dtype=np.float32)
    right = bool(np.array_equal(buffer.get(), total))
    reasons = {choice.algorithm for choice in exchange.choices}
    counts = [call.count for call in double.RECORD.calls]
    exchange.free()
    assert group.gather(right) == [True] * group.size
    if group.size > 1:
        assert counts == [5000, 7, 2000, 310]
        assert reasons == {NCCL}
        assert len({call.stream for call in double.RECORD.calls}) == 1
        if group.is_root:
            assert launched[0] == 1  # the first bucket left before the others were ready


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", sorted(CODES))
def test_codes_of_dtypes(group: Group, double: Any, dtype: str) -> None:
    """Half precision is added up in float32, and moved as it is."""
    kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    twin = group.duplicate()
    device = load().asarray(whole(0, 9, kind))
    twin.all_reduce(device, NCCL)
    summed = [bool((device.get().astype(np.float64) == whole(0, 9) * group.size).all())]
    moved = load().asarray(whole(group.rank, 9, kind))
    twin.bind(moved, NCCL, 1, BROADCAST.name).run()
    summed.append(bool((moved.get().astype(np.float64) == whole(0, 9)).all()))
    twin.free()
    low = dtype in ("float16", "bfloat16")
    assert [call.dtype for call in double.RECORD.calls] == ["float32" if low else dtype, dtype]
    assert group.gather(summed) == [[True, True]] * group.size


@pytest.mark.mpi
def test_a_library_without_the_name_of_bfloat16(group: Group, double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(double, "NCCL_BFLOAT16")
    twin = group.duplicate()
    nccl = twin.devices().nccl(load())
    code = nccl.code(load().zeros(1, bfloat16()))
    twin.free()
    assert group.gather(code) == [9] * group.size


@pytest.mark.mpi
def test_two_ranks_on_one_card_are_refused_before_nccl_is_called(group: Group, double: Any) -> None:
    load().cuda.runtime.settings().current = 0
    twin = group.duplicate()
    if group.size > 1:
        with pytest.raises(
            DeviceError, match=r"ranks 0-\d of \d are on one, 0000:00:00.0; start one rank for each GPU"
        ):
            twin.all_reduce(load().ones(3, np.float32), NCCL)
    else:
        twin.all_reduce(load().ones(3, np.float32), NCCL)
    assert len(double.RECORD.calls) == (0 if group.size > 1 else 1)
    twin.free()


def test_cards_are_told_apart_by_node_and_by_part() -> None:
    refuse_shared_cards([(0, "0000:01:00.0 aa"), (1, "0000:01:00.0 aa"), (0, "0000:01:00.0 bb")])
    with pytest.raises(DeviceError, match="ranks 0, 2 of 3 are on one, 0000:01:00.0"):
        refuse_shared_cards([(0, "0000:01:00.0 aa"), (1, "0000:01:00.0 aa"), (0, "0000:01:00.0 aa")])


@pytest.mark.mpi
def test_a_rank_without_nccl_stops_all(group: Group, double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = group.duplicate()
    if group.rank == group.size - 1:
        monkeypatch.setattr(double, "available", False)
    who = f"rank {group.size - 1}: " if group.size > 1 else ""  # where all ranks say the same, none is named
    with pytest.raises(DeviceError, match=f"^{who}NCCL is not installed; install nvidia-nccl-cu13"):
        Nccl(twin, load())
    twin.free()


@pytest.mark.mpi
def test_an_error_of_nccl_ends_its_communicator(group: Group, double: Any) -> None:
    twin = group.duplicate()
    bound = twin.bind(load().ones(8, np.float32), NCCL)
    bound.start()
    double.RECORD.failure = double.NcclError(2, "a link is down")
    with pytest.raises(CommError, match=f"NCCL failed on rank {group.rank} of {group.size} .*a link is down"):
        bound.wait()
    assert double.RECORD.ended == ["abort"]
    twin.free()
    assert double.RECORD.ended == ["abort"]


@pytest.mark.mpi
def test_the_double_finds_what_nccl_would_hang_at(group: Group, double: Any) -> None:
    if group.size > 1:
        twin = group.duplicate()
        device = load().ones(8 + group.rank, np.float32)
        bound = twin.bind(device, NCCL)
        with pytest.raises(CommError, match="NCCL would hang"):
            bound.start()
        twin.free()


@pytest.mark.mpi
def test_what_nccl_cannot_do_is_said(group: Group, double: Any) -> None:
    twin = group.duplicate()
    with pytest.raises(UsageError, match="NCCL has no neighbour-average; it has all-reduce"):
        twin.bind(load().ones(3, np.float32), NCCL, 0, NEIGHBOUR_AVERAGE.name)
    with pytest.raises(DtypeError, match="NCCL knows no int16; convert to one of int8"):
        twin.bind(load().ones(3, np.int16), NCCL)
    with pytest.raises(UsageError, match="'nccl' sums device arrays, and this one is NumPy's"):
        twin.all_reduce(np.ones(3, np.float32), NCCL)
    twin.free()
