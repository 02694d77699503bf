"""Parallel strategies, one per file: each wraps a model and uses the group of its own axis."""

from nnmpi.parallel.data import DataParallel

__all__ = ["DataParallel"]
