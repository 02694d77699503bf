"""Parts: cuts parameters and buffers for one rank of a group, each once, so that tied ones stay tied."""

from __future__ import annotations

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Buffer, Module
from nnmpi.parallel.sharded.placement import Placement
from nnmpi.shard import Region
from nnmpi.tensor.parameter import Parameter


class Parts:
    """What one rank gets of a model's parameters.

    Attributes:
        group: the ranks that share each layer.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._cut: dict[int, tuple[Parameter, Parameter]] = {}  # the whole one is kept, so that its id stays its own

    def cut(self, whole: Parameter, placement: Placement, axis: int) -> Parameter:
        """Return this rank's part of a parameter of which one axis goes with the cut axis of an activation.

        Raises:
            LayoutError: when the axis cannot be cut so, or another layer has the same parameter cut in another way.
        """
        region = self._region(whole.shape, placement, axis)
        if id(whole) not in self._cut:
            part = Parameter(region.local_shape, whole.init, region)
            part.requires_grad = whole.requires_grad
            self._cut[id(whole)] = (whole, part)
        part = self._cut[id(whole)][1]
        if part.region != region:
            raise LayoutError(
                f"two layers share a parameter of shape {whole.shape} and would cut it in two ways; let the table give "
                "them shardings that cut the same axis, or Sharding.REPLICATED"
            )
        return part

    def cut_buffer(self, whole: Buffer, placement: Placement) -> Buffer:
        """Return this rank's part of a buffer (channels,) that goes with the cut axis of an activation.

        Raises:
            LayoutError: when it cannot be cut so.
        """
        region = self._region(whole.shape, placement, 0)
        return Buffer(region.local_shape, whole.value, region)

    def check(self, model: Module) -> None:
        """Refuse a model in which a parameter stands whole in one place and cut in another.

        Raises:
            LayoutError: naming it.
        """
        for name, parameter in model.named_parameters():
            if id(parameter) in self._cut:
                raise LayoutError(
                    f"parameter {name!r} is whole there and cut in another place of the model; let the table give both "
                    "places shardings that cut the same axis, or Sharding.REPLICATED"
                )

    def _region(self, shape: tuple[int, ...], placement: Placement, axis: int) -> Region:
        return placement.region(shape, axis, self.group.size, self.group.rank)
