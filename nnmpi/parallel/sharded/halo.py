"""Halo exchange: a rank gets the rows of images that its windows see and its neighbours have.

    10 rows, kernel 3, padding 1, 3 ranks        rank 0 has 0..3     rank 1 has 4..6     rank 2 has 7..9

        rank 0    b 0 1 2 3 4                    b: border, filled with a value; a rank's own rows lie in the middle,
        rank 1          3 4 5 6 7                and 4 and 3 change places between ranks 0 and 1, 7 and 6 between
        rank 2                6 7 8 9 b          ranks 1 and 2

Output rows are dealt out as `shard.split` does it, and each rank needs the input rows under its windows, whatever
stride, kernel and number of rows are: they may come from several ranks, and a rank without output rows needs none. The
backward pass sends the gradients of borrowed rows home, where they are added up in rank order.
"""

from dataclasses import dataclass

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.windows import out_size
from nnmpi.comm.group import Group
from nnmpi.comm.point_to_point import send_and_receive
from nnmpi.errors import ShapeError
from nnmpi.parallel.sharded.collectives import CATEGORY
from nnmpi.shard import part
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor
from nnmpi.timeline import RECEIVE, span


@dataclass(frozen=True)
class RowWindows:
    """How windows go over the rows of images.

    Attributes:
        height: the rows of a whole image.
        reach: the rows that a window sees, from its first to its last.
        stride: the rows from one window to the next.
        padding: the rows of border above and below.
    """

    height: int
    reach: int
    stride: int
    padding: int

    @property
    def outputs(self) -> int:
        """How many windows there are, one for each row of the whole result."""
        return out_size(self.height, self.reach, self.stride, self.padding)

    def owned(self, size: int, rank: int) -> range:
        """Return the image rows that a rank has."""
        return part(self.height, size, rank)

    def needed(self, size: int, rank: int) -> range:
        """Return the image rows that a rank's windows see; below 0 and from `height` on there is border.

        A rank without windows gets border, one row too little for a window.
        """
        own = part(self.outputs, size, rank)
        if not own:
            return range(self.height, self.height + self.reach - 1)
        first = own.start * self.stride - self.padding
        return range(first, first + (len(own) - 1) * self.stride + self.reach)


class Halo(Function):
    """The rows that a rank's windows see, from all ranks' rows and a border of one value."""

    __slots__ = ("windows", "group", "value")

    def __init__(self, group: Group, windows: RowWindows, value: float) -> None:
        self.group, self.windows, self.value = group, windows, value

    def _common(self, owner: int, user: int) -> range:
        """Return the rows that one rank has and another one needs."""
        has, needs = self.windows.owned(self.group.size, owner), self.windows.needed(self.group.size, user)
        return range(max(has.start, needs.start), max(min(has.stop, needs.stop), has.start, needs.start))

    def _transfer(self, away: dict[int, Array], home: dict[int, tuple[int, ...]], like: Array) -> dict[int, Array]:
        """Send arrays to ranks and return those that come from others, of the shapes given."""
        xp = namespace(like)
        room: dict[int, Array] = {rank: xp.empty(shape, dtype=like.dtype) for rank, shape in home.items()}
        bytes_sent = sum(array.nbytes for array in away.values())
        with span("halo", CATEGORY, RECEIVE, {"bytes": bytes_sent}):
            send_and_receive(self.group, list(away.items()), list(room.items()))
        return room

    def _peers(self, borrowing: bool) -> dict[int, range]:
        """Return the rows that this rank gets from each other one, or (not borrowing) gives to it."""
        rank = self.group.rank
        pairs = {r: self._common(r, rank) if borrowing else self._common(rank, r) for r in range(self.group.size)}
        return {r: rows for r, rows in pairs.items() if r != rank and rows}

    def forward(self, x: Array) -> Array:
        size, rank = self.group.size, self.group.rank
        has, needs = self.windows.owned(size, rank), self.windows.needed(size, rank)
        n, h, w, c = x.shape
        if h != len(has):
            raise ShapeError(
                f"rank {rank} of {size} has {h} rows of images, not the {len(has)} of a height of "
                f"{self.windows.height} that the model was sharded for; shard it with the sample's shape that it gets"
            )
        xp = namespace(x)
        y: Array = xp.full((n, len(needs), w, c), self.value, dtype=x.dtype)
        away = {r: xp.ascontiguousarray(_rows(x, rows, has.start)) for r, rows in self._peers(False).items()}
        borrowed = self._peers(True)
        came = self._transfer(away, {r: (n, len(rows), w, c) for r, rows in borrowed.items()}, x)
        own = self._common(rank, rank)
        _rows(y, own, needs.start)[...] = _rows(x, own, has.start)
        for r, rows in borrowed.items():
            _rows(y, rows, needs.start)[...] = came[r]
        return y

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        size, rank = self.group.size, self.group.rank
        has, needs = self.windows.owned(size, rank), self.windows.needed(size, rank)
        n, _, w, c = grad.shape
        xp = namespace(grad)
        away = {r: xp.ascontiguousarray(_rows(grad, rows, needs.start)) for r, rows in self._peers(True).items()}
        lent = self._peers(False)
        came = self._transfer(away, {r: (n, len(rows), w, c) for r, rows in lent.items()}, grad)
        to_x: Array = xp.zeros((n, len(has), w, c), dtype=grad.dtype)
        own = self._common(rank, rank)
        for r in range(size):
            if r == rank:
                _rows(to_x, own, has.start)[...] += _rows(grad, own, needs.start)
            elif r in lent:
                _rows(to_x, lent[r], has.start)[...] += came[r]
        return (to_x,)


def halo(x: Tensor, group: Group, windows: RowWindows, value: float = 0.0) -> Tensor:
    """Return the image rows that this rank's windows see: (batch, own rows, w, c) -> (batch, needed rows, w, c).

    Args:
        value: of the border.

    Raises:
        ShapeError: when this rank's rows are not its part of the height.
    """
    return Halo(group, windows, value)(x)


def _rows(images: Array, rows: range, first: int) -> Array:
    """Return a view of some rows of images whose first row has that number."""
    return images[:, rows.start - first : rows.stop - first]
