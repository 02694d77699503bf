"""The gradient check: backward's derivatives compared with central differences, in float64.

A kink within the step fails the check: the function has no derivative there. The error says so and
gives the sampled values, since backward's result would be neither right nor wrong.
"""

from collections.abc import Callable, Sequence

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base.errors import DtypeError, GraphError
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


class GradientError(GraphError):
    """A derivative that backward and central differences disagree on, or that does not exist."""


def check_gradients(
    function: Callable[..., Tensor],
    inputs: Sequence[Array],
    step: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    seed: int = 0,
) -> None:
    """Compare backward's gradients of `function` at `inputs` with central differences.

    The result is projected on a random direction, fixed by `seed`, so that one backward pass checks
    every output.

    Args:
        function: takes one Tensor per input and returns a Tensor of any shape.
        inputs: float64 arrays; strides may be any.
        step: the half-width of the difference, relative to max(1, |x|).

    Raises:
        GradientError: naming the input, the element, both derivatives and the values sampled.
        DtypeError: when an input is not float64: the differences would be noise.
    """
    for i, x in enumerate(inputs):
        if x.dtype != np.float64:
            raise DtypeError(f"check_gradients needs float64 inputs; input {i} is {x.dtype}")
    tensors = [Tensor(x, requires_grad=True) for x in inputs]
    result = function(*tensors)
    direction = np.random.default_rng(seed).standard_normal(result.shape)
    result.backward(direction)

    def value(arrays: Sequence[Array]) -> float:
        with no_grad():
            return float((function(*[Tensor(a) for a in arrays])._data * direction).sum())

    here = value(inputs)
    moved = [np.array(a, copy=True) for a in inputs]
    for i, x in enumerate(inputs):
        grad = tensors[i].grad
        grad = np.zeros_like(x) if grad is None else grad
        for element in np.ndindex(x.shape):
            at, derivative = float(x[element]), float(grad[element])
            h = step * max(1.0, abs(at))
            samples = []
            for moved[i][element] in (at - h, at + h):
                samples.append(value(moved))
            moved[i][element] = at
            below, above = samples
            difference = (above - below) / (2 * h)
            # the last term: rounding of the function's value, magnified by the division by h
            tolerance = atol + rtol * max(abs(difference), abs(derivative)) + 1e-15 * abs(here) / h
            where = f"input {i} element {element} (value {at!r})"
            sampled = f"sampled {below!r}, {here!r}, {above!r} at steps of {h:g}"
            left, right = (here - below) / h, (above - here) / h
            if abs(left - right) > 1e-2 * max(1.0, abs(left), abs(right)):
                raise GradientError(
                    f"no derivative at {where}: {left:.8g} from below, {right:.8g} from above;"
                    f" {sampled}"
                )
            if not abs(derivative - difference) <= tolerance:
                raise GradientError(
                    f"backward gives {derivative:.10g} for {where}, central differences"
                    f" {difference:.10g}; {sampled}"
                )
