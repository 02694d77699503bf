"""Checks that ranks hold the same model, with equal values.

Every strategy with replicas begins with these checks and equal first values. `check_equal` later
finds a drift: of data-parallel replicas, of parameters that tensor parallelism replicates, of
parameters that several stages use.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import LayoutError, UsageError, expect
from nnmpi.comm.agreement import require_equal
from nnmpi.comm.buffers import to_host
from nnmpi.comm.group import Group
from nnmpi.nn.module import Module
from nnmpi.parallel.zero.storage import ShardedStorage
from nnmpi.tensor.parameter import FlatStorage

DIFFERENT_MODELS = "the ranks have different models"
BUILD_ALIKE = "build the same model on every rank"


def check_same_model(group: Group, model: Module | FlatStorage) -> None:
    """Compare names, shapes, dtypes and frozen parameters over all ranks. Collective.

    Of a model with its layers also their classes and settings: ranks with other activations, or
    another dropout, would sum gradients of different functions.

    Strategies do this first. MPI would not notice a difference: padded flat arrays of different
    models may have the same length.

    Raises:
        CommError: on all ranks, naming the first parameter that differs.
        LayoutError: when the ranks hold shards of one parameter, and not copies.
    """
    if group.size == 1:
        return
    storage, settings = (
        (model.storage, model.settings()) if isinstance(model, Module) else (model, [])
    )
    members = set(group.comm.members)
    for p in (span.parameter for span in storage.spans):
        others = set() if p.ranks is None else set(p.ranks.comm.members)
        # the ranks that share batches have a shard of experts each, all others have copies
        if others != members if p.rank_local else len(others & members) > 1:
            raise LayoutError(
                f"{p.name} is sharded over {'other' if p.rank_local else 'these'} ranks, which"
                " cannot be replicas; give the ranks with the same shards, where.mesh.replicas of"
                " where = nnmpi.arrange(...)"
            )
    dtypes = [str(array.dtype) for array in storage.data]
    spans = [(span.parameter, dtypes[span.buffer]) for span in storage.spans]
    parameters = [
        f"{p.name} {(p.region or p).shape if p.rank_local else p.shape}"
        f" {kind}{'' if p.requires_grad else ', frozen'}"
        for p, kind in spans
    ]
    require_equal(group, [*parameters, *settings], DIFFERENT_MODELS, BUILD_ALIKE)


def check_free(model: Module, group: Group, zero: bool = False) -> None:
    """Refuse a model that already has a strategy, or parameters whose gradients stay unsummed.

    Args:
        zero: whether the new strategy is ZeRO, which alone trains sharded storage.

    Raises:
        UsageError: in these cases; the message says what to do. Also for other types.
    """
    call = "DataParallel or ShardedDataParallel with (model, group)"
    expect(call, (model, Module), (group, Group))
    model.check_stored()
    model.storage.check_weights("a strategy")
    model.storage.finish_gradients()
    parameters = [span.parameter for span in model.storage.spans]
    if any(item.hook is not None or item.guard is not None for item in parameters):
        raise UsageError(
            "the model has a DataParallel (or other hooks) already; call its release() first"
        )
    if isinstance(model.storage, ShardedStorage) and not zero:
        raise model.storage.refuse("only ZeRO trains it")
    if model.storage.node_shared:
        raise UsageError("the model has a fused update already; call its worker's release() first")


def broadcast_state(model: Module, group: Group, parameters: bool = True) -> None:
    """Give all ranks rank 0's buffers, and its parameters unless `parameters` is False. Collective.

    Also its base, if the model has adapters.

    Parameters of one rank's experts stay as they are.
    """
    model.storage.distributed = True
    entries = model.entries() if parameters else dict(model.named_buffers())
    entries |= {name: item for name, item in model.named_base() if item.home is None}
    for item in entries.values():
        if getattr(item, "rank_local", False):
            continue
        kept = getattr(item, "kept", None)
        array = item.data if kept is None else kept.data.view(np.uint16)
        values = namespace(array).ascontiguousarray(array)
        group.broadcast(values)
        if values is not array:
            array[...] = values
    model.storage.version.meet()  # no rank may write to shared parameters before all have copied


def check_replicas(model: Module, group: Group) -> None:
    """Compare each parameter and buffer that is replicated in a tensor group. Collective.

    They must stay equal bit for bit, or the ranks' results drift apart.

    Raises:
        CommError: on all ranks, naming one that differs and the ranks.
    """
    arrays = {
        name: item.data
        for name, item in model.entries().items()
        if item.region is None or getattr(item, "rank_local", False)
    }
    check_equal(
        group, arrays, "{}, which is replicated in the tensor group, differs between its ranks"
    )


def check_equal(group: Group, arrays: Mapping[str, Array], problem: str) -> None:
    """Compare hashes of arrays that should be equal on all ranks. Collective.

    Args:
        group: the ranks.
        arrays: by name, of any shape and dtype.
        problem: the error sentence, with {} for the name of an array that differs.

    Raises:
        CommError: on all ranks, naming one that differs and the ranks.
    """
    names, hosts = list(arrays), map(np.ascontiguousarray, map(to_host, arrays.values()))
    digests = [hashlib.blake2b(host.data, digest_size=16).hexdigest() for host in hosts]
    require_equal(group, digests, lambda number: problem.format(names[number]), show=None)
