"""Device arrays between ranks: every collective, however they travel, gives what it gives with host arrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nnmpi import models, optim
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.precision import bfloat16
from nnmpi.comm import buffers
from nnmpi.comm.algorithms.registry import ALGORITHMS, AUTO, COLLECTIVES, NATIVE
from nnmpi.comm.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, NEIGHBOUR_AVERAGE, REDUCE_SCATTER
from nnmpi.comm.group import Group
from nnmpi.compose.worker import Worker
from nnmpi.data.loader import Loader
from nnmpi.errors import CommError, NnmpiError, UsageError
from nnmpi.shard import part
from tests.device.library import device_backend, load
from tests.equivalence.reference import digits
from tests.worker_options import grouped

SUMS = [(ALL_REDUCE.name, name) for name in (NATIVE, AUTO, *ALGORITHMS)]
OTHERS = [key for key in COLLECTIVES if key[0] not in (ALL_REDUCE.name, NEIGHBOUR_AVERAGE.name)]
OTHERS += [(name, NATIVE) for name in (REDUCE_SCATTER.name, ALL_GATHER.name, BROADCAST.name)]


@pytest.fixture
def cards(group: Group) -> Iterator[None]:
    """A card for each rank."""
    settings = load().cuda.runtime.settings()
    before = settings.devices, settings.current
    settings.devices = group.size
    device_backend(group.rank)
    yield
    settings.devices, settings.current = before


@pytest.mark.mpi
@pytest.mark.parametrize("n", [0, 1, 7919])
@pytest.mark.parametrize(("operation", "algorithm"), SUMS + OTHERS)
@pytest.mark.parametrize("kind", ["float32", "int64", "float16", "bfloat16"])
@pytest.mark.usefixtures("cards")
def test_collectives_keep_their_contracts(group: Group, operation: str, algorithm: str, n: int, kind: str) -> None:
    """Whole numbers, which every order of adding sums exactly; blocking, polled and waited for."""
    dtype = bfloat16() if kind == "bfloat16" else np.dtype(kind)
    whole = [np.random.default_rng(rank).integers(-9, 9, n).astype(dtype) for rank in range(group.size)]
    total = np.sum([each.astype(np.float64) for each in whole], axis=0).astype(dtype)
    parts = [slice(own.start, own.stop) for own in (part(n, group.size, rank) for rank in range(group.size))]
    where = parts[group.rank] if operation == REDUCE_SCATTER.name else slice(None)
    wanted = {
        ALL_REDUCE.name: total,
        REDUCE_SCATTER.name: total[where],
        BROADCAST.name: whole[0],
        ALL_GATHER.name: np.concatenate([each[own] for each, own in zip(whole, parts, strict=True)]),
    }[operation]
    device = load().empty(n, dtype)
    bound, right = group.bind(device, algorithm, 5, operation), []
    for turn in range(3):
        device[...] = load().asarray(whole[group.rank])
        if turn == 0:
            bound.run()
        else:
            bound.start()
        while turn == 1 and not bound.poll():
            pass
        if turn == 2:
            bound.wait()
        right.append(device[where].get().tobytes() == wanted.tobytes())
    assert group.gather(right) == [[True] * 3] * group.size


@pytest.mark.mpi
def test_the_user_says_whether_mpi_takes_device_arrays(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for word in ("1", "yes"):
            monkeypatch.setenv("NNMPI_CUDA_AWARE", word)
            buffers.cuda_aware.cache_clear()
            if word == "1":
                assert group.choose(load().zeros(3)).algorithm == NATIVE
            else:
                with pytest.raises(UsageError, match="NNMPI_CUDA_AWARE"):
                    group.choose(load().zeros(3))
    finally:
        monkeypatch.undo()
        buffers.cuda_aware.cache_clear()


@pytest.mark.mpi
@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_any_rank_broadcasts_any_shape(group: Group, shape: tuple[int, ...], root: int) -> None:
    device = load().full(shape, group.rank + 1, dtype=np.float32)
    group.broadcast(device, root % group.size)
    assert group.gather(bool((device.get() == root % group.size + 1).all())) == [True] * group.size


@pytest.mark.mpi
def test_what_cannot_be_summed_is_refused(group: Group) -> None:
    xp = load()
    for array in (xp.zeros(3, bool), xp.zeros((2, 2)), xp.zeros(6)[::2]):
        with pytest.raises(NnmpiError):
            group.all_reduce(array)
    if group.size > 1:
        with pytest.raises(CommError, match="differ"):
            group.all_reduce(xp.zeros(3 + group.rank))
    twice = group.bind(xp.zeros(3), "ring")
    twice.start()
    with pytest.raises(CommError, match="still running"):
        twice.start()
    twice.wait()


def train(group: Group, backend: Backend, allreduce: str, overlap: bool) -> tuple[dict[str, Any], set[str]]:
    """Return the losses of some steps and the weights after them, and the algorithms of the buckets."""
    dataset = digits()
    model = models.mlp(dataset.sample_shape, dataset.classes).initialize(seed=0, dtype="float64", backend=backend)
    options: dict[str, Any] = {"overlap": overlap, "bucket_bytes": 9_000, "check": True}
    worker = Worker(
        model, optim.SGD(model.storage, 0.1), group, backend=backend, **grouped(allreduce=allreduce, **options)
    )
    loader = Loader(dataset, 256, rank=group.rank, world=group.size, microbatches=2, dtype="float64")
    losses = [worker.step(batch).loss for batch in loader.epoch(0)]
    names = {choice.algorithm for choice in worker.parallel.exchange.choices}
    worker.release()
    return {"losses": np.array(losses), **model.state()}, names


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("allreduce", [NATIVE, "ring"])
@pytest.mark.usefixtures("cards")
def test_gradients_on_a_device_give_the_hosts_numbers(group: Group, allreduce: str, overlap: bool) -> None:
    device, names = train(group, device_backend(group.rank), allreduce, overlap)
    host, _ = train(group, numpy_backend(), NATIVE, overlap=False)
    different = [name for name in host if not np.allclose(device[name], host[name], rtol=1e-9, atol=1e-11)]
    assert not any(group.gather(different)), different
    assert group.gather(sorted(names)) == [[allreduce]] * group.size
