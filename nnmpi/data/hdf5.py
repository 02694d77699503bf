"""HDF5 files, by h5py: arrays stay in the file, and each rank reads its own rows.

    sim.h5                         x and y, or x_train, y_train, x_test, y_test: as in an .npz
    sim.h5:fields/u,fields/p       other names: samples and targets
    sim.h5:a/u,a/p,b/u,b/p         the same of a training and a test part

An array that is stored in one piece is mapped. One in chunks, which may be compressed, is read by
whole chunks, of which the last ones are kept; before each read the file is compared with what it
was. Files are opened for reading alone, without HDF5's lock, which would keep other nodes' ranks
out.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from nnmpi.base.errors import DataError, UsageError, shortened
from nnmpi.base.files import check_unpacked, foreign
from nnmpi.data.lazy import as_rows
from nnmpi.data.mapped import FileArray, check_unchanged, state_of

SUFFIXES = (".h5", ".hdf5", ".hdf")
MOST_LISTED = 12  # names in a message
# of given names; samples alone are for predictions
PLACES = {1: ("x",), 2: ("x", "y"), 4: ("x_train", "y_train", "x_test", "y_test")}


def _library(path: Path) -> ModuleType:
    try:
        import h5py
    except ImportError:
        raise UsageError(f"{path} needs h5py: pip install h5py") from None
    return h5py


def open_file(path: Path) -> Any:
    """Return an HDF5 file, opened for reading."""
    h5py = _library(path)
    with foreign(path, DataError, "not a complete HDF5 file"):
        return h5py.File(path, "r", locking=False)


def read_hdf5(
    path: Path, names: Sequence[str], given: Sequence[str] = ()
) -> tuple[dict[str, Any], str]:
    """Return an HDF5 file's arrays among `names`, in that order, and the names of all, for
    messages.

    Args:
        path: of the file.
        names: of arrays, of which capitals do not count.
        given: the names in the file of x and y, or of two parts; empty for `names` themselves.

    Raises:
        UsageError: for another number of given names, and without h5py.
        DataError: for a damaged file, missing names, and arrays that are no rows of numbers.
    """
    if given and len(given) not in PLACES:
        raise UsageError(
            f"{path}:{','.join(given)}: give two names, of samples and targets, or four, of a"
            " training and a test part"
        )
    file = open_file(path)
    with foreign(path, DataError, "its names cannot be read"):
        listed, found = _listed(file), {name.lower(): name for name in file}
    has = ", ".join(listed) or "no arrays"
    wanted = dict(zip(PLACES[len(given)], given, strict=True)) if given else found
    present = {name: wanted[name] for name in names if name in wanted}
    if not present:
        pair = ",".join((*listed, "SAMPLES", "TARGETS")[:2])
        raise DataError(f"{path}: holds {has}; name samples and targets, as in {path}:{pair}")
    return {name: _array(path, file, stored, has) for name, stored in present.items()}, has


def in_place(x: Any) -> Any:
    """Return h5py's array mapped, if it is one piece of a file, or by rows; others unchanged.

    A file that is only read must stay as it is.

    Raises:
        DataError: for a file that ends before the array does; and, when rows are read, for one that
            was changed meanwhile.
    """
    if type(x).__module__.partition(".")[0] != "h5py":
        return x
    if x.file.mode != "r" or x.file.driver != "sec2":
        return x
    path, nbytes = Path(x.file.filename), x.size * x.dtype.itemsize
    is_whole = x.chunks is None and x.size and x.id.get_storage_size() == nbytes
    # of an array that nothing was written to the offset is none
    if not is_whole or not (offset := x.id.get_offset()):
        return as_rows(x, partial(check_unchanged, path, state_of(path)))
    if path.stat().st_size < offset + nbytes:
        raise DataError(f"{path}: {x.name} ends behind the file's end; it is truncated")
    return FileArray(path, x.dtype, x.shape, offset)


def _listed(file: Any) -> list[str]:
    """Return the names of arrays in a file, the first of them."""
    result = list[str]()

    def visit(name: str, item: Any) -> bool | None:
        if hasattr(item, "dtype"):
            result.append(shortened(name))
        return True if len(result) > MOST_LISTED else None

    file.visititems(visit)
    return [*result[:MOST_LISTED], "..."] if len(result) > MOST_LISTED else result


def _array(path: Path, file: Any, name: str, has: str) -> Any:
    """Return an array of a file: mapped, or read by rows.

    Raises:
        DataError: see `read_hdf5`.
    """
    with foreign(path, DataError, f"{name} cannot be opened"):
        item = file.get(name)
    where = f"{path}: {shortened(name)}"
    if item is None:
        raise DataError(f"{where} is not in the file, which holds {has}")
    dtype = getattr(item, "dtype", None)
    if dtype is None:
        raise DataError(f"{where} is a group of arrays; name one: {path}:{name}/...")
    if dtype.kind == "O":
        raise DataError(
            f"{where} is ragged, or of texts; write rows of one length, padded, and classes as"
            " numbers"
        )
    if dtype.kind not in "biuf" or not item.shape:
        raise DataError(f"{where} is {dtype} {item.shape}; needs rows of real numbers")
    rows = as_rows(in_place(item))  # which keeps the file open
    if isinstance(rows, FileArray):
        return rows
    check_unpacked(path, item.size * dtype.itemsize)
    rows[:1]  # what unpacks it may be missing
    return rows
