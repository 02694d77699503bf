"""The host memory of staged collectives goes back to where it came from: once, with its event, and not while in use."""

import gc
from typing import Any

import numpy as np
import pytest

from nnmpi.comm.algorithms.registry import NATIVE, SHARED
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.device.copies import PinnedBlock, PinnedPool
from nnmpi.comm.device.staged import PIECE_BYTES, SharedBlocks, Staged
from nnmpi.comm.group import Group
from tests.device.library import load


def watch(
    monkeypatch: pytest.MonkeyPatch, kind: type[PinnedPool | SharedBlocks]
) -> tuple[list[PinnedBlock], list[PinnedBlock]]:
    """Return what is taken from now on, and what is given back, as it goes on."""
    gc.collect()  # what earlier tests have left goes back now
    taken: list[PinnedBlock] = []
    given: list[PinnedBlock] = []
    take, give = kind.take, kind.give

    def watched_take(memory: Any, nbytes: int) -> PinnedBlock:
        taken.append(take(memory, nbytes))
        return taken[-1]

    def watched_give(memory: Any, block: PinnedBlock) -> None:
        given.append(block)
        give(memory, block)

    monkeypatch.setattr(kind, "take", watched_take)
    monkeypatch.setattr(kind, "give", watched_give)
    return taken, given


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", [NATIVE, "ring"])
def test_a_sum_that_nobody_keeps_gives_its_memory_back_with_its_last_copy(
    group: Group, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """At once, so that CuPy's pool never has it: that would hand it out while a copy still reads there."""
    taken, given = watch(monkeypatch, PinnedPool)
    device = load().ones(100, np.float32)
    group.start_all_reduce(device, algorithm).wait()
    group.bind(device, algorithm, 2).run()
    right = [len(taken) == (2 if group.size > 1 else 0), given == taken, all(block.event for block in given)]
    right.append(bool((device.get() == group.size**2).all()))
    assert group.gather(right) == [[True] * 4] * group.size


@pytest.mark.mpi
def test_memory_is_given_back_once(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, given = watch(monkeypatch, PinnedPool)
    bound = group.bind(load().ones(PIECE_BYTES, np.float32), NATIVE, 2)
    bound.run()
    bound.free()
    after = len(given)
    bound.free()
    del bound
    gc.collect()
    right = [len(taken) == after == (2 if group.size > 1 else 0), given == taken]
    assert group.gather(right) == [[True] * 2] * group.size


@pytest.mark.mpi
def test_memory_that_is_in_use_is_not_given_back(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that was dropped in the middle: MPI may have its memory for as long as it likes."""
    taken, given = watch(monkeypatch, PinnedPool)
    monkeypatch.setattr(load().cuda.Event, "done", property(lambda event: False))
    pending = group.start_all_reduce(load().ones(100, np.float32), "ring")
    polled = pending.poll()
    del pending
    gc.collect()
    assert group.gather([polled, len(taken), len(given)]) == [[group.size == 1, int(group.size > 1), 0]] * group.size


@pytest.mark.mpi
def test_memory_that_a_node_shares_waits_for_its_free(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving it back is collective, and ranks need not drop what they have at the same time."""
    whole = group.duplicate()
    taken, given = watch(monkeypatch, SharedBlocks)
    device = load().ones(100, np.float32)
    bound = Staged(
        device,
        lambda host: whole._bind_one(host, SHARED, 2, ALL_REDUCE.name, persistent=True),
        ALL_REDUCE.name,
        group.rank,
        group.size,
        memory=SharedBlocks(whole.memory(), load()),
    )
    bound.run()
    lease = bound._lease
    del bound
    gc.collect()
    dropped = [len(taken), len(given)]
    lease.end()
    whole.memory().free()
    whole.free()
    assert group.gather([dropped, len(given)]) == [[[1, 0], 1]] * group.size
