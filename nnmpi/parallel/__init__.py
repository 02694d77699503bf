"""Parallel strategies: what ranks share in training and exchange, each in its own group.

    strategy                       where                what the ranks share, and what they exchange
    data parallelism               data                 a batch; gradients are summed in buckets, maybe under backward
      in a fixed order of sums     fixed_reduction      the same, with the same bits under every dp x pp
      fused with the update        fused                the same, and the parameters, in memory of the node
      ZeRO                         zero/                the same, and state, gradients, parameters, each in parts
    model averaging                averaging            weights now and then (local SGD, gossip)
    parameter servers              server               gradients and weights, with servers, at each rank's own pace
    pipeline parallelism           pipeline/            the layers one after the other; activations and their gradients
    tensor parallelism             tensor, sharded/     each layer; activations before or after it
    sequence parallelism           sequence/            the positions of each sequence; keys and values, or heads
    expert parallelism             experts              a batch, and the experts of a mixture; rows and results

    replication     for all strategies with replicas: is it the same model, give all ranks the same
                    values
    divergence      where the first value that is not finite comes from
    model_state     which rank has which slice of which array; arrays gathered for a checkpoint, and
                    back

Begin with data, then pipeline/stage, then tensor. A strategy imports no other one; `compose` puts
them together. To add a strategy, add a module here, to STRATEGIES in tests/layering/layers.py and
to `compose`.
"""

from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.fused import FusedUpdate
from nnmpi.parallel.tensor import shard
from nnmpi.parallel.zero.strategy import ShardedDataParallel

__all__ = [
    "DataParallel",
    "FusedUpdate",
    "ShardedDataParallel",
    "shard",
]
