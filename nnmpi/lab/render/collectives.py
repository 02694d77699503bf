"""Pictures of collectives as text: rounds down, ranks across, messages in the cells.

A page gets an animation: the messages of each round, and the contents of their chunks on arrival.

    {"begins": [["1", "1"], ["10", "10"]],        by rank and chunk: rank 0's part, rank 1's part
     "rounds": 2,
     "messages": [{"round": 0, "from": 0, "to": 1, "chunks": [1],
                   "reduce": True, "after": ["11"], "clock": [1, 0.5]}, ...]}

The contents of a chunk are a hexadecimal number with a digit for each rank (see `collective`). The
clock at a message's end is [latencies, buffers] along the path that leads to it, which takes
latencies x alpha + buffers x bytes x beta seconds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nnmpi.base.errors import ScheduleError, UsageError, counted
from nnmpi.base.picture import Arrow, Bar, Picture, check_figure, new_figure, save_figure
from nnmpi.base.units import aligned, format_bytes, format_seconds
from nnmpi.comm.collective import Algorithm, Chunks, Collective, Step, as_collective, runs
from nnmpi.comm.duration import coefficients
from nnmpi.comm.fit import Fit, describe_fit
from nnmpi.comm.machine import Curve, Machine
from nnmpi.comm.prove import prove, proved_steps

_LEGEND = """\
2 -> 1  chunk 2 goes to rank 1     2 <- 1  chunk 2 comes from rank 1     \
2 <+ 1  it comes and is added     .  idle"""
DRAWN = 8  # every number of ranks up to this one has an animation
MOST = 16  # ranks that fit a page
PRICED = (*range(2, MOST + 1), 24, 32, 48, 64)
SHOWN_BYTES = 2**20  # a page's initial buffer


def render(algorithm: Collective | Algorithm, size: int) -> str:
    """Return a picture of a proved collective on `size` ranks, one round per message.

        all-reduce by tree, 4 ranks

                 rank 0    rank 1    rank 2    rank 3
        round 0  all <+ 1  all -> 0  all <+ 3  all -> 2
        round 1  all <+ 2  .         all -> 0  .
        round 2  all -> 2  .         all <- 0  .
        round 3  all -> 1  all <- 0  all -> 3  all <- 2

    A rank that sends and receives in one round has two lines.

    Raises:
        ScheduleError: for a collective without proof; see `prove`.
    """
    collective = as_collective(algorithm)
    rounds: defaultdict[int, list[list[str]]] = defaultdict(lambda: [[] for _ in range(size)])
    for item in prove(collective, size).sent:
        cells = rounds[item.clock[0] - 1]
        what = _name(item.chunks, collective.contract.parts(size))
        cells[item.sender].insert(0, f"{what} -> {item.receiver}")
        cells[item.receiver].append(f"{what} {'<+' if item.reduce else '<-'} {item.sender}")
    title = f"{collective.contract.name} by {collective.name}, {counted(size, 'rank')}"
    if not rounds:
        return f"{title}: nothing to do"
    return f"{title}\n\n{_table('round', [cells for _, cells in sorted(rounds.items())])}"


def render_steps(steps: Sequence[Sequence[Step]]) -> str:
    """Return a picture of all ranks' steps, right or wrong: steps down, ranks across."""
    size = len(steps)
    rows: list[list[list[str]]] = [
        [[] for _ in steps] for _ in range(max(map(len, steps), default=0))
    ]
    for rank, local in enumerate(steps):
        for cells, step in zip(rows, local, strict=False):
            if step.send:
                cells[rank].append(f"{_name(step.send, size)} -> {step.to}")
            if step.recv:
                sign = "<+" if step.reduce else "<-"
                cells[rank].append(f"{_name(step.recv, size)} {sign} {step.from_}")
    return _table("step", rows) if rows else f"{counted(size, 'rank')}: nothing is done"


def _table(what: str, rows: Sequence[Sequence[list[str]]]) -> str:
    lines = [["", *(f"rank {rank}" for rank in range(len(rows[0])))]]
    for number, cells in enumerate(rows):
        name, idle = f"{what} {number}", "."
        for line in zip_longest(*cells, fillvalue=""):
            lines.append([name, *(text or idle for text in line)])
            name = idle = ""
    return "\n".join([*aligned(lines), "", _LEGEND])


def _name(chunks: Chunks, size: int) -> str:
    """Return chunk numbers as short text: "all", "3", "0-3", "4,0-1"."""
    if len(chunks) == size:
        return "all"
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs(chunks))


