"""Pictures: those in the docstrings are what the command prints, and all show what the programs
say.
"""

import inspect
import re
from dataclasses import replace

import pytest

from nnmpi.base.errors import ScheduleError
from nnmpi.lab.render.schedules import render
from nnmpi.lab.schedule import main
from nnmpi.schedule.lower import add_transfers
from nnmpi.schedule.schedule import COMPUTE
from nnmpi.schedule.schedules import SCHEDULES, make
from tests.schedule.every import KINDS, lowered


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_the_docstring_is_what_the_command_prints(name):
    text = inspect.getdoc(SCHEDULES[name].rule) or ""
    command, grid = re.search(r"^ *nnmpi schedule (.*)\n\n((?:.+\n)+)", text, re.MULTILINE).groups()
    assert f"--pipeline {name} " in command
    printed = main(command.split()).split("\n\n")
    assert printed[1].splitlines() == [line.strip() for line in grid.splitlines()]


@pytest.mark.parametrize("name, virtual", KINDS)
@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (3, 2), (4, 12), (8, 3)])
def test_every_piece_of_work_is_in_its_ranks_row(name, virtual, ranks, microbatches):
    schedule = lowered(name, ranks, microbatches, virtual)
    head, *rows = render(schedule).split("\n\n")[0].splitlines()
    assert head.startswith("time ") and len(rows) == ranks
    for rank, row in enumerate(rows):
        labels = re.findall(r"\d*[FBIW]\d+", row.removeprefix(f"rank {rank}"))
        work = [
            str(instruction)
            for instruction in schedule.instructions(rank)
            if instruction.kind in COMPUTE
        ]
        assert labels == [item if virtual > 1 else item.removeprefix(str(rank)) for item in work]
    assert len({len(row) for row in rows if row.endswith(("|", "+"))} | {0}) <= 1 + ranks


def test_what_waits_for_ever_is_not_drawn():
    with pytest.raises(ScheduleError, match="rank 0 waits for ever in its instruction 6; check"):
        schedule = add_transfers(make("1f1b", 2, 2))
        render(replace(schedule, programs=(schedule.programs[0], schedule.programs[1][:-1])))
