"""Whether what stands on several ranks is the same on all, beyond the replicas (which DataParallel compares)."""

from __future__ import annotations

import hashlib

import numpy as np

from nnmpi.backend.record import Backend
from nnmpi.compose.arrange import Arrangement
from nnmpi.errors import CommError
from nnmpi.nn.module import Module
from nnmpi.parallel.sharded.check import check_replicas


def check_equal(model: Module, arrangement: Arrangement, backend: Backend) -> None:
    """Compare hashes of what a tensor group has whole on each rank, and of parameters that are tied over stages.

    Collective.

    Raises:
        CommError: on all ranks of the group in question, naming the parameter.
    """
    if arrangement.mesh.tp.size > 1:
        check_replicas(model, arrangement.mesh.tp)
    parameters = dict(model.named_parameters())
    for tie in arrangement.ties:
        host = np.ascontiguousarray(backend.to_host(parameters[tie.name].data))
        digests = tie.group.gather(hashlib.blake2b(host.data, digest_size=16).hexdigest())
        different = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
        if different:
            raise CommError(
                f"the weights of {tie.name} differ between the ranks of the stages that share it (rank {different[0]} "
                f"of {tie.group.size})"
            )
