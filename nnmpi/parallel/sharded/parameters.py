"""What each rank gets of a model's parameters."""

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
        return self._part(whole, self._region(whole.shape, placement, axis))

    def deal(self, module: Module, mine: bool) -> None:
        """Leave a module all of its parameters and buffers if it is this rank's, and nothing of them if it is not.

        Raises:
            LayoutError: when a module of another rank has one of them, too, or one has no axis.
        """
        for path, each in module.named_modules():
            for name, entry in [*each._members(Parameter), *each._members(Buffer)]:
                shape = entry.shape if entry.region is None else entry.region.shape
                if not shape:
                    raise LayoutError(
                        f"{path}.{name} in a branch is a single number; give it the shape (1,), so that a rank that "
                        "computes another branch can have none of it"
                    )
                region = Region(shape, 0, 0, shape[0] if mine else 0)
                if entry.region == region:
                    continue  # met already: two modules of the branch share it
                if isinstance(entry, Parameter):
                    each.set_child(name, self._part(entry, region))
                elif entry.region is None:
                    each.set_child(name, Buffer(region.local_shape, entry.value, region))
                else:
                    raise LayoutError(f"{path}.{name} stands in branches of two ranks; make a layer for each branch")

    def cut_buffer(self, whole: Buffer, placement: Placement) -> Buffer:
        """Return this rank's part of a buffer (channels,) that is cut along with an activation.

        Raises:
            LayoutError: when it cannot be cut so.
        """
        region = self._region(whole.shape, placement, 0)
        return Buffer(region.local_shape, whole.value, region)

    def _part(self, whole: Parameter, region: Region) -> Parameter:
        if id(whole) not in self._cut and whole.region is None:
            part = Parameter(region.local_shape, whole.init, region)
            part.requires_grad = whole.requires_grad
            self._cut[id(whole)] = (whole, part)
        part = whole if whole.region is not None else self._cut[id(whole)][1]
        if part.region != region:
            raise LayoutError(
                f"two layers share a parameter of shape {whole.shape} and would cut it in two ways; let the table give "
                "them shardings that cut the same axis, or Sharding.REPLICATED"
            )
        return part

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
