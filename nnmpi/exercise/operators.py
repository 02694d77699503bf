"""Gradients of operations to write, in NumPy; held against central differences, element by element."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.exercise.exercise import Exercise, Function, WrongAnswer, as_numbers, call
from nnmpi.tensor.check import GradientError, check_gradients
from nnmpi.tensor.function import Function as Operation

LABELS = np.array([0, 3, 1])


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _cross_entropy(scores: Array) -> Array:
    return np.asarray(-np.log(_softmax(scores)[np.arange(len(LABELS)), LABELS]).sum())


def _layer_norm(x: Array) -> Array:
    centred = x - x.mean(axis=1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis=1, keepdims=True)))


def check(
    forward: Callable[..., Array], shapes: dict[str, tuple[int, ...]], further: Array | None, function: Function
) -> str:
    """Return that the gradients are right.

    Args:
        forward: the operation.
        shapes: of its inputs, by their names.
        further: what the function gets behind the inputs, and what has no gradient.

    Raises:
        WrongAnswer: naming the input and the element.
    """
    draw = np.random.default_rng(1)  # not what the check draws its direction from: across it some gradients are 0
    inputs = [draw.normal(size=shape) for shape in shapes.values()]

    def gradients(grad: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        given = [array.copy() for array in (grad, *arrays)]
        found = call(function, *given, *([] if further is None else [further]))
        for name, before, after in zip(("grad", *shapes), (grad, *arrays), given, strict=True):
            if not np.array_equal(before, after):
                raise WrongAnswer(f"it changes {name}, which others still need; compute on copies")
        found = found if isinstance(found, tuple) else (found,)
        if len(found) != len(shapes):
            raise WrongAnswer(f"it gives {len(found)} gradients, and must give {len(shapes)}: of {', '.join(shapes)}")
        named = zip(found, shapes.items(), strict=True)
        return tuple(as_numbers(f"the gradient of {name}", each, shape).astype(float) for each, (name, shape) in named)

    class _Asked(Operation):
        def forward(self, *arrays: Array) -> Array:
            self.saved = arrays
            return forward(*arrays)

        def backward(self, grad: Array) -> tuple[Array, ...]:
            return gradients(grad, self.saved)

    try:
        check_gradients(lambda *tensors: _Asked()(*tensors), inputs)
    except GradientError as error:
        text = str(error)
        for number, name in enumerate(shapes):
            text = text.replace(f"input {number} element", f"{name}, element")
        raise WrongAnswer(text.replace("backward gives", "it gives")) from None
    return f"right for every element of {', '.join(shapes)}"


_TABLE: tuple[tuple[str, str, Callable[..., Array], dict[str, tuple[int, ...]]], ...] = (
    ("relu", "y = max(x, 0)", lambda x: np.maximum(x, 0), {"x": (4, 5)}),
    ("sigmoid", "y = 1 / (1 + exp(-x))", lambda x: np.asarray(1 / (1 + np.exp(-x))), {"x": (4, 5)}),
    ("linear", "y = x @ w + b", lambda x, w, b: x @ w + b, {"x": (3, 4), "w": (4, 5), "b": (5,)}),
    ("softmax", "each row of y is exp(x) / sum(exp(x))", _softmax, {"x": (3, 5)}),
    ("layer-norm", "each row of y is x less its mean, over the root of its mean square", _layer_norm, {"x": (3, 5)}),
)

EXERCISES = (
    *(
        Exercise(
            f"{name}-gradient",
            f"The gradient of an operation: {formula}.\n\ngrad is the gradient of y, in y's shape. Return "
            f"{'that of x' if len(shapes) == 1 else 'those of ' + ', '.join(shapes)}.",
            f"grad, {', '.join(shapes)}",
            partial(check, forward, shapes, None),
            "import numpy as np",
        )
        for name, formula, forward, shapes in _TABLE
    ),
    Exercise(
        "cross-entropy-gradient",
        "The gradient of the sum of the rows' cross-entropies.\n\nloss = -sum over rows of log(softmax(scores)[row, "
        "labels[row]]); grad is a number, the gradient of the loss.\nReturn that of scores.",
        "grad, scores, labels",
        partial(check, _cross_entropy, {"scores": (3, 5)}, LABELS),
        "import numpy as np",
    ),
)
