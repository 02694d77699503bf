"""Trains under a limit of memory for each rank: one that the layout knows, one that the system enforces, or both.

The system's (RLIMIT_DATA) counts private writable memory. It is set once Python, NumPy and MPI are loaded, to what they
have taken plus the limit; so it is for parameters, gradients, state and activations, and so nearly is the layout's.
"""

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness.memory import data_bytes
from benchmarks.pipeline.network import EvenMlp
from nnmpi import optim
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement, arrange
from nnmpi.compose.layout import Layout
from nnmpi.compose.worker import Worker
from nnmpi.errors import DeviceError
from nnmpi.optim.optimizer import Optimizer


def measure(group: Group, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what became of a run under a limit. Collective.

    Args:
        settings: "network", "degrees" (dp, pp, tp), "limit_bytes", "known" and "enforced": whether the layout knows
            the limit and whether the system holds it, and "steps".
    """
    network, limit = EvenMlp(**settings["network"]), int(settings["limit_bytes"])
    dp, pp, tp = settings["degrees"]
    layout = Layout(dp, pp, tp, split=network.cut(pp), memory_limit=limit if settings["known"] else None)
    row: dict[str, Any] = {"layout": f"dp {dp} x pp {pp} x tp {tp}"}
    row |= {name: settings[name] for name in ("known", "enforced", "limit_bytes")}
    batch = network.batch(group.rank // (pp * tp), dp)
    _warm_up(network)
    try:
        where = arrange(network.build(), group, layout)
    except DeviceError as error:
        return row | {"outcome": "refused", "words": str(error)}
    needed = group.gather(sum(int(np.prod(p.declared)) for p in where.model.parameters()) * 4 * 4)
    row["needed_bytes"] = max(needed)
    with _held(limit if settings["enforced"] else None):
        failed, optimizer = "", None
        try:
            optimizer = _fill(where)
        except MemoryError as error:
            failed = f"MemoryError: {error}"
        words = [each for each in group.gather(failed) if each]
        if words or optimizer is None:
            return row | {"outcome": "out of memory", "words": words[0]}
        worker = Worker(where.model, optimizer, group, arrangement=where)
        losses = [worker.step(batch).loss for _ in range(settings["steps"])]
        worker.release()
    return row | {"outcome": "trained", "losses": [losses[0], losses[-1]], "words": ""}


def _fill(where: Arrangement) -> Optimizer:
    """Give this rank's part of the model its values, and make the optimizer."""
    where.model.initialize(seed=1)
    return optim.build("adam", where.model.storage, lr=1e-4)


def _warm_up(network: EvenMlp) -> None:
    """Let BLAS take the memory that it keeps for itself."""
    square = np.ones((network.width, network.width), np.float32)
    square @ square


@contextmanager
def _held(limit: int | None) -> Iterator[None]:
    """Let this process take only so many more bytes in a block; None for any."""
    if limit is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
