import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from nnmpi.data.cifar import RECORD, batches, load_cifar, locate_cifar
from nnmpi.errors import DataError


def records(labels: list[int], seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), RECORD - 1)).astype(np.uint8)
    return np.concatenate([np.array(labels, np.uint8)[:, np.newaxis], pixels], axis=1).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data_batch_1.bin").write_bytes(records([1, 2, 3], 1))
    (tmp_path / "data_batch_2.bin.gz").write_bytes(gzip.compress(records([4, 5], 2)))
    (tmp_path / "test_batch.bin").write_bytes(records([9], 3))
    return tmp_path


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as out:
        for name, content in members.items():
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def test_planes_become_channels(folder: Path) -> None:
    train, test = load_cifar(folder, "cifar10")
    assert (train.x.shape, test.x.shape, train.x.dtype) == ((5, 32, 32, 3), (1, 32, 32, 3), np.uint8)
    assert train.y.tolist() == [1, 2, 3, 4, 5]
    content = records([1, 2, 3], 1)
    for image, channel, row, column in [(0, 0, 0, 0), (0, 2, 31, 31), (2, 1, 5, 17)]:
        place = image * RECORD + 1 + channel * 1024 + row * 32 + column
        assert train.x[image, row, column, channel] == content[place]


def test_batches_come_in_the_order_of_their_numbers(folder: Path) -> None:
    (folder / "data_batch_10.bin").write_bytes(records([7]))
    assert load_cifar(folder, "cifar10")[0].y.tolist() == [1, 2, 3, 4, 5, 7]


def test_plain_file_goes_before_gz(folder: Path) -> None:
    (folder / "data_batch_1.bin.gz").write_bytes(b"never read")
    assert batches(folder)["data_batch_1"].name == "data_batch_1.bin"
    assert load_cifar(folder, "cifar10")[0].y.tolist()[:3] == [1, 2, 3]


def test_archive_gives_the_same_as_the_folder(folder: Path) -> None:
    members = {"test_batch.bin": records([9], 3), "readme.html": b"<html>", "data_batch_2.bin": records([4, 5], 2)}
    path = archive(folder / "x.tar.gz", {**members, "data_batch_1.bin": records([1, 2, 3], 1)})
    for packed, plain in zip(load_cifar(path, "cifar10"), load_cifar(folder, "cifar10"), strict=True):
        np.testing.assert_array_equal(packed.x, plain.x)
        np.testing.assert_array_equal(packed.y, plain.y)


def test_locate_finds_folder_official_folder_or_archive(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert locate_cifar(folder) == folder
    official = tmp_path_factory.mktemp("outer") / "cifar-10-batches-bin"
    folder.rename(official)
    assert locate_cifar(official.parent) == official
    (official / "test_batch.bin").unlink()
    assert locate_cifar(official.parent) is None
    packed = archive(official.parent / "cifar-10-binary.tar.gz", {"test_batch.bin": records([9])})
    assert locate_cifar(official.parent) == packed


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("data_batch_1.bin", records([1, 2])[:-1], "6145 bytes are not whole CIFAR-10 records of 3073"),
        ("data_batch_1.bin", records([1, 2]) + b"x", "6147 bytes are not whole"),
        ("data_batch_1.bin", records([1, 10]), "label 10 of image 1 is not in 0..9"),
        ("test_batch.bin", b"", "the file is empty"),
        ("data_batch_2.bin.gz", gzip.compress(records([4]))[:-9], "not a whole gz file"),
    ],
)
def test_damaged_batch_is_named(folder: Path, name: str, content: bytes, text: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=text) as caught:
        load_cifar(folder, "cifar10")
    assert name in str(caught.value)


@pytest.mark.parametrize("keep", [0, 20, 1000, -10])
def test_cut_archive_is_named(folder: Path, keep: int) -> None:
    path = archive(folder / "x.tar.gz", {"data_batch_1.bin": records([1] * 9), "test_batch.bin": records([2])})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"x\.tar\.gz: not a whole tar\.gz"):
        load_cifar(path, "cifar10")


def test_altered_pixel_in_an_archive_is_found(folder: Path) -> None:
    path = archive(folder / "x.tar.gz", {"data_batch_1.bin": records([1] * 9), "test_batch.bin": records([2])})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # random pixels do not pack, so this is one of them
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.tar\.gz: not a whole tar\.gz archive .*CRC"):
        load_cifar(path, "cifar10")


def test_archive_without_test_batch_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"needs test_batch.bin .* has \['data_batch_1'\]"):
        load_cifar(archive(folder / "x.tar.gz", {"data_batch_1.bin": records([1])}), "cifar10")


def test_damaged_member_of_an_archive_is_named(folder: Path) -> None:
    path = archive(folder / "x.tar.gz", {"data_batch_1.bin": records([1]), "test_batch.bin": records([12])})
    with pytest.raises(DataError, match=r"x.tar.gz, cifar-10-batches-bin/test_batch.bin: label 12"):
        load_cifar(path, "cifar10")
