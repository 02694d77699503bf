"""What is said when there is no device to use, and when one fails: one sentence each, with what would help."""

from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from nnmpi.backend.device_errors import REMEDY, Facts, explain_error, explain_import, explain_start, installed_wheels
from nnmpi.backend.memory import MemoryUse
from nnmpi.errors import DeviceError
from tests.device.library import load

GIB = 2**30
FACTS = Facts("NVIDIA H200, device 0", MemoryUse(100 * GIB, 120 * GIB, None, 120 * GIB, "its own"), 9 * GIB, 140 * GIB)


def named(name: str, module: str, base: type[Exception] = RuntimeError, **attributes: Any) -> type[Exception]:
    """Return a class of errors as a library has it."""
    return type(name, (base,), {"__module__": module, **attributes})


def wheels(*names: str) -> Any:
    """Return what tells that these are installed."""
    return lambda: list(names)


@pytest.mark.parametrize(
    ("installed", "error", "words"),
    [
        ((), ModuleNotFoundError("No module named 'cupy'"), r"No module named 'cupy'\); install nnmpi\[cuda12\] or"),
        (
            ("cupy-cuda12x", "cupy-cuda13x"),
            ImportError("CuPy failed to load"),
            "cupy-cuda12x and cupy-cuda13x are both installed and overwrite one another; uninstall both",
        ),
        (
            ("cupy-cuda13x",),
            ImportError(
                "\n======\nFailed to import CuPy.\n\nIf you installed CuPy via wheels ...\n\nOriginal error:\n"
                "  ImportError: libcublas.so.13: cannot open shared object file: No such file or directory\n======\n"
            ),
            r"cupy does not find CUDA's libcublas \(ImportError: libcublas.so.13: cannot open.*"
            r"pip install 'cupy-cuda13x\[ctk\]'`, or the wheel",
        ),
        (
            ("cupy-cuda13x",),
            AttributeError("module 'numpy' has no attribute 'long'"),
            "cupy-cuda13x needs another NumPy.*numpy>=2.0,<2.6.*no attribute 'long'",
        ),
        (("cupy-cuda13x",), ImportError("something else"), "something else.*anew"),
        (("cupy-cuda13x",), ImportError(""), r"\(ImportError\)"),
    ],
)
def test_why_cupy_cannot_be_imported(installed: tuple[str, ...], error: Exception, words: str) -> None:
    """Not installed, installed twice, without CUDA's libraries, with a NumPy that does not fit, or something else."""
    with pytest.raises(DeviceError, match=words):
        raise DeviceError(explain_import(error, wheels(*installed)))


def test_the_cause_counts_too() -> None:
    """CuPy raises its own error from that of the loader."""
    try:
        try:
            raise ImportError("libnvrtc.so.13: cannot open shared object file")
        except ImportError as error:
            raise ImportError("cupy failed") from error
    except ImportError as error:
        assert "cupy does not find CUDA's libnvrtc" in explain_import(error, wheels("cupy-cuda13x"))


