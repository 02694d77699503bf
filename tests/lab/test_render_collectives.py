"""Pictures: one by heart, and that all show what the steps say."""

import inspect
import re

import pytest

from nnmpi.base.errors import ScheduleError
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES
from nnmpi.comm.prove import prove
from nnmpi.lab.render.collectives import render

RING = """\
all-reduce by ring, 3 ranks

         rank 0  rank 1  rank 2
round 0  2 -> 1  0 -> 2  1 -> 0
         1 <+ 2  2 <+ 0  0 <+ 1
round 1  1 -> 1  2 -> 2  0 -> 0
         0 <+ 2  1 <+ 0  2 <+ 1
round 2  0 -> 1  1 -> 2  2 -> 0
         2 <- 2  0 <- 0  1 <- 1
round 3  2 -> 1  0 -> 2  1 -> 0
         1 <- 2  2 <- 0  0 <- 1
"""


def test_the_ring():
    assert render(ALGORITHMS["ring"], 3).startswith(RING)


def test_the_picture_in_the_docstring_is_the_picture():
    shown = (inspect.getdoc(render) or "").split("\n\n", 1)[1].split("\n\nA rank")[0]
    assert render(ALGORITHMS["tree"], 4).startswith(inspect.cleandoc(shown))


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("size", [2, 3, 8, 13, 16])
def test_every_message_is_in_its_ranks_columns(name, size):
    picture = render(COLLECTIVES[name], size).split("\n\n")[1].splitlines()
    columns = [picture[0].index(f"rank {rank}") for rank in range(size)]
    cells = [
        (columns.index(result.start()), *result.groups())
        for line in picture
        for result in re.finditer(r"(?<=  )(\S+) (->|<\+|<-) (\d+)", line)
    ]
    sent = sorted((rank, what, int(other)) for rank, what, arrow, other in cells if arrow == "->")
    come = sorted((int(other), what, rank) for rank, what, arrow, other in cells if arrow != "->")
    steps = [COLLECTIVES[name](rank, size) for rank in range(size)]
    assert sent == come
    assert sorted((a, b) for a, _, b in sent) == sorted(
        (r, s.to) for r in range(size) for s in steps[r] if s.to is not None
    )
    assert sum(cell[2] == "<+" for cell in cells) == sum(
        step.reduce for local in steps for step in local
    )
    assert f"round {prove(COLLECTIVES[name], size).rounds - 1} " in "\n".join(picture)


def test_one_rank_and_none():
    assert render(ALGORITHMS["tree"], 1) == "all-reduce by tree, 1 rank: nothing to do"
    with pytest.raises(ScheduleError, match="0 ranks"):
        render(ALGORITHMS["tree"], 0)
