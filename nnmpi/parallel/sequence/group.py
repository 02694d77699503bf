"""The ranks that share sequences: each has some positions of every sample, and all layers.

                  positions      0  1  2 | 3  4  5                 sp 2, --sp-attention ulysses
    tokens    (batch, 6)         rank 0  | rank 1
    embedding, norm, mlp ...     each position by itself: nothing is exchanged
    attention                    over all positions: `ulysses` or `ring`
    loss                         each rank's own tokens; a mean is over those of the global batch

A model's input is marked as a shard of a tensor (see `tensor.placement`). So each operation on it
either works on positions by themselves, or exchanges them with the other ranks, or is refused; no
module is replaced.

To the parameters the ranks of a group are replicas: each computes the gradient of its positions'
losses, and these are summed over dp x sp as data parallelism sums them. Until that sum, the
gradient of a full tensor is here each rank's summand of it, unlike in a tensor group. All of the
strategy follows: a copy needs no exchange, a scatter is `take_part` (see `ops.collectives`), and a
gather is `gather_summing_grads`.
"""

from dataclasses import dataclass, replace
from typing import Any

from nnmpi.backend.array import namespace
from nnmpi.base.errors import LayoutError, UsageError
from nnmpi.data.loader import Batch
from nnmpi.nn.sharding import RING, ULYSSES
from nnmpi.ops.collectives import TensorParallelGroup
from nnmpi.parallel.sequence.attention import RingAttention, UlyssesAttention
from nnmpi.tensor.placement import PairPlacement, Placement, Shard, is_sharded
from nnmpi.tensor.sharded import ShardedTensor, mark
from nnmpi.tensor.tensor import Tensor

POSITIONS = 1  # the axis


@dataclass(frozen=True)
class SequenceGroup(TensorParallelGroup):
    """The ranks that share sequences.

    Attributes:
        group: the ranks.
        way: of attention: ULYSSES (each rank has one range of positions) or RING (two ranges, one
            from each end).
    """

    way: str = ULYSSES
    depth = 0  # outside of tensor groups' shards
    taking, giving = "take_part", "gather_summing_grads"

    def placement(self, length: int) -> Placement:
        """Return the placement of this many positions."""
        kind = PairPlacement if self.way == RING else Placement
        return kind(length, axis=POSITIONS)

    # ---- for the trainer ----

    def part(self, batch: Batch) -> Batch:
        """Return a batch with this rank's positions alone.

        Raises:
            UsageError: for samples or labels without positions.
        """
        shapes = tuple(batch.x.shape), tuple(batch.y.shape)
        if len(shapes[0]) < 2 or len(shapes[1]) != 2 or shapes[0][1] != shapes[1][1]:
            raise UsageError(
                f"sp {self.size} shards the positions of sequences: it needs samples (batch, time,"
                f" ...) and labels (batch, time), not {shapes[0]} and {shapes[1]}; leave sp at 1"
            )
        labels = None if batch.host_y is None else self.take(batch.host_y)
        local = replace(batch, x=self.take(batch.x), y=self.take(batch.y), host_y=labels)
        return replace(local, length=shapes[0][1])

    def take(self, array: Any) -> Any:
        """Return this rank's positions of samples or labels (batch, time, ...)."""
        placement = self.placement(array.shape[POSITIONS])
        region = placement.region(array.shape, POSITIONS, self.size, self.rank)
        return namespace(array).ascontiguousarray(region.take(array))

    def as_sharded(self, x: Tensor, length: int) -> ShardedTensor:
        """Return this rank's positions, marked as a shard of the full sequences.

        Args:
            x: (batch, this rank's positions, ...).
            length: of the full sequences.
        """
        return mark(x, Shard(self.placement(length), self, ""))

    def as_local(self, x: Any, length: int) -> Tensor:
        """Return a model's result for this rank's positions as a plain tensor.

        Raises:
            LayoutError: when it has lost its positions.
        """
        if is_sharded(x) and x.shard.group == self and x.shard.placement == self.placement(length):
            return x.part()
        shape = getattr(x, "shape", type(x).__name__)
        raise LayoutError(
            f"the model's result {shape} does not have the {length} positions of its input at axis"
            f" {POSITIONS}, which sp {self.size} shards; leave sp at 1"
        )

    # ---- for tensors ----

    def copy(self, x: Tensor) -> Tensor:
        """Return x: its gradient's summands are summed with the parameters' gradients."""
        return x

    def attention(self, kernels: Any, placement: Placement) -> Any:
        """Return this group's kernels for attention over all ranks' positions."""
        ranges = [placement.ranges(self.size, rank) for rank in range(self.size)]
        if self.way == RING:
            return RingAttention(self.group, ranges)
        return UlyssesAttention(self.group, ranges, kernels)
