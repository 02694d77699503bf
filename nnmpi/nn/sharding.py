"""The vocabulary of sharding: tables that assign a sharding to each layer.

`parallel` has the implementations; models import only this. A table maps full names of modules, or
patterns, to a `Sharding`:

    {"0": Sharding.COLUMN, "3": Sharding.COLUMN, "7": Sharding.ROW}
    {"*.attention.proj": Sharding.ROW}

An exact name has precedence, then the first pattern that matches. Modules without parameters need
no entry: their class says how they follow the sharding of their input (`Reach`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, TypeAlias

__all__ = ["Reach", "Sharding", "Units"]

# algorithms of attention over positions of several ranks, see `parallel.sequence`
RING: Final = "ring"
ULYSSES: Final = "ulysses"
STAGES = (1, 2, 3)  # of ZeRO
OPTIMIZER, ALL = "optimizer", "all"  # values of `offload_state`


class Sharding(Enum):
    """A rank's share of a layer. For a Linear of weight (in, out):

        COLUMN   in | # # . . |      ROW      | # # # # |       REPLICATED   | # # # # |
                    | # # . . |               | # # # # |                    | # # # # |
                    | # # . . |               | . . . . |                    | # # # # |
                    | # # . . |               | . . . . |                    | # # # # |
                        out

        COLUMN       some outputs. The input is full on every rank, the result is sharded.
        ROW          some inputs. The input is sharded; an all-reduce sums the ranks' results.
        ROWS         the full layer, for some rows of the image. Ranks exchange the rows that
                     windows across their borders need (a halo).
        VOCAB        of an Embedding some entries. Of a Linear the same as COLUMN; at the end of
                     the model its logits may stay sharded, for a loss that supports it.
        BRANCHES     some of the modules of `Branches`, in full; all ranks get every result.
        REPLICATED   the full layer on the full input, as every layer without an entry.

    For a Conv2d, COLUMN shards the output channels and ROW the input channels. An Embedding with
    COLUMN has some features of every entry. BatchNorm, LayerNorm and Dropout adopt the sharding of
    their input unless the table says REPLICATED.
    """

    COLUMN = "column"
    ROW = "row"
    ROWS = "rows"
    VOCAB = "vocab"
    BRANCHES = "branches"
    REPLICATED = "replicated"


class Reach(Enum):
    """What an element of a layer's result is computed from, in a sample; a layer's class says it.

        ELEMENT    the same element of the input: the layer computes any part of a sharded input.
                   Its parameters, if it has any, broadcast
        CHANNEL    its own channel: the layer computes sharded channels, but image rows need others
        ALL        other features as well: the layer gets full inputs

    Such a layer follows the placement of its input, unless the table says REPLICATED, and its
    result has its input's shape, unless it has a `shape_after` of its own. A subclass may compute
    something else, so it says it anew.
    """

    ELEMENT = "element"
    CHANNEL = "channel"
    ALL = "all"


@dataclass(frozen=True)
class Units:
    """The indivisible units of a layer's sharded features, such as the heads of attention.

        Units(3, repeats=2) of 12 features over 2 ranks        0 0 0 0 1 1  0 0 0 0 1 1

    Attributes:
        count: the number of units, such as the heads of an attention.
        repeats: the number of times that the sequence of units recurs: 3 for queries, keys and
            values side by side.
        sharding: COLUMN if the layer's outputs consist of the units, ROW if its inputs do.
    """

    count: int
    repeats: int = 1
    sharding: Sharding = Sharding.COLUMN


ShardingTable: TypeAlias = Mapping[str, Sharding]

NO_TABLE: ShardingTable = MappingProxyType({})
NO_UNITS: Mapping[str, Units] = MappingProxyType({})


def find(table: ShardingTable, name: str) -> tuple[str, Sharding] | None:
    """Return the pattern and sharding for a module's full name; None without an entry."""
    if name in table:
        return name, table[name]
    for pattern, sharding in table.items():
        if fnmatchcase(name, pattern):
            return pattern, sharding
    return None
