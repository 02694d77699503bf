"""The queue of what will happen in virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

Act: TypeAlias = Callable[[], None]


class Agenda:
    """Does what was put on it in order of time; of two things at the same moment, what was put there first.

        agenda = Agenda(now_s=0.0)
        agenda.add(2.5, lambda: print("hello"))
        while agenda.go_on():                       # moves now_s to 2.5 and prints
            pass

    So the order depends on what is computed alone, never on how long computing takes.

    Attributes:
        now_s: the moment of what was done last.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._entries: list[tuple[float, int, Act]] = []
        self._added = 0

    def add(self, at_s: float, act: Act) -> None:
        """Put something on the agenda; a moment that is over counts as now."""
        heappush(self._entries, (max(at_s, self.now_s), self._added, act))
        self._added += 1

    @property
    def next_s(self) -> float | None:
        """The moment of what comes next; None if there is nothing."""
        return self._entries[0][0] if self._entries else None

    def go_on(self) -> bool:
        """Do what comes next; return False if there was nothing."""
        if not self._entries:
            return False
        self.now_s, _, act = heappop(self._entries)
        act()
        return True
