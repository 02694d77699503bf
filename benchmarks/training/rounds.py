"""Blocks of steps, one contestant after another, round after round.

round 0    torch   nnmpi   nnmpi compiled   ...     a block of some steps each, in another order every round
round 1    nnmpi   torch   ...                      whoever does not run sleeps
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import isinf
from statistics import median
from typing import Any

from benchmarks.training.team import Team
from nnmpi.errors import NnmpiError

CLOCKS = ("cpu_s", "process_s", "wall_s")
LR = 1e-5  # so small that the last of some thousand steps works on numbers like the first one's
WARM_UP = 3

Seconds = dict[str, list[float]]


def clock(ranks: int) -> str:
    """Return what counts: the thread's CPU time on one rank, the wall clock on several."""
    return "cpu_s" if ranks == 1 else "wall_s"


def play(teams: Sequence[Team], rounds: int, block_s: float) -> tuple[int, Mapping[str, Seconds]]:
    """Return the steps in a block, and for each contestant and clock its seconds per step, block by block.

    Args:
        block_s: how long a block of the contestant in the middle should take.
    """
    first = [_block(team, WARM_UP) and _block(team, 1)["wall_s"] for team in teams]
    steps = max(1, round(block_s / max(median(first), 1e-6)))
    found: dict[str, Seconds] = {team.contestant.name: {name: [] for name in CLOCKS} for team in teams}
    for number in range(-1, rounds):  # the first round warms up
        for team in random.Random(number).sample(list(teams), len(teams)):
            taken = _block(team, steps)
            if number >= 0:
                for name in CLOCKS:
                    found[team.contestant.name][name].append(taken[name] / steps)
    return steps, found


def _block(team: Team, steps: int) -> dict[str, float]:
    """Run a block; return the seconds of the slowest rank."""
    answers: list[dict[str, Any]] = team.tell("block", lr=LR, steps=steps)
    if any(isinf(answer["loss"]) for answer in answers):
        raise NnmpiError(f"{team.contestant.name} has diverged; the losses are {[a['loss'] for a in answers]}")
    return {name: max(answer[name] for answer in answers) for name in CLOCKS}
