"""Finds where a loss or gradient stopped being finite: on which rank, in which layer.

The failed step is computed again. That may be slow, since it happens once before the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.kernels import to_float32
from nnmpi.backend.precision import precision
from nnmpi.base.errors import DivergenceError
from nnmpi.comm.group import Group
from nnmpi.memory.layers import without_hooks
from nnmpi.nn.mode import observed
from nnmpi.nn.module import Module
from nnmpi.tensor.tensor import Tensor


def finite(array: Array) -> bool:
    """Return whether all elements are finite."""
    return bool(np.isfinite(to_float32(array)).all())


def explain(
    group: Group, model: Module, x: Array, loss: Callable[[], Tensor], step: int, value: float
) -> DivergenceError:
    """Return the error that says where the first value that is not finite came from. Collective.

    All ranks do the forward pass, and all or none the backward pass, whatever each finds, since
    layers may communicate.

    Args:
        group: the ranks that computed the loss together.
        model: in the state in which the step failed.
        x: this rank's input, (batch, ...).
        loss: computes this rank's loss again, in the mode of the failed step.
        step: the update that failed, counted from 1.
        value: the global loss.
    """
    computed, origin = _run_forward(model, x, loss)
    origins: Sequence[str | None] = group.gather(origin)
    return _error(
        origins if any(origins) else group.gather(_run_backward(model, computed)), step, value
    )


def _error(origins: Sequence[str | None], step: int, value: float) -> DivergenceError:
    nowhere = None, "all ranks together, though both are finite on each"
    origin, rank_name = next(
        ((origin, f"rank {rank}") for rank, origin in enumerate(origins) if origin), nowhere
    )
    return DivergenceError(nonfinite_message(step, value, origin, rank_name))


def locate_nonfinite(model: Module, x: Array, loss: Callable[[], Tensor]) -> str | None:
    """Return the origin of the first non-finite value as text; None if all are finite.

    Not collective, for asynchronous ranks. Afterwards the model's gradients are those of this
    computation.

    Args:
        model: in the state in which the step failed.
        x: the input, (batch, ...).
        loss: computes the loss again, in the mode of the failed step and with its weights.
    """
    computed, origin = _run_forward(model, x, loss)
    return origin or _run_backward(model, computed)


def nonfinite_message(step: int, value: float, origin: str | None, rank_name: str) -> str:
    """Return the error message for a worker whose own loss or gradient is not finite.

    Args:
        step: the update that failed, counted from 1.
        value: the loss.
        origin: the result of `locate_nonfinite`; None if all was finite in the second computation.
        rank_name: the worker: "rank 2", "worker 2".
    """
    ending = f", and it or its gradient is not finite on {rank_name}; lower the learning rate"
    if origin is not None:
        ending = (
            f"; values that are not finite were first found in {origin} on {rank_name}; lower the"
            " learning rate, clip the gradients, or check the data"
        )
    hint = (
        "; float16 ends at 65504: precision bf16 or smaller inputs may help"
        if precision() == "fp16"
        else ""
    )
    return f"step {step}: the loss is {value:g}{ending}{hint}"


def explain_gradients(group: Group, model: Module, step: int, value: float) -> DivergenceError:
    """Return the error that says which parameter's present gradient is not finite. Collective.

    Args:
        group: all ranks.
        model: with the gradients of the failed step, summed over all.
        step: the update that failed, counted from 1.
        value: the global loss.
    """
    entries = list(model.storage.held())
    weights = (
        f"the weights {span.parameter.name!r}" for span, data, _ in entries if not finite(data)
    )
    origin = next(weights, None) or _wrong_gradient(
        (span.parameter.name, grad) for span, _, grad in entries
    )
    text = origin and f"{origin}, summed over microbatches and replicas"
    return _error(group.gather(text), step, value)


def _run_forward(model: Module, x: Array, loss: Callable[[], Tensor]) -> tuple[Tensor, str | None]:
    """Return the loss, computed again, and this rank's first non-finite value as text, or None."""
    origins = [] if finite(x) else ["the input"]
    origins += [
        f"the weights {name!r}"
        for name, parameter in model.named_parameters()
        if not finite(parameter.data)
    ]

    def observe(module: Module, result: object) -> None:
        if isinstance(result, Tensor) and not finite(result.data):
            origins.append(f"the output of layer {module.path!r} ({type(module).__name__})")

    with observed(observe):
        computed = loss()
    origins += [] if finite(computed.data) else ["the loss itself"]
    return computed, next(iter(origins), None)


def _run_backward(model: Module, loss: Tensor) -> str | None:
    """Return this rank's first non-finite gradient as text, or None."""
    parameters = dict(model.named_parameters())
    with without_hooks(list(parameters.values())):
        for parameter in parameters.values():
            parameter.grad = None
        loss.backward()
    return _wrong_gradient((name, item.grad) for name, item in parameters.items())


def _wrong_gradient(grads: Iterable[tuple[str, Array | None]]) -> str | None:
    """Return the non-finite gradient that the backward pass reaches first; or None."""
    wrong = [name for name, grad in grads if grad is not None and not finite(grad)]
    return f"the gradient of {wrong[-1]!r}" if wrong else None
