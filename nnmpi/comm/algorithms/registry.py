"""The all-reduce algorithms by the names that the command line and `Group` know."""

from collections.abc import Mapping
from types import MappingProxyType

from nnmpi.comm.algorithms.ring import ring
from nnmpi.comm.algorithms.star import star
from nnmpi.comm.algorithms.tree import tree
from nnmpi.comm.steps import Algorithm
from nnmpi.errors import UsageError

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({"ring": ring, "tree": tree, "ps": star})

NATIVE = "native"  # MPI's own all-reduce: there are no steps to look at
AUTO = "auto"  # chosen by size: see choose.py
NAMES = (AUTO, NATIVE, *ALGORITHMS)


def find_algorithm(name: str) -> Algorithm:
    """Return the algorithm of this name.

    Raises:
        UsageError: for a name that is not one of `ALGORITHMS`.
    """
    if name not in ALGORITHMS:
        raise UsageError(f"there is no all-reduce algorithm {name!r}; the names are {', '.join(NAMES)}")
    return ALGORITHMS[name]
