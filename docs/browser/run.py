"""What the page `docs/browser.md` runs in the browser's Python: a reader's program, proved, priced
and drawn beside the package's own.
"""

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnmpi.base.custom import load_custom
from nnmpi.base.errors import NnmpiError, UsageError
from nnmpi.base.units import aligned, format_bytes, format_seconds
from nnmpi.comm.algorithms.registry import ALGORITHMS, find_collective
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.duration import price
from nnmpi.comm.fit import parse_network
from nnmpi.comm.prove import prove
from nnmpi.lab.pages.page import make_page
from nnmpi.lab.render.collectives import DRAWN, SHOWN_BYTES, render
from nnmpi.lab.render.collectives import compare as compare_collectives
from nnmpi.lab.render.schedules import compare as compare_schedules
from nnmpi.lab.schedule import main as schedule_command
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.schedules import SCHEDULES, named
from nnmpi.schedule.simulate import Simulation, even_costs, simulate_schedule

FILE = Path("mine.py")
# A browser computes slowly: the pages have fewer numbers of ranks than those of the commands.
SIZES = range(2, DRAWN + 1)
FORWARD_S = 1e-3


def show(kind: str, program: str, settings: str) -> str:
    """Return a program's text and page, as JSON: {"text": ..., "page": ..., "failed": ...}.

    Args:
        kind: "all_reduce" or "schedule", the name of the function in the program.
        program: Python.
        settings: JSON of {"ranks": ..., "microbatches": ..., "network": ...}, as a reader typed it.
    """
    page = ""
    try:
        FILE.write_text(program)
        asked = json.loads(settings)
        ranks = _whole("ranks", asked["ranks"], 2, DRAWN)
        text, page = KINDS[kind](ranks, asked)
    except NnmpiError as error:
        text = f"nnmpi: {error}"
    except Exception:
        text = _own_frames(traceback.format_exc())
    return json.dumps({"text": text, "page": page, "failed": not page})


def _show_all_reduce(ranks: int, asked: dict[str, Any]) -> tuple[str, str]:
    algorithm = load_custom(f"{FILE}:all_reduce", "the program", "(rank, size)")
    own = find_collective(ALL_REDUCE.name, algorithm, None)
    machine = parse_network(asked["network"], ranks, ranks)
    proof = prove(own, ranks)
    all_ = {"yours": own, **ALGORITHMS}
    seconds = {name: price(one, ranks, SHOWN_BYTES, machine) for name, one in all_.items()}
    order = sorted(seconds, key=lambda name: seconds[name])
    lines = [
        f"proved on {ranks} ranks: {proof.rounds} rounds, {proof.messages} messages,"
        f" {proof.chunk_transfers} chunks sent",
        "",
        render(own, ranks),
        "",
        f"a buffer of {format_bytes(SHOWN_BYTES)}, messages by {asked['network']}:",
        *aligned([[f"  {name}", format_seconds(seconds[name])] for name in order]),
    ]
    data = compare_collectives(all_, "yours", ranks, machine, sizes=SIZES)
    return "\n".join(lines), make_page("collective", "your all-reduce beside others", data)


def _show_schedule(ranks: int, asked: dict[str, Any]) -> tuple[str, str]:
    microbatches = _whole("microbatches", asked["microbatches"], 1, 16)
    words = f"--pipeline {FILE}:schedule --stages {ranks} --microbatches {microbatches}".split()
    words += ["--network", asked["network"]] if asked["network"] else []
    text = schedule_command(words)
    own = named(load_custom(f"{FILE}:schedule", "the program", "(rank, ranks, microbatches)"))
    machine = parse_network(asked["network"], ranks, ranks) if asked["network"] else None

    def simulate(one: Schedule) -> Simulation:
        costs = even_costs(one.stages, FORWARD_S / one.virtual)
        return simulate_schedule(one, costs, machine, lambda _: (SHOWN_BYTES,))

    data = compare_schedules(
        {"yours": (own, 1)} | {name: (name, row.stages) for name, row in SCHEDULES.items()},
        "yours",
        ranks,
        microbatches,
        simulate,
        ((), ()),
    )
    return text, make_page("schedule", "your schedule beside others", data)


def _whole(name: str, text: str, least: int, most: int) -> int:
    """Return a number that a reader typed.

    Raises:
        UsageError: for other text.
    """
    if not (text.isdecimal() and least <= int(text) <= most):
        raise UsageError(f"{name} is {text}; give a whole number, {least} to {most}")
    return int(text)


def _own_frames(text: str) -> str:
    """Return a traceback from the first line of the reader's program on."""
    lines = text.splitlines()
    own = [number for number, line in enumerate(lines) if FILE.name in line]
    return "\n".join([lines[0], *lines[own[0] :]] if own else lines)


KINDS: dict[str, Callable[[int, dict[str, Any]], tuple[str, str]]] = {
    "all_reduce": _show_all_reduce,
    "schedule": _show_schedule,
}
