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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from nnmpi.backend.array import Array, namespace
from nnmpi.base.errors import CheckpointError, NnmpiError
from nnmpi.base.files import foreign, parse_json, write_atomically
from nnmpi.models.torch_layers import SAME, NamedWeight, layer_weights
from nnmpi.models.torch_order import flattened_images
from nnmpi.nn.linear import Linear
from nnmpi.nn.mode import observed
from nnmpi.nn.module import Module
from nnmpi.tensor.tensor import Tensor


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
        for weight in layer_weights(module, images.get(path)):
            named = weight.inside(path)
            # a layer has converted the arrays of modules within it before these are reached
            result.setdefault(named.name, named)
    return [result.get(name, NamedWeight(name, (name,), SAME)) for name in model.entries()]


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


def to_torch(model: Module, sample: Array) -> dict[str, Array]:
    """Return a model's values by PyTorch's names, in its layouts."""
    state = model.state()
    return {
        name: array
        for item in torch_weights(model, sample)
        for name, array in zip(item.theirs, item.conversion.write(state[item.name]), strict=True)
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
    missing = sorted(name for name in known - state.keys() if not _is_counter(name))
    unknown = sorted(state.keys() - known)
    if missing or unknown:
        raise CheckpointError(
            f"{source} does not fit the model: missing {missing or '-'}, unknown {unknown or '-'}"
        )
    result = dict[str, Array]()
    for weight in weights:
        arrays = [state[name] for name in weight.theirs if not _is_counter(name)]
        result[weight.name] = np.ascontiguousarray(weight.conversion.read(*arrays))
    return result


def _is_counter(name: str) -> bool:
    """Return whether a name is that of PyTorch's counter of batches, which nnmpi does not need."""
    return name.endswith("num_batches_tracked")


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


def read_array(file: Path, stored: Any, name: str, index: tuple[slice, ...] = ()) -> Array:
    """Return an array of an open safetensors file; bfloat16, which NumPy lacks, as float32.

    Args:
        index: of the part that is read, without the rest.
    """
    part = stored.get_slice(name)
    if part.get_dtype() != "BF16":
        return part[index] if index else stored.get_tensor(name)
    with file.open("rb") as content:  # the length of a JSON header, the header, the arrays
        size = int.from_bytes(content.read(8), "little")
        start, _ = parse_json(content.read(size))[name]["data_offsets"]
        shape = tuple(part.get_shape())
        if 0 in shape:  # which cannot be mapped
            return np.zeros(shape, "f4")[index]
        halves = np.memmap(content, "<u2", "r", offset=8 + size + start, shape=shape)[index]
    return (halves.astype("u4") << 16).view("f4")


def read_torch(file: Path) -> dict[str, Array]:
    """Return the arrays of a state_dict in safetensors.

    Raises:
        CheckpointError: when it cannot be read.
    """
    with open_arrays(file, CheckpointError) as stored:
        return {name: read_array(file, stored, name) for name in stored.keys()}  # noqa: SIM118  it is no mapping
