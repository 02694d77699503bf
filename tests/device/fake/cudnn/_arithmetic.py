"""What the operations compute, in cuDNN's axes: images (n, c, h, w), kernels (o, c / groups, kh,
kw), heads (batch, heads, time, features).
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided

Shape = tuple[int, ...]


def result_shape(name, given, results, options):
    """Return the shapes of the results; those that a convolution's gradients have are checked
    against what they are gradients of.
    """
    if name == "sdpa":
        q, v = given["q"], given["v"]
        return [(*q[:3], v[3]), (*q[:3], 1)][: len(results)]
    if name == "sdpa_backward":
        assert given["o"] == given["dO"] == (*given["q"][:3], given["v"][3])
        assert given["stats"] == (*given["q"][:3], 1)
        return [given["q"], given["k"], given["v"]]
    a, b, (result,) = given["a"], given["b"], results
    image = result if name == "conv_dgrad" else a
    kernel = result if name == "conv_wgrad" else b
    out = {"conv_fprop": result, "conv_dgrad": a, "conv_wgrad": b}[name]
    assert image[1] % kernel[1] == 0
    axes = zip(image[2:], kernel[2:], *options.values(), strict=True)
    sizes = [
        (size + 2 * pad - apart * (k - 1) - 1) // step + 1 for size, k, pad, step, apart in axes
    ]
    expected = (image[0], kernel[0], *sizes)
    return [result] if out == expected else [(-1,)]


def _windows(x, kernel, out, options):
    """Return images with a border, and their windows (n, c, out_h, out_w, kh, kw) in them."""
    (top, left), (down, across), (apart, beside) = options.values()
    padded = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
    image, channel, row, pixel = padded.strides
    return padded, as_strided(
        padded,
        (*x.shape[:2], *out, *kernel),
        (image, channel, row * down, pixel * across, row * apart, pixel * beside),
    )


def _grouped(x, axis, groups):
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def _fprop(places, options, a, b):
    groups = a.shape[1] // b.shape[1]
    _, seen = _windows(a, b.shape[2:], places[0].shape[2:], options)
    result = np.einsum(
        "ngchwrs,gocrs->ngohw", _grouped(seen, 1, groups), _grouped(b, 0, groups), optimize=True
    )
    return [result.reshape(places[0].shape)]


def _dgrad(places, options, a, b):
    shape, (top, left) = places[0].shape, options["padding"]
    groups = shape[1] // b.shape[1]
    padded, seen = _windows(np.zeros(shape, a.dtype), b.shape[2:], a.shape[2:], options)
    parts = np.einsum("ngohw,gocrs->ngchwrs", _grouped(a, 1, groups), _grouped(b, 0, groups))
    parts = parts.reshape(seen.shape)
    for i, j in np.ndindex(*b.shape[2:]):
        seen[..., i, j] += parts[..., i, j]
    return [padded[:, :, top : top + shape[2], left : left + shape[3]]]


def _wgrad(places, options, a, b):
    shape = places[0].shape
    groups = a.shape[1] // shape[1]
    _, seen = _windows(a, shape[2:], b.shape[2:], options)
    result = np.einsum(
        "ngchwrs,ngohw->gocrs", _grouped(seen, 1, groups), _grouped(b, 1, groups), optimize=True
    )
    return [result.reshape(shape)]


def _scores(q, k, attn_scale, shift):
    scores = attn_scale * (q @ k.swapaxes(2, 3))
    if shift is not None:
        scores[..., ~np.tri(*scores.shape[2:], shift, dtype=bool)] = -np.inf
    return scores


def _sdpa(places, options, q, k, v):
    scores = _scores(q, k, **options)
    top = scores.max(3, keepdims=True)
    powers = np.exp(scores - top)
    total = powers.sum(3, keepdims=True)
    return [powers @ v / total, top + np.log(total)][: len(places)]


def _sdpa_backward(places, options, q, k, v, o, dO, stats):
    p = np.exp(_scores(q, k, **options) - stats)
    d = p * (dO @ v.swapaxes(2, 3) - (dO * o).sum(3, keepdims=True)) * options["attn_scale"]
    return [d @ k, d.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dO]


COMPUTE = {
    "conv_fprop": _fprop,
    "conv_dgrad": _dgrad,
    "conv_wgrad": _wgrad,
    "sdpa": _sdpa,
    "sdpa_backward": _sdpa_backward,
}
