"""Data sets in files, mapped by every rank of a node: found in place, or prepared once.

    KEY/data/set.json     the training part, and perhaps a test part: names, classes, rules of a
                          table ..., and where their arrays are: in the source, or here
             0.npy ...    arrays that were decoded or converted
    KEY/known-SPLIT.json  what a `Dataset` computes of all its samples, of the parts after a split

A reader that knows of this makes its arrays by `Team.array` and fills the part of its rank; of any
other one, rank 0 has the arrays in memory and writes them.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from nnmpi.backend.array import Array, Shape
from nnmpi.base.errors import DataError
from nnmpi.base.files import json_text, read_json, rebuilt, write_json
from nnmpi.data.cache import filled, writing
from nnmpi.data.columns import Encoding
from nnmpi.data.dataset import Dataset, check_scales
from nnmpi.data.facts import Moments, content, moments
from nnmpi.data.lazy import Chosen, blocks
from nnmpi.data.mapped import FileArray, read_header, state_of
from nnmpi.data.team import Spool, Team

FORMAT = 1  # of the files; part of KEY
SET = "set.json"
SPOOL, SPOOLED = "spool.bin", 2**18  # numbers in memory
# A source up to this size is read by each rank, which takes no longer than to find it prepared.
SMALL_BYTES = 2**20
HEAD_BYTES = 2**16  # of a file's begin, which are part of KEY
Pair: TypeAlias = tuple[Dataset, Dataset | None]
ReadSet: TypeAlias = Callable[..., Pair]  # of a team
_ARRAYS = "x", "y", "weights"
_ABOUT = [item.name for item in fields(Dataset) if item.name not in (*_ARRAYS, "places")]


class FolderTeam(Team):
    """A team whose arrays are files in a folder.

    Args:
        team: of the ranks.
        folder: an empty one, the same on all ranks.
    """

    def __init__(self, team: Team, folder: Path) -> None:
        self._team, self.rank, self.size, self.say = team, team.rank, team.size, team.say
        self.folder, self._count = folder, 0

    def alone(self) -> "FolderTeam":
        """Return one process that goes on in this folder, without the others."""
        result = FolderTeam(Team(self.say), self.folder)
        result._count = self._count
        return result

    def gather(self, value: Any) -> list[Any]:
        """See `Team`."""
        return self._team.gather(value)

    def agreed(self) -> AbstractContextManager[None]:
        """See `Team`."""
        return self._team.agreed()

    def spool(self) -> Spool:
        """See `Team`."""
        return _FileSpool(self.folder / SPOOL)

    def array(self, shape: Shape, dtype: Any) -> Array:
        """See `Team`; its room on the disk is taken now.

        Raises:
            UsageError: without room, since a full disk would end the process that fills a page.
        """
        file = self.folder / f"{self._count}.npy"
        self._count += 1
        self.first(lambda: _make_file(file, shape, np.dtype(dtype)))
        return npy.open_memmap(file, "r+")


class _FileSpool(Spool):
    """Numbers in a file, of which few are in memory; the file is removed with what is not kept."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def extend(self, values: Sequence[float] | NDArray[np.float64]) -> None:
        """See `Spool`."""
        super().extend(values)
        if len(self._added) > SPOOLED:
            self._flush()

    def _flush(self) -> None:
        with writing(self._file.parent), self._file.open("ab") as stream:
            stream.write(self._added)
        del self._added[:]

    @property
    def numbers(self) -> NDArray[np.float64]:
        """See `Spool`."""
        if self._added:
            self._flush()
        return np.memmap(self._file, np.float64, "r+")


def _make_file(file: Path, shape: Shape, dtype: np.dtype[Any]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with writing(file.parent), file.open("wb") as stream:
        npy.write_array_header_1_0(stream, header)
        stream.flush()
        nbytes = stream.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, nbytes)
        else:
            stream.truncate(nbytes)


def key_of(files: Sequence[Path]) -> list[Any]:
    """Return what tells whether files have changed: sizes and times, and the begin of one alone."""
    result: list[Any] = [[os.path.abspath(file), *state_of(file)] for file in files]
    if len(files) == 1:
        with files[0].open("rb") as stream:
            result.append(sha256(stream.read(HEAD_BYTES)).hexdigest())
    return result


def prepare_set(entry: Path, read: ReadSet, is_shared: bool, team: Team) -> Path:
    """Return the folder with a data set's files; write them first if they are missing. Collective.

    Args:
        entry: of the cache.
        read: the reader.
        is_shared: whether all ranks of the team call it; else rank 0.
        team: of the node's ranks.

    Raises:
        NnmpiError: of the reader, on all ranks.
        UsageError: see `cache.filled`.
    """

    def write(folder: Path) -> None:
        place = FolderTeam(team, folder)
        if is_shared:
            parts = read(place)
            team.first(lambda: _save(parts, place.alone()))
        else:
            one = place.alone()
            team.first(lambda: _save(read(one), one))

    return filled(entry, write, team)


