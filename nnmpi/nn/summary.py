"""A model's layers, with what each makes of a sample: `Module.summary`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nnmpi.backend.array import Shape, namespace
from nnmpi.backend.recording import Recorder
from nnmpi.base.errors import UsageError
from nnmpi.base.picture import preformat
from nnmpi.base.units import aligned, format_bytes
from nnmpi.nn.mode import evaluation, observed
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.tensor import Tensor

HEAD = "layer", "result", "parameters", "multiply-adds", "memory"
WIDTH = 80  # of the table
LEAST = 16  # characters of a layer's name and class, whatever the numbers take


@dataclass
class LayerRow:
    """A layer in a summary: what it does itself, without the layers within it.

    Attributes:
        path, kind: its full name and its class.
        result: the shape of its last result; None if it was not called, or returns no tensor.
        parameters: the number of their elements; of shared ones, only where they come first.
        products: the pairs of numbers that it multiplies and adds up in products of matrices.
        nbytes: of the arrays that its operations make.
    """

    path: str
    kind: str
    result: Shape | None = None
    parameters: int = 0
    products: int = 0
    nbytes: int = 0


@dataclass
class ModelSummary:
    """The layers of a model. As text, and in a notebook, it is a table.

    Attributes:
        rows: the layers, the model itself first.
    """

    rows: list[LayerRow] = field(default_factory=list)

    @property
    def total(self) -> LayerRow:
        """The sums over all layers, beside the model's result."""
        return LayerRow(
            "",
            "total",
            self.rows[0].result,
            sum(row.parameters for row in self.rows),
            sum(row.products for row in self.rows),
            sum(row.nbytes for row in self.rows),
        )

    def __str__(self) -> str:
        lines, above = [HEAD], list[str]()  # the paths of the layers that contain the next one
        for row in (*self.rows, self.total):
            while above and not row.path.startswith(f"{above[-1]}."):
                above.pop()
            name = row.path.removeprefix(f"{above[-1]}." if above else "")
            label = f"{'| ' * (len(above) + bool(name))}{name} {row.kind}" if name else row.kind
            above += [row.path] if row.path else []
            numbers = (
                f"{row.parameters:,}" if row.parameters else "",
                f"{row.products:,}" if row.products else "",
                format_bytes(row.nbytes) if row.nbytes else "",
            )
            shape = "" if row.result is None else "x".join(map(str, row.result))
            lines.append((label, shape, *numbers))
        numbers_width = max(map(len, aligned([line[1:] for line in lines])))
        most = max(WIDTH - 2 - numbers_width, LEAST)
        return "\n".join(
            aligned(
                [
                    (label if len(label) <= most else f"{label[: most - 3]}...", *others)
                    for label, *others in lines
                ]
            )
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return preformat(str(self))


class _Counter(Recorder):
    """Adds up what operations do, for the layer that calls them.

    Args:
        rows: of the model's modules, by id.
    """

    def __init__(self, rows: dict[int, LayerRow]) -> None:
        super().__init__()
        self._rows = rows
        self._within: list[LayerRow] = []  # the layers that are being called, the innermost last

    def enter(self, module: Any) -> None:
        """See `Recorder.enter`."""
        other = LayerRow("", type(module).__name__)  # a module that the model made on its way
        self._within.append(self._rows.get(id(module), other))

    def leave(self, module: Any, result: Any) -> None:
        """Note a layer's result."""
        row = self._within.pop()
        row.result = result.shape if isinstance(result, Tensor) else None

    def apply(self, function: Any, inputs: Any, values: list[Any]) -> Any:
        """See `Recorder.apply`."""
        result, row = self.run_eagerly(function.forward, *values), self._within[-1]
        traits, array = function.traits, result if hasattr(result, "nbytes") else np.asarray(result)
        if traits is not None and traits.products is not None:
            row.products += int(traits.products(function, array, *values))
        if not function.views:
            row.nbytes += array.nbytes
        return result

    def refusal(self, what: str, remedy: str = "") -> str:
        """See `Recorder.refusal`."""
        return (
            f"{what} in a forward pass is not to be had while it is summed up, as what a model"
            " decides by it differs from batch to batch; compute with tensors alone"
        )


def summarize(model: Any, inputs: tuple[Any, ...]) -> ModelSummary:
    """See `Module.summary`."""
    if not inputs:
        raise UsageError(
            "summary needs a sample, whose shapes it follows, such as model.summary(x[:1])"
        )
    seen, rows = set[int](), dict[int, LayerRow]()
    for path, module in model.named_modules():
        own = [x for _, x in module._members(Parameter) if id(x) not in seen]
        seen.update(map(id, own))
        count = sum(parameter.size for parameter in own)
        rows.setdefault(id(module), LayerRow(path, type(module).__name__, None, count))
    inputs = tuple(_beside(model, x) for x in inputs)
    counter = _Counter(rows)
    with no_grad(), evaluation(), observed(counter.leave), counter.running():
        model(*inputs)
    return ModelSummary([*rows.values()])


def _beside(model: Any, x: Any) -> Any:
    """Return an array in the memory of a model's weights."""
    weights = next((item.data for _, item in model.named_parameters()), None)
    if weights is None or not isinstance(x, np.ndarray):
        return x
    return namespace(weights).asarray(x)
