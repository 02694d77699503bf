"""A double of NCCL that writes down what is called, computes it by MPI, and finds what NCCL would hang or crash at.

Every call is compared over the ranks before it is done: name, count, dtype, operation, root. Where they differ, NCCL
would wait for ever; here all ranks raise. Results arrive on the stream that was named, and not before (see `_streams`).
In a group, calls are done at its end.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cupy_backends.cuda.api.runtime import CUDARuntimeError

from cupy import _streams
from cupy._address import bytes_at
from cupy.cuda import memory, runtime

available = True
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9
DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
ID_BYTES = 128
RENDEZVOUS_LIMIT_S = 20.0


class NcclError(RuntimeError):
    """What NCCL returns instead of success."""

    def __init__(self, status: int, words: str = "") -> None:
        names = {2: "NCCL_ERROR_SYSTEM_ERROR", 5: "NCCL_ERROR_INVALID_USAGE", 4: "NCCL_ERROR_INVALID_ARGUMENT"}
        super().__init__(
            f"{names.get(status, 'NCCL_ERROR_UNKNOWN')}: {words or 'run with NCCL_DEBUG=WARN for details'}"
        )
        self.status = status


class _Record:
    """What this process has done so far.

    Attributes:
        failure: for tests: what `check_async_error` is to find.
        ended: how communicators ended: "destroy", "abort".
    """

    def __init__(self) -> None:
        self.failure: NcclError | None = None
        self.ended: list[str] = []
        self.depth = 0
        self.queued: list[Callable[[], None]] = []


RECORD = _Record()


def get_version() -> int:
    """Return NCCL's version."""
    return 23203


def get_unique_id() -> bytes:
    """Return a new communicator's name."""
    return os.urandom(ID_BYTES)


def groupStart() -> None:
    """Begin a group."""
    RECORD.depth += 1


def groupEnd() -> None:
    """End it: what was called in it is done now."""
    if not RECORD.depth:
        raise NcclError(5, "groupEnd without groupStart")
    RECORD.depth -= 1
    if not RECORD.depth:
        queued, RECORD.queued = RECORD.queued, []
        for each in queued:
            each()


class NcclCommunicator:
    """A communicator: this process's device and those of the others with the same name."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        if not isinstance(commId, bytes) or len(commId) != ID_BYTES:
            raise NcclError(4, "a unique id has 128 bytes")
        from mpi4py import MPI

        ranks = self._meet(ndev, commId.hex()[:32], rank, MPI.COMM_WORLD.Get_rank())
        self._comm: Any = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks), 77)
        self._size, self._rank, self._device = ndev, rank, runtime.getDevice()
        cards = self._comm.allgather((os.uname().nodename, self._device))
        if len(set(cards)) < ndev:
            raise NcclError(5, f"Duplicate GPU detected : {cards}")

    @staticmethod
    def _meet(ndev: int, name: str, rank: int, world_rank: int) -> list[int]:
        """Return the world ranks of all, by files in a folder that the name stands for."""
        folder = Path(tempfile.gettempdir()) / f"nnmpi-nccl-{name}"
        folder.mkdir(exist_ok=True)
        (folder / f"{rank}.new").write_text(json.dumps(world_rank))
        (folder / f"{rank}.new").rename(folder / str(rank))
        end = time.monotonic() + RENDEZVOUS_LIMIT_S
        while not all((folder / str(each)).exists() for each in range(ndev)):
            if time.monotonic() > end:
                raise NcclError(2, f"only {len(list(folder.iterdir()))} of {ndev} ranks came")
            time.sleep(0.001)
        return [json.loads((folder / str(each)).read_text()) for each in range(ndev)]

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """Sum for all."""
        self._call("allReduce", sendbuf, count, recvbuf, count, datatype, stream, lambda all_: _sum(all_, op), op=op)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Give root's to all."""
        self._call("broadcast", sendbuff, count, recvbuff, count, datatype, stream, lambda all_: all_[root], root=root)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """Sum for the root; the others' is not written."""
        into = recvbuf if self._rank == root else 0
        self._call("reduce", sendbuf, count, into, count, datatype, stream, lambda all_: _sum(all_, op), op, root)

    def check_async_error(self) -> None:
        """Raise what has failed."""
        self._check()
        if RECORD.failure is not None:
            raise RECORD.failure

    def destroy(self) -> None:
        """End."""
        self._check()
        self._comm.Free()
        self._comm = None
        RECORD.ended.append("destroy")

    def abort(self) -> None:
        """End at once."""
        self._comm = None
        RECORD.ended.append("abort")

    def _check(self) -> None:
        if self._comm is None:
            raise NcclError(4, "the communicator has ended")

    def _call(
        self,
        name: str,
        source: int,
        count: int,
        target: int,
        into: int,
        datatype: int,
        stream: int,
        work: Callable[[list[Any]], Any],
        op: int = -1,
        root: int = -1,
    ) -> None:
        self._check()
        dtype = DTYPES[datatype]
        if not count:
            raise NcclError(4, "count of 0")

        def do() -> None:
            said = self._comm.allgather((name, count, dtype, op, root))
            if len(set(said)) > 1:
                raise NcclError(5, f"NCCL would hang: the ranks call {said}")
            queue = _streams.STREAMS.get(stream)
            if queue is None:
                raise CUDARuntimeError(400)
            queue._settle()
            everyones = self._comm.allgather(_bytes(source, count, dtype).tobytes())
            result = work([np.frombuffer(each, _kind(dtype)) for each in everyones])
            if target:  # of whoever has the result
                place = _bytes(target, into, dtype)
                queue._push(_streams._Copy(lambda: result, lambda value: np.copyto(place, value), to_host=False))

        if RECORD.depth:
            RECORD.queued.append(do)
        else:
            do()


def _kind(dtype: str) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def _bytes(address: int, count: int, dtype: str) -> Any:
    """Return device memory as NumPy sees it; it must lie in one allocation."""
    kind = _kind(dtype)
    if count and memory.base_of(address, count * kind.itemsize) is None:
        raise NcclError(4, f"{count} of {dtype} at {address:#x} are outside of the device's memory")
    return bytes_at(address, count * kind.itemsize).view(kind)


def _sum(everyones: list[Any], op: int) -> Any:
    if op != NCCL_SUM:
        raise NotImplementedError(f"the double has no reduction {op}")
    total = everyones[0].copy()
    for each in everyones[1:]:
        total += each
    return total
