"""The name of PyTorch's module of functions: its import says what to import instead."""

from nnmpi.base.words import instead

raise ImportError(f"No module named {__name__!r}{instead('functional')}")
