"""Ranks that exchange small values: the part of a group that everything else in this package builds on.

Nothing here sums or moves arrays; `group.Group` does.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn, Self, cast

import numpy as np

from nnmpi.comm.world import Comm
from nnmpi.errors import CommError, UsageError


class Communicator:
    """Some ranks, numbered 0..size-1 among themselves.

    Its methods are collective unless they say otherwise: all ranks call them, in the same order.

    Args:
        comm: a communicator of these ranks, of this package's or of mpi4py's.
        private: whether nobody else uses `comm`. If not, this works on a duplicate, so that its messages never meet
            others'.

    Attributes:
        rank: this process's number among them.
        size: the number of ranks.
        comm: the communicator, for the modules of this package.
    """

    def __init__(self, comm: Comm | Any, private: bool = False) -> None:
        found = _find_world(comm)
        self.comm: Comm = found if private else found.duplicate()
        self.rank, self.size = self.comm.rank, self.comm.size
        self._nodes: list[int] | None = None

    def __repr__(self) -> str:
        """Return rank and size."""
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def __reduce__(self) -> NoReturn:
        raise CommError(
            "a group of ranks is not copied or pickled, nor is a model that a Worker or a strategy works on; call its "
            "release() first, or build the model again and use load_state"
        )

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the one that prints and writes (not collective)."""
        return self.rank == 0

    def split(self, color: int, key: int = 0) -> Self:
        """Return the group of the ranks that gave the same color, ordered by key, then by rank here.

        Raises:
            UsageError: for a negative color.
        """
        if color < 0:
            raise UsageError(f"color {color} is negative; number the groups from 0")
        return type(self)(self.comm.split(color, key), private=True)

    def node(self) -> Self:
        """Return the group of the ranks that share this node's memory, in the order they have here."""
        return type(self)(self.comm.split_by_node(self.rank), private=True)

    def nodes(self) -> list[int]:
        """Return the number of each rank's node, 0, 1 ... in order of their first ranks. Collective the first time."""
        if self._nodes is None:
            node = self.node()
            first = min(node.gather(self.rank))
            node.free()
            firsts = self.gather(first)
            numbers = {rank: number for number, rank in enumerate(sorted(set(firsts)))}
            self._nodes = [numbers[rank] for rank in firsts]
        return self._nodes

    def local_rank(self) -> int:
        """Return this rank's number among those on its node. Collective the first time."""
        nodes = self.nodes()
        return nodes[: self.rank].count(nodes[self.rank])

    def free(self) -> None:
        """Give the communicator back; for programs that make many."""
        self.comm.free()

    # ---- values ----

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, in rank order, on every rank.

        Tuples become lists and keys of dictionaries text, this rank's own too. Equal values are one object, which is
        not to be changed.

        Raises:
            CommError: on all ranks, when a value is none that JSON can hold.
        """
        text = np.frombuffer(encode_json(value), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.comm.allgather(np.array([text.size], np.int64), lengths)
        texts = np.empty(int(lengths.sum()), np.uint8)
        self.comm.allgatherv(text, texts, lengths.tolist())
        whole, ends = texts.tobytes(), np.cumsum(lengths).tolist()
        values: list[Any] = []
        known: dict[bytes, Any] = {}  # most often many ranks say the same
        for rank, (begin, end) in enumerate(pairwise([0, *ends])):
            part = whole[begin:end]
            if part not in known:
                known[part] = decode_json(part, rank)
            values.append(known[part])
        return values

    def share(self, value: Any, root: int = 0) -> Any:
        """Return root's JSON value on every rank; what the others pass is not looked at.

        Raises:
            CommError: on all ranks, when the value is none that JSON can hold.
        """
        if self.size == 1:
            return decode_json(encode_json(value), root)
        text = np.frombuffer(encode_json(value) if self.rank == root else b"", np.uint8)
        length = np.array([text.size], np.int64)
        self.comm.broadcast(length, root)
        buffer = text.copy() if self.rank == root else np.empty(int(length[0]), np.uint8)
        self.comm.broadcast(buffer, root)
        return decode_json(buffer.tobytes(), root)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.comm.barrier()

    def sum_floats(self, values: Sequence[float], asleep: bool = False) -> list[float]:
        """Return the sums over the ranks of a few numbers, in float64 and in rank order: the same bits with any MPI.

        Args:
            asleep: whether to leave the core to others until the last rank comes, which may be late.
        """
        if self.size == 1:
            return [float(value) for value in values]
        own = np.array(values, np.float64)
        everyones = np.empty((self.size, own.size))
        if asleep:
            requests = [self.comm.iallgatherv(own, everyones, [own.size] * self.size)]
            self.comm.world.wait_until(lambda: self.comm.test_all(requests))
        else:
            self.comm.allgather(own, everyones)
        return list(everyones.sum(axis=0).tolist())

    def max_floats(self, values: Sequence[float]) -> list[float]:
        """Return the largest over the ranks of each of a few numbers; NaN if any rank has NaN."""
        own = np.array(values, np.float64)
        everyones = np.empty((self.size, own.size))
        self.comm.allgather(own, everyones)  # `allreduce` does not say what it does with NaN
        return list(everyones.max(axis=0).tolist())


def _find_world(comm: Any) -> Comm:
    """Return a communicator with the calls of `comm.world`: itself, or for one of mpi4py's what has them."""
    if hasattr(comm, "world"):
        return cast(Comm, comm)
    from nnmpi.comm.mpi.mpi_world import wrap  # needs an MPI library, which whoever has such a communicator has

    return wrap(comm)


def encode_json(value: Any) -> bytes:
    """Return the value as JSON text: no pickle, so that a message can hold nothing but data.

    What JSON cannot hold becomes a complaint that `decode_json` raises at the other end. The sender must not raise:
    the other ranks are on their way into the exchange and would wait for it.
    """
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def decode_json(text: bytes, rank: int) -> Any:
    """Return the value that `rank` encoded: lists for tuples, text for the keys of dictionaries, as JSON has it.

    Raises:
        CommError: when the value was none that JSON can hold; names the rank.
    """
    message = json.loads(text)
    if "error" in message:
        raise CommError(
            f"rank {rank} sent what is not a JSON value ({message['error']}); "
            "send None, bool, int, float, str, and lists and dictionaries of them"
        )
    return message["value"]
