"""How an activation is spread over the ranks of a tensor group, and what each rank gets of the parameters.

    replicated   every rank has all of it, the same bits
    features     each rank has some of the last axis       (batch, h, w, c)  ->  (batch, h, w, part of c)
    rows         each rank has some rows of the images     (batch, h, w, c)  ->  (batch, part of h, w, c)

An axis is divided in `units`, as `shard.split` does it. When images are flattened, the cut shows in another form:
channels that were divided come again for every pixel (`repeats`), and a row of the image has become w * c features,
which stay together (`unit`):

    h w = 3 pixels, 4 channels over 2 ranks        units=4 repeats=3      0 0 1 1  0 0 1 1  0 0 1 1
    h = 4 rows of w c = 3 numbers over 2 ranks     units=4 unit=3         0 0 0  0 0 0  1 1 1  1 1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nnmpi.comm.group import Group
from nnmpi.errors import LayoutError
from nnmpi.nn.module import Buffer, Module
from nnmpi.shard import Region, part
from nnmpi.tensor.parameter import Parameter

FEATURES, ROWS = -1, 1  # the axes that can be cut


@dataclass(frozen=True)
class Placement:
    """How an activation is spread over the ranks.

    Attributes:
        units: how many units are divided among the ranks along the axis; 0 for a replicated activation.
        unit: how many neighbouring elements a unit has.
        repeats: how often all units come, one after another; None when only the next layer's size will tell.
        axis: the axis that is cut: the last one (-1), or the images' rows (1).
    """

    units: int = 0
    unit: int = 1
    repeats: int | None = 1
    axis: int = FEATURES

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of it."""
        return self.units == 0

    @property
    def has_rows(self) -> bool:
        """Whether the rows of images are cut."""
        return not self.is_replicated and self.axis == ROWS

    def cut(self, total: int, size: int, rank: int) -> Region:
        """Return a rank's part of the cut axis.

        Args:
            total: the length of the whole axis.
            size: the number of ranks.
            rank: one of them.

        Raises:
            LayoutError: when the axis cannot have that length.
        """
        return self.region((total,), 0, size, rank)

    def region(self, shape: Sequence[int], axis: int, size: int, rank: int) -> Region:
        """Return a rank's part of an array that is cut along with the activation, such as a layer's weight.

        Args:
            shape: of the whole array.
            axis: the axis of the array that corresponds to the activation's cut axis.
            size: the number of ranks.
            rank: one of them.

        Raises:
            LayoutError: when that axis cannot have its length.
        """
        whole = tuple(shape)
        own = part(self.units, size, rank)
        repeats = self.resolve(whole[axis]).repeats or 1
        return Region(whole, axis % len(whole), own.start * self.unit, own.stop * self.unit, repeats)

    def resolve(self, total: int) -> Placement:
        """Return the placement with its repeats known, given the length of the whole axis.

        Raises:
            LayoutError: when the axis cannot have that length.
        """
        once = self.units * self.unit
        repeats = self.repeats if self.repeats is not None else total // max(once, 1)
        if once * repeats != total:
            raise LayoutError(
                f"an activation whose {self.units} parts of {self.unit} lie on several ranks cannot be {total} long; "
                "give the layer before it Sharding.REPLICATED, or check the layers' sizes"
            )
        return replace(self, repeats=repeats)

    def check_known(self, size: int) -> None:
        """Refuse a placement of unknown repeats if some rank has no unit: it could not tell the number of repeats.

        Raises:
            LayoutError: for such a placement.
        """
        if self.repeats is None and self.units < size:
            raise LayoutError(
                f"{self.units} channels of flattened images lie on {size} ranks, and those that have none cannot tell "
                "the images' size; give shard() the shape of a sample, or use fewer ranks"
            )

    def width(self, size: int, rank: int) -> int:
        """Return how many elements a rank has of each repeat."""
        return len(part(self.units, size, rank)) * self.unit


REPLICATED = Placement()


def features(units: int, unit: int = 1) -> Placement:
    """Return the placement of an activation whose last axis is divided in `units` units."""
    return Placement(units, unit)


def rows(height: int) -> Placement:
    """Return the placement of images whose rows are divided."""
    return Placement(height, axis=ROWS)


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
