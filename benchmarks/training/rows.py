"""What was measured, as rows; and what follows from them: the fastest of each group, ratios, speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.turns import ratio, summary
from benchmarks.training.contestants import EAGER, FSDP, GROUPS, JIT, PURE, SHARDED, STOCK, TUNED
from benchmarks.training.judge import GradientErrors
from benchmarks.training.team import Team

Row = Mapping[str, Any]
Seconds = Mapping[str, Sequence[float]]
"""By clock: seconds per step, block by block."""
RATIOS = ((STOCK, EAGER), (STOCK, PURE), (STOCK, JIT), (TUNED, PURE), (TUNED, JIT))
RATIOS += ((SHARDED, PURE), (FSDP, SHARDED), (FSDP, STOCK))


def clock(ranks: int) -> str:
    """Return what counts: the thread's CPU time on one rank, the wall clock on several."""
    return "cpu_s" if ranks == 1 else "wall_s"


def row(team: Team, steps: int, seconds: Seconds, errors: GradientErrors) -> dict[str, Any]:
    """Return a contestant's row. Its memory is asked for here: call it when the blocks are done.

    Args:
        team: its processes.
        steps: of a block.
        seconds: by clock, of a step, block by block.
        errors: how far it is from the reference.
    """
    contestant = team.contestant
    main = seconds[clock(contestant.ranks)]
    return {
        "case": contestant.case,
        "ranks": contestant.ranks,
        "name": contestant.name,
        "group": contestant.group,
        "compiled": contestant.compiled,
        "steps": steps,
        "rounds": len(main),
        "clock": clock(contestant.ranks),
        **summary("step", main),
        **{f"median_{name}": median(values) for name, values in seconds.items()},
        "blocks_s": main,
        "imported_bytes": max(hello["imported_bytes"] for hello in team.hello),
        "peak_bytes": max(answer["peak_bytes"] for answer in team.ask("memory")),
        "errors": vars(errors),
    }


def best(rows: Sequence[Row], case: str, ranks: int) -> dict[str, Row]:
    """Return the fastest row of each group that took part, EAGER among them.

    Args:
        rows: of all cases.
        case: its name.
        ranks: how many.
    """
    mine = [each for each in rows if (each["case"], each["ranks"]) == (case, ranks)]
    groups = {group: [each for each in mine if each["group"] == group] for group in GROUPS}
    groups[EAGER] = [each for each in groups[PURE] if not each["compiled"]]
    return {group: min(found, key=lambda each: each["step_s"]) for group, found in groups.items() if found}


def ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return how many times faster nnmpi's fastest ways are than others': the median of the rounds' ratios."""
    found = []
    for case, ranks in pairs(rows):
        fastest = best(rows, case, ranks)
        for slow, fast in RATIOS:
            if slow in fastest and fast in fastest:
                found.append(
                    {
                        "case": case,
                        "ranks": ranks,
                        "of": slow,
                        "over": fast,
                        **ratio("ratio", fastest[slow]["blocks_s"], fastest[fast]["blocks_s"]),
                        "memory_ratio": fastest[slow]["peak_bytes"] / max(fastest[fast]["peak_bytes"], 1),
                    }
                )
    return found


def speedups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return how many times faster several ranks are than one, by the wall clock, at the same global batch."""
    found = []
    for case, ranks in pairs(rows):
        alone = best(rows, case, 1)
        for group, each in best(rows, case, ranks).items():
            if ranks > 1 and group in alone and group != EAGER:
                speed = alone[group]["median_wall_s"] / each["median_wall_s"]
                found.append({"case": case, "ranks": ranks, "group": group, "speedup": speed})
    return found


def pairs(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Return the cases and ranks that were measured, in order."""
    return list(dict.fromkeys((each["case"], each["ranks"]) for each in rows))
