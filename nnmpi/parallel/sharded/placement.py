"""Placement: how an activation lies on the ranks of a tensor group.

    whole        every rank has all of it, the same bits
    features     each rank has some of the last axis       (batch, h, w, c)  ->  (batch, h, w, part of c)
    rows         each rank has some rows of the images     (batch, h, w, c)  ->  (batch, part of h, w, c)

What is dealt out are `units`, as `shard.split` does it. A flattened image keeps its placement in another form: channels
that were cut come back once for every pixel (`repeats`), and a row that was dealt out has become w * c features, which
stay together (`unit`):

    h w = 3 pixels, 4 channels over 2 ranks        units=4 repeats=3      0 0 1 1  0 0 1 1  0 0 1 1
    h = 4 rows of w c = 3 numbers over 2 ranks     units=4 unit=3         0 0 0  0 0 0  1 1 1  1 1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nnmpi.errors import LayoutError
from nnmpi.shard import Region, part

FEATURES, ROWS = -1, 1  # the axes that can be cut


@dataclass(frozen=True)
class Placement:
    """How an activation lies on the ranks.

    Attributes:
        units: how many pieces are dealt out along the axis; 0 for a whole activation.
        unit: how many neighbouring elements a piece has.
        repeats: how often the pieces come, one after another; None when only the next layer's size will tell.
        axis: the axis that is cut: the last one (-1), or the images' rows (1).
    """

    units: int = 0
    unit: int = 1
    repeats: int | None = 1
    axis: int = FEATURES

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all of it."""
        return self.units == 0

    @property
    def has_rows(self) -> bool:
        """Whether the rows of images are cut."""
        return not self.is_whole and self.axis == ROWS

    def cut(self, total: int, size: int, rank: int) -> Region:
        """Return a rank's part of the cut axis, which is `total` long when it is whole.

        Raises:
            LayoutError: when the axis cannot have that length.
        """
        return self.region((total,), 0, size, rank)

    def region(self, shape: Sequence[int], axis: int, size: int, rank: int) -> Region:
        """Return a rank's part of an array of which one axis goes with the cut axis of the activation.

        Args:
            shape: of the whole array.
            axis: which of its axes it is.

        Raises:
            LayoutError: when that axis cannot have its length.
        """
        whole = tuple(shape)
        own = part(self.units, size, rank)
        repeats = self.resolve(whole[axis]).repeats or 1
        return Region(whole, axis % len(whole), own.start * self.unit, own.stop * self.unit, repeats)

    def resolve(self, total: int) -> Placement:
        """Return the placement with its repeats known, given the length of the whole axis.

        Raises:
            LayoutError: when the axis cannot have that length.
        """
        once = self.units * self.unit
        repeats = self.repeats if self.repeats is not None else total // max(once, 1)
        if once * repeats != total:
            raise LayoutError(
                f"an activation whose {self.units} parts of {self.unit} lie on several ranks cannot be {total} long; "
                "give the layer before it Sharding.REPLICATED, or check the layers' sizes"
            )
        return replace(self, repeats=repeats)

    def check_known(self, size: int) -> None:
        """Refuse a placement of unknown repeats of which some rank has nothing: it could never tell how many there are.

        Raises:
            LayoutError: when it is so.
        """
        if self.repeats is None and self.units < size:
            raise LayoutError(
                f"{self.units} channels of flattened images lie on {size} ranks, and those that have none cannot tell "
                "the images' size; give shard() the shape of a sample, or use fewer ranks"
            )

    def width(self, size: int, rank: int) -> int:
        """Return how many elements a rank has of each repeat."""
        return len(part(self.units, size, rank)) * self.unit


WHOLE = Placement()


def features(units: int, unit: int = 1) -> Placement:
    """Return the placement of an activation whose last axis is dealt out in `units` pieces."""
    return Placement(units, unit)


def rows(height: int) -> Placement:
    """Return the placement of images whose rows are dealt out."""
    return Placement(height, axis=ROWS)
