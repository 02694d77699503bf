import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from nnmpi.data.idx import load_idx, read_idx
from nnmpi.errors import DataError

LABELS = "train-labels-idx1-ubyte"
IMAGES = "t10k-images-idx3-ubyte"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read_gives_what_was_written(tmp_path: Path, idx_parts: dict[str, bytes], suffix: str) -> None:
    images = read_idx(write(tmp_path / f"a{suffix}", idx_parts[IMAGES]), 3)
    assert images.shape == (10, 6, 5)
    assert images.tobytes() == idx_parts[IMAGES][16:]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda good: b"", "empty"),
        (lambda good: good[:3], "not an IDX file"),
        (lambda good: good[:10], "header is cut off after 10 of 16 bytes"),
        (lambda good: good[:-1], "promises 300 bytes of values .10 x 6 x 5. and 299 follow"),
        (lambda good: good + b"\0", "and 301 follow"),
        (lambda good: b"\1" + good[1:], "not an IDX file"),
        (lambda good: good[:2] + b"\x0d" + good[3:], "type 13"),
        (lambda good: good[:3] + b"\1" + good[4:], "not an IDX file of 3 dims"),
        (lambda good: good[:4] + struct.pack(">I", 2**32 - 1) + good[8:], "promises 128849018850 bytes"),
        (lambda good: b"<html>not found</html>", "begins with 3c 68 74 6d"),
    ],
)
def test_damaged_file_is_named(
    tmp_path: Path, idx_parts: dict[str, bytes], suffix: str, damage: object, text: str
) -> None:
    path = write(tmp_path / f"damaged{suffix}", damage(idx_parts[IMAGES]))  # type: ignore[operator]
    with pytest.raises(DataError, match=text) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[: len(packed) // 2],
        lambda packed: packed[:-4],
        lambda packed: packed[:40] + bytes([packed[40] ^ 0xFF]) + packed[41:],
        lambda packed: packed + b"garbage",
        lambda packed: b"plain text",
    ],
)
def test_damaged_gz_is_named(tmp_path: Path, idx_parts: dict[str, bytes], damage: object) -> None:
    path = tmp_path / "damaged.gz"
    path.write_bytes(damage(gzip.compress(idx_parts[IMAGES])))  # type: ignore[operator]
    with pytest.raises(DataError, match="damaged.gz: not a whole gz file"):
        read_idx(path, 3)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none: cannot be read"):
        read_idx(tmp_path / "none", 1)


def test_part_is_grayscale_images(idx_folder: Path, idx_parts: dict[str, bytes]) -> None:
    test = load_idx(idx_folder, "test", "made up")
    assert (test.x.shape, test.x.dtype, test.classes) == ((10, 6, 5, 1), np.uint8, 10)
    assert test.rows(np.arange(10)).max() <= 1.0
    assert test.x.tobytes() == idx_parts[IMAGES][16:]
    np.testing.assert_array_equal(test.y, np.arange(10))


def test_number_of_labels_must_be_that_of_images(idx_folder: Path, idx_parts: dict[str, bytes]) -> None:
    (idx_folder / LABELS).write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 19) + idx_parts[LABELS][8:-1])
    with pytest.raises(DataError, match=f"has 20 images and .*{LABELS} 19 labels"):
        load_idx(idx_folder, "train", "made up")


def test_label_out_of_range_names_file_and_image(idx_folder: Path, idx_parts: dict[str, bytes]) -> None:
    (idx_folder / LABELS).write_bytes(idx_parts[LABELS][:-1] + b"\x0a")
    with pytest.raises(DataError, match=f"{LABELS}: label 10 of image 19 is not in 0..9"):
        load_idx(idx_folder, "train", "made up", tuple("0123456789"))


def test_part_without_samples_is_refused(idx_folder: Path) -> None:
    (idx_folder / "train-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(b"\0\0\x08\x03" + struct.pack(">III", 0, 6, 5))
    )
    (idx_folder / LABELS).write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 0))
    with pytest.raises(DataError, match="holds no labels"):
        load_idx(idx_folder, "train", "made up")
