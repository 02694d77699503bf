"""The mesh of ranks: replica (d), pipeline stage (p), tensor shard (t), sequence part (s).

It is arithmetic, without messages.

The axes are dp (data parallel), pp (pipeline), tp (tensor) and sp (sequence). tp is innermost: its
ranks communicate most, several times per layer, and neighbours in rank are mostly on one node. Then
comes sp: rank = ((d * pp + p) * sp + s) * tp + t. `Mesh(dp=2, pp=2, tp=2)`:

    8 ranks: dp 2 x pp 2 x tp 2

           p0   p1
    d0    0 1  2 3
    d1    4 5  6 7

    groups of tp: 0 1 | 2 3 | 4 5 | 6 7      a cell: shards of the same layers
    groups of pp: 0 2 | 1 3 | 4 6 | 5 7      along a row: consecutive layers
    groups of dp: 0 4 | 1 5 | 2 6 | 3 7      down a column: the same parameters
    replicas:     0 1 2 3 | 4 5 6 7          a row: one complete model

Each part s of the sequences has a complete model, too, so it counts as a replica: with sp, the
ranks with the same parameters are dp x sp ranks. `Mesh(dp=1, pp=2, tp=2, sp=2)`:

    8 ranks: dp 1 x pp 2 x tp 2 x sp 2

               p0       p1
    d0    0 1 2 3  4 5 6 7

    groups of sp: 0 2 | 1 3 | 4 6 | 5 7      within a cell: the same parameters, other positions
    replicas:     0 1 4 5 | 2 3 6 7

With known nodes, the ranks are ordered by node first, so that tensor groups and replicas lie on one
node each if they fit. Here a launcher placed the ranks on two nodes alternately,
`Mesh(dp=2, pp=2, tp=2, nodes=(0, 1, 0, 1, 0, 1, 0, 1))`:

    8 ranks on 2 nodes: dp 2 x pp 2 x tp 2

           p0   p1
    d0    0 2  4 6    node 0
    d1    1 3  5 7    node 1

Rank 0 is always (0, 0, 0, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import LayoutError

if TYPE_CHECKING:
    from nnmpi.comm.group import Group

DP, PP, TP, SP = "dp", "pp", "tp", "sp"
AXES = (DP, PP, TP, SP)
SUGGESTIONS = 5


class Coordinates(NamedTuple):
    """A rank's coordinates in the mesh.

    Attributes:
        d: the replica of the model.
        p: the position in the pipeline; the schedule maps it to one or more stages.
        t: the shard of each layer.
        s: the part of each sequence.
    """

    d: int
    p: int
    t: int
    s: int = 0

    def __str__(self) -> str:
        """Return the coordinates as "d1 p0 t3", with "s2" for sequence parts after the first."""
        return f"d{self.d} p{self.p} t{self.t}" + (f" s{self.s}" if self.s else "")


@dataclass(frozen=True)
class Mesh:
    """Ranks 0..dp*pp*tp*sp-1 on four axes.

    Attributes:
        dp: replicas of the model, each with other samples.
        pp: ranks of a pipeline.
        tp: ranks that shard a layer.
        nodes: the node number of each rank; None for an order by rank alone.
        sp: ranks that shard a sequence.

    Raises:
        LayoutError: for an axis below 1, or nodes of another number of ranks.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    nodes: tuple[int, ...] | None = None
    sp: int = 1

    def __post_init__(self) -> None:
        """Check the axes and the nodes."""
        _check_axes(dict(zip(AXES, self.shape, strict=True)))
        if self.nodes is not None and len(self.nodes) != self.size:
            raise LayoutError(
                f"nodes are given for {len(self.nodes)} ranks, but {self} has {self.size}; give one"
                " for each rank"
            )

    @classmethod
    def of(
        cls,
        world: int,
        dp: int | None = None,
        pp: int | None = None,
        tp: int | None = None,
        nodes: Sequence[int] | None = None,
        sp: int = 1,
    ) -> Mesh:
        """Return a world's mesh. An axis that is None is derived from the others.

        If several are None, pp and tp become 1 first.

            of(8) -> 8 x 1 x 1      of(8, pp=2) -> 4 x 2 x 1      of(8, dp=2, tp=2) -> 2 x 2 x 2

        Raises:
            LayoutError: when the product of the axes is not `world`; it names meshes that fit.
        """
        asked = {DP: dp, PP: pp, TP: tp, SP: sp}
        _check_axes(asked | {"world": world})
        several = [dp, pp, tp].count(None) > 1
        expected = asked | {PP: pp or 1, TP: tp or 1} if several else asked
        nearest = fitting(world, expected)[0]
        if _differing(nearest, expected):
            raise LayoutError(_misfit(world, expected, asked))
        return replace(nearest, nodes=None if nodes is None else tuple(nodes))

    def __str__(self) -> str:
        """Return the axes as text."""
        return f"dp {self.dp} x pp {self.pp} x tp {self.tp}" + (
            f" x sp {self.sp}" if self.sp > 1 else ""
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes of the axes, (dp, pp, tp, sp)."""
        return self.dp, self.pp, self.tp, self.sp

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.shape)

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's coordinates.

        Raises:
            LayoutError: for a rank outside the mesh.
        """
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is not one of {self} = {self.size} ranks")
        ((d, p, s, t),) = np.argwhere(self._ranks == rank).tolist()
        return Coordinates(d, p, t, s)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks of each group along some axes: `groups(DP, SP)` is the replicas."""
        last = [(DP, PP, SP, TP).index(axis) for axis in axes]
        rows = np.moveaxis(self._ranks, last, range(-len(axes), 0))
        return rows.reshape(-1, prod(rows.shape[-len(axes) :])).tolist()

    def bind(self, group: Group) -> BoundMesh:
        """Return the mesh with this rank's group of each axis. Collective.

        Communicators are scarce, so an axis of all ranks in order is the group itself, and all axes
        of size 1 share one group.

        Raises:
            LayoutError: on all ranks, for a group of another size than the mesh.
        """
        if group.size != self.size:
            raise LayoutError(_misfit(group.size, dict(zip(AXES, self.shape, strict=True)), {}))
        made = [] if self.size == 1 else [group.split(group.rank)]

        def along(*axes: str) -> Group:
            groups = self.groups(*axes)
            if groups == [[*range(group.size)]]:
                return group
            if len(groups[0]) == 1:
                return made[0]
            ((color, key),) = np.argwhere(np.array(groups) == group.rank).tolist()
            made.append(group.split(color, key))
            return made[-1]

        dp = along(DP)
        return BoundMesh(
            self,
            group,
            self.coordinates(group.rank),
            dp=dp,
            pp=along(PP),
            tp=along(TP),
            sp=along(SP),
            model=along(PP, TP),
            replicas=dp if self.sp == 1 else along(DP, SP),
            made=made,
        )

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        """The rank at (d, p, s, t): in order, but by node first, with rank 0's node in front."""
        nodes = self.nodes or (0,) * self.size
        ranks = sorted(range(self.size), key=lambda rank: nodes.index(nodes[rank]))
        return np.reshape(ranks, (self.dp, self.pp, self.sp, self.tp))


@dataclass(frozen=True)
class BoundMesh:
    """A mesh with this rank's groups; its rank in a group is its coordinate on that axis.

    Attributes:
        sizes: the arithmetic.
        world: the group of all ranks, as given to `bind`.
        coordinates: this rank's.
        dp: the ranks with the same part of the model and of each sequence.
        pp: the ranks of this pipeline, in order.
        tp: the ranks that shard this rank's layers.
        sp: the ranks that shard this rank's sequences.
        model: all ranks of this replica of the model; rank p * tp + t.
        replicas: all ranks with the same part of the model, dp x sp; rank d * sp + s.
        made: the groups made by `bind`, to be freed.
    """

    sizes: Mesh
    world: Group
    coordinates: Coordinates
    dp: Group
    pp: Group
    tp: Group
    sp: Group
    model: Group
    replicas: Group
    made: list[Group]

    def free(self) -> None:
        """Free the groups, except the world. Collective; repeated calls do nothing."""
        while self.made:
            self.made.pop().free()


# ---- layouts that fit ----


def fitting(world: int, asked: dict[str, int | None]) -> list[Mesh]:
    """Return the layouts of this many ranks, the nearest to the requested one first.

    The distance is the number of axes that differ; axes that are None do not count. sp is the
    requested one, or the largest number below it that divides the world.
    """
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    sp = max(n for n in divisors if n <= (asked.get(SP) or 1))
    rest = world // sp
    meshes = [
        Mesh(d, p, rest // d // p, sp=sp) for d in divisors for p in divisors if rest % (d * p) == 0
    ]
    return sorted(meshes, key=lambda mesh: (_differing(mesh, asked), -mesh.dp, -mesh.pp))


def _differing(mesh: Mesh, asked: dict[str, int | None]) -> int:
    """Return the number of axes that differ from the requested ones."""
    return sum(
        asked.get(axis) not in (None, local) for axis, local in zip(AXES, mesh.shape, strict=True)
    )


def _misfit(world: int, axes: dict[str, int | None], asked: dict[str, int | None]) -> str:
    """Return the sentence about axes that do not make up the world."""
    known = {
        axis: size for axis, size in axes.items() if size is not None and (axis != SP or size > 1)
    }
    product = " x ".join(f"{axis} {size}" for axis, size in known.items())
    meshes = fitting(world, asked or axes)
    some = ", ".join(str(mesh) for mesh in meshes[:SUGGESTIONS]) + (
        " ..." if len(meshes) > SUGGESTIONS else ""
    )
    ranks = f"{world} rank{' is' if world == 1 else 's are'}"
    kind = "not a multiple of" if None in axes.values() else "not"
    return f"{ranks} {kind} {product} = {prod(known.values())}; these fit: {some}"


def _check_axes(axes: dict[str, int | None]) -> None:
    for axis, size in axes.items():
        if size is not None and size < 1:
            what = f"a world of {size} ranks" if axis == "world" else f"{axis} {size}"
            raise LayoutError(f"{what} is impossible; give at least 1")
