"""Finds where a loss or gradient stopped being finite: on which rank, in which layer.

It computes the failed step again, and so may be slow: it runs once, and then the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.precision import precision, to_float32
from nnmpi.comm.group import Group
from nnmpi.errors import DivergenceError
from nnmpi.memory.layers import unwatched
from nnmpi.nn.mode import observed
from nnmpi.nn.module import Module
from nnmpi.tensor.tensor import Tensor


def finite(array: Array) -> bool:
    """Return whether all elements are finite."""
    xp = namespace(array)
    return bool(xp.isfinite(to_float32(xp, array)).all())


def explain(
    group: Group, model: Module, x: Array, loss: Callable[[], Tensor], step: int, value: float
) -> DivergenceError:
    """Return the error that says where the first value that is not finite came from. Collective.

    All ranks do the forward pass, and all or none the backward pass, whatever they find: layers may
    communicate in it.

    Args:
        group: the ranks that computed the loss together.
        model: in the state in which the step failed.
        x: this rank's input, (batch, ...).
        loss: computes this rank's loss again, in the mode of the failed step.
        step: the update that failed, counted from 1.
        value: the global loss.
    """
    again, result = _go_forward(model, x, loss)
    places: Sequence[str | None] = group.gather(result)
    return _told(places if any(places) else group.gather(_go_backward(model, again)), step, value)


def _told(places: Sequence[str | None], step: int, value: float) -> DivergenceError:
    nowhere = None, "all ranks together, though it is on each"
    place, who = next(
        ((place, f"rank {rank}") for rank, place in enumerate(places) if place), nowhere
    )
    return DivergenceError(nonfinite_message(step, value, place, who))


def locate_nonfinite(model: Module, x: Array, loss: Callable[[], Tensor]) -> str | None:
    """Return the origin of the first non-finite value as text; None if all are finite.

    Not collective, for asynchronous ranks. Afterwards the model's gradients are those of this
    computation.

    Args:
        model: in the state in which the step failed.
        x: the input, (batch, ...).
        loss: computes the loss again, in the mode of the failed step and with its weights.
    """
    again, place = _go_forward(model, x, loss)
    return place or _go_backward(model, again)


def nonfinite_message(step: int, value: float, place: str | None, who: str) -> str:
    """Return the error message for a worker whose own loss or gradient is not finite.

    Args:
        step: the update that failed, counted from 1.
        value: the loss.
        place: what `locate_nonfinite` returned; None if all was finite when it was computed again.
        who: the worker: "rank 2", "worker 2".
    """
    what = f" or its gradient is not finite on {who}; lower the learning rate"
    if place is not None:
        what = (
            f"; the first values that are not finite are in {place} on {who}; lower the learning"
            " rate, "
        )
        what += "clip the gradients, or check the data"
    hint = (
        "; float16 ends at 65504: precision bf16 or smaller inputs may help"
        if precision() == "fp16"
        else ""
    )
    return f"step {step}: the loss is {value:g}{what}{hint}"


def explain_gradients(
    group: Group, model: Module, step: int, value: float, source: str
) -> DivergenceError:
    """Return the error that says which parameter's present gradient is not finite. Collective.

    Args:
        group: all ranks.
        model: with the gradients of the failed step.
        step: the update that failed, counted from 1.
        value: the global loss.
        source: what the gradients were summed over, as text, such as "microbatches and replicas".
    """
    held = list(model.storage.held())
    weights = (f"the weights {span.parameter.name!r}" for span, data, _ in held if not finite(data))
    result = next(weights, None) or _wrong_gradient(
        (span.parameter.name, grad) for span, _, grad in held
    )
    return _told(group.gather(result and f"{result}, summed over {source}"), step, value)


def _go_forward(model: Module, x: Array, loss: Callable[[], Tensor]) -> tuple[Tensor, str | None]:
    """Compute the loss again; return it, and the place of this rank's first value that is not
    finite, or None.
    """
    places = [] if finite(x) else ["the input"]
    places += [
        f"the weights {name!r}"
        for name, parameter in model.named_parameters()
        if not finite(parameter.data)
    ]

    def observe(module: Module, result: object) -> None:
        if isinstance(result, Tensor) and not finite(result.data):
            places.append(f"the output of layer {module.path!r} ({type(module).__name__})")

    with observed(observe):
        again = loss()
    places += [] if finite(again.data) else ["the loss itself"]
    return again, next(iter(places), None)


def _go_backward(model: Module, loss: Tensor) -> str | None:
    """Return which of this rank's gradients is the first that is not finite, or None."""
    parameters = dict(model.named_parameters())
    with unwatched(list(parameters.values())):
        for parameter in parameters.values():
            parameter.grad = None
        loss.backward()
    return _wrong_gradient((name, item.grad) for name, item in parameters.items())


def _wrong_gradient(grads: Iterable[tuple[str, Array | None]]) -> str | None:
    """Return which gradient a backward pass came to first of those that are not finite: the last
    one; or None.
    """
    wrong = [name for name, grad in grads if grad is not None and not finite(grad)]
    return f"the gradient of {wrong[-1]!r}" if wrong else None
