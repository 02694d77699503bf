"""The queue of what will happen in virtual time."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

Act: TypeAlias = Callable[[], None]


class EventQueue:
    """Runs events in order of time; of two at the same moment, the one that was added first.

        events = EventQueue(now_s=0.0)
        events.add(2.5, lambda: print("hello"))
        while events.run_next():                    # moves now_s to 2.5 and prints
            pass

    So the order depends on the virtual times alone, and never on how long computing takes.

    Attributes:
        now_s: the moment of the last event.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._entries: list[tuple[float, int, Act]] = []
        self._added = 0

    def add(self, at_s: float, act: Act) -> None:
        """Add an event; a moment that is over counts as now."""
        # the count decides between equal moments, so that two functions are never compared
        heappush(self._entries, (max(at_s, self.now_s), self._added, act))
        self._added += 1

    @property
    def next_s(self) -> float | None:
        """The moment of the next event; None if there is none."""
        return self._entries[0][0] if self._entries else None

    def run_next(self) -> bool:
        """Run the next event; return False if there was none."""
        if not self._entries:
            return False
        self.now_s, _, act = heappop(self._entries)
        act()
        return True
