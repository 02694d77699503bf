"""A step leaves nothing behind: neither memory nor objects, whatever way gradients travel."""

import gc
import tracemalloc

import numpy as np
import pytest

from nnmpi import Worker, models, optim
from nnmpi.base.shard import part
from nnmpi.comm.mpi.mpi_world import OPERATIONS
from nnmpi.data import Batch
from nnmpi.data.sampler import Cut
from tests.harness.slow import GROWTH
from tests.worker_options import grouped

ROWS = 24
WARM_UP, WINDOWS, STEPS = 400, 6, 50
WAYS = [
    {},
    {"fused_update": False},
    {"overlap": True, "bucket_bytes": 20_000},
    {"allreduce": "ring", "overlap": True},
    {"clip": 0.1},
]


def make_batch(group):
    """Return this rank's part of a batch."""
    draws, local = np.random.default_rng(0), part(ROWS, group.size, group.rank)
    x, y = draws.normal(size=(ROWS, 8, 8, 1)).astype("float32"), draws.integers(0, 10, ROWS)
    rows = slice(local.start, local.stop)
    cuts = (Cut(0, len(local), local.start),)
    return Batch(x[rows], y[rows], np.arange(ROWS)[rows], cuts, ROWS, epoch=0, number=0)


def resident_bytes():
    """Return what of this process lies in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def held():
    """Return the bytes that Python holds, and the objects."""
    gc.collect()  # NumPy's as_strided makes cycles
    return tracemalloc.get_traced_memory()[0], len(gc.get_objects())


@pytest.mark.host_only("the host's memory after hundreds of steps")
@pytest.mark.mpi
@pytest.mark.slow(GROWTH)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_three_hundred_steps_leave_nothing_behind(group, way):
    """What a step leaves grows in each of six windows; a cache, or Python's store of tuples, grows
    in some. Passes are replayed from the fourth on.
    """
    model = models.cnn((8, 8, 1), 10, hidden=(32,)).initialize(seed=0)
    worker, batch = (
        Worker(model, optim.Adam(model.storage), group, **grouped(**way)),
        make_batch(group),
    )
    worker.step(batch)
    tracemalloc.start()  # slows a step down, and sees only what is made from now on
    for _ in range(OPERATIONS):  # the watchdog's record of the last calls is full then
        group.barrier()
    # and of the calls that a step makes; on a busy machine few of them wait and are noted
    for _ in range(WARM_UP):
        worker.step(batch)
    resident, seen = resident_bytes(), [held()]
    for _ in range(WINDOWS):
        for _ in range(STEPS):
            worker.step(batch)
        seen.append(held())
    tracemalloc.stop()
    smallest = np.diff(seen, axis=0).min(axis=0)
    result = group.gather([*smallest.tolist(), resident_bytes() - resident])
    worker.release()
    # One number or tuple a step would be 1,400 bytes in a window, one object of ours 50 objects.
    # MPI's own store of messages grows by 2 MiB at once when another rank is late.
    assert all(bytes_ < 1_000 and more < 25 and large < 2**22 for bytes_, more, large in result), (
        result
    )
