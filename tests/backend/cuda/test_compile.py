"""Every source goes through CUDA's run-time compiler, as CuPy calls it, for devices of three
generations; no driver.
"""

import re
from pathlib import Path

import pytest

from nnmpi.backend.cuda import launch
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
    for family in (
        "copy",
        "dense",
        "depthwise",
        "softmax",
        "layer_norm",
        "norm",
        "activation",
        "embedding",
    )
    for dtype in ("float16", "bfloat16")
]

# What reads and writes 16 bytes at a time where it can.
PACKED = {
    "add_bias",
    "bias_relu",
    "copy",
    "relu_grad_bias",
    "slope_grad_bias",
    "softmax_warps",
    "softmax_grad_warps",
    "softmax_loss_grad_warps",
    "layer_norm_warps",
    "layer_norm_grad_warps",
    "bias_gelu_slope",
    "normalize",
    "norm_grad",
    "max_pool",
    "max_pool_grad",
    "avg_pool",
    "avg_pool_grad",
    "embedding",
    "dropout",
    "sgd",
    "sgd_momentum",
    "adam",
    "track",
    "activate",
    "activate_grad",
    "add",
    "multiply",
    "add_low",
}


def compiled(family, t, p, form, *more):
    """Return a compiled family, and what the compiler said."""
    options = (*launch.options(t, p), *CUPY, *more)
    return nvrtc.compiled(launch.source(family), f"{family}.cu", options, form)


@pytest.mark.parametrize(
    ("family", "t", "p"),
    [pytest.param(*pair, marks=[] if pair[1] == pair[2] == "float32" else SLOW) for pair in PAIRS],
    ids=map("-".join, PAIRS),
)
def test_for_an_h200(family, t, p):
    """Nothing to warn of, registers for 1,024 threads or more, and none of them kept in memory (in
    float64 two may).
    """
    cubin, log = compiled(family, t, p, "CUBIN", "-arch=sm_90", "--ptxas-options=-v")
    assert len(cubin) > 1000
    assert "warning" not in log
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    assert sorted(names) == sorted(KERNEL.findall(launch.source(family)))
    spilled, used = (
        map(int, re.findall(form, log))
        for form in (r"(\d+) bytes s(?:pill|tack)", r"Used (\d+) registers")
    )
    registers, memory = (128, 16) if t == "float64" else (64, 0)
    assert max(used) <= registers
    assert max(spilled) <= memory


@SLOW
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_100"])
@pytest.mark.parametrize("family", ["dense", "softmax"])
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
                assert re.search(r"ld\.global(\.nc)?\.v4", text), name
                assert re.search(r"st\.global\.v4", text), name
    assert result == PACKED
