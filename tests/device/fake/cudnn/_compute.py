"""Convolutions by loops over the kernel's places, read from and written to addresses of the fake device."""

from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
from cupy._address import bytes_at
from cupy.cuda.memory import base_of

from cudnn._handle import Handle
from cudnn._tensor import Tensor

ALIGNMENT = 16


def run(
    tensors: list[Tensor], addresses: dict[int, int], workspace: int, scratch: int, handle: Handle, tf32: bool
) -> None:
    """Compute a graph's output.

    Args:
        tensors: the graph's; the last one is the output.
        addresses: by the number of each tensor that is not virtual.
        workspace: address of so many bytes.
        handle: whose stream must be the current one, or the results would come too late or too early.
        tf32: whether inputs are rounded to ten bits of their fraction.
    """
    if handle.backend_handle is None or handle.stream != cupy.cuda.get_current_stream().ptr:
        raise RuntimeError("the handle's stream is not the current one")
    given = {each.uid for each in tensors if not each.virtual}
    if set(addresses) != given:
        raise ValueError(f"the variant pack has buffers for {sorted(addresses)}, the graph has tensors {sorted(given)}")
    taken = [memory(workspace, scratch)]
    taken[0][...] = 0xFF  # a kernel may leave anything there
    values: dict[int, Any] = {}
    for each in tensors[:-1]:
        if each.source is None:
            x = array(each, addresses[each.uid]).astype(np.float64)
            values[each.uid] = to_tf32(x) if tf32 else x
        else:
            values[each.uid] = apply(each, values, None)
    out = array(tensors[-1], addresses[tensors[-1].uid])
    result = apply(tensors[-1], values, out.shape)
    if result.shape != out.shape:
        raise ValueError(f"the result is {result.shape}, and the output said to be {out.shape}")
    out[...] = result.astype(np.float32) if out.dtype.itemsize == 2 else result


def memory(address: int, size: int) -> Any:
    """Return bytes of the fake device."""
    if type(address) is not int:
        raise TypeError(f"the double wants addresses as numbers of Python, not {type(address).__name__}")
    if address % ALIGNMENT:
        raise RuntimeError(f"address {address:#x} is no multiple of {ALIGNMENT}")
    if base_of(address, size) is None:
        raise RuntimeError(f"{size} bytes at {address:#x} are not memory of the device")
    return bytes_at(address, size)


def array(tensor: Tensor, address: int) -> Any:
    """Return a tensor's memory as an array (n, c, h, w)."""
    dtype = dtype_of(tensor.data_type.name)
    assert tensor.dim is not None
    n, c, h, w = tensor.dim
    flat = memory(address, n * c * h * w * dtype.itemsize).view(dtype)
    return flat.reshape(n, h, w, c).transpose(0, 3, 1, 2)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for a type of cuDNN's."""
    if name == "BFLOAT16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"HALF": "float16", "FLOAT": "float32"}[name])


def to_tf32(x: Any) -> Any:
    """Return values rounded to ten bits of their fraction."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def apply(tensor: Tensor, values: dict[int, Any], shape: tuple[int, ...] | None) -> Any:
    """Return what a tensor's operation gives, in float64.

    Args:
        shape: of the output, which gradients are told and do not know.
    """
    assert tensor.source is not None
    name, inputs, options = tensor.source
    arrays = [values[each.uid] for each in inputs]
    if name == "relu":
        return np.maximum(arrays[0], 0)
    if name == "bias":
        return arrays[0] + arrays[1]
    if options["pre_padding"] != options["post_padding"]:
        raise ValueError("the double wants the same border on both sides")
    if name == "conv_fprop":
        x, w = arrays
        size = [
            (x.shape[a + 2] + 2 * p - d * (w.shape[a + 2] - 1) - 1) // s + 1
            for a, (p, s, d) in enumerate(
                zip(options["pre_padding"], options["stride"], options["dilation"], strict=True)
            )
        ]
        y = np.zeros((x.shape[0], w.shape[0], *size))
        for seen, place, xs, ys in taps(x, w.shape, size, options):
            y[:, ys] += np.einsum("nchw,oc->nohw", xs[seen], w[ys, :, place[0], place[1]])
        return y
    assert shape is not None
    return gradient(name, arrays, shape, options)


def gradient(name: str, arrays: list[Any], shape: tuple[int, ...], options: dict[str, Any]) -> Any:
    """Return the gradient of images ("conv_dgrad") or of kernels ("conv_wgrad") of this shape."""
    result = np.zeros(shape)
    if name == "conv_dgrad":
        dy, w = arrays
        rows, columns = options["pre_padding"]
        wide = np.zeros((*shape[:2], shape[2] + 2 * rows, shape[3] + 2 * columns))
        inner = wide[:, :, rows : rows + shape[2], columns : columns + shape[3]]
        for seen, place, xs, ys in taps(wide, w.shape, dy.shape[2:], options, bordered=True):
            xs[seen] += np.einsum("nohw,oc->nchw", dy[:, ys], w[ys, :, place[0], place[1]])
        result[...] = inner
        return result
    x, dy = arrays
    for seen, place, xs, ys in taps(x, shape, dy.shape[2:], options):
        result[ys, :, place[0], place[1]] = np.einsum("nchw,nohw->oc", xs[seen], dy[:, ys])
    return result


def taps(
    x: Any, kernels: tuple[int, ...], size: Any, options: dict[str, Any], bordered: bool = False
) -> Iterator[tuple[Any, tuple[int, int], Any, slice]]:
    """Yield, per place in the kernel and group: what windows see there, the place, the group's images and outputs."""
    rows, columns = options["pre_padding"]
    wide = x if bordered else np.pad(x, ((0, 0), (0, 0), (rows, rows), (columns, columns)))
    o, c, kh, kw = kernels
    groups = x.shape[1] // c
    (sh, sw), (dh, dw) = options["stride"], options["dilation"]
    for g in range(groups):
        images, outputs = wide[:, g * c : (g + 1) * c], slice(g * (o // groups), (g + 1) * (o // groups))
        for i, j in np.ndindex(kh, kw):
            seen = (
                slice(None),
                slice(None),
                slice(i * dh, i * dh + (size[0] - 1) * sh + 1, sh),
                slice(j * dw, j * dw + (size[1] - 1) * sw + 1, sw),
            )
            yield seen, (i, j), images, outputs
