"""What others must know of an operation beside its arithmetic: its traits, stated in its class.

    class SoftmaxFunction(Function):
        traits = Traits(
            onnx=lambda f, y, x: x.add("Softmax", axis=f.axis),
            samples=(Sample("softmax", lambda x: softmax(x), ((3, 4),)),),
        )

The exporter of ONNX files, the conversion to PyTorch's weights and the tests of gradients, of
devices and of ONNX's runtime read them, and have no lists of operations of their own. So an
operation is added in one place. One without traits, such as a user's, is refused by the exporter.

Traits are data, and formulas that are called with somebody else's values: this package knows
neither ONNX nor the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

from nnmpi.backend.array import Shape


class Channels(Enum):
    """Where PyTorch has the channels of an operation's result.

    KEPT          where the input has them
    FIRST         behind the batch: of convolutions and pooling, which read images
    NORMALIZED    the same, and so has the input: of what treats each channel by itself
    LAST          on the last axis, as here: of linear layers, attention, embeddings
    """

    KEPT = "kept"
    FIRST = "first"
    NORMALIZED = "normalized"
    LAST = "last"


class NotExported(NamedTuple):
    """That an operation has no counterpart in ONNX; a formula returns it for a form that has none.

    Attributes:
        remedy: what to do instead, for the error.
        form: of the operation, such as "the activation mish"; "" for the operation itself.
    """

    remedy: str = "leave it out of what is exported"
    form: str = ""


OF_RANKS: Final = NotExported("export the model on one rank")


class WrittenApart(Enum):
    """An operation whose nodes depend on its inputs' shapes: `lab.onnx.operators` writes them."""

    WRITTEN = "written"


OTHERWISE: Final = "compute it with other operations"
WRITTEN: Final = WrittenApart.WRITTEN

# An operator's name; or (operation, its result, *its inputs) -> the value, of values that have
# `add(op, *others, **attributes)`, `each` for what works element by element, `images` for what has
# the channels first, and arithmetic (see `lab.onnx.graph.GraphValue`).
OnnxForm: TypeAlias = str | Callable[..., Any] | NotExported | WrittenApart


@dataclass(frozen=True)
class Sample:
    """A call on which tests try an operation: its gradients, on a device, in ONNX's runtime.

    Attributes:
        name: the public function, perhaps followed by the way in which it is called: "softmax
            first axis".
        call: (*tensors, *arrays) -> the result.
        shapes: of the tensors; None for one tensor of any shape, whose elements are independent.
        arrays: what else it gets, such as labels; floating point in the tensors' dtype. In all but
            parameters the first axis is the batch's.
        values: of the tensors, where the operation has a derivative: "any", "positive", "nonzero",
            "distinct" or "probability".
        parameters: how many of the tensors, the last ones, are parameters.
    """

    name: str
    call: Callable[..., Any]
    shapes: tuple[Shape, ...] | None = None
    arrays: tuple[Any, ...] = ()
    values: str = "any"
    parameters: int = 0

    @property
    def public(self) -> str:
        """The public function's name."""
        return self.name.partition(" ")[0]


@dataclass(frozen=True)
class Traits:
    """See the head of this file.

    Attributes:
        onnx: what computes it in an ONNX file, or that nothing does. A subclass has its own: it may
            compute something else.
        channels: of its result in PyTorch.
        samples: on which it is tested.
        tested_in: the file of its tests, if it cannot be called alone, as on ranks.
        products: (operation, its result, *its inputs) -> how many pairs of numbers it multiplies
            and adds up, if it multiplies matrices; `Module.summary` shows it.
    """

    onnx: OnnxForm
    channels: Channels = Channels.KEPT
    samples: tuple[Sample, ...] = ()
    tested_in: str = ""
    products: Callable[..., int] | None = None
