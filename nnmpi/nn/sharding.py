"""How layers are sharded over ranks: what a model's table says, and nothing of how it is done.

A table maps full names of modules, or patterns of them, to a `Sharding`:

    {"0": Sharding.COLUMN, "3": Sharding.COLUMN, "7": Sharding.ROW}          {"*.attention.project": Sharding.ROW}

A name that stands in it word for word counts first, then the first pattern that fits. Modules
without parameters need no entry: they work on whatever lies before them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeAlias

# how attention sees positions of other ranks, see `parallel.sequence`
RING, ULYSSES = "ring", "ulysses"
WAYS = (ULYSSES, RING)
STAGES = (1, 2, 3)  # of ZeRO
OPTIMIZER, ALL = "optimizer", "all"  # what of the states may lie out of memory


class Sharding(Enum):
    """What each rank has of a layer. For a Linear of weight (in, out):

        COLUMN   in | # # . . |      ROW      | # # # # |       REPLICATED   | # # # # |
                    | # # . . |               | # # # # |                    | # # # # |
                    | # # . . |               | . . . . |                    | # # # # |
                    | # # . . |               | . . . . |                    | # # # # |
                        out

    COLUMN: some outputs. The input is whole on every rank, the result is sharded. ROW: some
    inputs. The input is sharded, and the ranks' results are added up to a whole one. ROWS: all
    of the layer, for some rows of the image; ranks give one another the rows that their windows
    overlap. VOCAB: of an Embedding some entries; of a Linear the same as COLUMN, and its result,
    one number per class, may stay
        shared out at the end of the model, for a loss that knows it.
    BRANCHES: of `Branches` some, whole; each rank computes its own, and all get every result.
    REPLICATED: all of the layer, on the whole input. So is what no table names.

    For a Conv2d COLUMN means some output channels and ROW some input channels. Embedding with
    COLUMN has some features of every entry. BatchNorm, LayerNorm and Dropout follow what lies
    before them unless the table says REPLICATED.
    """

    COLUMN = "column"
    ROW = "row"
    ROWS = "rows"
    VOCAB = "vocab"
    BRANCHES = "branches"
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Units:
    """The indivisible units of a layer's sharded features, such as the heads of attention.

        Units(3, repeats=2) of 12 features over 2 ranks        0 0 0 0 1 1  0 0 0 0 1 1

    Attributes:
        count: how many are sharded, such as the heads of an attention.
        repeats: how many times all of them come, one after another: 3 times in queries, keys and
            values side by side.
        sharding: COLUMN if the features that come out are made of them, ROW if those that come in
            are.
    """

    count: int
    repeats: int = 1
    sharding: Sharding = Sharding.COLUMN


Table: TypeAlias = Mapping[str, Sharding]

NO_TABLE: Table = MappingProxyType({})
NO_UNITS: Mapping[str, Units] = MappingProxyType({})


def find(table: Table, name: str) -> tuple[str, Sharding] | None:
    """Return the entry for a module's full name, and its pattern; None where there is none."""
    if name in table:
        return name, table[name]
    for pattern, sharding in table.items():
        if fnmatchcase(name, pattern):
            return pattern, sharding
    return None
