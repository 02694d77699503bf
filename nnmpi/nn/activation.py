"""Layers without parameters: activations, softmax, dropout, flattening, losses."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeAlias

from nnmpi.backend import activations
from nnmpi.backend.array import Shape, namespace
from nnmpi.backend.random import key_pair
from nnmpi.base.errors import ShapeError, UsageError, check_int, number
from nnmpi.base.words import refuse_words
from nnmpi.nn.mode import current, note_mask, warn_later
from nnmpi.nn.module import Constant, Module, Parameter
from nnmpi.nn.sharding import Reach
from nnmpi.ops.activation import (
    elu,
    gelu,
    leaky_relu,
    log_softmax,
    prelu,
    relu,
    selu,
    sigmoid,
    silu,
    softmax,
    softplus,
    tanh,
)
from nnmpi.ops.dropout import MaskKey, dropout
from nnmpi.ops.loss import (
    binary_cross_entropy,
    binary_nll,
    check_reduction,
    cross_entropy,
    huber,
    kl_div,
    mae,
    mse,
    nll,
)
from nnmpi.tensor.tensor import Tensor

__all__ = [
    "ELU",
    "GELU",
    "SELU",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout2d",
    "Flatten",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "LeakyReLU",
    "LogSoftmax",
    "MSELoss",
    "NLLLoss",
    "PReLU",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "activation",
]


class ActivationLayer(Module):
    """A layer that computes each element by itself; a subclass of this file is an `--activation`.

    Each subclass states its `reach` again: of one that does not nothing is known, see `own_reach`.

    Attributes:
        _form: what it computes. Its name is that of the option.
    """

    _form: ClassVar[activations.Activation]


class ReLU(ActivationLayer):
    """max(x, 0)"""

    reach = Reach.ELEMENT
    _form = activations.RELU
    forward = staticmethod(relu)


class LeakyReLU(ActivationLayer):
    """x where positive, negative_slope * x elsewhere."""

    reach = Reach.ELEMENT
    _form = activations.LEAKY_RELU

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its negative elements scaled."""
        return leaky_relu(x, self.negative_slope)


class PReLU(Module):
    """x where positive, a learned slope times x elsewhere: (..., channels), keeps the shape.

    Args:
        num_parameters: 1 for one slope, or the number of channels for one of each.
        init: the slopes' first value.

    Example:
        >>> layer = nn.PReLU().initialize(seed=0)
        >>> layer(np.float32([[-2, 3]])).numpy().tolist()
        [[-0.5, 3.0]]
    """

    reach = Reach.ELEMENT

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        shape = (check_int("PReLU's num_parameters", num_parameters),)
        self.weight = Parameter(shape, Constant(init))

    def input_features(self) -> int | None:
        """See `Module.input_features`."""
        return self.weight.size if self.weight.size > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return x with its negative elements scaled. See `ops.prelu`."""
        return prelu(x, self.weight)


class ELU(ActivationLayer):
    """x where positive, alpha (e^x - 1) elsewhere."""

    reach = Reach.ELEMENT
    _form = activations.ELU

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        """Return x, bent below 0."""
        return elu(x, self.alpha)


class Softplus(ActivationLayer):
    """log(1 + e^(beta x)) / beta; x itself where beta x is above the threshold."""

    reach = Reach.ELEMENT
    _form = activations.SOFTPLUS

    def __init__(self, beta: float = 1.0, threshold: float = 20.0) -> None:
        self.beta, self.threshold = beta, threshold

    def forward(self, x: Tensor) -> Tensor:
        """Return the smooth ReLU of x."""
        return softplus(x, self.beta, self.threshold)


class SELU(ActivationLayer):
    """1.0507 times ELU(1.67326), which keeps mean 0 and variance 1 from layer to layer."""

    reach = Reach.ELEMENT
    _form = activations.SELU
    forward = staticmethod(selu)


class GELU(ActivationLayer):
    """x Phi(x); approximate="tanh" gives the form of GPT-2."""

    reach = Reach.ELEMENT
    _form = activations.GELU

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Return x Phi(x)."""
        return gelu(x, self.approximate)


class SiLU(ActivationLayer):
    """x * sigmoid(x)"""

    reach = Reach.ELEMENT
    _form = activations.SILU
    forward = staticmethod(silu)


class Tanh(ActivationLayer):
    """The hyperbolic tangent."""

    reach = Reach.ELEMENT
    _form = activations.TANH
    forward = staticmethod(tanh)


class Sigmoid(ActivationLayer):
    """1 / (1 + e^-x)"""

    reach = Reach.ELEMENT
    _form = activations.SIGMOID
    forward = staticmethod(sigmoid)


class Softmax(Module):
    """e^x / sum(e^x) along an axis."""

    reach = Reach.ALL

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the softmax."""
        return softmax(x, self.dim)


class LogSoftmax(Softmax):
    """The logarithm of softmax along an axis, without overflow."""

    reach = Reach.ALL

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithm."""
        return log_softmax(x, self.dim)


