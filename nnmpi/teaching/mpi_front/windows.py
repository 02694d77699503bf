"""mpi4py's windows, as far as they are memory that the ranks of a node share.

A rank's stores are seen by all at once: ranks are threads. A program that lacks a `Fence` or a
`Barrier` gives other results with other seeds.
"""

from itertools import accumulate

import numpy as np

from nnmpi.teaching.mpi_front.datatypes import BYTE, buffer
from nnmpi.teaching.mpi_front.handles import (
    PROC_NULL,
    Exception,
    FrontGroup,
    FrontHandle,
    local,
    refuse,
)


class Win(FrontHandle):
    """Memory of all ranks of a communicator: (wire, the part of each rank, bytes of a step)."""

    @classmethod
    def Allocate_shared(cls, size, disp_unit=1, info=None, comm=None):
        """Return memory in which the ranks' parts follow one another.

        Args:
            size: of this rank's part, in bytes.
            disp_unit: bytes of a step, which Shared_query returns.
            info: hints, without effect.
            comm: ranks of one node; without it, this rank alone.
        """
        comm = local().COMM_SELF if comm is None else comm
        if size < 0:
            raise Exception("ERR_ARG", f"there is no memory of {size} bytes")
        wire = comm._wire.duplicate()
        nodes = {wire._board.nodes[rank] for rank in wire.members}
        if len(nodes) > 1:
            raise Exception("ERR_COMM", f"ranks of {len(nodes)} nodes share no memory; split them")
        given = comm.allgather((size, disp_unit))
        ends = [*accumulate(length for length, _ in given)]
        memory = wire._board.made.setdefault(("Win", wire._number), np.zeros(ends[-1], BYTE))
        parts = [
            (memory[end - length : end], unit)
            for end, (length, unit) in zip(ends, given, strict=True)
        ]
        return cls._of((wire, parts))

    def Shared_query(self, rank):
        """Return a rank's memory and bytes of a step; for PROC_NULL the first that is not empty."""
        _, parts = self._given()
        if rank == PROC_NULL:
            rank = next((at for at, (part, _) in enumerate(parts) if part.size), 0)
        if not 0 <= rank < len(parts):
            raise Exception("ERR_RANK", f"there is no rank {rank} in a window of {len(parts)}")
        part, unit = parts[rank]
        return buffer.frombuffer(part), unit

    def tomemory(self):
        """Return this rank's memory."""
        return self.Shared_query(self._given()[0].rank)[0]

    def Get_group(self):
        """Return its ranks."""
        return FrontGroup._made(self._given()[0].members)

    def Fence(self, assertion=0):
        """Wait for all of its ranks."""
        self._given()[0].barrier()

    def Free(self):
        """Make it null, when all of its ranks do."""
        self.Fence()
        self._value = None

    def Sync(self):
        """Do nothing: what a rank has stored is seen."""
        self._given()

    Flush_all = Flush_local_all = Unlock_all = Sync

    def Lock_all(self, assertion=0):
        """Do nothing: a rank stores undisturbed until it communicates."""
        self._given()

    memory = property(tomemory)
    group = property(Get_group)


def _refuse(name):
    return staticmethod(lambda *args, **options: refuse(Win(), name))


for _name in ("Allocate", "Create", "Create_dynamic"):
    setattr(Win, _name, _refuse(_name))
