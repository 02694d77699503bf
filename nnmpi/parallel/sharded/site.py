"""Site: the place of a layer in a model that is being sharded, and what every layer's rule needs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import Sharding
from nnmpi.parallel.sharded.exchange import gather, scatter, spread
from nnmpi.parallel.sharded.parts import Parts
from nnmpi.parallel.sharded.placement import WHOLE, Placement
from nnmpi.parallel.sharded.wrap import Exchanged
from nnmpi.tensor.tensor import Tensor

Exchange: TypeAlias = Callable[[Tensor], Tensor]
Placed: TypeAlias = tuple[Module, Placement]


@dataclass(frozen=True)
class Site:
    """Where a layer stands.

    Attributes:
        name: its full name in the model.
        placement: how the activation lies that comes to it.
        shape: of a whole sample of that activation, without the batch; None when it is not known.
        sharding: what the table says of the layer; None when it says nothing.
        parts: cuts parameters for this rank.
    """

    name: str
    placement: Placement
    shape: tuple[int, ...] | None
    sharding: Sharding | None
    parts: Parts

    @property
    def group(self) -> Group:
        """The ranks that share each layer."""
        return self.parts.group

    def on_whole(self, module: Module, features: int | None = None) -> Placed:
        """Return a layer that works as it is on whole activations, with what it takes to have them whole.

        Args:
            features: the length of their last axis, where the layer knows it.
        """
        if self.placement.is_whole:
            return module, WHOLE
        return Exchanged(module, before=self.to_whole(features)), WHOLE

    def to_whole(self, features: int | None = None) -> Exchange:
        """Return what makes the activation whole, for a computation that is the same on every rank."""
        return partial(gather, group=self.group, placement=self._known(features))

    def to_each(self, features: int | None = None) -> Exchange:
        """Return what makes the activation whole, for a computation that is another on every rank."""
        return partial(spread, group=self.group, placement=self._known(features))

    def _known(self, features: int | None) -> Placement:
        if features is not None and self.placement.repeats is None:
            return self.placement.resolve(features)
        self.placement.check_known(self.group.size)
        return self.placement

    def to_parts(self, placement: Placement) -> Exchange:
        """Return what leaves each rank its part of the activation, in that placement."""
        if placement == self.placement:
            return _same
        cut = partial(scatter, group=self.group, placement=placement)
        if self.placement.is_whole:
            return cut
        whole = self.to_whole()
        return lambda x: cut(whole(x))

    def sample(self) -> tuple[int, int, int]:
        """Return the whole image (height, width, channels) that comes to the layer.

        Raises:
            LayoutError: when it is not known, or no image.
        """
        if self.shape is None or len(self.shape) != 3:
            raise self.refuse(
                "works on the rows of images, whose height must be known: give shard() the shape of a sample, "
                "sample=(height, width, channels)"
            )
        height, width, channels = self.shape
        return height, width, channels

    def refuse(self, why: str) -> LayoutError:
        """Return the error that says which layer cannot be sharded so, and why."""
        return LayoutError(f"layer {self.name!r} {why}")


def _same(x: Tensor) -> Tensor:
    return x
