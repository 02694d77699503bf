"""Parallel strategies, one per file: each wraps a model and uses the group of its own axis."""

from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.fused import FusedUpdate, house, unhouse
from nnmpi.parallel.tensor import shard

__all__ = ["DataParallel", "FusedUpdate", "house", "shard", "unhouse"]
