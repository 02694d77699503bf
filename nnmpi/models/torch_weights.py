"""PyTorch's names and layouts for any model's weights: a state_dict as safetensors.

    layer               nnmpi                                 PyTorch
    Linear              (in, out)                             (out, in)
      after Flatten     rows by (h, w, c) or (t, c)           columns by (c, h, w) or (c, t)
    MultiheadAttention  qkv, proj                             in_proj_weight, in_proj_bias, out_proj
    Conv2d              (kh, kw, in, out)                     (out, in, kh, kw)
    Conv1d              (1, kernel, in, out)                  (out, in, kernel)
    Conv3d              (kd, kh, kw, in, out)                 (out, in, kd, kh, kw)
    LayerNorm of images (h, w, c)                             (c, h, w)
    BatchNorm           running_variance                      running_var, num_batches_tracked
    GRU                 layers.0.weight, bias, bias_n         weight_ih_l0, two biases
    LSTM                layers.0.weight, i f o g, one bias    weight_ih_l0, i f g o, two biases
    RNN                 layers.0.weight, one bias             weight_ih_l0, two biases
    cells               weight ...                            weight_ih ...
    others              equal

A module's name is the path of attributes in both. So a PyTorch model of the same structure loads
the file without conversion.

The order of the axes of sequences (batch, time, channels) is the layers': PyTorch has the channels
in front of time in convolutions, pools and norms of channels, and last in all others.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from nnmpi.backend.array import Array, Shape, namespace
from nnmpi.base.errors import CheckpointError, NnmpiError, is_own
from nnmpi.base.files import foreign, parse_json, write_atomically
from nnmpi.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose2d
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import observed
from nnmpi.nn.module import Module
from nnmpi.nn.norm import BatchNorm, LayerNorm
from nnmpi.nn.recurrent import (
    GRU,
    LSTM,
    GRUCell,
    GRULayer,
    LSTMCell,
    LSTMDirection,
    RNNCell,
)
from nnmpi.nn.transformer import MultiheadAttention
from nnmpi.ops.attention import Attention, PackedAttention
from nnmpi.ops.conv.convolution import Conv2dFunction, ConvTranspose2dFunction
from nnmpi.ops.embedding import EmbeddingFunction
from nnmpi.ops.linear import LinearFunction, TransposedLinearFunction
from nnmpi.ops.norm import BatchNormFunction, GroupNormFunction, LayerNormFunction
from nnmpi.ops.pool import Pool2dFunction
from nnmpi.ops.recurrent import RecurrentFunction
from nnmpi.tensor.function import Elementwise, Function, enable_grad
from nnmpi.tensor.parameter import Parameter
from nnmpi.tensor.reduce import MatMul
from nnmpi.tensor.shape import Reshape, Transpose
from nnmpi.tensor.tensor import Tensor

Write: TypeAlias = Callable[[Array], tuple[Array, ...]]
Read: TypeAlias = Callable[..., Array]

# Operations by where PyTorch has the channels of their results; the others pass them on.
CHANNEL_NORMS = BatchNormFunction, GroupNormFunction
CHANNELS_FIRST = Conv2dFunction, ConvTranspose2dFunction, Pool2dFunction, *CHANNEL_NORMS
CHANNELS_LAST = (
    *(LinearFunction, MatMul, RecurrentFunction),
    *(Attention, PackedAttention, EmbeddingFunction),
)


@dataclass(frozen=True)
class NamedWeight:
    """An array of a model, and its conversion to PyTorch and back.

    Attributes:
        name: in nnmpi.
        theirs: the names in PyTorch, of one or more arrays.
        write: converts to PyTorch's arrays, one per name.
        read: converts PyTorch's arrays back.
    """

    name: str
    theirs: tuple[str, ...]
    write: Write
    read: Read


def torch_weights(model: Module, sample: Array) -> list[NamedWeight]:
    """Return the conversion of each parameter and buffer of a model to a PyTorch state_dict.

    Args:
        model: the full model, with values.
        sample: (1, *sample_shape), an input. It passes through the model once, to detect linear
            layers that read flattened images.
    """
    images = flattened_images(model, sample)
    result: dict[str, NamedWeight] = {}
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        for name, theirs, write, read in _of_module(module, images.get(path)):
            item = NamedWeight(inside + name, tuple(inside + name for name in theirs), write, read)
            result.setdefault(item.name, item)
    return [
        result.get(name, NamedWeight(name, (name,), lambda x: (x,), lambda x: x))
        for name in model.entries()
    ]


def flattened_images(model: Module, sample: Array) -> dict[str, Shape]:
    """Return the shapes (height, width, channels) of images that linear layers read flattened.

    By the layers' names; of sequences (time, channels), also those that a LayerNorm of both axes
    reads. They are found on the tape, so that operations in a forward count as layers do.

    Raises:
        CheckpointError: when anything else depends on the order of a flattened image's elements, or
            features become an image: their order in PyTorch is another. When PyTorch's order of a
            sequence's or a parameter's axes is unknown.
    """
    matches, names = dict[str, Shape](), dict[Any, str]()
    layers = dict[Any, Module]()

    def observe(module: Any, result: Any) -> None:
        node = getattr(result, "node", None)
        names.setdefault(node, module.path)
        if isinstance(module, Linear | LayerNorm):
            layers[node] = module

    parameters = model.parameters()
    if not parameters:
        return matches  # no layer has weights, and no array tells the library
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
    pending = [getattr(item, "node", None) for item in results]
    seen, bare = {None, *pending}, _bare_parameters(model)
    while pending:
        node: Any = pending.pop()
        edges: tuple[Any, ...] = () if node is None else _edges(node)
        more = {edge for edge in edges if isinstance(edge, Function)} - seen
        pending, seen = [*pending, *more], seen | more
        layer = layers.get(node)
        unknown = [bare[item] for item in _weights_of(node) if item in bare]
        if isinstance(layer, LayerNorm):
            if layer.weight.ndim == 2 and _is_channels_first(edges[0], 2):
                matches[layer.path] = node.shape[1:]
            elif not _channels(edges[0]) and layer.weight in _unclear(layer):
                unknown.append(f"{layer.path}.weight")
            layer = None
        if unknown:
            raise CheckpointError(
                f"{unknown[0]} has axes of equal lengths, whose order in PyTorch may be another"
                f" than in {_operation(node)}; convert the weights yourself and call"
                " model.load_state, or make a Parameter the weight of a layer, such as nn.Linear"
            )
        images = {_image_behind(edge) for edge in edges} - {()}
        if isinstance(node, LinearFunction | RecurrentFunction) and _is_partly_flat(edges[0]):
            images, layer = {node.shape}, None
        if images and layer:
            (matches[layer.path],) = images
        elif (images and not _keeps_order(node, edges)) or (not images and _makes_image(node)):
            what = names.get(node) or _operation(node)
            raise CheckpointError(
                f"{what} {'reads a flattened image' if images else 'makes features an image'},"
                " whose elements have another order in PyTorch; only a linear layer behind a"
                " flattened image can be converted"
            )
    return matches


def _operation(node: Any) -> str:
    return type(node).__name__.removesuffix("Function")


def _bare_parameters(model: Module) -> dict[Any, str]:
    """Return the parameters of a user's classes whose shapes do not show the order of axes."""
    result = dict[Any, str]()
    for path, module in model.named_modules():
        known = {name for name, *_ in _of_module(module, None)}
        for item, name in _unclear(module).items():
            if name not in known and not is_own(type(module)):
                result[item] = f"{path}.{name}".strip(".")
    return result


