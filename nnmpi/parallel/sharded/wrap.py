"""Exchanged: a module with an exchange before or after it, in whose place it stands under the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from nnmpi.nn.module import Module
from nnmpi.nn.skip import Pop
from nnmpi.tensor.tensor import Tensor


class Exchanged(Module):
    """after(inner(before(x))).

    It does not show in the model's tree: names of modules and parameters stay those that they are without it.

    Args:
        inner: the module.
        before, after: what happens to its input and its result; None for nothing.
    """

    def __init__(
        self, inner: Module, before: Callable[[Any], Any] | None = None, after: Callable[[Any], Any] | None = None
    ) -> None:
        self.inner = inner
        self._before, self._after = before, after

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the inner module under this one's name, and all below it."""
        yield from self.inner.named_modules(prefix)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield the inner module's children."""
        yield from self.inner.children()

    def set_child(self, name: str, module: Module) -> None:
        """Put a module in the place of the inner module's child with that name."""
        self.inner.set_child(name, module)

    def forward(self, x: Any) -> Any:
        """Return the inner module's result, exchanged."""
        y = self.inner(x if self._before is None else self._before(x))
        return y if self._after is None else self._after(y)


class ExchangedPop(Pop):
    """pop(before(x), kept): the exchange is in the link itself, as what comes to a Pop may be what was kept, too.

    Args:
        pop: the whole model's.
        before: what happens to its first input.
    """

    def __init__(self, pop: Pop, before: Callable[[Any], Any]) -> None:
        super().__init__(pop.name, pop.shortcut)
        self._before = before

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """Return the sum."""
        return super().forward(self._before(x), kept)


class Exchange(Module):
    """An exchange as a module without parameters."""

    def __init__(self, exchange: Callable[[Any], Any]) -> None:
        self._exchange = exchange

    def forward(self, x: Any) -> Any:
        """Return x, exchanged."""
        return self._exchange(x)
