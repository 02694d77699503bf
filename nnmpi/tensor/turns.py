"""Turns: ranks agree on each operation of a backward pass that needs all of them.

Each rank numbers a group's operations as it calls them, so an operation has one number everywhere.
A backward pass stops at each of them, the last one first, and the ranks exchange two facts: its
number, and whether a gradient has reached its result.

    forward         the losses use        backward
    1 all_reduce    rank 0 only           ^  rank 1 adds a gradient of zeros
    2 all_reduce    rank 1 only           |  rank 0 adds a gradient of zeros
    3 all_reduce    no rank               |  left out

So a result that one rank's loss does not use leaves the other ranks' gradients as they are. A rank
whose loss uses none of the results takes part, too: while such operations await their backward
pass, a backward pass is collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from nnmpi.backend.recording import active, call
from nnmpi.base.errors import CommError, GraphError
from nnmpi.tensor.function import Function

KEPT = 32  # operations of a group that stay although their results were dropped
NO_TURN = 0  # the number of a rank that has passed all of its operations

_in_use: ContextVar[WeakSet[Turns] | None] = ContextVar("nnmpi_turns", default=None)
_born = count()

inside_pass: ContextVar[bool] = ContextVar("nnmpi_inside_pass", default=False)
"""Whether a backward pass is running, or a pass meets at operations of its own graph alone."""


@contextmanager
def graph_alone() -> Iterator[None]:
    """Let passes meet the other ranks at operations of their own graph alone.

    A pipeline's stage has graphs of other microbatches, whose operations have turns of their own: a
    pass that met at all of them took 345 exchanges a step, of which it needed 68.
    """
    token = inside_pass.set(True)
    try:
        yield
    finally:
        inside_pass.reset(token)


class Turns:
    """The turns of a group's operations; see `turns_of`.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Any) -> None:
        self._comm, self._count, self.born = group.comm, 0, next(_born)
        self.of: WeakKeyDictionary[Function, Turn] = WeakKeyDictionary()
        # a result is often dropped before the backward pass by the rank that does not use it
        self.kept: deque[Function] = deque(maxlen=KEPT)

    def next(self) -> int:
        """Return the number of the next operation."""
        self._count += 1
        return self._count

    def meet(self, number: int, is_used: bool) -> tuple[int, bool]:
        """Return the largest of the ranks' numbers, and whether any of its ranks uses the result.

        Collective. The numbers are negative on the way: lengths, which other exchanges begin with,
        are not (see `Communicator.gather`).
        """
        by_rank = np.empty(self._comm.size, np.int64)
        self._comm.allgather(np.array([-1 - 2 * number - is_used], np.int64), by_rank)
        if by_rank.max() >= 0:
            raise CommError(
                "some ranks are in the backward pass of a collective, and others in another"
                " collective; call collectives and backward in the same order on all ranks"
            )
        largest, any_uses = divmod(-1 - int(by_rank.min()), 2)
        return largest, bool(any_uses)

    def forget(self, root: Function | None) -> None:
        """Keep no dropped operations that are older than the root of a pass that has ended."""
        newer = [item for item in self.kept if root is not None and item.number > root.number]
        self.kept.clear()
        self.kept.extend(newer)

    def close(self) -> None:
        """Forget all operations: the group or the strategy that had them ends."""
        self.of.clear()
        self.kept.clear()

    def find(self, number: int) -> Function:
        """Return the operation of that number."""
        for function, turn in list(self.of.items()):
            if turn.number == number and function.edges is not None:
                return function
        raise GraphError(
            "another rank's loss uses the result of a collective that this rank has dropped, or"
            " computed without a gradient; keep the result until the backward pass, or add"
            " 0 * result.sum() to the loss on every rank"
        )


class Turn:
    """An operation's number, which a replay of a recorded step renews."""

    __slots__ = "number", "turns"
    varies = ("number",)  # see `program.compare`

    def __init__(self, turns: Turns) -> None:
        self.turns, self.number = turns, NO_TURN

    def take(self) -> None:
        """Take the group's next number."""
        self.number = self.turns.next()

    def agree(self, is_used: bool) -> tuple[Function | None, bool]:
        """Meet the other ranks at this operation. Collective.

        Returns:
            An operation that another rank uses and that comes before this one in the backward pass,
            or None; and whether any rank uses this one.

        Raises:
            GraphError: when this rank does not have the other operation any more.
        """
        turns, recorder = self.turns, active()
        if recorder is not None and recorder.is_rehearsal:
            raise GraphError("a rehearsal meets no other ranks, which may have ended")
        while True:
            number, wanted = turns.meet(self.number, is_used)
            other = turns.find(number) if wanted and number > self.number else None
            if recorder is not None:
                expected = self if other is None else turns.of[other]
                recorder.record(self._agree_again, is_used, expected, wanted)
            if other is not None or number == self.number:
                return other, wanted

    def _agree_again(self, is_used: bool, expected: Turn, wanted: bool) -> None:
        if self.turns.meet(self.number, is_used) != (expected.number, wanted):
            raise CommError(
                "the ranks' losses use other results of collectives than in the step that was"
                " compiled; do not compile this step"
            )


def turns_of(group: Any) -> Turns:
    """Return a group's turns."""
    if group.turns is None:
        group.turns = Turns(group)
    return group.turns


def in_turn(turns: Turns | None, function: Function, *inputs: Any) -> Any:
    """Apply an operation whose backward pass needs all ranks of a group.

    Args:
        turns: of the group; None for an ordinary operation.
        function: not applied yet; all ranks call it in the same order.
        inputs: of the operation.
    """
    if turns is None:
        return function(*inputs)
    turn = Turn(turns)
    call(turn.take, writes=())
    result = function(*inputs)
    if hasattr(function, "edges"):  # it is recorded
        turns.of[function] = turn
        if not inside_pass.get():
            turns.kept.append(function)
        in_use = _in_use.get()
        if in_use is None:
            _in_use.set(in_use := WeakSet())
        in_use.add(turns)
    return result


def find_turns(root: Function | None, nodes: Sequence[Function] | None) -> dict[Function, Turn]:
    """Return the operations that await their backward pass, up to a root (None for a leaf).

    Args:
        nodes: those to choose from; None for all that this rank has.
    """
    in_use = _in_use.get()
    if not in_use:
        return {}
    chosen = None if nodes is None else set(nodes)
    return {
        function: turn
        for turns in sorted(in_use, key=lambda turns: turns.born)  # alike on all ranks
        for function, turn in list(turns.of.items())
        if function.edges is not None
        and (root is None or function.number <= root.number)
        and (chosen is None or function in chosen)
    }