@pytest.mark.parametrize(
    ("status", "driver", "visible", "words"),
    [
        (35, 0, None, "cupy finds no CUDA driver on this machine; install NVIDIA's driver, or use the backend numpy"),
        (
            35,
            12040,
            None,
            "cupy is built for CUDA 13.2, but the driver knows CUDA up to 12.4; install nnmpi[cuda12] in its place, or "
            "a newer driver, or use the backend numpy",
        ),
        (
            35,
            11080,
            None,
            "cupy is built for CUDA 13.2, but the driver knows CUDA up to 11.8; install a newer driver, or use "
            "the backend numpy",
        ),
        (
            2,
            13000,
            "0",
            "the device's memory is taken by other processes, which nvidia-smi lists; end them, or use another device",
        ),
        (
            100,
            13000,
            "",
            "cupy finds no CUDA device: CUDA_VISIBLE_DEVICES='' shows it none of this machine's; unset it, or name one "
            "that nvidia-smi lists, or use the backend numpy",
        ),
        (100, 13000, None, "cupy finds no CUDA device: the driver sees none (try nvidia-smi); use the backend numpy"),
        (
            46,
            13000,
            "0",
            "cupy cannot use the device: another process has it for itself; let ranks share it (nvidia-smi -c DEFAULT, "
            "or NVIDIA's MPS), or start one rank per device",
        ),
        (
            802,
            13000,
            "0",
            "cupy cannot use the device: the machine is not ready; where devices are joined by NVSwitch, "
            "nvidia-fabricmanager must run",
        ),
        (999, 13000, None, "cupy cannot start CUDA (cudaErrorUnknown); try nvidia-smi, or use the backend numpy"),
    ],
)
def test_why_there_is_no_device(
    status: int, driver: int, visible: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No driver, an older one, none visible, none there, or something else."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    error = named("CUDARuntimeError", "cupy_backends.cuda.api.runtime", status=status)("cudaErrorUnknown")
    assert explain_start(error, driver, 13020, wheels("cupy-cuda13x")) == words
    both = explain_start(error, driver, 13020, wheels("cupy-cuda12x", "cupy-cuda13x"))
    assert ("both installed: keep one" in both) is (visible is None)


def test_no_device_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count may be 0."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "the driver sees none" in explain_start(None, 13000, 13000, wheels("cupy-cuda13x"))


def test_what_the_first_kernel_misses() -> None:
    """NVRTC is looked for when a kernel is compiled; where it is, the headers may be missing."""
    lost = named("DynamicLibNotFoundError", "cuda.pathfinder")(
        'Failure finding "libnvrtc.so": No such file: libnvrtc.so'
    )
    assert explain_start(lost, 13000, 13000, wheels("cupy-cuda13x")) == (
        'cupy does not find CUDA\'s libnvrtc (Failure finding "libnvrtc.so": No such file: libnvrtc.so); install '
        "CUDA's libraries with `pip install 'cupy-cuda13x[ctk]'`"
    )
    assert "does not find CUDA's libnvrtc" in str(explain_error(lost, lambda: FACTS))
    header = named("CompileException", "cupy.cuda.compiler")("a.cu(1): catastrophic error: cannot open cuda_fp16.h")
    assert explain_start(header, 13000, 13000, wheels("cupy-cuda12x")).startswith(
        "cupy cannot compile a kernel for the device (a.cu(1): catastrophic error: cannot open cuda_fp16.h); install "
    )


def test_which_wheels_are_installed(tmp_path: Path) -> None:
    """Of those that bring cupy, wherever Python looks for packages; the libraries beside it do not count."""
    for name in ("cupy_cuda13x-14.2.0", "cupy_cuda12x-13.6.0", "cupy_xarray-0.1", "numpy-2.4.6"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert installed_wheels([str(tmp_path), str(tmp_path / "missing")]) == ["cupy-cuda12x", "cupy-cuda13x"]
    real = sorted(each for each in {str(d.metadata["Name"]).lower() for d in distributions()} if "cupy-cuda" in each)
    assert installed_wheels() == real


def test_out_of_memory() -> None:
    """What was asked for, who has what, and what to lower."""
    error = load().cuda.memory.OutOfMemoryError(20 * GIB, 100 * GIB, 0)
    words = str(explain_error(error, lambda: FACTS))
    assert "has no room for 20" in words and "this process use 100" in words and words.endswith(REMEDY)


def test_out_of_memory_of_other_libraries() -> None:
    """CUDA's own and cuBLAS's say it without a size; a device that answers no more leaves the numbers out."""
    runtime = named("CUDARuntimeError", "cupy_backends.cuda.api.runtime", status=2)("cudaErrorMemoryAllocation")
    blas = named("CUBLASError", "cupy_backends.cuda.libs.cublas", status=3)("CUBLAS_STATUS_ALLOC_FAILED")
    for error in (runtime, blas):
        assert "has no room for some memory more: arrays" in str(explain_error(error, lambda: FACTS))

    def silent() -> Facts:
        raise runtime

    assert str(explain_error(runtime, silent)).startswith(
        "the device has no room for some memory more (cudaErrorMemoryAllocation); make the batch smaller"
    )


@pytest.mark.parametrize(
    ("name", "module", "status", "text", "words"),
    [
        (
            "CUDARuntimeError",
            "cupy_backends.cuda.api.runtime",
            700,
            "cudaErrorIllegalAddress: an illegal memory access was encountered",
            "illegal address: cudaErrorIllegalAddress.*CUDA_LAUNCH_BLOCKING=1 shows the call that is to blame",
        ),
        ("CUDADriverError", "cupy_backends.cuda.api.driver", 719, "launch failed", "launch failure: launch failed"),
        ("CUDARuntimeError", "cupy_backends.cuda.api.runtime", 1, "invalid argument", "CUDARuntimeError on the device"),
        (
            "CompileException",
            "cupy.cuda.compiler",
            None,
            "a.cu(1): error: x\n\n1 error",
            r"cannot compile a kernel for the device \(a.cu\(1\): error: x\); are",
        ),
        (
            "NVRTCError",
            "cupy_backends.cuda.libs.nvrtc",
            6,
            "NVRTC_ERROR",
            "are CUDA's libraries those that cupy's extra",
        ),
        ("CUBLASError", "cupy_backends.cuda.libs.cublas", 13, "EXECUTION_FAILED", "cuBLAS failed"),
        ("NcclError", "cupy_backends.cuda.libs.nccl", 5, "NCCL_ERROR_INVALID_USAGE", "NcclError on the device"),
    ],
)
def test_other_errors(name: str, module: str, status: int | None, text: str, words: str) -> None:
    """What the libraries say becomes a sentence."""
    error = named(name, module, status=status)(text)
    with pytest.raises(DeviceError, match=words):
        raise explain_error(error, lambda: FACTS) or AssertionError("not explained")


def test_errors_of_others_stay() -> None:
    """NumPy's, Python's and the program's own."""
    for error in (MemoryError(), ValueError("x"), DeviceError("x"), KeyboardInterrupt()):
        assert explain_error(error, lambda: FACTS) is None
