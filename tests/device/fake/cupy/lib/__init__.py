"""CuPy's module of helpers."""

from cupy.lib import stride_tricks

__all__ = ["stride_tricks"]
