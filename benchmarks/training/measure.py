"""A case from its data to its rows: start the contestants, judge them, time them in turns, and read
their peak memory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import isinf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.turns import in_turns, ratio, steps_in_block, summary
from benchmarks.training.cases import CASES
from benchmarks.training.contestants import JIT, PURE, STOCK, TUNED, nnmpi_field, torch_field
from benchmarks.training.judge import CaseFiles, Judge
from benchmarks.training.team import Team, Teams
from benchmarks.training.trainer_nnmpi import has_jit
from nnmpi.base.errors import NnmpiError

Row = Mapping[str, Any]
CLOCKS = ("cpu_s", "wall_s")
# A model that has learnt its one batch by heart computes with denormal numbers, which are slow. At
# this rate the last of thousands of steps works on numbers like the first one's.
LR = 1e-5
WARM_UP = 3
GROUPS = (PURE, JIT, STOCK, TUNED)
RATIOS = ((STOCK, PURE), (STOCK, JIT), (TUNED, PURE), (TUNED, JIT))


def measure(
    name: str, options: argparse.Namespace, torch: bool, facts: dict[str, str]
) -> Iterator[list[Row]]:
    """Yield a case's rows, those of one number of ranks together.

    Args:
        name: of the case.
        options: of the command line.
        torch: whether PyTorch takes part.
        facts: receives the contestants' libraries by name.

    Raises:
        WrongResultError: before anything is timed, for a result unlike the reference's.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="nnmpi-") as folder:
        files = CaseFiles(case, Path(folder))
        judge = Judge(files, torch)
        for ranks in options.ranks:
            field = nnmpi_field(case, ranks, has_jit(), options.check)
            field += torch_field(case, ranks, options.check) if torch else []
            with Teams(field, files.folder) as teams:
                errors = {team: judge.examine(team) for team in teams}
                for team in teams:
                    team.ask("memory")
                    for hello in team.hello:
                        facts |= hello["facts"]
                steps, blocks = time_blocks(list(teams), options.rounds, options.block_s)
                # CPU time of the thread on one rank, because other programs affect it least; the
                # wall clock on several, because waiting for messages is part of their step
                yield [
                    _row(team, steps, blocks[team][ranks > 1], vars(errors[team])) for team in teams
                ]


def time_blocks(
    teams: Sequence[Team], rounds: int, block_s: float
) -> tuple[int, Mapping[Team, Any]]:
    """Return the steps of a block, and each contestant's seconds per step by each clock, block by
    block.

    Args:
        teams: the contestants; all but one sleep.
        rounds: blocks of each.
        block_s: seconds of a block of the median contestant.
    """
    steps = steps_in_block(
        block_s, [_block(team, WARM_UP) and _block(team, 1)[-1] for team in teams]
    )
    result: Mapping[Team, list[list[float]]] = {team: [[] for _ in CLOCKS] for team in teams}
    for team, counts in in_turns(teams, rounds):
        block = _block(team, steps)
        if counts:
            for seconds, taken in zip(result[team], block, strict=True):
                seconds.append(taken / steps)
    return steps, result


def _block(team: Team, steps: int) -> list[float]:
    """Run a block; return the seconds of the slowest rank by each clock."""
    answers = team.ask("block", lr=LR, steps=steps)
    if any(isinf(answer["loss"]) for answer in answers):
        raise NnmpiError(
            f"{team.contestant.name} has diverged; the losses are {[a['loss'] for a in answers]}"
        )
    return [max(answer[name] for answer in answers) for name in CLOCKS]


def _row(team: Team, steps: int, blocks_s: Sequence[float], errors: Mapping[str, float]) -> Row:
    """Return a contestant's row after its blocks."""
    item = team.contestant
    row = {
        "case": item.case,
        "ranks": item.ranks,
        "name": item.name,
        "group": item.group,
        "steps": steps,
    }
    peak_bytes = max(team.ask("memory"))
    return (
        row
        | summary("step", blocks_s)
        | {"blocks_s": blocks_s, "peak_bytes": peak_bytes, "errors": errors}
    )


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return each group's fastest row, and the medians of the rounds' ratios, for each case and
    number of ranks.
    """
    result = []
    for case, ranks in dict.fromkeys((item["case"], item["ranks"]) for item in rows):
        mine = [item for item in rows if (item["case"], item["ranks"]) == (case, ranks)]
        best = {
            item["group"]: item
            for item in sorted(mine, key=lambda row: median(row["blocks_s"]), reverse=True)
        }
        ratios = {
            f"{slow} / {fast}": ratio("ratio", best[slow]["blocks_s"], best[fast]["blocks_s"])
            for slow, fast in RATIOS
            if slow in best and fast in best
        }
        result.append({"case": case, "ranks": ranks, "best": best, "ratios": ratios})
    return result
