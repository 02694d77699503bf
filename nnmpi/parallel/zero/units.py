"""What is gathered and summed at once, and how many bytes that takes: integers alone, before a model has values.

A unit is a run of the model's layers, such as a block. Its parameters lie together in a flat array (one for each
optimizer group), of which rank r owns part r of `shard.split`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from nnmpi.comm.gradients import BUCKET_BYTES
from nnmpi.nn.chain import ChainLayer, ModelPart, Run, join_layers, open_chain
from nnmpi.nn.module import Module
from nnmpi.nn.sharding import ALL
from nnmpi.shard import buckets, part
from nnmpi.tensor.parameter import ALIGNMENT_BYTES, Parameter

SHARED = -1  # the number of the unit of parameters that several units have
UNIT_BYTES = {1: BUCKET_BYTES, 2: BUCKET_BYTES, 3: 64 * 2**10}  # by stage: shorter units would be messages for nothing


@dataclass(frozen=True, eq=False)
class Unit:
    """A run of layers, with the calls that compute them and the parameters that no other unit has."""

    layers: tuple[ChainLayer, ...]
    joined: tuple[Run, ...]
    parameters: tuple[Parameter, ...]


def cut_units(model: Module, limit_bytes: int, itemsize: int) -> tuple[tuple[Unit, ...], tuple[Parameter, ...]]:
    """Cut a model's chain into units; return them, and the parameters that several of them have.

    Layers of one child of the model stay together, such as a residual block's. Children are taken together as long as
    their parameters are not more than the limit; one without parameters goes with the one before it.

    Args:
        model: a sequence, or a part of one; any other module is one unit.
        limit_bytes: at least 1.
        itemsize: bytes of an element.
    """
    layers = model.layers if isinstance(model, ModelPart) else open_chain(model)
    blocks = [tuple(block) for _, block in groupby(layers, lambda layer: layer.name.partition(".")[0])]
    seen: set[int] = set()
    merged: list[tuple[ChainLayer, ...]] = []
    sizes: list[int] = []
    for block in blocks:
        new = {id(each): each for each in _parameters(block) if id(each) not in seen}
        seen |= new.keys()
        size = sum(each.size for each in new.values()) * itemsize
        if merged and (not size or not sizes[-1]):
            merged[-1], sizes[-1] = merged[-1] + block, sizes[-1] + size
        else:
            merged.append(block)
            sizes.append(size)
    runs = [tuple(layer for i in group for layer in merged[i]) for group in buckets(sizes, limit_bytes)] or [
        tuple(layers)
    ]
    users: dict[int, set[int]] = {}
    for number, run in enumerate(runs):
        for each in _parameters(run):
            users.setdefault(id(each), set()).add(number)
    units = [
        Unit(run, join_layers(run), tuple(each for each in _parameters(run) if len(users[id(each)]) == 1))
        for run in runs
    ]
    return tuple(units), tuple(each for each in model.parameters() if len(users.get(id(each), ())) != 1)


def _parameters(layers: Sequence[ChainLayer]) -> list[Parameter]:
    """Return the parameters of some layers, each once."""
    found = {id(each): each for layer in layers for _, module in layer.members for each in module.parameters()}
    return list(found.values())


@dataclass(frozen=True)
class StateBytes:
    """What a rank holds of parameters, gradients and optimizer state, in bytes.

    Attributes:
        parameters, gradients, optimizer: the rank's own parts, or all of them; of what lies out of memory nothing.
        units: slots of gathered parameters, and scratch for a unit's gradients.
        lengths: of each unit, and of what several units have: what is gathered and summed at once.
        longest: the longest of this rank's parts of them: where a sum arrives that MPI's own reduce-scatter makes.
    """

    parameters: int
    gradients: int
    optimizer: int
    units: int
    lengths: tuple[int, ...] = ()
    longest: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.units


def predict_bytes(
    model: Module,
    stage: int,
    rank: int,
    size: int,
    itemsize: int,
    state_arrays: int,
    unit_bytes: int | None = None,
    stands_once: bool = False,
    away: str | None = None,
) -> StateBytes:
    """Return what a rank will hold, to the byte, with one optimizer group. The model needs no values.

    Args:
        model: as for `cut_units`.
        stage: 1, 2 or 3; 0 for plain data parallelism.
        rank, size: of the ranks that share it.
        itemsize: bytes of an element.
        state_arrays: how many arrays of each parameter's size the optimizer keeps.
        unit_bytes: see `ShardedStorage`.
        stands_once: whether the parameters stand once in memory that all ranks share.
        away: what lies out of memory: `OPTIMIZER`'s state, or `ALL`, its state and the parameters, in stage 3; None for
            nothing.
    """
    units, shared = cut_units(model, unit_bytes or UNIT_BYTES[stage or 1], itemsize)
    lengths = [_length(unit.parameters, itemsize) for unit in units]
    apart = _length(shared, itemsize)
    whole = _length(model.parameters(), itemsize) * itemsize
    owns = [len(part(length, size, rank)) for length in [*lengths, apart]]
    own = sum(owns) * itemsize
    scratch = (max(lengths, default=0) + apart) * itemsize
    slots = 0 if stands_once else sum(max(lengths[i::2], default=0) for i in (0, 1)) * itemsize + apart * itemsize
    return StateBytes(
        (own if stage == 3 or stands_once else whole) if away != ALL else 0,
        own if stage >= 2 else whole,
        (own if stage else whole) * state_arrays if away is None else 0,
        {0: 0, 1: 0, 2: scratch, 3: scratch + slots}[stage],
        tuple(length * itemsize for length in (*lengths, apart) if length),
        max(owns) * itemsize,
    )


def _length(parameters: Sequence[Parameter], itemsize: int) -> int:
    """Return the elements of a flat array of some parameters, with its gaps."""
    step = ALIGNMENT_BYTES // itemsize
    return sum(-(-each.size // step) * step for each in parameters)
