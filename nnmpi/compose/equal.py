"""Whether what stands on several ranks is the same on all, beyond the replicas (which DataParallel compares)."""

from __future__ import annotations

import hashlib

import numpy as np

from nnmpi.backend.record import Backend
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.errors import CommError
from nnmpi.nn.module import Module
from nnmpi.tensor.parameter import Parameter


def check_equal(model: Module, arrangement: Arrangement, backend: Backend) -> None:
    """Compare hashes of parameters that a tensor group has whole on each rank, and of those tied over stages.

    Collective.

    Raises:
        CommError: on all ranks of the group in question, naming the parameter.
    """
    parameters = dict(model.named_parameters())
    whole = {name: parameter for name, parameter in parameters.items() if parameter.region is None}
    _compare(arrangement.mesh.tp, whole, backend, "of its tensor group")
    for tie in arrangement.ties:
        _compare(tie.group, {tie.name: parameters[tie.name]}, backend, "of the stages that share it")


def _compare(group: Group, parameters: dict[str, Parameter], backend: Backend, where: str) -> None:
    if group.size == 1:
        return
    digests = {name: _digest(parameter, backend) for name, parameter in parameters.items()}
    for rank, theirs in enumerate(group.gather(digests)):
        different = [name for name, digest in theirs.items() if digest != digests.get(name)]
        if different:
            raise CommError(
                f"the weights of {different[0]} differ between the ranks {where} (rank {rank} of {group.size})"
            )


def _digest(parameter: Parameter, backend: Backend) -> str:
    return hashlib.blake2b(np.ascontiguousarray(backend.to_host(parameter.data)).data, digest_size=16).hexdigest()
