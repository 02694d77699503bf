"""The binary version of CIFAR-10: records of one label byte and three 32 x 32 colour planes.

    record   label   1024 bytes red   1024 bytes green   1024 bytes blue      3073 bytes, rows first

Format: https://www.cs.toronto.edu/~kriz/cifar.html. The Python version holds pickles and is not read.
"""

import gzip
import re
import tarfile
import zlib
from pathlib import Path

import numpy as np

from nnmpi.data.dataset import Dataset
from nnmpi.data.files import read_bytes
from nnmpi.errors import DataError

ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE, CHANNELS = 32, 3
RECORD = 1 + CHANNELS * SIDE * SIDE
BATCH = re.compile(r"(data_batch_\d+|test_batch)\.bin(\.gz)?")


def batches(folder: Path) -> dict[str, Path]:
    """Return the batch files of a folder by name ("data_batch_1" ..., "test_batch"), plain before .gz."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*_batch*.bin*")):  # "a.bin" sorts before "a.bin.gz"
        match = BATCH.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault(match[1], path)
    return found


def locate_cifar(folder: Path) -> Path | None:
    """Return what to read in this folder: the folder itself, the official folder in it, the archive, or None.

    A subset of the training batches will do; at least one and the test batch must be there.
    """
    for place in (folder, folder / FOLDER):
        names = batches(place)
        if "test_batch" in names and len(names) > 1:
            return place
    archive = folder / ARCHIVE
    return archive if archive.is_file() else None


def load_cifar(place: Path, name: str) -> tuple[Dataset, Dataset]:
    """Return the training and test parts from a place that `locate_cifar` gave: x (n, 32, 32, 3) uint8, scale 1/255.

    Raises:
        DataError: for a missing or damaged file or a label above 9; the message names the file.
    """
    if place.is_dir():
        contents = {batch: (str(path), read_bytes(path)) for batch, path in batches(place).items()}
    else:
        contents = _read_archive(place)
    order = sorted(contents, key=lambda batch: (len(batch), batch))  # data_batch_10 after data_batch_9
    parts = {batch: _parse(contents[batch][1], contents[batch][0]) for batch in order}
    trains = [parts[batch] for batch in order if batch != "test_batch"]
    if not trains or "test_batch" not in parts:
        raise DataError(f"{place}: needs test_batch.bin and at least one data_batch_N.bin, and has {order}")
    return _dataset(name, trains), _dataset(name, [parts["test_batch"]])


def _read_archive(path: Path) -> dict[str, tuple[str, bytes]]:
    """Return (name for messages, content) of each batch in the official archive, read in one pass."""
    contents = {}
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for member in archive:
                match = BATCH.fullmatch(Path(member.name).name)
                stream = archive.extractfile(member) if match and member.isfile() else None
                if match and stream:
                    contents[match[1]] = (f"{path}, {member.name}", stream.read())
            while unpacked.read(1 << 20):  # to the end, where gz keeps its checksum
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path}: not a whole tar.gz archive ({error}); get it again") from error
    return contents


def _parse(content: bytes, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 32, 32, 3) uint8 and labels (n,) of one batch."""
    if not content or len(content) % RECORD:
        raise DataError(f"{source}: {len(content)} bytes are not whole CIFAR-10 records of {RECORD} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    labels = records[:, 0]
    wrong = np.flatnonzero(labels >= len(CLASS_NAMES))
    if wrong.size:
        raise DataError(f"{source}: label {labels[wrong[0]]} of image {wrong[0]} is not in 0..{len(CLASS_NAMES) - 1}")
    planes = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
    return planes.transpose(0, 2, 3, 1), labels


def _dataset(name: str, parts: list[tuple[np.ndarray, np.ndarray]]) -> Dataset:
    images = np.ascontiguousarray(np.concatenate([images for images, _ in parts]))
    labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    return Dataset(name, images, labels, len(CLASS_NAMES), 1 / 255, CLASS_NAMES)
