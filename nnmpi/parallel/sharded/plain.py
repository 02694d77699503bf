"""Layers without parameters on activations that lie on several ranks: which work as they are, and how others do."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from nnmpi.nn.activation import Flatten, Softmax
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.parallel.sharded.placement import FEATURES, ROWS, Placement
from nnmpi.parallel.sharded.site import Placed, Site


def place_elementwise(layer: Module, site: Site) -> Placed:
    """Return a layer that works on each element alone, and so on any part."""
    return site.on_whole(layer) if site.sharding is Sharding.REPLICATED else (layer, site.placement)


def place_softmax(layer: Softmax, site: Site) -> Placed:
    """Return the layer as it is, unless its axis is cut; then on whole activations."""
    if site.sharding is Sharding.REPLICATED or _is_cut(layer.axis, site):
        return site.on_whole(layer)
    return layer, site.placement


def _is_cut(axis: int, site: Site) -> bool:
    """Return whether an axis is the one that is cut, as far as is known; the first axis is the batch."""
    if site.placement.has_rows:
        return axis in (ROWS, ROWS - 4)
    if axis < 0 or site.shape is None:
        return axis >= -1  # counted from the front, it may be the last one
    return axis == len(site.shape)


def place_flatten(layer: Flatten, site: Site) -> Placed:
    """Return the layer as it is; what was cut stays cut (see `placement`)."""
    if site.placement.is_whole or site.sharding is Sharding.REPLICATED:
        return site.on_whole(layer)
    if site.placement.has_rows:
        _, width, channels = site.sample()
        return layer, Placement(site.placement.units, width * channels, axis=FEATURES)
    if site.shape is None:
        return layer, replace(site.placement, repeats=None)
    return layer, replace(site.placement, repeats=prod(site.shape) // (site.placement.units * site.placement.unit))
