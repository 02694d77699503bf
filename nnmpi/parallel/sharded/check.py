"""Comparing what every rank of a tensor group has whole: it must stay the same, bit for bit, or results drift apart."""

from __future__ import annotations

import hashlib

from nnmpi.comm.device.hosts import to_host
from nnmpi.comm.group import Group
from nnmpi.errors import CommError
from nnmpi.nn.module import Buffer, Module
from nnmpi.tensor.parameter import Parameter


def check_replicas(model: Module, group: Group) -> None:
    """Compare a hash of each parameter and buffer that is not cut over all ranks; collective.

    Raises:
        CommError: on all ranks, naming one that differs and the ranks.
    """
    entries: dict[str, Parameter | Buffer] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [name for name, entry in entries.items() if entry.region is None]
    arrays = [to_host(entries[name].data) for name in names]
    everyone = group.gather([hashlib.blake2b(array.data, digest_size=16).hexdigest() for array in arrays])
    for number, name in enumerate(names):
        different = [rank for rank, theirs in enumerate(everyone) if theirs[number] != everyone[0][number]]
        if different:
            raise CommError(
                f"{name}, which every rank of the tensor group has whole, is on rank {different[0]} not what it is on "
                f"rank 0 ({len(different)} of {group.size} ranks differ)"
            )
