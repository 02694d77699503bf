"""A case from its data to its rows: contestants are started, judged, timed, and asked for their memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.training.cases import SHALLOWSPEED, Case, find
from benchmarks.training.contestants import JIT, NAIVE, PURE, STOCK, Contestant, nnmpi_field, torch_field
from benchmarks.training.judge import Judge
from benchmarks.training.options import Options
from benchmarks.training.ours import available
from benchmarks.training.rounds import LR, play
from benchmarks.training.rows import best, row
from benchmarks.training.subject import Subject
from benchmarks.training.team import Team, Teams

Row = dict[str, Any]
GROWTH_GROUPS = (PURE, JIT, STOCK)


@dataclass
class Found:
    """What was measured so far.

    Attributes:
        rows: of contestants, see `rows.row`.
        growth: of the fastest ones, resident bytes before and after many steps.
        facts: what the contestants say of what computes in them.
    """

    rows: list[Row] = field(default_factory=list)
    growth: list[Row] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


def measure(name: str, options: Options, torch: bool, found: Found, tell: Callable[[Sequence[Row]], None]) -> None:
    """Measure a case on all numbers of ranks.

    Args:
        found: is added to.
        tell: called with the rows of each number of ranks.

    Raises:
        WrongResultError: before anything is timed, when a result is not the reference's.
    """
    case = find(name)
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as place:
        subject = Subject(case, Path(place))
        judge = Judge(subject, torch)
        for ranks in options.ranks:
            contestants = entrants(case, ranks, options.check, torch)
            with Teams(contestants, subject.folder) as teams:
                rows = _together(list(teams), judge, options, found)
            found.rows += rows
            tell(rows)


def entrants(case: Case, ranks: int, reduced: bool, torch: bool) -> list[Contestant]:
    """Return those who take part."""
    ours = nnmpi_field(case, ranks, *available(), reduced)
    if case == SHALLOWSPEED:
        return [*ours, Contestant(NAIVE, case.name, ranks)]
    return ours + (torch_field(case, ranks, reduced) if torch else [])


def _together(teams: Sequence[Team], judge: Judge, options: Options, found: Found) -> list[Row]:
    """Return the rows of contestants that take turns."""
    findings = [judge.examine(team) for team in teams]
    for team in teams:
        team.tell("fresh")
        for hello in team.hello:
            found.facts |= hello["facts"]
    steps, seconds = play(teams, options.rounds, options.block_s)
    rows = [
        row(team, steps, seconds[team.contestant.name], finding) for team, finding in zip(teams, findings, strict=True)
    ]
    if options.growth_steps:
        fastest = best(rows, judge.subject.case.name, teams[0].contestant.ranks)
        names = [fastest[group]["name"] for group in GROWTH_GROUPS if group in fastest]
        found.growth += [_growth(team, options.growth_steps) for team in teams if team.contestant.name in names]
    return rows


def _growth(team: Team, steps: int) -> Row:
    """Return how much the resident size grows over many steps, in the rank in which it grows most."""
    before = [answer["resident_bytes"] for answer in team.tell("memory")]
    team.tell("block", lr=LR, steps=steps)
    after = [answer["resident_bytes"] for answer in team.tell("memory")]
    grown, begin = max((b - a, a) for a, b in zip(before, after, strict=True))
    contestant = team.contestant
    return {
        "case": contestant.case,
        "ranks": contestant.ranks,
        "name": contestant.name,
        "steps": steps,
        "before_bytes": begin,
        "after_bytes": begin + grown,
    }