class Flatten(Module):
    """(batch, ...) -> (batch, features)"""

    reach = Reach.ELEMENT

    def shape_after(self, shape: Shape) -> Shape:
        """See `Module.shape_after`."""
        return (prod(shape),)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with all axes but the first flattened into one."""
        return x.flatten()


ACTIVATIONS: Mapping[str, type[Module]] = MappingProxyType(
    {kind._form.name.replace("_", "-"): kind for kind in ActivationLayer.__subclasses__()}
)
"""The layers by the names of --activation."""

ActivationName: TypeAlias = Annotated[str, tuple(ACTIVATIONS)]


def activation(name: str) -> Module:
    """Return the activation layer of that name, one of `ACTIVATIONS`.

    Raises:
        UsageError: for another name.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"activation {name!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


class Dropout(Module):
    """Drops elements at random in training; returns x unchanged in evaluation.

    The mask is a function of the run's seed, the step, the layer's full name and the sample's index
    in the global batch (`nn.training` sets them). So every layout drops the same elements. A layer
    used twice in a pass drops the same elements both times, with a warning: make one layer per use.
    Passes with the same `step` have the same masks.

    Args:
        p: the probability that an element is dropped, in [0, 1).

    Example:
        >>> layer = nn.Dropout(0.5).initialize(seed=0)
        >>> x = np.ones((1, 4), "float32")
        >>> layer(x).numpy().tolist()  # only training drops
        [[1.0, 1.0, 1.0, 1.0]]
        >>> with nn.training(step=0):
        ...     sorted(set(layer(np.ones((9, 9), "float32")).numpy().ravel().tolist()))
        [0.0, 2.0]
    """

    reach = Reach.ELEMENT

    def __init__(self, p: float = 0.5) -> None:
        self.p = number("dropout's p", p, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or in training x with dropped elements."""
        if not current().training or self.p == 0:
            if self.p:
                warn_later(x)
            return x
        note_mask(self)
        return dropout(x, self.p, partial(mask_key, self.path))


class Dropout2d(Dropout):
    """Dropout of whole channels: (batch, ..., channels). See `Dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x, or in training x without some channels."""
        if x.ndim < 2:
            raise ShapeError(f"Dropout2d needs (batch, ..., channels), not {x.shape}")
        ones = namespace(x._data).ones((len(x), *(1,) * (x.ndim - 2), x.shape[-1]), x.dtype)
        return x * super().forward(Tensor(ones))


def mask_key(path: str) -> MaskKey:
    """Return the key of a layer's dropout stream and the first row of this rank.

    Passed to the operation as a function, since a compiled pass evaluates it again in each replay.
    """
    mode = current()
    return key_pair("dropout", mode.seed, mode.step, path), mode.first_row


class MSELoss(Module):
    """Mean squared error of outputs and targets; see `ops.mse`. Losses have PyTorch's names.

    Args:
        reduction: "mean", "sum" or "none".
        options: the operation's other arguments, by name.

    Raises:
        TypeError: for an argument that the operation does not have.
    """

    function: ClassVar[Callable[..., Tensor]] = staticmethod(mse)

    def __init__(self, reduction: str = "mean", **options: Any) -> None:
        check_reduction(reduction)
        known = signature(self.function).parameters
        refuse_words(type(self).__name__, [name for name in options if name not in known])
        self.options = {"reduction": reduction, **options}

    def forward(self, x: Tensor, target: Any) -> Tensor:
        """Return the loss."""
        return self.function(x, target, **self.options)


class L1Loss(MSELoss):
    """Called with outputs and targets; see `ops.mae`."""

    function = staticmethod(mae)


class BCEWithLogitsLoss(MSELoss):
    """Called with logits and targets in [0, 1]; see `ops.binary_cross_entropy`."""

    function = staticmethod(binary_cross_entropy)


class BCELoss(MSELoss):
    """Called with probabilities and targets in [0, 1]; see `ops.binary_nll`."""

    function = staticmethod(binary_nll)


class KLDivLoss(MSELoss):
    """Called with log-probabilities and targets; see `ops.kl_div`, also for the arguments."""

    function = staticmethod(kl_div)

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__("sum" if reduction == "batchmean" else reduction, log_target=log_target)
        self.options["reduction"] = reduction


class CrossEntropyLoss(MSELoss):
    """Called with logits and labels; see `ops.cross_entropy`, also for the arguments.

    Args:
        weight: (classes,), or None.
        reduction, options: as for `MSELoss`.
    """

    function = staticmethod(cross_entropy)

    def __init__(self, weight: Any = None, *, reduction: str = "mean", **options: Any) -> None:
        if isinstance(weight, str):
            raise UsageError(f"weight is {weight!r}; give reduction={weight!r} by its name")
        super().__init__(reduction, **options, **({} if weight is None else {"weight": weight}))


class NLLLoss(CrossEntropyLoss):
    """Called with log-probabilities and labels; see `ops.nll`, also for the arguments."""

    function = staticmethod(nll)  # type: ignore[assignment]


class HuberLoss(MSELoss):
    """Called with outputs and targets; see `ops.huber`, also for the arguments."""

    function = staticmethod(huber)
