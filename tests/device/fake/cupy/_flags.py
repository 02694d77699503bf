"""How an array lies in memory."""

from typing import Any


class Flags:
    """How an array lies."""

    __slots__ = ("c_contiguous", "f_contiguous", "owndata")

    def __init__(self, array: Any) -> None:
        flags = array._host.flags
        self.c_contiguous, self.f_contiguous = flags.c_contiguous, flags.f_contiguous
        self.owndata = array.base is None

    @property
    def forc(self) -> bool:
        """Whether either."""
        return self.c_contiguous or self.f_contiguous

    @property
    def fnc(self) -> bool:
        """Whether Fortran's order alone."""
        return self.f_contiguous and not self.c_contiguous

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self, name.lower()))
