"""Expert parallelism: ranks that share batches also shard the experts of a mixture.

                 rank 0    rank 1
    samples      0 1 2     3 4       as under data parallelism
    experts      0 1 2     3 4       each on one rank, which gets its rows from all: `ops.experts`
    the rest     all       all       gradients are summed

An expert's gradient is complete on its rank, since its rows came from all ranks. So its weights,
gradient and state are on that rank alone (Lepikhin et al., "GShard", 2021).
"""

from nnmpi.base.errors import LayoutError
from nnmpi.base.shard import Region, split
from nnmpi.comm.group import Group
from nnmpi.nn.experts import MixtureOfExperts
from nnmpi.nn.module import Module
from nnmpi.ops.collectives import AllToAll


def share_experts(model: Module, group: Group) -> None:
    """Shard the experts of each mixture over the ranks, before initialization; not collective.

    Raises:
        LayoutError: for a model without a mixture.
    """
    mixtures = [
        module for _, module in model.named_modules() if isinstance(module, MixtureOfExperts)
    ]
    if not mixtures:
        raise LayoutError(
            "expert_parallel shards nn.MixtureOfExperts, but this model has none; leave it out"
        )
    for module in mixtures if group.size > 1 else ():
        module.ranks, module.exchange = group, AllToAll
        owned = split(module.b1.shape[0], group.size)[group.rank]
        for name in ("w1", "b1", "w2", "b2"):
            full = getattr(module, name)
            region = Region(full.shape, 0, owned.start, owned.stop)
            part = type(full)(region.local_shape, full.init, region, group)
            part.requires_grad, part.rank_local = full.requires_grad, True
            if full.is_base:
                part.make_base(full.base_dtype)
            module.set_child(name, part)
