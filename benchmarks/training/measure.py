"""A case from its data to its rows: contestants are started, judged, timed in turns, and asked for their memory."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf
from pathlib import Path
from typing import Any

from benchmarks.harness.turns import shuffled, steps_in_block
from benchmarks.training.cases import CASES, Case
from benchmarks.training.contestants import Contestant, nnmpi_field, sharded_field, torch_field
from benchmarks.training.judge import CaseFiles, Judge
from benchmarks.training.rows import Seconds, row
from benchmarks.training.team import Team, Teams
from benchmarks.training.trainer_nnmpi import available
from nnmpi.errors import NnmpiError

Row = dict[str, Any]
CLOCKS = ("cpu_s", "process_s", "wall_s")
LR = 1e-5  # so small that the last of some thousand steps works on numbers like the first one's
WARM_UP = 3


@dataclass
class Findings:
    """What was measured so far.

    Attributes:
        rows: of contestants, see `rows.row`.
        facts: which libraries compute in the contestants, by name.
    """

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


def measure(
    name: str, options: argparse.Namespace, torch: bool, found: Findings, show: Callable[[Sequence[Row]], None]
) -> None:
    """Measure a case on all numbers of ranks.

    Args:
        name: of the case.
        options: of the command line.
        torch: whether PyTorch takes part.
        found: is added to.
        show: called with the rows of each number of ranks.

    Raises:
        WrongResultError: before anything is timed, when a result is not the reference's.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as place:
        files = CaseFiles(case, Path(place))
        judge = Judge(files, torch)
        for ranks in options.ranks:
            contestants = list(entrants(case, ranks, options.check, torch))
            if options.sharded:
                contestants = sharded_field(case, ranks, torch)
            with Teams(contestants, files.folder) as teams:
                rows = _together(list(teams), judge, options, found)
            found.rows += rows
            show(rows)


def entrants(case: Case, ranks: int, reduced: bool, torch: bool) -> list[Contestant]:
    """Return those who take part.

    Args:
        case: what is trained.
        ranks: of each of them.
        reduced: whether ways are left out that others contain.
        torch: whether PyTorch takes part.
    """
    ours = nnmpi_field(case, ranks, *available(), reduced)
    return ours + (torch_field(case, ranks, reduced) if torch else [])


def _together(teams: Sequence[Team], judge: Judge, options: argparse.Namespace, found: Findings) -> list[Row]:
    """Return the rows of contestants that take turns."""
    errors = [judge.examine(team) for team in teams]
    for team in teams:
        team.ask("fresh")
        for hello in team.hello:
            found.facts |= hello["facts"]
    steps, seconds = time_blocks(teams, options.rounds, options.block_s)
    return [row(team, steps, seconds[team.contestant.name], error) for team, error in zip(teams, errors, strict=True)]


def time_blocks(teams: Sequence[Team], rounds: int, block_s: float) -> tuple[int, Mapping[str, Seconds]]:
    """Return the steps in a block, and for each contestant and clock its seconds per step, block by block.

    Args:
        teams: the contestants; whoever does not run sleeps.
        rounds: blocks of each.
        block_s: how long a block of the contestant in the middle should take.
    """
    first = [_block(team, WARM_UP) and _block(team, 1)["wall_s"] for team in teams]
    steps = steps_in_block(block_s, first)
    found: dict[str, dict[str, list[float]]] = {team.contestant.name: {name: [] for name in CLOCKS} for team in teams}
    for number in range(-1, rounds):  # the first round warms up
        for team in shuffled(teams, number):
            taken = _block(team, steps)
            if number >= 0:
                for name in CLOCKS:
                    found[team.contestant.name][name].append(taken[name] / steps)
    return steps, found


def _block(team: Team, steps: int) -> dict[str, float]:
    """Run a block; return the seconds of the slowest rank."""
    answers: list[dict[str, Any]] = team.ask("block", lr=LR, steps=steps)
    if any(isinf(answer["loss"]) for answer in answers):
        raise NnmpiError(f"{team.contestant.name} has diverged; the losses are {[a['loss'] for a in answers]}")
    return {name: max(answer[name] for answer in answers) for name in CLOCKS}
