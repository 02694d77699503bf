"""The IDX format of MNIST and its followers: unsigned bytes behind a header of sizes.

    byte  0  1  2     3     4..7    8..11   ...
          0  0  type  dims  size 0  size 1  ...   sizes are big-endian 32-bit; then the values, last dim fastest

Format: http://yann.lecun.com/exdb/mnist/. Only type 8 (unsigned byte) is read: all known image sets use it.
"""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nnmpi.data.dataset import Dataset
from nnmpi.data.files import find, read_bytes
from nnmpi.errors import DataError

UNSIGNED_BYTE = 8
# For each part: the images' and the labels' file names, the official one first.
FILES = {
    "train": (
        ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
        ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    ),
    "test": (
        ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
        ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
    ),
}


def read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """Return the array of an IDX file, plain or .gz, as read-only uint8 with the sizes of its header.

    Args:
        dims: the number of dims the file must have (3 for images, 1 for labels).

    Raises:
        DataError: for a file that is damaged or of another kind; the message names it.
    """
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[3] != dims:
        raise DataError(f"{path}: not an IDX file of {dims} dims (it begins with {content[:4].hex(' ')})")
    if content[2] != UNSIGNED_BYTE:
        raise DataError(f"{path}: IDX values of type {content[2]}; only type {UNSIGNED_BYTE} (unsigned byte) is read")
    header = 4 + 4 * dims
    if len(content) < header:
        raise DataError(f"{path}: the IDX header is cut off after {len(content)} of {header} bytes")
    sizes: tuple[int, ...] = struct.unpack(f">{dims}I", content[4:header])
    expected = math.prod(sizes)
    if len(content) - header != expected:
        raise DataError(
            f"{path}: the header promises {expected} bytes of values ({' x '.join(map(str, sizes))}) "
            f"and {len(content) - header} follow"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def has_idx(folder: Path) -> bool:
    """Return whether the folder has all four files."""
    return all(find(folder, names) for pair in FILES.values() for names in pair)


def load_idx(folder: Path, part: str, name: str, class_names: tuple[str, ...] = ()) -> Dataset:
    """Return the part "train" or "test" of the IDX files in a folder: x (n, height, width, 1) uint8, scale 1/255.

    Args:
        folder: with the four files.
        part: "train" or "test".
        name: of the data set.
        class_names: one for each class; without them the number of classes is the largest label plus one.

    Raises:
        DataError: for a missing or damaged file, images and labels of different number, or a label out of range.
    """
    paths = []
    for names in FILES[part]:
        path = find(folder, names)
        if path is None:
            raise DataError(f"{folder}: has no {names[0]}, plain or .gz")
        paths.append(path)
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if len(images) != len(labels):
        raise DataError(f"{paths[0]} has {len(images)} images and {paths[1]} {len(labels)} labels")
    if len(labels) == 0:
        raise DataError(f"{paths[1]}: the file holds no labels")
    classes = len(class_names) or int(labels.max()) + 1
    wrong = np.flatnonzero(labels >= classes)
    if wrong.size:
        raise DataError(f"{paths[1]}: label {labels[wrong[0]]} of image {wrong[0]} is not in 0..{classes - 1}")
    return Dataset(name, images[..., np.newaxis], labels.astype(np.int64), classes, 1 / 255, class_names)