def animation(collective: Collective, size: int) -> dict[str, Any]:
    """Return a collective's animation as JSON values.

    Raises:
        ScheduleError: for a collective without proof; see `prove`.
    """
    messages = sorted(prove(collective, size).sent, key=lambda item: (item.clock[0], item.sender))
    chunks, begins_with = range(collective.contract.chunks(size)), collective.contract.begins
    begins = [[begins_with(rank, chunk, size) for chunk in chunks] for rank in range(size)]
    parts = collective.contract.parts(size)
    return {
        "parts": parts,
        "begins": [[f"{held:x}" if held else "" for held in local] for local in begins],
        "rounds": max((message.clock[0] for message in messages), default=0),
        "messages": [
            {
                "round": message.clock[0] - 1,
                "from": message.sender,
                "to": message.receiver,
                "chunks": list(message.chunks),
                "reduce": message.reduce,
                "after": [f"{held:x}" for held in message.after],
                "clock": [message.clock[0], message.clock[1] / parts],
            }
            for message in messages
        ],
    }


def picture(collective: Collective, size: int) -> Picture:
    """Return the messages as arrows from round to round; see `animation`."""
    result = animation(collective, size)
    ranks = [Bar(f"rank {rank}", 0, result["rounds"]) for rank in range(size)]
    arrows = [
        Arrow(
            f"rank {item['from']}",
            item["round"],
            f"rank {item['to']}",
            item["round"] + 1,
            "added" if item["reduce"] else "copied",
            _name(item["chunks"], result["parts"]),
        )
        for item in result["messages"]
    ]
    title = (
        f"{collective.contract.name} by {collective.name}, {counted(size, 'rank')}:"
        " which chunks go where"
    )
    return Picture(title, "rounds", ranks, arrows)


def compare(
    collectives: Mapping[str, Collective],
    first: str,
    ranks: int,
    machine: Machine,
    nbytes: int = SHOWN_BYTES,
    sizes: Sequence[int] = PRICED,
) -> dict[str, Any]:
    """Return the data of a page that compares collectives with one contract.

    Collectives without proof on some number of ranks are left out there.

    Args:
        collectives: by name.
        first: the name of the one shown first; the next one stands beside it.
        ranks: number of ranks that the page shows first.
        machine: gives the page's initial alpha and beta: one message between nodes, or inside the
            only node.
        nbytes: of the buffer that the page shows first.
        sizes: numbers of ranks that have a price; those up to `DRAWN` are drawn, too.

    Raises:
        UsageError: for ranks that do not fit a page.
    """
    if not 2 <= ranks <= MOST:
        raise UsageError(f"a page draws 2 to {MOST} ranks, not {ranks}; draw it as text")
    drawn = sorted({*(size for size in sizes if size <= DRAWN), ranks})
    curve = machine.link(machine.nodes is not None).one_way
    return {
        "operation": collectives[first].contract.name,
        "ranks": ranks,
        "bytes": nbytes,
        "drawn": max(drawn),
        "alpha": curve.alpha_s,
        "beta": curve.beta(nbytes or 1),
        "first": first,
        "algorithms": {
            name: {
                "animations": {
                    size: animation(collective, size) for size in drawn if size in right
                },
                "costs": {
                    size: coefficients(collective, size)[:2] for size in sizes if size in right
                },
            }
            for name, collective in collectives.items()
            for right in [{ranks, *(size for size in sizes if _is_right(collective, size))}]
        },
    }


def _is_right(collective: Collective, size: int) -> bool:
    """Return whether a proof succeeds; a user's algorithm may need a power of two, say."""
    try:
        proved_steps(collective, size)  # other pages of this process may have asked before
    except ScheduleError:
        return False
    return True


def draw_fit(fit: Fit, sums: Mapping[str, Curve], file: Path) -> None:
    """Draw the measured seconds of all-reduces beside the predicted ones, on logarithmic axes.

    Args:
        fit: predicts.
        sums: the measured seconds of all-reduces by name.
        file: of the figure.

    Raises:
        UsageError: see `save_figure`.
    """
    check_figure(file)
    figure = new_figure(6.5, 4.5)
    axes = figure.subplots()
    for number, (name, curve) in enumerate(sums.items()):
        lengths = [nbytes for nbytes, _ in curve.points]
        axes.plot(
            lengths,
            [fit.predict(name, round(nbytes)) for nbytes in lengths],
            color=f"C{number}",
            label=name,
        )
        axes.plot(*zip(*curve.points, strict=True), "o", color=f"C{number}", alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="bytes of a buffer", ylabel="seconds of an all-reduce")
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_bytes(round(nbytes)))
    axes.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds, 1))
    axes.plot([], "-", color="0.4", label="predicted")
    axes.plot([], "o", color="0.4", label="measured")
    axes.set_title(
        f"{next(describe_fit(fit))}, {fit.facts['host']}, {fit.facts['date']}", size=10, loc="left"
    )
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, file)
