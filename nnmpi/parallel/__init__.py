"""Parallel strategies: what ranks share in training and exchange, each in its own group.

    strategy                     where             what the ranks share, and what they exchange
    data parallelism             data              a batch; gradients are summed in buckets
      in a fixed order of sums   fixed_reduction   the same, with the same bits under every dp x pp
      by a sum of one's own      summed            a batch; whatever the sum sends
      in fewer bytes             compressed        the same: rounded, largest, or of low rank
      fused with the update      fused             the same, and the node's parameters
      ZeRO                       zero/             the same, sharding state, gradients, parameters
    pipeline parallelism         pipeline/         the layers; activations and their gradients
    tensor parallelism           tensor, sharded/  each layer; activations before or after it
    sequence parallelism         sequence/         positions of each sequence; keys, values or heads
    expert parallelism           experts           a batch, and experts of a mixture; rows, results

    replication     for all strategies with replicas: checks of equal models, equal first values
    witness         whether all ranks do the same: compared in some updates, by words
    divergence      the origin of the first value that is not finite
    model_state     which rank has which slice of which array; gather to a checkpoint, and scatter

Begin with data, whose Replicas is the base of all data parallelism, then pipeline/stage, then
tensor. A strategy imports no other one, except variants of data parallelism; `compose` combines
them. To add a strategy, add a module here, to STRATEGIES in tests/layering/layers.py and to
`compose`.
"""

from nnmpi.parallel.data import DataParallel
from nnmpi.parallel.fused import FusedUpdate
from nnmpi.parallel.summed import GradientSum, SummedReplicas
from nnmpi.parallel.tensor import shard
from nnmpi.parallel.zero.strategy import ShardedDataParallel

__all__ = [
    "DataParallel",
    "FusedUpdate",
    "GradientSum",
    "ShardedDataParallel",
    "SummedReplicas",
    "shard",
]