def _unclear(module: Module) -> dict[Any, str]:
    """Return the names of a module's parameters with two axes of one length, above 1."""
    sides = {
        (item, name): [length for length in item.shape if length > 1]
        for name, item in module._members(Parameter)
    }
    return dict(pair for pair, lengths in sides.items() if len({*lengths}) < len(lengths))


def _weights_of(node: Any) -> Iterator[Any]:
    """Yield the leaves that an operation reads in an order of axes that PyTorch has otherwise."""
    pending: list[Any] = []
    if isinstance(node, LinearFunction | Conv2dFunction | ConvTranspose2dFunction):
        pending = [_edges(node)[1]] * (not isinstance(node, TransposedLinearFunction))
    elif isinstance(node, Elementwise) and "first" in _channels(node):
        pending = [edge for edge in _edges(node) if not isinstance(edge, Function)]
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, Function) and not isinstance(item, (Transpose, *CHANNELS_LAST)):
            pending += _edges(item)


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
    is_norm = isinstance(node, CHANNEL_NORMS) and len(node.shape) == 3
    if not is_norm and not (isinstance(node, Reshape) and len(node.shape) >= 4):
        return False
    while isinstance(node, Elementwise | Reshape | GroupNormFunction):
        before, source = _reshaped(node), _edges(node)[0]
        if before and node.shape[-1] != before[-1]:
            return len(before) == 2 and isinstance(source, Function) and _has_order(node.shape)
        node = source
    return False


def _edges(node: Any) -> tuple[Any, ...]:
    return node.edges or ()


def _reshaped(node: Any) -> Shape:
    """Return the shape that an operation gave another one; () of other operations."""
    return node.saved[0] if isinstance(node, Reshape) else ()


