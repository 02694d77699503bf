"""Every source goes through CUDA's run-time compiler, as CuPy calls it, for devices of three
generations; no driver.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from nnmpi.backend import activations, plain, printed
from nnmpi.backend.cuda import kernels, launch
from nnmpi.backend.cuda.rows import RowKernel
from nnmpi.backend.trace import CELL, NUMBER, ROW, VECTOR
from nnmpi.ops import activation
from nnmpi.optim import adaptive
from tests.backend.cuda import nvrtc
from tests.harness.slow import COMPILER

FOLDER = Path(launch.__file__).parent
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.cu"))
# What CuPy adds to the options.
CUPY = ("--device-as-default-execution-space", "-ftz=true")
SLOW = pytest.mark.slow(COMPILER)
KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')
PLAIN = ("float32", "float64", "float16", "bfloat16")

# Families in which P is another dtype than T where both are 16 bits wide, or of its own.
PAIRS = [(family, dtype, dtype) for family in FAMILIES for dtype in PLAIN]
PAIRS += [("copy", "float32", "bfloat16"), ("copy", "float64", "float16")]
PAIRS += [
    (family, dtype, "float32")
    for family in ("copy", "depthwise", "softmax", "norm", "embedding")
    for dtype in ("float16", "bfloat16")
]

# What reads and writes 16 bytes at a time where it can.
PACKED = {
    "copy",
    "softmax_warps",
    "softmax_grad_warps",
    "softmax_loss_grad_warps",
    "max_pool",
    "max_pool_grad",
    "avg_pool",
    "avg_pool_grad",
    "embedding",
    "dropout",
}

# Row formulas that are printed: the sums over rows, the results in place, and the operands: R rows,
# C numbers of rows, V vectors, S vectors of each sample; floats; settings.
NORM = "R", 1e-5, "low", "S", "S", "S"
PRINTED = {
    "bias": (0, 1, kernels._paired, "R", "V", np.add),
    "sigmoid": (0, 0, activations._sigmoid, "R"),
    "softmax": (0, 0, activation.softmax_rows, "R"),
    "softmax_grad": (0, 0, activation._softmax_grad, "R", "R"),
    "layer_norm": (0, 0, plain._layer_norm, "R", 1e-5, True, "V", "V"),
    "layer_norm_grad": (
        *(2, 0, plain._layer_norm_grad, "R", "R", "C", "V"),
        *(True, True, True, True, "C"),
    ),
    "normalize": (0, 0, kernels._normalize, *NORM, "V", "V"),
    "norm_sums": (2, 0, kernels._norm_terms, "R", *NORM),
    "norm_grad": (0, 0, kernels._norm_grad, "R", *NORM, "V", "S", "S", 0.1, True),
    "adam": (0, 0, adaptive.adam, *"RRRR", *[0.1] * 6),
    "sum": (1, 0, printed.itself, "R"),
}
# kernels without a result for each element, or without an array that is read
UNPACKED = ("_totals", "norm_grad_columns", "norm_terms_columns", "itself_columns")


def compiled(family, t, p, form, *more):
    """Return a compiled family, and what the compiler said."""
    options = (*launch.options(t, p), *CUPY, *more)
    return nvrtc.compiled(launch.source(family), f"{family}.cu", options, form)


@pytest.mark.parametrize(
    "family, t, p",
    [pytest.param(*pair, marks=[] if pair[1] == pair[2] == "float32" else SLOW) for pair in PAIRS],
    ids=map("-".join, PAIRS),
)
def test_for_an_h200(family, t, p):
    """Nothing to warn of, registers for 1,024 threads or more, and none of them kept in memory (in
    float64 two may).
    """
    cubin, log = compiled(family, t, p, "CUBIN", "-arch=sm_90", "--ptxas-options=-v")
    assert len(cubin) > 1000
    check_log(log, launch.source(family), t)


def check_log(log, source, t, memory=0):
    """Compare what the compiler said with what it should."""
    assert "warning" not in log
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    assert sorted(names) == sorted(KERNEL.findall(source))
    spilled, used = (
        map(int, re.findall(form, log))
        for form in (r"(\d+) bytes s(?:pill|tack)", r"Used (\d+) registers")
    )
    assert max(used) <= (128 if t == "float64" else 64)
    assert max(spilled) <= (16 if t == "float64" else memory)


def printed_kernel(name, t):
    """Return the kernels of a formula for a dtype, and parameters as they are beside it."""
    sums, reuse, formula, *operands = PRINTED[name]
    p = "float64" if t == "float64" else "float32"
    letters = {"R": (ROW, (t, False)), "C": (CELL, (p, False)), "V": (VECTOR, (p, False))}
    letters["S"] = VECTOR, (p, True)
    pairs = [
        letters[x] if x in letters else (NUMBER, None) if type(x) is float else ((x,), None)
        for x in (t.endswith("16") if x == "low" else x for x in operands)
    ]
    return RowKernel(formula, *zip(*pairs, strict=True), p, sums, reuse)


@pytest.mark.parametrize("t", [pytest.param(t, marks=[SLOW][t == "float32" :]) for t in PLAIN])
@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_for_an_h200(name, t):
    """As the sources: registers, memory, and loads and stores of 16 bytes."""
    found = printed_kernel(name, t)
    options = (*found.options, *CUPY)
    _, log = nvrtc.compiled(
        found.code, name, (*options, "-arch=sm_90", "--ptxas-options=-v"), "CUBIN"
    )
    check_log(log, found.code, t, 16)
    ptx, _ = nvrtc.compiled(found.code, name, (*options, "-arch=compute_90"), "PTX")
    for text in ptx.decode().split(".entry ")[1:]:
        if not re.match(r"\w+", text).group().endswith(UNPACKED):
            check_packs(text)


@SLOW
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_100"])
@pytest.mark.parametrize("family", ["depthwise", "softmax"])
def test_for_other_devices(family, arch):
    """Before and after; the oldest has no instruction for bfloat16. All else that differs is in
    what all share.
    """
    cubin, _ = compiled(family, "bfloat16", "float32", "CUBIN", f"-arch={arch}")
    assert len(cubin) > 1000


def test_what_the_compiler_refuses():
    """It is told, with the place."""
    with pytest.raises(nvrtc.CompileError, match=r'bad\.cu.*"nonsense" is undefined'):
        nvrtc.compiled("void bad() { nonsense; }", "bad.cu", ("-arch=sm_90",), "CUBIN")


def check_packs(text):
    """Look for loads and stores of 16 bytes."""
    assert re.search(r"ld\.global(\.nc)?\.v[24]", text), text[:80]
    assert re.search(r"st\.global\.v[24]", text), text[:80]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_16_bytes_at_a_time(dtype):
    """Loads and stores of all kernels whose time is that of the memory."""
    result = set()
    for family in FAMILIES:
        ptx, _ = compiled(family, dtype, dtype, "PTX", "-arch=compute_90")
        for text in ptx.decode().split(".entry ")[1:]:
            name = re.match(r"\w+", text).group()
            if name in PACKED:
                result.add(name)
                check_packs(text)
    assert result == PACKED
