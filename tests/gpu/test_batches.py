"""Batches on a device are the host's: copied ahead of the steps, of images and of sentences of many
lengths.
"""

import numpy as np
import pytest

from nnmpi import Worker, models, optim, simulate
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.upload import resident
from nnmpi.data import (
    Compose,
    Dataset,
    Flip,
    Loader,
    Normalize,
    Shift,
    TextSource,
    load_text,
    prepare_tokens,
)
from nnmpi.data import loader as loader_module
from tests.equivalence.reference import digits


@pytest.mark.parametrize(
    "transform", [None, Compose(Shift(1), Flip(), Normalize.fit(digits()))], ids=["none", "all"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batches_on_a_device_are_the_hosts(device, transform, dtype):
    """Bit for bit, the last short one and an empty part too, while the next one is on its way."""
    for rank, world in ((0, 1), (2, 3)):
        loader = Loader(digits(), 28, rank=rank, world=world, transform=transform, dtype=dtype)
        require_same(loader, device)
        assert (loader._held_by(device) is None) == (transform is not None)


def require_same(loader, device, start=0):
    """Compare an epoch's batches on a device with the host's."""
    names = ["cuts", "global_rows", "targets", "number", "epoch", "first", "microbatches"]
    with loader.epoch(1, start) as host, loader.epoch(1, start, device) as there:
        count = start
        for ours, theirs in zip(there, host, strict=True):
            np.testing.assert_array_equal(device.to_host(ours.x), theirs.x, strict=True)
            np.testing.assert_array_equal(device.to_host(ours.y), theirs.y, strict=True)
            np.testing.assert_array_equal(ours.labels, theirs.y, strict=True)
            np.testing.assert_array_equal(ours.indices, theirs.indices, strict=True)
            assert ours.x.flags.c_contiguous and ours.x.dtype == loader.dtype
            assert all(getattr(ours, name) == getattr(theirs, name) for name in names)
            count += 1
    assert count == loader.batches_per_epoch


def bytes_of(shape, labels):
    """Return a data set of bytes: every other row of an array, so that its samples have gaps."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (2 * len(labels), *shape), dtype=np.uint8)[::2]
    return Dataset("bytes", x, labels, classes=3 if labels.dtype.kind in "iu" else 0, scale=1 / 255)


@pytest.mark.parametrize("share", [0.0, 0.25], ids=["sent", "resident"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", ["bytes", "quantities", "many labels", "normalized", "none"])
def test_batches_of_a_data_set_that_fits_and_of_one_that_does_not(
    device, monkeypatch, share, microbatches, kind
):
    """Bit for bit: scaled and normalized there or here, from any batch on, gathered in parts."""
    monkeypatch.setattr(loader_module, "RESIDENT_SHARE", share)
    monkeypatch.setattr(loader_module, "GATHERED_BYTES", 3 * 7 * 105 * 4)
    shape, random = (5, 7, 3), np.random.default_rng(1)
    labels = {
        "quantities": random.standard_normal((61, 2)).astype("float32"),
        "many labels": random.integers(-1, 3, (61, 4)),
    }.get(kind, random.integers(0, 3, 61))
    if kind == "none":
        labels = labels[:3]
    dataset = bytes_of(shape, labels)
    mean, std = random.random((2, 3)) + 0.1
    normalize = Normalize(mean, std) if kind == "normalized" else None
    for rank, world, start in ((0, 1, 0), (1, 2, 2)):
        loader = Loader(
            dataset, 7, rank=rank, world=world, transform=normalize, microbatches=microbatches
        )
        require_same(loader, device, min(start, len(loader)))
        assert (loader._held_by(device) is not None) == (share > 0)


def test_a_data_set_stays_on_the_device(device, monkeypatch):
    """It is copied once; another data set, and another transform, are followed."""
    copied = []

    def count(backend, array):
        copied.append(array.nbytes)
        return resident(backend, array)

    monkeypatch.setattr(loader_module, "resident", count)
    loader = Loader(digits(), 28)
    for _ in range(3):
        require_same(loader, device)
    assert len(copied) == 1
    loader.transform = Compose(Flip())
    require_same(loader, device)
    loader.transform = Normalize.fit(digits())
    require_same(loader, device)
    assert len(copied) == 1
    loader.dataset = bytes_of((2, 2, 1), np.arange(50) % 3)
    require_same(loader, device)
    assert len(copied) == 2


def test_a_batch_that_is_dropped_on_its_way_does_no_harm(device):
    """Its memory goes to later copies alone, which come after it."""
    loader = Loader(digits(), 28, transform=Compose(Flip()))
    for _ in range(3):
        with loader.epoch(0, backend=device) as given:
            next(given)
        require_same(loader, device)


def test_room_is_what_a_limit_leaves(device):
    room = device.room_bytes()
    held = device.zeros(1 << 20, "uint8")
    assert 0 < device.room_bytes() <= room - held.nbytes
    pool = device.xp.get_default_memory_pool()
    before = pool.get_limit()
    try:
        pool.set_limit(size=pool.used_bytes() + 4096)
        assert device.room_bytes() == 4096
    finally:
        pool.set_limit(size=before)


def test_a_transform_of_ones_own_is_done_on_the_host(device):
    """It gets floats, scaled, as everywhere."""
    loader = Loader(digits(), 28, transform=lambda x, indices, epoch, seed: x + 1)
    ours, theirs = next(loader.epoch(0, backend=device)), next(loader.epoch(0))
    np.testing.assert_array_equal(device.to_host(ours.x), theirs.x)


@pytest.mark.parametrize("sentences", [False, True], ids=["blocks", "sentences"])
def test_padded_batches_give_the_hosts_numbers(device, sentences, tmp_path, monkeypatch):
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    (tmp_path / "a.txt").write_text(
        "\n".join("".join(random.choice(list("abc "), n)) + "d" for n in range(1, 24))
    )
    source = TextSource(tmp_path / "a.txt", sentences=sentences)
    prepare_tokens(source)
    train, test = load_text(source, 9)

    def main(group, backend):
        model = models.gpt(train.classes, 9, 6, 1, 2).initialize(
            seed=0, dtype="float64", backend=backend
        )
        worker = Worker(model, optim.SGD(model.storage, lr=0.1), group, backend=backend)
        loader = Loader(train, 5, group, microbatches=2, dtype="float64")
        report = worker.run(loader, 0, 0, loader.batches_per_epoch, 0, lambda step: 0.1)
        held_out = Loader(test, 5, group, shuffle=False)
        with held_out.epoch(0, backend=backend) as given:
            tested = worker.evaluate(given)
        state = worker.state()[0].to_dict(everywhere=True)
        worker.release()
        numbers = [
            report.totals.loss_sum,
            report.totals.targets,
            tested.loss,
            tested.accuracy,
            tested.targets,
        ]
        return {**state, "numbers": np.array(numbers)}

    host, there = (
        simulate(lambda group, backend=backend: main(group, backend), 2)[0]
        for backend in (numpy_backend(), device)
    )
    assert host["numbers"][1] == train.targets.sum() and host["numbers"][4] == test.targets.sum()
    for name, values in host.items():
        np.testing.assert_allclose(there[name], values, rtol=1e-9, atol=1e-11, err_msg=name)
