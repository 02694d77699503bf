"""What each rank gets of a model's parameters."""

from __future__ import annotations

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Buffer, Module
from nnmpi.shard import Region
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.placement import Placement


class ParameterSharder:
    """Cuts a model's parameters and buffers for one rank, each once, so that tied parameters stay tied.

    Attributes:
        group: the ranks that share each layer.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # By the id of the whole parameter, which is kept here, so that no other object gets its id: (whole, part).
        self._cut: dict[int, tuple[Parameter, Parameter]] = {}

    def cut(self, whole: Parameter, placement: Placement, axis: int) -> Parameter:
        """Return this rank's part of a parameter that is cut along with an activation.

        Args:
            whole: the parameter.
            placement: of the activation.
            axis: the axis of the parameter that corresponds to the activation's cut axis.

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
        """Return this rank's part of a buffer (channels,) that is cut along with an activation.

        Raises:
            LayoutError: when it cannot be cut so.
        """
        region = self._region(whole.shape, placement, 0)
        return Buffer(region.local_shape, whole.value, region)

    def check(self, model: Module) -> None:
        """Refuse a model that uses a parameter whole in one place and cut in another.

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
