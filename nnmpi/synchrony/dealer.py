"""Dealing out the parts of batches, in order, to whoever is free."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Unit:
    """What a worker does in one step: one part of one batch.

    Attributes:
        batch: the number of the global batch in its epoch.
        part: which of its parts, one per worker; it may have no rows.
    """

    batch: int
    part: int


class Dealer:
    """Deals each part of batches first..stop-1 once.

        3 parts     (0,0) (0,1) (0,2)   (1,0) (1,1) (1,2)   (2,0) ...
                                               ^ next         close():     the last one is (1,2), stop is 2
                                                              close(True): there is no more one, stop is 1
    Args:
        first, stop: the batches; there may be none.
        parts: of each batch, at least 1.

    Attributes:
        stop: the batches up to which it deals now: lower after `close`.
        dealt: how many units were dealt.
        undealt: how many parts of batches that were begun will not be dealt.
    """

    def __init__(self, first: int, stop: int, parts: int) -> None:
        self.first, self.stop, self.parts = first, max(first, stop), parts
        self.dealt = self.undealt = 0
        self._batch, self._part = first, 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to be dealt."""
        return self._batch >= self.stop

    def deal(self) -> Unit | None:
        """Return the next unit, None if nothing is left."""
        if self.exhausted:
            return None
        unit = Unit(self._batch, self._part)
        self.dealt += 1
        self._part += 1
        if self._part == self.parts:
            self._batch, self._part = self._batch + 1, 0
        return unit

    def skip(self) -> None:
        """Deal no more of the batch that was begun, if one was; it counts as done, and what was left as undealt."""
        if self._part:
            self.undealt += self.parts - self._part
            self._batch, self._part = self._batch + 1, 0

    def close(self, at_once: bool = False) -> None:
        """Deal no more after the batch that was begun, or nothing any more, which leaves that batch out of `stop`."""
        if self.exhausted:
            return
        if at_once:
            self.stop = self._batch
            self.undealt += self.parts - self._part if self._part else 0
        else:
            self.stop = self._batch + (self._part > 0)
