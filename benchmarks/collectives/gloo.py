"""PyTorch's gloo among the same ranks, over the loopback device, for comparison. It needs torch."""

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nnmpi.base.errors import UsageError
from nnmpi.comm.group import Group

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"


def check_gloo(nodes: int) -> None:
    """Check that gloo can run here.

    Raises:
        UsageError: without torch, or on several nodes.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "gloo is PyTorch's and torch is not installed; pip install torch, or leave gloo out"
        )
    if nodes > 1:
        raise UsageError(
            f"gloo is measured over the loopback device of one node, not on {nodes}; leave gloo out"
        )


def start_gloo(group: Group) -> None:
    """Make the process group of the same ranks. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(group.share(folder)) / "gloo"
        join(group.rank, group.size, f"file://{rendezvous}")
        group.barrier()  # rank 0 removes the folder after it


def join(rank: int, size: int, rendezvous: str) -> None:
    """Join the process group at this address, with one thread in each rank.

    Args:
        rank: of this process.
        size: processes in the group.
        rendezvous: an `init_method` of PyTorch's: "env://", "file://...".
    """
    os.environ.setdefault(INTERFACE, LOOPBACK)
    importlib.import_module("torch").set_num_threads(1)
    _distributed().init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)


def stop_gloo() -> None:
    """Destroy the process group."""
    _distributed().destroy_process_group()


def gloo_sum(array: NDArray[Any]) -> Callable[[], Any]:
    """Return the call that replaces the array by its sum over the ranks."""
    tensor = importlib.import_module("torch").from_numpy(array)
    all_reduce = _distributed().all_reduce
    return lambda: all_reduce(tensor)


def _distributed() -> Any:
    return importlib.import_module("torch.distributed")