def _save(parts: Pair, place: FolderTeam) -> None:
    values = []
    with writing(place.folder):
        for part in parts:
            if part is not None:
                about = {name: getattr(part, name) for name in _ABOUT}
                about["encoding"] = [asdict(column) for column in part.encoding]
                arrays = {name: _place_of(array, place) for name, array in part.arrays.items()}
                values.append({**about, **arrays})
        write_json(place.folder / SET, values)
        (place.folder / SPOOL).unlink(missing_ok=True)


def _place_of(array: Any, place: FolderTeam) -> dict[str, Any]:
    """Return where an array is; write it first if no file has it as it is."""
    if isinstance(array, FileArray):
        return {"path": os.path.abspath(array.path), **array.place}
    file = _file_of(array, place.folder)
    if file is None:
        copy = place.array(tuple(array.shape), array.dtype)
        for first, rows in blocks(array):
            copy[first : first + len(rows)] = rows
        file = _file_of(copy, place.folder)
    assert file is not None
    return {"path": file}


def _file_of(array: Any, folder: Path) -> str | None:
    """Return the name of the file in a folder that a mapped array is the whole of."""
    size = array.size if isinstance(array, np.ndarray) else 0
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.size == size and array.filename:
            file = Path(array.filename)
            return file.name if file.parent == folder else None
        array = array.base
    return None


def load_set(folder: Path) -> Pair:
    """Return a prepared data set, mapped.

    Raises:
        DataError: for damaged files, with the remedy.
    """
    try:
        parts = [_load(values, folder) for values in read_json(folder / SET)]
        return parts[0], parts[1] if len(parts) > 1 else None
    except (DataError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise damaged(folder, error) from error


def damaged(folder: Path, error: Exception) -> DataError:
    """Return the error about an entry of the cache that cannot be read."""
    return DataError(f"{folder} is damaged ({error}); remove {folder.parent}, and it is made again")


def _load(values: dict[str, Any], folder: Path) -> Dataset:
    given = [name for name in _ARRAYS if name in values]
    arrays: dict[str, Any] = {name: _open(values.pop(name), folder) for name in given}
    kinds = {**get_type_hints(Dataset), "encoding": Encoding}
    about = {name: rebuilt(kinds[name], value) for name, value in values.items()}
    return Dataset(**arrays, **about)


def _open(place: dict[str, Any], folder: Path) -> FileArray:
    path = folder / place.pop("path")  # of a source, the full path
    if place:
        return FileArray(path, place.pop("dtype"), tuple(place.pop("shape")), **place)
    with path.open("rb") as stream:
        shape, dtype, _ = read_header(stream)
        return FileArray(path, dtype, shape, stream.tell(), is_ours=True)


# ---- what is known ----


def known_file(entry: Path, *split: float) -> Path:
    """Return the file of what is known of the parts after a split, which the numbers decide."""
    return entry / f"known-{sha256(json_text(split).encode()).hexdigest()[:16]}.json"


def measure(file: Path, parts: Sequence[Dataset], team: Team) -> None:
    """Write what is known of data sets to a file. Collective.

    Raises:
        DataError: see `check_scales`; then nothing is written.
    """
    contents = dict[int, str]()

    def content_of(array: Any) -> list[str]:
        source, places = array, ""
        if isinstance(array, Chosen):
            source, places = array.source, sha256(array.places.data).hexdigest()
        if id(source) not in contents:
            contents[id(source)] = content(source, team)
        return [contents[id(source)], places]

    values = []
    for part in parts:
        texts = [*map(content_of, part.arrays.values()), part.classes, part.scale]
        identity = sha256(json_text(texts).encode()).hexdigest()
        if not part.is_tokens:
            vars(part)["moments"] = moments(part.x, part.places, team)
        of_all = None if part.is_tokens else part.moments.values
        about = {"identity": identity, "moments": of_all}
        values.append({**about, **team.first(partial(_rest, part))})
    with team.agreed(), writing(file):
        check_scales(*parts)
        if team.rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, values)


def _rest(part: Dataset) -> dict[str, Any]:
    names = ["vocabulary", "variance", "classes", "notes"]
    if part.predicts == "quantities":
        names.append("target_scale")
    return {name: getattr(part, name) for name in names}


def read_known(file: Path) -> list[dict[str, Any]]:
    """Return what `measure` has written to a file, by part; nothing without the file.

    Raises:
        DataError: for a damaged file, with the remedy.
    """
    if not file.is_file():
        return []
    try:
        known = [dict(part) for part in read_json(file)]
        for values in known:
            of_all, values["notes"] = values["moments"], tuple(values["notes"])
            values["moments"] = None if of_all is None else Moments.from_values(of_all)
            values["classes"] = int(values["classes"])
        return known
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise damaged(file, error) from error
