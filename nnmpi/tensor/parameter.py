"""Parameter: a leaf tensor whose values are trained. It knows its shape and initializer first, its values later.

A layer declares its parameters; `Module.initialize` gives them values, once the full names are known, because initial
values are drawn from a stream keyed by seed and full name and so do not depend on the layout.
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.recording import active
from nnmpi.errors import ShapeError, UninitializedError
from nnmpi.shard import Region
from nnmpi.tensor.tensor import Tensor

Initializer: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _zeros(_generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.zeros(shape)


class Parameter(Tensor):
    """A trained tensor, empty until its model is initialized.

    Attributes:
        name: the full name in its model ("2.weight"), set by `Module.initialize`.
        declared: the shape that it will have.
        init: draws its initial values: init(generator, shape) -> array.
        region: which part of a larger parameter this one is, when its ranks share that out; None for a whole one.
        guard: called before a backward pass writes to its gradient; it raises where that must not be. Or None.

    Args:
        shape: of the values; or an array or a list of first values, which then needs no `init`. A list of whole
            numbers is a shape.
        init: draws its initial values; zeros by default.
        region: `shape` is then that of the part, and the values are the part's of those that the whole would get.

    Raises:
        ShapeError: when the region has another shape.
    """

    __slots__ = ("declared", "guard", "init", "name", "region")

    guard: Callable[[], None] | None

    def __init__(
        self, shape: tuple[int, ...] | Array, init: Initializer | None = None, region: Region | None = None
    ) -> None:
        if isinstance(shape, list) and all(isinstance(each, Integral) for each in shape):
            shape = tuple(shape)
        if not isinstance(shape, tuple):
            values = np.array(Tensor(shape).numpy())
            shape, init = values.shape, lambda _generator, _shape: values
        if region is not None and region.local_shape != shape:
            raise ShapeError(f"a parameter of shape {shape} is not a region of shape {region.local_shape}")
        self.declared: tuple[int, ...] = shape
        self.init: Initializer = init or _zeros
        self.name, self.region = "", region
        self.requires_grad = True
        self.grad = self.node = self.tape = self.buffer = self.hook = self.guard = self.cut = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes, known before there are values."""
        return self.declared

    def draw(self, generator: np.random.Generator) -> Array:
        """Return initial values, float64: of a part, those that the whole parameter would have there."""
        if self.region is None:
            return self.init(generator, self.declared)
        part: Array = self.region.take(self.init(generator, self.region.shape))
        return part

    def add_grad(self, grad: Array, xp: Any) -> None:
        """Add one operation's contribution to the gradient, see `Variable.add_grad`, unless the guard forbids it."""
        if self.guard is not None:
            self.guard()
        if grad is self.buffer and self.grad is None and active() is None:
            self.grad = grad  # it was computed there
        else:
            super().add_grad(grad, xp)

    def check_write(self) -> None:
        """Let the guard raise if the gradient must not be written to now."""
        if self.guard is not None:
            self.guard()

    def finish_gradient(self) -> None:
        """Let `buffer` hold the gradient: zeros where there is none, and a copy of one that is another array."""
        if self.buffer is not None and self.grad is not self.buffer:
            self.buffer[...] = 0 if self.grad is None else self.grad
            self.grad = self.buffer

    def __getattr__(self, name: str) -> Any:
        # reached only when a slot is empty, or a property needs an empty one
        if name == "declared" or (name != "data" and not hasattr(type(self), name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        raise UninitializedError(
            f"a parameter of shape {self.declared} has no values yet; call model.initialize(seed=0) first; a layer "
            "that is neither a module's attribute nor an item of a list that is one is not found then"
        )

    def __repr__(self) -> str:
        return f"Parameter({self.name or 'unnamed'}, shape={self.declared})"
