"""A collective as a picture for slides: ranks down, rounds across, and in each place the rank's memory.

           begin       round 0      round 1          a box is a chunk, a stripe in it the part of a rank; what has
rank 0    [|   |]     [||  |]      [||| |]           come in the round has a frame
rank 1    [ |  |]     [ || |]      [||| |]
"""

from pathlib import Path

from nnmpi.comm.collective import Collective, count
from nnmpi.comm.film import MOST, film
from nnmpi.errors import UsageError
from nnmpi.pages.svg import EMPTY, INK, LINE, colour, rectangle, text, write_svg

_LEFT, _TOP, _HEIGHT, _STRIPE, _GAP = 60.0, 24.0, 26.0, 4.0, 14.0  # pixels


def draw_slide(collective: Collective, size: int, file: Path) -> None:
    """Write the picture.

    Raises:
        UsageError: for ranks that do not fit, or a file that cannot be written.
        ScheduleError: for a collective that is not right.
    """
    if not 1 <= size <= MOST:
        raise UsageError(f"a slide shows 1 to {MOST} ranks, not {size}; draw it as text")
    found = film(collective, size)
    held = [row[:] for row in found["begins"]]
    chunk_width = _STRIPE * size + 5
    column = chunk_width * size + _GAP
    parts = [text(0, _TOP + _HEIGHT * rank + 17, f"rank {rank}") for rank in range(size)]
    for number in range(found["rounds"] + 1):
        came = {
            (message["to"], chunk): after
            for message in found["messages"]
            if message["round"] == number - 1
            for chunk, after in zip(message["chunks"], message["after"], strict=True)
        }
        for (rank, chunk), after in came.items():
            held[rank][chunk] = after
        left = _LEFT + column * number
        parts.append(text(left, 14, f"round {number - 1}" if number else "begin"))
        for rank, row in enumerate(held):
            for chunk, what in enumerate(row):
                x, y = left + chunk * chunk_width, _TOP + _HEIGHT * rank
                parts.append(
                    rectangle(x, y, chunk_width - 2, _HEIGHT - 5, EMPTY, INK if (rank, chunk) in came else LINE)
                )
                parts += [
                    rectangle(x + 2 + _STRIPE * who, y + 3, _STRIPE - 0.5, _HEIGHT - 11, colour(who, size))
                    for who in range(size)
                    if what and count(int(what, 16), who)
                ]
    title = f"{collective.contract.name} by {collective.name}, {size} ranks"
    write_svg(file, title, _LEFT + column * (found["rounds"] + 1), _TOP + _HEIGHT * size, parts)
