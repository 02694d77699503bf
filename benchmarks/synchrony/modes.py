"""The ways of synchronization that are compared, and who is slow in a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nnmpi.synchrony.neighbours import RANDOM
from nnmpi.synchrony.sync import Sync

REFERENCE = "bsp, ring"
MODES: Mapping[str, Sync] = MappingProxyType(
    {
        REFERENCE: Sync(),
        "bsp, server": Sync(servers=1),
        "ssp, S = 1": Sync("ssp", staleness=1),
        "ssp, S = 4": Sync("ssp", staleness=4),
        "ssp, S = 16": Sync("ssp", staleness=16),
        "asp": Sync("asp"),
        "local, K = 8": Sync("local", local_steps=8),
        "gossip, ring": Sync("gossip"),
        "gossip, random": Sync("gossip", neighbours=RANDOM),
    }
)

FACTOR, PROBABILITY = 3.0, 0.25
EQUAL, ONE, CHANCE = "equal", "one slow", "by chance"
SLOW = (EQUAL, ONE, CHANCE)
PLAIN, WITH_MOMENTUM = "plain SGD", "momentum 0.8"  # recipes in which workers see all samples
OWN = "own classes"  # the recipe in which every worker sees a part of the samples sorted by class, and no other


def stragglers(slow: str, workers: int, factor: float = FACTOR) -> str:
    """Return who is slow, as --straggler has it: nobody, the last worker, or each with a probability at each step.

    The last worker is on no server's rank, so that its messages take as long as anybody's.

    Args:
        slow: EQUAL, ONE or CHANCE.
        workers: how many.
        factor: how many times as long a slow step takes.
    """
    return {
        EQUAL: "",
        ONE: f"rank={workers - 1},factor={factor:g}",
        CHANCE: f"random,probability={PROBABILITY:g},factor={factor:g}",
    }[slow]


def last_ones(count: int, workers: int, factor: float) -> str:
    """Return the text for so many slow workers, the last ones; for a factor of 1 nobody is.

    Args:
        count: slow workers.
        workers: all of them.
        factor: how many times as long their steps take.
    """
    ranks = range(workers - count, workers) if factor > 1 else range(0)
    return ";".join(f"rank={rank},factor={factor:g}" for rank in ranks)
