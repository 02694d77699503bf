"""Unit time: what things take in the figures of the papers, and wherever no better is known."""

from collections.abc import Mapping
from types import MappingProxyType

from nnmpi.schedule.instruction import Kind

PAPERS: Mapping[Kind, int] = MappingProxyType({Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1})
"""A whole backward takes two, since it multiplies two matrices (for inputs, for weights) where a forward takes one."""

EQUAL: Mapping[Kind, int] = MappingProxyType({Kind.F: 1, Kind.B: 1, Kind.I: 1, Kind.W: 1})
"""All take one: simpler to draw, but too kind to backwards."""
