"""Where ranks are when they do not go on: what a rank says of itself, and one sentence about all of them.

Nothing is written down in the step for this. A thread looks at the stack of the main thread now and then: the innermost
of nnmpi's functions there says whether it waits for other ranks (those of `nnmpi.comm` do). What waits for long is the
world's `waiter` meanwhile, and says for what, in `waits_for`. The thread does not read other threads' variables: Python
hands out what they hold just then, and lets go of it in the wrong thread.

    rank 0   ... a step of training > the sum of its losses > an all-gather     waits, in an all-gather of 3 ranks
    rank 1   ... a step of training > the sum of its losses > an all-gather     waits
    rank 2   ... mine.py:12 in forward                                          does not: it is the one that is missing

A thread in which ranks are simulated waits for none: their scheduler knows when nobody can go on, and says so at once.
"""

import gc
import os
import sys
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from nnmpi.comm.agreement import name_ranks

PACKAGE, ROOM, POLLING, SIMULATED = "nnmpi.", "nnmpi.comm.", "wait_until", "nnmpi.comm.simulated."
WARNING_S, LIMIT_S = 10.0, 300.0  # of training
BUSY_FACTOR = 10  # how many times the limit is given to a rank that does something, though nobody knows whether it ends


@runtime_checkable
class Waiter(Protocol):
    """What waits for other ranks and can say for what."""

    def waits_for(self) -> str:
        """Return it in words."""


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes:
        waits: whether for other ranks.
        words: in words.
        mark: differs once it has gone on, as far as can be seen.
    """

    waits: bool
    words: str
    mark: Hashable


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself.

    Attributes:
        waits_s: for how long it has been in one wait for other ranks; 0 where it does not wait.
        still_s: for how long it has been at one place without computing.
        place: where it is, in words.
        step: of training.
    """

    waits_s: float
    still_s: float
    place: str
    step: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Hold off the collector of garbage while another thread's stack is looked at.

    In Python 3.11 a collection may begin where an object for a frame is made. If it lets the other thread go on, the
    frame has gone when the object is tied to it, and what lies in its place is overwritten: other objects in the place
    of frames, and faults of memory. Later Pythons collect between instructions alone.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def find_place(thread: int, operation: str, waiter: object = None) -> Place:
    """Return where a thread is.

    Args:
        thread: its `ident`.
        operation: the last call to the world, which it may be in.
        waiter: what it waits in, where that can say for what.
    """
    with _nothing_collected():
        return _find_place(sys._current_frames().get(thread), _ask(waiter) or operation)


def _find_place(frame: FrameType | None, words: str) -> Place:
    frames = list(_outward(frame))
    simulating = [n for n, each in enumerate(frames) if _module(each).startswith(SIMULATED)]
    if simulating:  # its ranks compute in other threads: it goes on as long as this process works
        caller = min(simulating[-1] + 1, len(frames) - 1)
        return Place(False, f"at {_line(frames[caller])}, which simulates ranks", int(time.process_time()))
    inner = next((number for number, each in enumerate(frames) if _module(each).startswith(PACKAGE)), None)
    polled = [n for n, each in enumerate(frames) if _in_room(each) and each.f_code.co_name == POLLING]
    if not polled and (inner is None or not _in_room(frames[inner])):
        # a list: a tuple that grows from a generator breaks where another thread asks for all objects meanwhile
        marks = [(id(each.f_code), each.f_lasti) for each in frames]
        return Place(False, f"at {_line(frames[0])}" if frames else "nowhere", tuple(marks))
    found = polled[-1] if polled else inner or 0  # what is polled changes, and may be anybody's
    caller = next((n for n in range(found, len(frames)) if not _in_room(frames[n])), len(frames))
    others = (each for each in frames[caller:] if _module(each).partition(".")[0] not in sys.stdlib_module_names)
    words += "".join(f", called at {_line(each)}" for each in islice(others, 1))
    return Place(True, words, words)


def processor_seconds(thread: int) -> float:
    """Return how long a living thread of this process (its `ident`) has computed; 0 where the system does not say."""
    if not thread or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def describe(statuses: Mapping[int, RankStatus], silent: Mapping[int, float], unknown: list[int]) -> str:
    """Return who is missing, and in what all others wait: half a sentence.

    Args:
        statuses: of the ranks that answer.
        silent: the others, and for how many seconds nothing was heard of them.
        unknown: ranks that nothing was ever heard of.
    """
    parts = [f"{name_ranks([rank])} has not been heard of for {seconds:.0f} s" for rank, seconds in silent.items()]
    if unknown:
        parts.append(f"of {name_ranks(unknown)} nothing is known")
    busy = {rank: status for rank, status in statuses.items() if not status.waits_s}
    parts += [f"{_plural(ranks, 'is', 'are')} {place}" for place, ranks in _by_place(busy).items()]
    waiting = {rank: status for rank, status in statuses.items() if status.waits_s}
    if not parts:
        parts = ["all ranks wait for one another; if none goes on, they are not in the same collective or message"]
    parts += [f"{_plural(ranks, 'waits', 'wait')} in {place}" for place, ranks in _by_place(waiting).items()]
    return "; ".join(parts)


def describe_loss(rank: int, last: RankStatus | None, own: tuple[int, RankStatus]) -> str:
    """Return that a rank has died, where it was, and where the one is that tells of it.

    Args:
        rank: which has died.
        last: what it has said last; None where nobody knows.
        own: the rank that tells, and where it is.
    """
    seen = "" if last is None else f"; it was last heard of {_where(last)}"
    return f"{name_ranks([rank])} has gone, killed or by an exit of its own{seen}; rank {own[0]} is {_where(own[1])}"


def _where(status: RankStatus) -> str:
    step = "" if status.step is None else f" (step {status.step})"
    return f"{'in ' if status.waits_s else ''}{status.place}{step}"


def is_over(statuses: Mapping[int, RankStatus], silent: Mapping[int, float], limit_s: float) -> bool:
    """Return whether nobody will come any more, as far as a time limit can tell; 0 for never.

    A rank that is at ever other places computes, or works for all: it is given ten times as long.
    """
    waited_s = max((status.waits_s for status in statuses.values()), default=0.0)
    if not limit_s or waited_s < limit_s:
        return False
    busy = [status for status in statuses.values() if not status.waits_s]
    stuck = bool(silent) or not busy or any(status.still_s >= limit_s for status in busy)
    return stuck or waited_s >= BUSY_FACTOR * limit_s


def _ask(owner: object) -> str:
    """Return for what an object waits; nothing for another object, and for one that is still being made."""
    try:
        return owner.waits_for() if isinstance(owner, Waiter) else ""
    except (AttributeError, IndexError):
        return ""


def _by_place(statuses: Mapping[int, RankStatus]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, status in sorted(statuses.items()):
        step = "" if status.step is None else f" (step {status.step})"
        found.setdefault(status.place + step, []).append(rank)
    return found


def _plural(ranks: list[int], one: str, several: str) -> str:
    return f"{name_ranks(ranks)} {one if len(ranks) == 1 else several}"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _in_room(frame: FrameType) -> bool:
    return _module(frame).startswith(ROOM)


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_qualname.partition('.<')[0]}"
