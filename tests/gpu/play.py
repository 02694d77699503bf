"""What the checks on a device share: running one call on two backends, and saying how far apart the
results are.
"""

from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module

import numpy as np

from nnmpi import Tensor, use_precision
from nnmpi.backend.precision import low_dtype
from tests.harness.slow import MORE_PRECISIONS, once_more

FLOAT64, FLOAT32, TF32, BF16, FP16 = "float64", "float32", "tf32", "bf16", "fp16"
MODES = [
    FLOAT64,
    FLOAT32,
    BF16,
    *(once_more(mode, reason=MORE_PRECISIONS) for mode in (TF32, FP16)),
]

# The largest error of an element, as a share of the largest element of the reference in float64. A
# float has 53 bits, 24, 11 (TF32 and float16) or 8 (bfloat16); results are rounded some times, and
# long sums add up their errors' squares; an LSTM in TF32, whose steps round again, reaches 6.4e-3.
TOLERANCES = {FLOAT64: 1e-12, FLOAT32: 1e-5, TF32: 8e-3, BF16: 3e-2, FP16: 4e-3}


def precise(mode):
    """Return the context of a mode; float64 needs none."""
    return nullcontext() if mode in (FLOAT64, FLOAT32) else use_precision(mode)


def rounded(values, mode):
    """Return float64 values that the mode's dtype has exactly."""
    low = low_dtype(mode) if mode in (BF16, FP16) else None
    dtype = low if low is not None else np.dtype(FLOAT64 if mode == FLOAT64 else FLOAT32)
    return np.asarray(values, np.float64).astype(dtype).astype(np.float64)


def dtypes(sample, mode):
    """Return the dtype of each input: parameters are float32 whatever flows between layers."""
    wide = np.dtype(FLOAT64 if mode == FLOAT64 else FLOAT32)
    low = (low_dtype(mode) if mode in (BF16, FP16) else None) or wide
    count = len(sample.inputs) - sample.parameters
    return [low] * count + [wide] * sample.parameters


def call(sample, backend, kinds):
    """Return the result of a call and its gradients, in host memory as float64, by name."""
    leaves = [
        Tensor(backend.asarray(np.asarray(values).astype(kind)), requires_grad=True)
        for values, kind in zip(sample.inputs, kinds, strict=True)
    ]
    fixed = [
        backend.asarray(
            np.asarray(values).astype(kinds[0]) if number < sample.floats else np.asarray(values)
        )
        for number, values in enumerate(sample.fixed)
    ]
    result = sample.function(*leaves, *fixed)
    matches = {"result": result.data}
    if result.requires_grad:
        seed = np.random.default_rng(5).uniform(-1, 1, result.shape)
        # a number that every mode has
        result.backward(backend.asarray(rounded(seed, BF16).astype(result.dtype)))
        matches |= {f"gradient {number}": leaf.grad for number, leaf in enumerate(leaves)}
    return {
        name: np.asarray(backend.to_host(value)).astype(np.float64)
        for name, value in matches.items()
    }


def differences(found, right, tolerance, least=0.0):
    """Return in words which arrays are further apart than the tolerance, as a share of the right
    one's largest.

    Args:
        least: what the largest counts for at least, where terms may cancel.
    """
    words = []
    for name, expected in right.items():
        got = found[name]
        if got.shape != expected.shape:
            words.append(f"{name} has shape {got.shape}, not {expected.shape}")
            continue
        largest = float(np.abs(expected).max(initial=least)) or 1.0
        error = float(np.abs(got - expected).max(initial=0)) / largest
        if not error <= tolerance:
            words.append(f"{name} is off by {error:.2g} of the largest, more than {tolerance:g}")
    return words


def exact(sample, mode):
    """Return the sample with inputs that the mode has exactly, so that only the computation
    rounds.
    """
    fixed = [
        rounded(x, mode) if number < sample.floats else x for number, x in enumerate(sample.fixed)
    ]
    return replace(sample, inputs=[rounded(x, mode) for x in sample.inputs], fixed=fixed)


def no_waiting(refuse=True):
    """Refuse hidden synchronization inside the block, or allow it again, by CuPy's own switch."""
    return import_module("cupyx").allow_synchronize(not refuse)
