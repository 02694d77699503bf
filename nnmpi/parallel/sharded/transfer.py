"""A tensor that goes from one rank to another, as a pair of operations of which each is the other's backward.

    forward    rank a   x --> Send -> token  . . . . . . .  rank b   start -> Receive --> x
    backward   rank a   gradient of x <-- Send              rank b   Receive <-- gradient of x

The two ranks must come to their ends in an order in which nobody waits for ever: rank a's backward pass through the
token needs rank b's through x.
"""

from __future__ import annotations

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.group import Group
from nnmpi.comm.neighbours import exchange
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor


class Send(Function):
    """Sends x to a rank; the result is a token of no elements, to go backward from."""

    __slots__ = ("group", "to")

    def __init__(self, group: Group, to: int) -> None:
        self.group, self.to = group, to

    def forward(self, x: Array) -> Array:
        self.saved = (x.shape,)
        exchange(self.group, [(self.to, namespace(x).ascontiguousarray(x))], [])
        token: Array = namespace(x).zeros(0, dtype=x.dtype)
        return token

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        came = namespace(grad).empty(self.saved[0], dtype=grad.dtype)
        exchange(self.group, [], [(self.to, came)])
        return (came,)


class Receive(Function):
    """Receives a tensor of a known shape, in the dtype of the token that it begins with."""

    __slots__ = ("from_", "group", "wanted")

    def __init__(self, group: Group, from_: int, wanted: tuple[int, ...]) -> None:
        self.group, self.from_, self.wanted = group, from_, wanted

    def forward(self, start: Array) -> Array:
        self.saved = (start.shape,)
        x: Array = namespace(start).empty(self.wanted, dtype=start.dtype)
        exchange(self.group, [], [(self.from_, x)])
        return x

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        exchange(self.group, [(self.from_, namespace(grad).ascontiguousarray(grad))], [])
        return (namespace(grad).zeros(self.saved[0], dtype=grad.dtype),)


def send(x: Tensor, group: Group, to: int) -> Tensor:
    """Send x to a rank, which calls `receive`; return a token whose backward pass fetches x's gradient."""
    return Send(group, to)(x)


def receive(group: Group, from_: int, shape: tuple[int, ...], start: Tensor) -> Tensor:
    """Return the tensor that a rank sends; its backward pass sends the gradient there.

    Args:
        shape: of the tensor.
        start: where the graph begins on this rank: a tensor of any shape, in the dtype of what is sent, that needs a
            gradient if what is sent does.
    """
    return Receive(group, from_, shape)(start)
