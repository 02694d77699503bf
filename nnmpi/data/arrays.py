"""Arrays: NumPy archives; and what other files with arrays have in common.

An .npz holds x and y; or x_train, y_train and perhaps x_test and y_test, or another name of a
held-out part (`dataset.HELD_OUT`), in any capitals.

    x    (n, ...), any real dtype: uint8 stays uint8 with scale 1/255, the rest becomes float32.
         3-D quantities are grayscale images and get a channel axis.
         Tokens: uint16 or uint32, or other integers (n, time) with several labels per sample.
    y    (n,) or (n, 1): integers from 0 on
         (n, ...): several labels per sample; -1 does not count
         any real dtype with predicts="quantities"
"""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.base.errors import DataError, shortened
from nnmpi.base.files import check_unpacked, foreign, opened
from nnmpi.data.dataset import (
    HELD_OUT,
    TOKEN_TYPES,
    TRAIN,
    Dataset,
    LabelKind,
    as_float32,
    judge_classes,
)
from nnmpi.data.lazy import blocks, change_rows, is_lazy, read_all
from nnmpi.data.mapped import FileArray, read_header
from nnmpi.data.prepared import SMALL_BYTES
from nnmpi.data.tables import HINT, NO_RULES, TableRules, refuse_rules
from nnmpi.data.team import ALONE, Team

TRAIN_PARTS = *(f"_{part}" for part in TRAIN), ""
TEST_PARTS = tuple(f"_{part}" for part in HELD_OUT)
PARTS = tuple(f"{item}{part}" for part in (*TRAIN_PARTS, *TEST_PARTS) for item in "xy")
ReadArrays: TypeAlias = Callable[[Path, Sequence[str]], tuple[dict[str, Array], str]]
PIECE_BYTES = 2**20  # that are unpacked at once


def load_arrays(
    path: Path,
    name: str,
    read: ReadArrays,
    predicts: LabelKind = "classes",
    rules: TableRules = NO_RULES,
    scale: float | None = None,
    classes: int = 0,
) -> tuple[Dataset, Dataset | None]:
    """Return the training part of a file of arrays, and the test part or None; see the module.

    Args:
        path: of the file.
        name: of the data set.
        read: of a row of `readers.READERS`.
        predicts: the kind of y; "any" takes floats for quantities and integers for classes.
        rules: must be empty; they are here because `load` calls all readers alike.
        scale: of bytes that are not pixels.
        classes: their number, if it is known; labels are not read for it then.
    """
    refuse_rules(f"data set {path}", rules)
    arrays, has = read(path, PARTS)
    first, second = (
        next((part for part in parts if {f"x{part}", f"y{part}"} & {*arrays}), "")
        for parts in (TRAIN_PARTS, TEST_PARTS)
    )
    needed = {f"{item}{part}" for item in "xy" for part in (first, second or first)}
    if not needed <= {*arrays}:
        raise DataError(
            f"{path}: holds {has}; needs x and y, or x_train, y_train, x_test and y_test"
        )
    for item, x in arrays.items() if rules.as_bytes else ():
        # whole numbers are bytes, whatever their dtype
        if item[0] == "x" and x.dtype.kind in "iu" and x.size and _fit_bytes(x):
            arrays[item] = change_rows(x, lambda rows, _: rows.astype(np.uint8))
    is_other = rules.as_bytes is not None
    train = _part(path, name, arrays, first, predicts, classes, is_other)
    if scale is not None:
        train = replace(train, scale=scale)
    if not second:
        return train, None
    test = _part(path, name, arrays, second, predicts, train.classes)
    kinds = [f"x{part} holds {arrays[f'x{part}'].dtype}" for part in (first, second)]
    if train.scale != test.scale:
        raise DataError(
            f"{path}: {' and '.join(kinds)}; bytes are divided by 255, other numbers are not: save"
            " both in one dtype"
        )
    return train, test


