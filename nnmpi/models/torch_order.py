"""The order in which PyTorch has the elements that a model flattens.

nnmpi has the channels of images and sequences last, PyTorch has them first in most layers. So what
is flattened has another order there, and the rows of a linear layer behind it are others. Where
that is so is found on the tape of a forward pass: operations in a forward count as layers do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.base.errors import CheckpointError, is_own
from nnmpi.models.torch_layers import layer_weights
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import observed
from nnmpi.nn.module import Module
from nnmpi.nn.norm import LayerNorm
from nnmpi.ops.conv.convolution import Conv2dFunction, ConvTranspose2dFunction
from nnmpi.ops.linear import LinearFunction, TransposedLinearFunction
from nnmpi.ops.norm import GroupNormFunction, LayerNormFunction
from nnmpi.ops.recurrent import RecurrentFunction
from nnmpi.tensor.function import Elementwise, Function, enable_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.shape import Reshape, Transpose
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import Channels


def flattened_images(model: Module, sample: Array) -> dict[str, Shape]:
    """Return the shapes (height, width, channels) of images that linear layers read flattened.

    By the layers' names; of sequences (time, channels), also those that a LayerNorm of both axes
    reads.

    Args:
        model: the full model, with values.
        sample: (1, *sample_shape), an input.

    Raises:
        CheckpointError: when anything else depends on the order of a flattened image's elements, or
            features become an image: their order in PyTorch is another. When PyTorch's order of a
            sequence's or a parameter's axes is unknown.
    """
    if not model.parameters():
        return {}  # no layer has weights, and no array tells the library
    forward = _observe(model, sample)
    unclear = _unclear_parameters(model)
    images = dict[str, Shape]()
    for node in _operations(forward.results):
        edges, layer = _edges(node), forward.layers.get(node)
        _refuse_unclear(node, [unclear[leaf] for leaf in _weights_of(node) if leaf in unclear])

        if isinstance(layer, LayerNorm):
            if layer.weight.ndim == 2 and _is_channels_first(edges[0], 2):
                images[layer.path] = node.shape[1:]
            elif not _channels(edges[0]) and layer.weight in _unclear_of(layer):
                _refuse_unclear(node, [f"{layer.path}.weight"])

        read = {_image_behind(edge) for edge in edges} - {()}
        is_dense = isinstance(node, LinearFunction | RecurrentFunction)
        if is_dense and _is_partly_flat(edges[0]):
            _refuse(forward.describe(node), "reads a flattened image")
        elif read and isinstance(layer, Linear):
            (images[layer.path],) = read
        elif read and not _keeps_order(node, edges):
            _refuse(forward.describe(node), "reads a flattened image")
        elif not read and _makes_image(node):
            _refuse(forward.describe(node), "makes features an image")
    return images


def _refuse_unclear(node: Any, names: Sequence[str]) -> None:
    """Refuse an operation's parameters of these names, if there are any: see `_unclear_of`."""
    if names:
        raise CheckpointError(
            f"{names[0]} has axes of equal lengths, whose order in PyTorch may be another"
            f" than in {_operation(node)}; convert the weights yourself and call"
            " model.load_state, or make a Parameter the weight of a layer, such as nn.Linear"
        )


def _refuse(operation: str, what: str) -> None:
    raise CheckpointError(
        f"{operation} {what}, whose elements have another order in PyTorch; only a linear layer"
        " behind a flattened image can be converted"
    )


# ---- the forward pass, and the operations on its tape ----


@dataclass
class _Forward:
    """What a forward pass has left.

    Attributes:
        results: the operations that made the model's results.
        names: of the modules, by the operation that made a module's result.
        layers: the linear layers and LayerNorms, in the same way.
    """

    results: list[Function] = field(default_factory=list)
    names: dict[Any, str] = field(default_factory=dict)
    layers: dict[Any, Module] = field(default_factory=dict)

    def describe(self, node: Any) -> str:
        """Return the name of the module that an operation ends, or else the operation's."""
        return self.names.get(node) or _operation(node)


def _observe(model: Module, sample: Array) -> _Forward:
    """Pass a sample through a model, with gradients of all parameters."""
    forward = _Forward()

    def observe(module: Any, result: Any) -> None:
        node = getattr(result, "node", None)
        forward.names.setdefault(node, module.path)  # of modules within one another the inner one
        if isinstance(module, Linear | LayerNorm):
            forward.layers[node] = module

    parameters = model.parameters()
    x = namespace(parameters[0].data).asarray(sample)
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:  # which the tape would leave out
        parameter.requires_grad = True
    try:
        with enable_grad(), observed(observe):
            result = model(Tensor(x, requires_grad=x.dtype.kind == "f"))
    finally:
        for parameter in frozen:
            parameter.requires_grad = False
    results = result if isinstance(result, tuple | list) else (result,)
    nodes = (getattr(item, "node", None) for item in results)
    forward.results = [node for node in nodes if node is not None]
    return forward


def _operations(results: Sequence[Function]) -> Iterator[Any]:
    """Yield all operations behind results, each once."""
    seen, pending = {*results}, [*results]
    while pending:
        node = pending.pop()
        yield node
        for edge in _edges(node):
            if isinstance(edge, Function) and edge not in seen:
                seen.add(edge)
                pending.append(edge)


def _operation(node: Any) -> str:
    return type(node).__name__.removesuffix("Function")


def _channels_of(node: Any) -> Channels:
    """Return where PyTorch has the channels of a result; a user's operation passes them on."""
    traits = getattr(node, "traits", None)
    return Channels.KEPT if traits is None else traits.channels


def _edges(node: Any) -> tuple[Any, ...]:
    return node.edges or ()


