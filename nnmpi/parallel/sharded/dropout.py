"""Dropout on a part of each row: the elements that the whole layer drops."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.counter import key_pair
from nnmpi.comm.group import Group
from nnmpi.nn.dropout import Dropout
from nnmpi.nn.mode import current
from nnmpi.nn.sharding import Sharding
from nnmpi.ops.dropout import dropout
from nnmpi.parallel.sharded.placement import Placement
from nnmpi.parallel.sharded.site import Placed, Site
from nnmpi.shard import Region
from nnmpi.tensor.tensor import Tensor


class PartDropout(Dropout):
    """Drops the elements of this rank's part that the whole layer would drop: a mask is a function of the place.

    Args:
        layer: the whole layer.
        group: the ranks that share its input.
        placement: how that lies on them.
    """

    def __init__(self, layer: Dropout, group: Group, placement: Placement) -> None:
        self.rate = layer.rate
        self._group, self._placement = group, placement
        self._columns: dict[Any, Array] = {}  # by the shape of a row and the library: made, and copied there, once

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or in training x with dropped elements."""
        if not current().training or self.rate == 0:
            return x
        xp, row = namespace(x.data), x.shape[1:]
        columns = self._columns.get((xp.__name__, row))
        if columns is None:
            columns = xp.asarray(places(self._group, self._placement, row))
            self._columns[xp.__name__, row] = columns
        return dropout(x, self.rate, self._draw, columns=columns)

    def _draw(self) -> tuple[tuple[int, int], int]:
        """Return what the mask depends on. See `nn.Dropout`."""
        mode = current()
        return key_pair("dropout", mode.seed, mode.step, self.path), mode.first_row


def places(group: Group, placement: Placement, row: tuple[int, ...]) -> Array:
    """Return the numbers, in a whole row, of the elements that this rank has of it: uint32, in order.

    Args:
        row: the shape of this rank's part of a row.
    """
    if prod(row) == 0:
        return np.empty(0, np.uint32)
    if placement.has_rows:
        placement = Placement(placement.units, prod(row[1:]))
    else:  # pixels before the last axis, and repeats within it, come one after another
        placement = replace(placement, repeats=prod(row) // placement.width(group.size, group.rank))
    total = placement.units * placement.unit * (placement.repeats or 1)
    region: Region = placement.cut(total, group.size, group.rank)
    numbers: Array = region.take(np.arange(total, dtype=np.uint32))
    return numbers


def place_dropout(layer: Dropout, site: Site) -> Placed:
    """Return the layer for the part that lies before it."""
    if site.placement.is_whole or site.sharding is Sharding.REPLICATED:
        return site.on_whole(layer)
    return PartDropout(layer, site.group, site.placement), site.placement