def _fit_bytes(x: Array) -> bool:
    return all(rows.min() >= 0 and rows.max() <= 255 for _, rows in blocks(x))


def read_samples(path: Path, read: ReadArrays) -> Array:
    """Return x (or x_test) of a file of arrays: integers unchanged, floats as float32."""
    arrays, has = read(path, ["x", *(f"x{part}" for part in TEST_PARTS)])
    for name, x in arrays.items():
        return read_all(x if x.dtype.kind in "iu" else _samples(path, name, x))
    raise DataError(f"{path}: holds {has}; needs x, the samples")


def read_npz(path: Path, names: Sequence[str], team: Team = ALONE) -> tuple[dict[str, Array], str]:
    """Return an .npz file's arrays among `names`, in that order, and the names of all, for
    messages.

    Capitals do not count. Large arrays that are not compressed stay in the file.
    """
    what = "not a complete .npz file of arrays without pickled objects"
    with opened(path) as stream, foreign(path, DataError, what):
        if not zipfile.is_zipfile(stream):
            raise ValueError("it is truncated, or another kind of file")
        with zipfile.ZipFile(stream) as archive:
            members = {item.filename: item for item in archive.infolist()}
            has = shortened(", ".join(name.removesuffix(".npy") for name in members)) or "nothing"
            found = {name.lower(): item for name, item in members.items()}
            present = {name: found[f"{name}.npy"] for name in names if f"{name}.npy" in found}
            check_unpacked(path, sum(item.file_size for item in present.values()))
            arrays = {
                name: _read_member(path, stream, archive, item, team)
                for name, item in present.items()
            }
    return arrays, has


def _read_member(
    path: Path,
    stream: IO[bytes],
    archive: zipfile.ZipFile,
    item: zipfile.ZipInfo,
    team: Team,
) -> Any:
    """Return an array of an archive: in the file, if it is large and can be; or one of the team's.

    All its bytes are read in either case, of which zipfile compares the checksum.
    """
    with archive.open(item) as content:
        shape, dtype, is_in_order = read_header(content)
        stays = item.compress_type == zipfile.ZIP_STORED and item.file_size > SMALL_BYTES
        if is_in_order and stays:
            offset = _begin_of(stream, item) + content.tell()
            while content.read(PIECE_BYTES):
                pass
            return FileArray(path, dtype, shape, offset, item.CRC)
        if is_in_order and 0 not in shape:
            result = team.array(shape, dtype)
            left = result.reshape(-1).view(np.uint8)
            while piece := content.read(PIECE_BYTES):
                left[: len(piece)] = np.frombuffer(piece, np.uint8)
                left = left[len(piece) :]
            if left.size:
                raise ValueError("it is truncated")
            return result
    with archive.open(item) as content:
        return npy.read_array(content, allow_pickle=False)


def _begin_of(stream: IO[bytes], item: zipfile.ZipInfo) -> int:
    """Return where the content of a member begins: behind its header, whose length varies."""
    stream.seek(item.header_offset + 26)
    lengths = np.frombuffer(stream.read(4), "<u2")
    return item.header_offset + 30 + int(lengths.sum())


def read_npy(path: Path, names: Sequence[str]) -> tuple[dict[str, Array], str]:
    """Return the arrays among `names` of .npy files, mapped, and the names of all, for messages.

    Args:
        path: of a folder with x.npy and y.npy, x_train.npy ..., or these in folders train/ and
            test/ (or another name of a part); or of a file alone, which has x.
        names: of the arrays, of which capitals do not count.
    """
    files = {"x": path} if path.is_file() else npy_files(path)
    arrays = dict[str, Array]()
    for name in names:
        if name in files:
            with foreign(files[name], DataError, "not a complete .npy file without objects"):
                arrays[name] = _mapped(files[name])
    return arrays, ", ".join(sorted(files))