def _reshaped(node: Any) -> Shape:
    """Return the shape that an operation gave another one; () of other operations."""
    return node.saved[0] if isinstance(node, Reshape) else ()


# ---- parameters of a user's own ----


def _unclear_parameters(model: Module) -> dict[Any, str]:
    """Return the parameters of a user's classes whose shapes do not show the order of axes."""
    result = dict[Any, str]()
    for path, module in model.named_modules():
        if is_own(type(module)):
            continue
        converted = {weight.name for weight in layer_weights(module)}
        for parameter, name in _unclear_of(module).items():
            if name not in converted:
                result[parameter] = f"{path}.{name}".strip(".")
    return result


def _unclear_of(module: Module) -> dict[Any, str]:
    """Return the names of a module's parameters with two axes of one length, above 1."""
    result = dict[Any, str]()
    for name, parameter in module._members(Parameter):
        lengths = [length for length in parameter.shape if length > 1]
        if len({*lengths}) < len(lengths):
            result[parameter] = name
    return result


def _weights_of(node: Any) -> Iterator[Any]:
    """Yield the leaves that an operation reads in an order of axes that PyTorch has otherwise."""
    pending: list[Any] = []
    if isinstance(node, TransposedLinearFunction):
        return  # it reads its weight as PyTorch does
    if isinstance(node, LinearFunction | Conv2dFunction | ConvTranspose2dFunction):
        pending = [_edges(node)[1]]
    elif isinstance(node, Elementwise) and "first" in _channels(node):
        pending = [edge for edge in _edges(node) if not isinstance(edge, Function)]
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, Function) and not (
            isinstance(item, Transpose) or _channels_of(item) is Channels.LAST
        ):
            pending += _edges(item)


# ---- images behind an operation ----


def _image_behind(node: Any) -> Shape:
    """Return the shape of the image that an operation's result is, flattened; () without one."""
    length = node.shape[-1] if isinstance(node, Function) else 0
    while isinstance(node, Elementwise | Reshape | GroupNormFunction):
        image = _reshaped(node)[1:]  # without the axis of the batch
        if len(image) >= 2:
            is_flat = prod(image) == length > image[-1]
            return image if is_flat and _is_channels_first(_edges(node)[0], len(image)) else ()
        node = next((edge for edge in _edges(node) if isinstance(edge, Function)), None)
    return ()


def _is_partly_flat(node: Any) -> bool:
    """Return whether channels and one side of a computed image became an axis together."""
    while isinstance(node, Elementwise | Reshape):
        before, source = _reshaped(node), _edges(node)[0]
        if len(before) >= 3 and prod(before[1:]) > node.shape[-1] > before[-1]:
            return "first" in _channels(source)
        node = source
    return False


def _keeps_order(node: Any, edges: tuple[Any, ...]) -> bool:
    """Return whether each element of the result is computed from the same element of an image."""
    return isinstance(node, Reshape) or (
        isinstance(node, Elementwise)
        and all(
            edge is None or _image_behind(edge) or edge.shape[-1:] in ((), (1,)) for edge in edges
        )
    )


def _makes_image(node: Any) -> bool:
    """Return whether an operation reads computed rows as images or sequences of channels."""
    is_norm = _channels_of(node) is Channels.NORMALIZED and len(node.shape) == 3
    if not is_norm and not (isinstance(node, Reshape) and len(node.shape) >= 4):
        return False
    while isinstance(node, Elementwise | Reshape | GroupNormFunction):
        before, source = _reshaped(node), _edges(node)[0]
        if before and node.shape[-1] != before[-1]:
            return len(before) == 2 and isinstance(source, Function) and _has_order(node.shape)
        node = source
    return False


def _has_order(shape: Shape) -> bool:
    """Return whether (batch, ..., channels) in another order of axes has another of elements."""
    return len(shape) >= 3 and shape[-1] > 1 and prod(shape[1:-1]) > 1


def _is_channels_first(node: Any, axes: int) -> bool:
    """Return whether PyTorch has (batch, channels, ...) where nnmpi has (batch, ..., channels).

    Args:
        node: the operation that made the array, or a model's input.
        axes: of a sample, 2 of sequences.

    Raises:
        CheckpointError: when only the program in PyTorch tells.
    """
    places = _channels(node)
    if len(places) > 1:
        raise CheckpointError(
            f"{_operation(node)}'s result comes from layers with the channels first and from layers"
            " with the channels last in PyTorch, so the order of its elements there is unknown;"
            " convert the layer that reads it yourself and call model.load_state"
        )
    return "first" in places if places else axes > 2


def _channels(node: Any) -> set[str]:
    """Return where PyTorch has the channels of an array: "first", "last", both if layers differ.

    Nothing of a model's input.
    """
    result, seen, pending = set[str](), set[Any](), [node]
    while pending:
        node = pending.pop()
        is_image = len(getattr(node, "shape", ())) >= 4
        if node in seen or not (isinstance(node, Function) and _has_order(node.shape)):
            continue
        seen.add(node)
        behind, before = _edges(node), _reshaped(node)
        channels = _channels_of(node)
        if channels in (Channels.FIRST, Channels.NORMALIZED):
            result.add("first")
            behind = behind if channels is Channels.NORMALIZED else ()
        elif channels is Channels.LAST:
            result.add("last")
            behind = behind if is_image else ()
        elif len(before) == 2:
            result.add("first" if is_image else "last")
            behind = ()
        elif (
            isinstance(node, Transpose)
            or (isinstance(node, LayerNormFunction) and node.saved[1].ndim == 1 and not is_image)
            or (before and node.shape[-1] != before[-1])
        ):
            result.add("last")
        pending += behind
    return result
