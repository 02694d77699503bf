"""What a notebook shows of values: `base.wings.Drawn` asks for it."""

from functools import singledispatch
from typing import Any

from nnmpi.backend.program.replay import StepProgram
from nnmpi.base.errors import shortened
from nnmpi.base.units import aligned
from nnmpi.comm.collective import Collective
from nnmpi.comm.mesh import Mesh
from nnmpi.compose.layout import Layout
from nnmpi.lab.render.collectives import render as render_collective
from nnmpi.lab.render.schedules import describe, render
from nnmpi.lab.report import gather, result
from nnmpi.schedule.schedule import Schedule
from nnmpi.tensor.tensor import Tensor
from nnmpi.train.run import Run

RANKS = 4  # of a collective for any number
MOST_RANKS = 64  # of a layout


@singledispatch
def draw(value: Any) -> str:
    """Return a value as a text picture; other values as their text."""
    return repr(value)


@draw.register
def _(value: Collective) -> str:
    return render_collective(value, RANKS)


@draw.register
def _(value: Schedule) -> str:
    return f"{describe(value)}\n\n{render(value)}"


@draw.register
def _(value: StepProgram) -> str:
    return f"{value.picture()}\n\n{value}"


@draw.register
def _(value: Run) -> str:
    page = gather(value.folder.path)
    return "\n".join([repr(value), result(page["results"]), *aligned(page["head"])])


@draw.register
def _(value: Tensor) -> str:
    node = f", computed by {type(value.node).__name__}" if value.node is not None else ""
    return f"{value.shape} {value.dtype}{node}\n{shortened(repr(value), 2000)}"


@draw.register
def _(value: Layout) -> str:
    degrees = [n for n in (value.dp, value.pp, value.tp) if isinstance(n, int)]
    if len(degrees) < 3:
        return f"{value!r}, for any number of ranks"
    dp, pp, tp = degrees
    mesh = Mesh(dp, pp, tp, sp=value.sp)
    rows = [[f"rank {n}", str(mesh.coordinates(n))] for n in range(min(mesh.size, MOST_RANKS))]
    return "\n".join([f"{value!r}: {mesh}, {mesh.size} ranks", *aligned(rows)])
