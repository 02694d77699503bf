"""The compared modes of synchronization, and the stragglers of a run."""

from collections.abc import Mapping
from types import MappingProxyType

from nnmpi.comm.synchrony.sync import Sync

REFERENCE = "bsp, ring"
MODES: Mapping[str, Sync] = MappingProxyType(
    {
        REFERENCE: Sync(),
        "ssp, S = 0": Sync("ssp", staleness=0),
        "ssp, S = 1": Sync("ssp", staleness=1),
        "ssp, S = 4": Sync("ssp", staleness=4),
        "ssp, S = 16": Sync("ssp", staleness=16),
        "asp": Sync("asp"),
        "local, K = 8": Sync("local", local_steps=8),
        "gossip": Sync("gossip"),
    }
)

EQUAL, ONE, CHANCE = "equal", "one slow", "by chance"
WORDS = {
    EQUAL: "equal workers",
    ONE: "one worker always 3 times slower",
    CHANCE: "each worker 3 times slower in a step with probability 0.25",
}


def slow_text(slow: str, workers: int) -> str:
    """Return the stragglers as text for `synchrony.slow`; the last worker is not on the server's
    rank.
    """
    return {EQUAL: "", ONE: f"rank={workers - 1},factor=3", CHANCE: "probability=0.25,factor=3"}[
        slow
    ]


def last_ones(count: int, workers: int, factor: float) -> str:
    """Return the text for `count` stragglers, the last workers; none for a factor of 1."""
    ranks = range(workers - count, workers) if factor > 1 else range(0)
    return ";".join(f"rank={rank},factor={factor:g}" for rank in ranks)
