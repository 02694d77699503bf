"""Function: one operation with its derivative, and the mode that says whether operations are recorded.

Any subclass may enter the graph; collectives, recomputation and the ends of pipeline stages do so too:

    class Square(Function):
        def forward(self, x):
            self.saved = (x,)
            return x * x

        def backward(self, grad):
            (x,) = self.saved
            return (2 * x * grad,)

    y = Square()(x)

The object is the node on the tape: one Python object per operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.errors import GraphError
from nnmpi.tensor.tape import Tape, join
from nnmpi.tensor.variable import Variable

if TYPE_CHECKING:
    from nnmpi.tensor.tensor import Tensor

_SCALAR: type = np.generic  # what NumPy returns in place of an array without axes
_recording: ContextVar[bool] = ContextVar("nnmpi_recording", default=True)


def recording() -> bool:
    """Return whether operations are being recorded for a backward pass."""
    return _recording.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Compute without recording: results need no gradient and keep nothing alive."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


@contextmanager
def enable_grad() -> Iterator[None]:
    """Record again inside a `no_grad` block."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


class Function:
    """One application of an operation. Subclasses define `forward` and `backward`; options go to `__init__`.

    Attributes:
        needs: per input, whether its gradient is wanted; set before `forward`. All False when nothing is recorded.
        saved: what backward needs, set by `forward`; freed by the backward pass. Keep arrays nowhere else.
        edges: per input, the operation or leaf that its gradient goes to, or None. None altogether once used up.
        grad: the gradient of the output, while a backward pass is on its way.
        shape, dtype: of the output.
    """

    __slots__ = ("__weakref__", "dtype", "edges", "grad", "needs", "owns_grad", "saved", "shape")

    dtype: np.dtype[Any]

    edges: tuple[Function | Variable | None, ...] | None
    grad: Array | None
    owns_grad: bool
    needs: tuple[bool, ...]
    saved: tuple[Any, ...]
    shape: tuple[int, ...]

    def forward(self, *inputs: Any) -> Array:
        """Return the result for the inputs' arrays (or plain values, for inputs that are no tensors)."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """Return one gradient per input, None where there is none. `grad` may be shared: do not write to it."""
        raise NotImplementedError(f"{type(self).__name__} defines no backward")

    def __call__(self, *inputs: Any) -> Tensor:
        """Apply the operation to tensors, arrays and plain values; record it if a tensor needs a gradient.

        Raises:
            GraphError: when no input is a tensor, or this object stands in a graph already.
        """
        if _recording.get():
            self.needs = tuple([isinstance(x, Variable) and x.requires_grad for x in inputs])
        else:
            self.needs = (False,) * len(inputs)
        self.saved = ()
        data = self.forward(*[x.data if isinstance(x, Variable) else x for x in inputs])
        result = _empty_like(inputs)
        result.data = np.asarray(data) if isinstance(data, _SCALAR) else data
        if True in self.needs:
            self._record(inputs, result)
        else:
            self.saved = ()
        return result

    def into(self, i: int) -> Array | None:
        """Return the array in which the gradient of input i may be computed in place, or None.

        A backward that returns this very array saves a copy (parameters' gradients live in flat storage).
        """
        edge = self.edges[i] if self.edges is not None else None
        if not isinstance(edge, Variable) or edge.grad is not None:
            return None
        # one leaf standing at two inputs gets two gradients, which cannot share one place
        return edge.buffer if self.edges is not None and self.edges.count(edge) == 1 else None

    def add_grad(self, grad: Array) -> None:
        """Add one use's contribution to the gradient of the output. Never writes to an array that others may hold."""
        if self.grad is None:
            self.grad, self.owns_grad = grad, False
        elif self.owns_grad:
            self.grad += grad
        else:
            self.grad, self.owns_grad = self.grad + grad, True

    def release(self) -> None:
        """Drop everything that only a backward pass needs."""
        self.edges = None
        self.saved = ()

    def _record(self, inputs: tuple[Any, ...], result: Tensor) -> None:
        if hasattr(self, "edges"):
            name = type(self).__name__
            raise GraphError(f"this {name} was applied before; each application needs a Function object of its own")
        tape: Tape | None = None
        hooked = False
        edges: list[Function | Variable | None] = []
        for x, needed in zip(inputs, self.needs, strict=True):
            if not needed:
                edges.append(None)
                continue
            if x.node is None:
                edges.append(x)
                hooked = hooked or x.hook is not None
            else:
                edges.append(x.node)
                tape = x.tape if tape is None else join(tape, x.tape)
        tape = Tape() if tape is None else tape.find()
        tape.hooked = tape.hooked or hooked
        tape.nodes.append(self)
        self.edges, self.grad, self.owns_grad = tuple(edges), None, False
        self.shape, self.dtype = result.data.shape, result.data.dtype
        result.requires_grad, result.node, result.tape = True, self, tape


def _empty_like(inputs: tuple[Any, ...]) -> Tensor:
    for x in inputs:
        if isinstance(x, Variable):
            tensor: Tensor = x.blank()  # type: ignore[attr-defined]
            return tensor
    raise GraphError("an operation needs at least one Tensor among its inputs; wrap the array in nnmpi.Tensor")
