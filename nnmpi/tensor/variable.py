"""What a graph is made of, seen from the graph: an array, its gradient, and where it was computed.

`Tensor` adds the operators; nothing here knows them, so that operations can be written without import cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nnmpi.backend.array import Array
from nnmpi.backend.recording import active

if TYPE_CHECKING:
    from nnmpi.tensor.function import Function
    from nnmpi.tensor.placement import TensorCut
    from nnmpi.tensor.tape import Tape


class Variable:
    """An array that the graph can differentiate.

    Attributes:
        data: the values.
        requires_grad: whether a backward pass computes a gradient for it.
        grad: the gradient, an array like `data`; None until a backward pass reaches this leaf.
        node: the operation that computed it; None for a leaf.
        tape: the tape that the operation stands on; None for a leaf.
        cut: which part of a larger tensor this is, see `cut.CutTensor`; None for a whole one.
        buffer: where the first gradient of a pass is written (a view into flat storage), or None.
        hook: called with this leaf, once in every backward pass that gives it a gradient, as soon as that is final; or
            None. Set it before the forward pass: operations look for it when they are recorded.
        guard: called before a backward pass writes to its gradient; it raises where that must not be. Or None; only
            parameters have one.
    """

    __slots__ = ("__weakref__", "buffer", "cut", "data", "grad", "hook", "node", "requires_grad", "tape")

    data: Array
    requires_grad: bool
    grad: Array | None
    node: Function | None
    tape: Tape | None
    buffer: Array | None
    hook: Callable[[Any], None] | None
    cut: TensorCut | None
    guard: Callable[[], None] | None = None

    def add_grad(self, grad: Array, xp: Any) -> None:
        """Add one operation's contribution to this leaf's gradient; the array may be written to its buffer in place.

        `xp` is the arrays' module, or a recorder's stand-in for it.
        """
        if self.grad is not None:
            if grad is not self.grad:  # else it was added there already, see `Function.sum_into`
                xp.add(self.grad, grad, out=self.grad)
            return
        if self.buffer is None:
            place = xp.empty_like(grad)  # a copy: the array may be shared
            xp.copyto(place, grad)
        else:
            place = self.buffer
            if grad is not place:
                xp.copyto(place, grad)
        recorder = active()
        if recorder is None:
            self.grad = place
        else:
            recorder.perform(self.set_grad, place)
            if self.buffer is None:
                recorder.loose.append((self, place))

    def check_write(self) -> None:
        """Raise if the gradient must not be written to now."""

    def set_grad(self, grad: Array | None) -> None:
        """Let this array be the gradient, or None."""
        self.grad = grad