def last_linear(model: Module, sample: Array) -> str | None:
    """Return the name of the layer with weight and bias whose result is the model's, or None.

    Args:
        model, sample: see `torch_weights`.
    """
    results = list[tuple[Any, str]]()

    def observe(module: Any, result: Any) -> None:
        if isinstance(module, Linear) and module.bias is not None:
            results.append((result, module.path))

    with observed(observe):
        last = model(Tensor(namespace(model.parameters()[0].data).asarray(sample)))
    return next((path for result, path in results if result is last), None)


def _image_behind(node: Any) -> Shape:
    """Return the shape of the image that an operation's result is, flattened; () without one."""
    size = node.shape[-1] if isinstance(node, Function) else 0
    while isinstance(node, Elementwise | Reshape | GroupNormFunction):
        edges, (_, *image) = _edges(node), _reshaped(node) or (0,)
        if len(image) >= 2:
            is_flat = prod(image) == size > image[-1]
            return tuple(image) if is_flat and _is_channels_first(edges[0], len(image)) else ()
        node = next((edge for edge in edges if isinstance(edge, Function)), None)
    return ()


def _is_partly_flat(node: Any) -> bool:
    """Return whether channels and one side of a computed image became an axis together."""
    while isinstance(node, Elementwise | Reshape):
        before, source = _reshaped(node), _edges(node)[0]
        if len(before) >= 3 and prod(before[1:]) > node.shape[-1] > before[-1]:
            return "first" in _channels(source)
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
        if isinstance(node, CHANNELS_FIRST):
            result.add("first")
            behind = behind if isinstance(node, CHANNEL_NORMS) else ()
        elif isinstance(node, CHANNELS_LAST):
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


def to_torch(model: Module, sample: Array) -> dict[str, Array]:
    """Return a model's values by PyTorch's names, in its layouts."""
    state = model.state()
    return {
        name: array
        for item in torch_weights(model, sample)
        for name, array in zip(item.theirs, item.write(state[item.name]), strict=True)
    }


def from_torch(
    weights: list[NamedWeight], state: Mapping[str, Array], source: object = "the state"
) -> dict[str, Array]:
    """Convert PyTorch's arrays to nnmpi's names and layouts.

    Args:
        weights: of the model, see `torch_weights`.
        state: arrays by PyTorch's names.
        source: the origin of the arrays, for the error.

    Raises:
        CheckpointError: for missing or unknown names.
    """
    known = {name for weight in weights for name in weight.theirs}
    counted = "num_batches_tracked"  # PyTorch's counter of batches, which nnmpi does not need
    missing = sorted(name for name in known - state.keys() if not name.endswith(counted))
    unknown = sorted(state.keys() - known)
    if missing or unknown:
        raise CheckpointError(
            f"{source} does not fit the model: missing {missing or '-'}, unknown {unknown or '-'}"
        )
    return {
        weight.name: np.ascontiguousarray(
            weight.read(*(state[x] for x in weight.theirs if not x.endswith(counted)))
        )
        for weight in weights
    }


def write_torch(
    file: Path, model: Module, sample: Array, metadata: Mapping[str, str] | None = None
) -> int:
    """Write a model's values as a PyTorch state_dict, and return the number of arrays.

    Args:
        file: `safetensors.torch.load_file` reads it.
        model, sample: see `torch_weights`.
        metadata: texts by name, stored in the file's header.

    Raises:
        OSError: when it cannot be written.
    """
    arrays = to_torch(model, sample)
    save_arrays(file, arrays, metadata)
    return len(arrays)


def save_arrays(
    file: Path,
    arrays: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    root: Path | None = None,
) -> None:
    """Write arrays as a PyTorch state_dict in safetensors, atomically and without pickle.

    Args:
        file, root: see `files.write_atomically`.
        arrays, metadata: by name.
    """
    # safetensors writes arrays in Fortran order scrambled
    in_order = {
        name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()
    }
    write_atomically(file, save(in_order, {**(metadata or {}), "format": "pt"}), root)


@contextmanager
def open_arrays(file: Path, kind: type[NnmpiError]) -> Iterator[Any]:
    """Open the arrays of a safetensors file.

    Raises:
        NnmpiError: of this kind, when it cannot be read.
    """
    with foreign(file, kind, "cannot be read as safetensors"), safe_open(file, "numpy") as stored:
        yield stored


def read_array(file: Path, stored: Any, name: str) -> Array:
    """Return an array of an open safetensors file; bfloat16, which NumPy lacks, as float32."""
    part = stored.get_slice(name)
    if part.get_dtype() != "BF16":
        return stored.get_tensor(name)
    with file.open("rb") as content:  # the length of a JSON header, the header, the arrays
        size = int.from_bytes(content.read(8), "little")
        start, stop = parse_json(content.read(size))[name]["data_offsets"]
        content.seek(8 + size + start)
        halves = np.frombuffer(content.read(stop - start), "<u2")
    return (halves.astype("u4") << 16).view("f4").reshape(part.get_shape())


