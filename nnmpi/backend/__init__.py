"""NumPy and CuPy behind one record, and named random streams."""

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.heap import keep_freed_memory
from nnmpi.backend.random import stream
from nnmpi.backend.record import Backend
from nnmpi.backend.select import select

__all__ = ["Array", "Backend", "keep_freed_memory", "namespace", "select", "stream"]