def _mapped(file: Path) -> Any:
    with file.open("rb") as stream:
        shape, dtype, is_in_order = read_header(stream)
        if is_in_order:
            return FileArray(file, dtype, shape, stream.tell())
    return np.load(file, mmap_mode="r").view(np.ndarray)


def npy_files(folder: Path) -> dict[str, Path]:
    """Return the .npy files in a folder by the names of arrays that `load_arrays` knows."""
    result = dict[str, Path]()
    for file in sorted(folder.glob("*.npy")):
        result[file.stem.lower()] = file
    for part in sorted(item for item in folder.iterdir() if item.is_dir()):
        if part.name.lower() in (*TRAIN, *HELD_OUT):
            for file in sorted(part.glob("*.npy")):
                result[f"{file.stem}_{part.name}".lower()] = file
    return {name: file for name, file in result.items() if name in PARTS}


def _part(
    path: Path,
    name: str,
    arrays: dict[str, Array],
    part: str,
    predicts: LabelKind,
    classes: int = 0,
    is_other: bool = False,
) -> Dataset:
    """Return a part of an archive, of other data than a model's if its classes may be some."""
    x_name, y_name, notes = f"x{part}", f"y{part}", tuple[str, ...]()
    x, y = arrays[x_name], arrays[y_name]
    if x.ndim < 2 or y.ndim < 1 or len(y) != len(x) or 0 in (x.size, y.size):
        raise DataError(
            f"{path}: {x_name} {x.shape} and {y_name} {y.shape}; needs (n, ...) samples and (n,) or"
            " (n, ...) labels"
        )
    y = read_all(y).reshape(-1) if prod(y.shape[1:]) == 1 else y
    if predicts == "quantities" or (predicts == "any" and y.dtype.kind == "f"):
        y = _finite(path, y_name, y)
    elif y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {y_name} is {y.dtype}; save labels as whole numbers (an integer dtype);"
            f" {HINT}"
        )
    elif is_other and not classes:
        classes = max(int(rows.max()) for _, rows in blocks(y)) + 1
    elif not classes:
        classes, notes = judge_classes(path, y_name, y, HINT)
    are_many = x.dtype.kind in "iu" and x.ndim == 2 and y.ndim > 1
    if y.dtype.kind == "f" or not (are_many or x.dtype in TOKEN_TYPES):
        x = _samples(path, x_name, x)
        if y.dtype.kind != "f" and y.ndim == 2 and all(_is_one_hot(rows) for _, rows in blocks(y)):
            raise DataError(
                f"{path}: {y_name} has a 1 in each row and else 0; give the numbers of the classes,"
                f" {y_name}.argmax(1)"
            )
        if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
            notes += (
                f"{x_name}: images of {x.shape[1]} x {x.shape[2]} pixels with {x.shape[3]}"
                " channels; if the channels are first, give x.transpose(0, 2, 3, 1)",
            )
    elif x.dtype == np.uint8:
        x = change_rows(x, lambda rows, _: rows.astype(np.uint16))
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    if is_lazy(x):
        return Dataset(name, x, y, classes, scale, notes=notes)
    result = Dataset(name, np.ascontiguousarray(x), y, classes, scale, notes=notes)
    _ = result.vocabulary  # which refuses tokens below 0
    return result


def _is_one_hot(y: Array) -> bool:
    return bool(((y.sum(1) == 1) & (y.max(1) == 1)).all())


def _samples(path: Path, name: str, x: Array) -> Array:
    result = x if x.dtype == np.uint8 else _finite(path, name, x)
    if x.ndim != 3:
        return result
    if isinstance(result, FileArray):
        return result.reshape(*x.shape, 1)
    return change_rows(result, lambda rows, _: rows[..., np.newaxis])


def _finite(path: Path, name: str, values: Array) -> NDArray[np.float32]:
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name} is {values.dtype}; needs real numbers")
    return as_float32(f"{path}: {name}", values)
