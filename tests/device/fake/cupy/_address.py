"""Memory by its address, as NumPy sees it."""

import numpy as np


class _At:
    """What NumPy asks for an address. (A ctypes array would be a new type for each size.)"""

    __slots__ = ("__array_interface__", "_keeps")

    def __init__(self, address, size, keeps):
        self._keeps = keeps
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_at(address, size, keeps=None):
    """Return bytes as an array that is the memory itself, and keeps what the memory belongs to."""
    return np.asarray(_At(address, size, keeps)) if size else np.empty(0, np.uint8)