def read_torch(file: Path) -> dict[str, Array]:
    """Return the arrays of a state_dict in safetensors.

    Raises:
        CheckpointError: when it cannot be read.
    """
    with open_arrays(file, CheckpointError) as stored:
        return {name: read_array(file, stored, name) for name in stored.keys()}  # noqa: SIM118  it is no mapping


def _of_module(
    module: Module, image: Shape | None
) -> Iterator[tuple[str, tuple[str, ...], Write, Read]]:
    """Yield a module's arrays that PyTorch names or lays out differently.

    The tuples are the attributes of `NamedWeight`, with names relative to the module.
    """
    if isinstance(module, Linear):
        yield "weight", ("weight",), partial(_linear, image), partial(_linear_back, image)
    elif isinstance(module, Conv1d):
        yield (
            "weight",
            ("weight",),
            lambda x: (x[0].transpose(2, 1, 0),),
            lambda x: x.transpose(2, 1, 0)[None],
        )
    elif isinstance(module, Conv2d | ConvTranspose2d | Conv3d):
        yield (
            "weight",
            ("weight",),
            lambda x: (x.transpose(-1, -2, *range(x.ndim - 2)),),
            lambda x: x.transpose(*range(2, x.ndim), 1, 0),
        )
    elif isinstance(module, LayerNorm) and (module.weight.ndim > 2 or image):
        for name in ("weight", "bias"):
            yield name, (name,), lambda x: (np.moveaxis(x, -1, 0),), lambda x: np.moveaxis(x, 0, -1)
    elif isinstance(module, BatchNorm):
        names = ("running_var", "num_batches_tracked")
        yield "running_variance", names, lambda x: (x, np.zeros((), np.int64)), lambda x: x
    elif isinstance(module, MultiheadAttention):
        for ours, start in (("qkv", "in_proj_"), ("proj", "out_proj.")):
            yield f"{ours}.weight", (f"{start}weight",), lambda x: (x.T,), lambda x: x.T
            yield f"{ours}.bias", (f"{start}bias",), lambda x: (x,), lambda x: x
    elif isinstance(module, GRU | LSTM):
        for number, inner in enumerate(module.layers):
            layer, reverse = divmod(number, getattr(module, "directions", 1))
            end = f"_l{layer}{'_reverse' * reverse}"
            for name, plain, write, read in _recurrent(inner):
                theirs = tuple(item + end for item in plain)
                yield f"layers.{number}.{name}", theirs, write, read
    elif isinstance(module, GRUCell | LSTMCell | RNNCell):
        yield from _recurrent(module)


def _recurrent(layer: Module) -> Iterator[tuple[str, tuple[str, ...], Write, Read]]:
    """Yield the arrays of a recurrent layer in one direction, or of a cell; see `_of_module`."""
    is_lstm, is_gru = isinstance(layer, LSTMDirection), isinstance(layer, GRULayer)
    gates: Callable[[Array], Array] = _gates if is_lstm else lambda x: x
    for name, weight in (("weight", "weight_ih"), ("recurrent", "weight_hh")):
        yield name, (weight,), lambda x: (gates(x.T),), lambda x: gates(x).T
    ih, hh = "bias_ih", "bias_hh"
    read = _first_gates if is_gru else lambda x, more: gates(x + more)
    yield "bias", (ih, hh), lambda x: (gates(x), np.zeros_like(x)), read
    if is_gru:
        yield "bias_n", (hh,), lambda x: (np.r_[x * 0, x * 0, x],), lambda x: x[2 * len(x) // 3 :]


def _linear(image: Shape | None, x: Array) -> tuple[Array, ...]:
    if image is None:
        return (x.T,)
    axes = (-1, -2, *range(len(image) - 1))
    return (x.reshape(*image, -1).transpose(axes).reshape(x.shape[1], -1),)


def _linear_back(image: Shape | None, x: Array) -> Array:
    if image is None:
        return x.T
    *sides, channels = image
    axes = (*range(2, len(image) + 1), 1, 0)
    return x.reshape(-1, channels, *sides).transpose(axes).reshape(x.shape[1], -1)


def _first_gates(ih: Array, hh: Array) -> Array:
    """Return a GRU's bias: the sum of PyTorch's two for r and z.

    For n they differ, since r multiplies the second one alone (`bias_n`).
    """
    return ih + np.where(np.arange(len(hh)) < 2 * len(hh) // 3, hh, 0)


def _gates(x: Array) -> Array:
    """Exchange the last two gates of rows (4 * features, ...): i f o g <-> i f g o."""
    i, f, o, g = np.split(x, 4)
    return np.concatenate((i, f, g, o))
