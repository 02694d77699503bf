"""Kernels that print row formulas: numba's and a device's alike."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from nnmpi.backend.array import Array
from nnmpi.backend.plain import PlainKernels
from nnmpi.backend.trace import Printed, is_printable


class PrintedKernels(PlainKernels):
    """Kernels that print nnmpi's own row formulas at their first call, see `PlainKernels.rows`.

    Attributes:
        printed: how.
        kinds_of: (operands, sums) -> for what a formula is printed, its operands' kinds, and more;
            () if for none.
        update: (loop, arrays) -> what computes an optimizer's formula, see `PlainKernels.updater`.
    """

    printed: ClassVar[Callable[..., Printed]]
    kinds_of: Callable[..., tuple[Any, ...]]
    update: Callable[..., Callable[..., None]]

    def __init__(self) -> None:
        self._loops: dict[Any, Any] = {}

    def rows(
        self,
        formula: Callable[..., Any],
        *operands: Any,
        sums: Sequence[Array] = (),
        reuse: int = False,
        blocks: bool = True,
    ) -> Any:
        """See `PlainKernels.rows`; by what is printed, unless the library computes it."""
        loop = self.found(formula, operands, sums, reuse)
        if loop is None or not loop.fits(operands):
            return super().rows(formula, *operands, sums=sums, blocks=blocks)
        return self.launch(loop, operands, sums)

    def found(
        self, formula: Any, operands: Any, sums: Sequence[Array] = (), reuse: int = False
    ) -> Any:
        """Return what is printed for operands, or None for what is left to the library."""
        if not is_printable(formula) or not (kinds := self.kinds_of(operands, sums)):
            return None
        key = formula, len(sums), reuse, *kinds
        if key not in self._loops:
            self._loops[key] = None
            with suppress(TypeError):
                self._loops[key] = self.printed(formula, *kinds, len(sums), reuse)
        return self._loops[key]

    def updater(self, formula: Any, arrays: Sequence[Array], numbers: Any) -> Callable[..., None]:
        loop = self.found(formula, (*arrays, *numbers))
        if loop is None or not loop.is_flat:
            return super().updater(formula, arrays, numbers)
        return self.update(loop, arrays)

    def launch(self, loop: Any, operands: tuple[Any, ...], sums: Sequence[Array]) -> Any:
        """Return the results, and write the sums."""
        return loop(operands, sums)


def itself(x: Array) -> tuple[Array]:
    """The formula of rows that are only summed."""
    return (x,)
