"""Functional operations on tensors; arithmetic, shapes and indexing are in `nnmpi.tensor`.

One file per family: linear, loss, attention, ...; `conv` is a package, and `experts` is the mixture
of experts that `nn` builds on. A module's `__all__` is what it offers here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nnmpi.base.words import missing_from, offer
from nnmpi.ops.activation import *
from nnmpi.ops.attention import *
from nnmpi.ops.conv.convolution import *
from nnmpi.ops.dropout import *
from nnmpi.ops.embedding import *
from nnmpi.ops.linear import *
from nnmpi.ops.loss import *
from nnmpi.ops.norm import *
from nnmpi.ops.pool import *
from nnmpi.ops.recurrent import *

if TYPE_CHECKING:
    from nnmpi.ops.collectives import *

# Imported on first use: it imports `nnmpi.comm`, a seventh of an engine's import time.
_LATE = "nnmpi.ops.collectives"
_OF_RANKS = "all_gather", "all_reduce", "all_to_all", "reduce_scatter"
__all__ = sorted([*offer(__name__), *_OF_RANKS])


def __getattr__(name: str) -> Any:
    if name in _OF_RANKS:
        return getattr(import_module(_LATE), name)
    return missing_from(__name__, name)
