"""One safetensors file, an array at a time: written from the first to the last, read in any order.

    8 bytes      N, the length of the header, little-endian
    N bytes      the header, JSON: {"0.weight": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, ...}
    the rest     the arrays' elements, little-endian, in C order, one array right after the other

The library writes all arrays at once, so that all of them would have to be there; it reads one at a time.
Source of the format: https://github.com/huggingface/safetensors
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from nnmpi.backend.array import Array
from nnmpi.comm.buffers import as_bytes
from nnmpi.errors import CheckpointError
from nnmpi.files import sha256
from nnmpi.parallel.shard_map import ArraySpec

HEADER_STEP_BYTES = 8  # the header is filled up with spaces, so that the elements are aligned
NAMES = {
    **{f"{kind}{bits}": f"{short}{bits}" for kind, short in (("int", "I"), ("uint", "U")) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "complex64": "C64",
    "bool": "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class TensorWriter:
    """Writes one file.

    Args:
        file: a new file; it is seen half-written, so it belongs into a folder that nobody reads yet.
        specs: shape and dtype of each array, in the order in which they will come.
        metadata: texts by name, which the file holds too.

    Raises:
        CheckpointError: for a dtype that the format has not.
        OSError: when the disk is full or not writable; so do the methods.
    """

    def __init__(self, file: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str] | None = None) -> None:
        self._file, self._left = file, dict(specs)
        header = _header(file, specs, metadata or {})
        self._stream = file.open("wb")
        try:
            self._put(np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8))
        except OSError:
            self.abandon()
            raise

    def write(self, name: str, array: Array) -> None:
        """Write the next array.

        Args:
            array: as announced; any strides.

        Raises:
            CheckpointError: when another array was to come.
        """
        wanted = next(iter(self._left.items()), ("", None))
        if wanted != (name, ArraySpec.of(array)):
            raise CheckpointError(f"{self._file}: {name} with {ArraySpec.of(array)} comes in place of {wanted}")
        del self._left[name]
        # order="C" copies what has gaps and, unlike ascontiguousarray, leaves a 0-d array 0-d
        self._put(as_bytes(np.asarray(array, array.dtype.newbyteorder("<"), order="C")))

    def close(self) -> dict[str, str | int]:
        """Wait until the disk has the file, and return its "bytes" and "sha256".

        The sum is taken here, of what the file holds, so that whoever waits for `write` does not wait for it.

        Raises:
            CheckpointError: when arrays are missing.
        """
        if self._left:
            raise CheckpointError(f"{self._file} is not finished: {len(self._left)} arrays are missing")
        self._stream.flush()
        found: dict[str, str | int] = {"bytes": self._stream.tell(), "sha256": sha256(self._file)}
        os.fsync(self._stream.fileno())
        self._stream.close()
        return found

    def abandon(self) -> None:
        """Close the file as it is; after `close` this does nothing."""
        with suppress(OSError):  # what is buffered may find no room: the file is of no use anyway
            self._stream.close()

    def _put(self, content: Array) -> None:
        self._stream.write(content.data)


class TensorFile(Mapping[str, Array]):
    """The arrays of a file by name, each read when it is asked for; in the order in which they stand there.

    Args:
        file: any safetensors file.

    Attributes:
        specs: shape and dtype of each array.
        metadata: texts by name; empty where there are none.

    Raises:
        CheckpointError: when it is missing or damaged.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        with self._opened() as opened:
            self._names: list[str] = list(opened.offset_keys())
            self.metadata: dict[str, str] = opened.metadata() or {}
            slices = {name: opened.get_slice(name) for name in self._names}
            self.specs = {
                name: ArraySpec(tuple(each.get_shape()), DTYPES.get(each.get_dtype(), each.get_dtype()))
                for name, each in slices.items()
            }

    def __getitem__(self, name: str) -> Array:
        """Read one array.

        Raises:
            KeyError: when there is none of this name.
            CheckpointError: when it cannot be read.
        """
        if name not in self.specs:
            raise KeyError(name)
        with self._opened() as opened:
            array: Array = opened.get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._names)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """Open the file for one read: kept open, it would take up its place on the disk after it is removed."""
        try:
            with safe_open(self.file, framework="numpy") as opened:
                yield opened
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.file} cannot be read: {error}") from None


def _header(file: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> bytes:
    """Return the header as bytes: which array is where."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, spec in specs.items():
        if spec.dtype not in NAMES:
            raise CheckpointError(f"{name} is {spec.dtype}, which {file.name} cannot hold; use float32 or float64")
        entries[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [at, at + spec.bytes],
        }
        at += spec.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_STEP_BYTES)
