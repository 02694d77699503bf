"""cuDNN's graphs on the double of its frontend: which are built, what is done without one, and that
the double is as strict as it says.
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from nnmpi import Tensor, jit, use_precision
from nnmpi.backend.cuda import cudnn as module
from nnmpi.backend.cuda.cudnn import cudnn_of
from nnmpi.backend.cuda.kernels import DeviceKernels
from nnmpi.backend.precision import bfloat16
from nnmpi.base.errors import DeviceError
from nnmpi.ops import conv2d, conv_transpose2d
from tests.device import library
from tests.harness.refusals import refuses

FLOAT32, BFLOAT16 = np.dtype("float32"), bfloat16()
ALONE = ((1, 1), (1, 1), (1, 1))  # stride, padding, dilation
RNG = np.random.default_rng(3)


@pytest.fixture
def backend():
    """The backend on the double of CuPy."""
    return library.device_backend()


@pytest.fixture
def double(backend, monkeypatch):
    """The double of the frontend, without plans from other tests."""
    result = sys.modules["cudnn"]
    assert result.__file__ is not None
    assert Path(result.__file__).is_relative_to(library.FOLDER)
    cudnn_of.cache_clear()
    result.EXECUTED.clear()
    yield result
    result.REFUSED.clear()
    cudnn_of.cache_clear()


def drawn(backend, *shape, dtype=FLOAT32):
    """Return small whole numbers on the device."""
    return backend.asarray(RNG.integers(-2, 3, shape).astype(dtype))


def operations(backend):
    """Return cuDNN's operations."""
    result = cudnn_of(backend.xp)
    assert result is not None
    return result


# ---- convolution


def convolved(backend, dtype, function=conv2d):
    """Return a convolution's result and gradients in host memory, always of the same arrays."""
    rng = np.random.default_rng(0)
    shapes = ((2, 6, 5, 4), (3, 3, 4, 4), (4,))
    x, weight, bias = (
        Tensor(backend.asarray(rng.integers(-2, 3, s).astype(kind)), requires_grad=True)
        for s, kind in zip(shapes, (dtype, FLOAT32, FLOAT32), strict=True)
    )
    y = function(x, weight, bias, 2, 1)
    y.backward(backend.asarray(rng.integers(-2, 3, y.shape).astype(y.dtype)))
    return [backend.to_host(item) for item in (y.data, x.grad, weight.grad, bias.grad)]


@pytest.mark.parametrize("function", [conv2d, conv_transpose2d])
@pytest.mark.parametrize("mode", ["float32", "tf32", "bf16"])
def test_a_refused_plan_is_computed_without_cudnn(backend, double, mode, function):
    """Each of the three operations by itself, with the same numbers."""
    dtype = BFLOAT16 if mode == "bf16" else FLOAT32
    names = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    with use_precision(mode):
        expected = convolved(backend, dtype, function)
        assert set(double.EXECUTED) == set(names)
        for refused in ({name} for name in names):
            cudnn_of.cache_clear()
            double.EXECUTED.clear()
            double.REFUSED |= refused
            for ours, right in zip(convolved(backend, dtype, function), expected, strict=True):
                np.testing.assert_array_equal(ours, right)
            assert set(double.EXECUTED) == set(names) - refused
            double.REFUSED.clear()


def test_a_plan_is_built_once_for_each_form(backend, double):
    """Forms of one size are told apart, and so are precisions and options; a refusal is kept."""
    library, built = operations(backend), len(double.BUILT)
    for _ in range(2):
        for shape in ((1, 4, 6, 3), (1, 6, 4, 3), (2, 4, 3, 3)):
            x, kernels = drawn(backend, *shape), drawn(backend, 5, 3, 3, 3)
            y = backend.zeros((*shape[:3], 5), FLOAT32)
            turned = np.ascontiguousarray(backend.to_host(kernels).transpose(1, 2, 3, 0))
            for mode, apart in product(("float32", "tf32"), (1, 2)):
                with use_precision(mode):
                    assert library.convolve(x, kernels, y, ((1, 1), (apart,) * 2, (apart,) * 2))
                right = conv2d(
                    Tensor(backend.to_host(x)), Tensor(turned), padding=apart, dilation=apart
                )
                np.testing.assert_array_equal(backend.to_host(y), right.data)
    assert len(double.BUILT) == built + 12
    double.REFUSED.add("conv_dgrad")
    grad = drawn(backend, 2, 4, 3, 5)
    assert not library.input_gradient(grad, kernels, x, ALONE)
    double.REFUSED.clear()
    assert not library.input_gradient(grad, kernels, x, ALONE)


def test_no_engine_rounds_float32_or_adds_at_random(backend, double):
    """1 + 2^-12 has more bits than TF32."""
    notes = double.numerical_note
    for mode, exact in (("float32", True), ("tf32", False)):
        with use_precision(mode):
            x = backend.asarray(np.full((1, 3, 3, 1), 1 + 2.0**-12, FLOAT32))
            y = conv2d(
                Tensor(x), Tensor(backend.asarray(np.ones((3, 3, 1, 1), FLOAT32))), padding=1
            )
        assert (float(y.data[0, 0, 0, 0]) == 4 + 2.0**-10) is exact
        assert (notes.TENSOR_CORE in double.BUILT[-1].notes) is exact
        assert notes.NONDETERMINISTIC in double.BUILT[-1].notes


def test_the_weights_gradient_is_kept_in_float32(backend, double):
    """Of bfloat16, too: 257 pixels of 1 need 9 bits. Where cuDNN writes none, it is rounded."""
    x = Tensor(backend.asarray(np.ones((257, 2, 2, 1), BFLOAT16)))
    for refused, sum_of_ones in (((), 257), (("conv_wgrad FLOAT",), 256)):
        cudnn_of.cache_clear()
        double.REFUSED.update(refused)
        weight = Tensor(backend.asarray(np.ones((2, 2, 1, 1), FLOAT32)), requires_grad=True)
        with use_precision("bf16"):
            conv2d(x, weight).sum().backward()
        assert weight.grad is not None
        assert (backend.to_host(weight.grad) == sum_of_ones).all()
        assert double.EXECUTED[-1] == "conv_wgrad"


def test_what_cudnn_is_not_asked_for(backend, double):
    """float64, arrays without elements, products of pixels, and everything without kernels."""

    def run(*shape, kernel=3, dtype=FLOAT32):
        x, weight = (
            drawn(backend, *shape, dtype=dtype),
            drawn(backend, kernel, kernel, 3, 2, dtype=dtype),
        )
        conv2d(Tensor(x), Tensor(weight))

    run(2, 5, 5, 3, dtype=np.dtype("float64"))
    run(0, 5, 5, 3)
    run(2, 5, 5, 3, kernel=1)
    with jit(False):
        run(2, 5, 5, 3)
    assert not double.EXECUTED
    run(2, 5, 5, 3)
    assert list(double.EXECUTED) == ["conv_fprop"]


def test_a_view_that_begins_anywhere_is_copied(backend, double):
    """cuDNN takes addresses for multiples of 16 bytes."""
    whole, weight = drawn(backend, 3, 5, 5, 3), drawn(backend, 3, 3, 3, 2)
    part = whole[1:]
    assert part.data.ptr % 16
    y = conv2d(Tensor(part), Tensor(weight))
    right = conv2d(Tensor(backend.to_host(part)), Tensor(backend.to_host(weight)))
    np.testing.assert_array_equal(backend.to_host(y.data), right.data)
    assert list(double.EXECUTED) == ["conv_fprop"]


def test_a_stream_of_its_own(backend, double):
    """A plan runs in the stream that is current at its call."""
    cuda, library = backend.xp.cuda, operations(backend)
    x, kernels, y = (
        drawn(backend, 1, 4, 4, 3),
        drawn(backend, 2, 3, 3, 3),
        backend.zeros((1, 4, 4, 2), FLOAT32),
    )
    for stream in (cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)):
        with stream:
            assert library.convolve(x, kernels, y, ALONE)
    assert library.convolve(x, kernels, y, ALONE)
    assert len(double.EXECUTED) == 3


def test_in_a_graph(backend, double):
    """What is captured is done at each launch, on what the arrays hold then."""
    xp, library = backend.xp, operations(backend)
    x, kernels, y = (
        drawn(backend, 1, 4, 4, 3),
        drawn(backend, 2, 3, 3, 3),
        backend.zeros((1, 4, 4, 2), FLOAT32),
    )
    assert library.convolve(x, kernels, y, ALONE)
    first, pool = backend.to_host(y), xp.cuda.MemoryPool(xp.get_default_memory_pool().malloc)
    with xp.cuda.using_allocator(pool.malloc), xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(xp.cuda.runtime.streamCaptureModeRelaxed)
        assert library.convolve(x, kernels, y, ALONE)
        graph = stream.end_capture()
        for times in (2, 3):
            x *= 2
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(backend.to_host(y), first * 2 ** (times - 1))


# ---- attention


class Kernels(DeviceKernels):
    """The kernels of a device, whose softmax the double's functions compute."""

    def _softmax(self, name, scale, causal, *arrays):
        xp, shape = self.xp, arrays[0].shape
        shown = shape[3] - shape[2] if causal else shape[3]
        hidden = ~xp.tri(*shape[2:], shown, dtype=bool)
        if name == "softmax":
            scores = xp.where(hidden, -np.inf, scale * arrays[0])
            powers = xp.exp(scores - scores.max(axis=3, keepdims=True))
            arrays[1][...] = (powers / powers.sum(axis=3, keepdims=True)).astype(arrays[1].dtype)
        else:
            grad, p = (x.astype(FLOAT32) for x in arrays[:2])
            inner = (grad * p).sum(axis=3, keepdims=True)
            arrays[2][...] = (scale * p * (grad - inner)).astype(arrays[2].dtype)


def attended(q, k, v, grad, causal):
    """Return attention and its gradients in float64, by NumPy."""
    q, k, v, grad = (x.astype(np.float64) for x in (q, k, v, grad))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    if causal:
        scores[..., ~np.tri(*scores.shape[2:], k.shape[2] - q.shape[2], dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(3, keepdims=True))
    p /= p.sum(3, keepdims=True)
    d = grad @ v.swapaxes(2, 3)
    d = p * (d - (d * p).sum(3, keepdims=True)) / np.sqrt(q.shape[3])
    return [p @ v, d @ k, d.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ grad]


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 9), (1, 1)])
@pytest.mark.parametrize("refused", [(), ("sdpa",), ("sdpa_backward",)], ids=str)
def test_attention(backend, double, queries, keys, causal, dtype, refused):
    """Also of packed heads, of later queries, and where cuDNN has a plan for one way alone."""
    heads, features, kernels = 3, 8, Kernels(backend.xp)
    double.REFUSED.update(refused)

    def place(time, packed):
        """Heads beside one another, as a projection's part, or each alone."""
        if not packed:
            return backend.zeros((2, heads, time, features), dtype)
        whole = backend.zeros((2, time, 2 * heads * features), dtype)
        parts = whole.reshape(2, time, 2, heads, features).transpose(2, 0, 3, 1, 4)
        return parts[1]

    for packed in (False, True):
        places = [place(time, packed) for time in (queries, keys, keys, queries)]
        for item in places:
            item[...] = backend.asarray(RNG.uniform(-2, 2, item.shape).astype(dtype))
        *inputs, grad = places
        y, *targets = (place(time, packed) for time in (queries, queries, keys, keys))
        residuals = kernels.attend(tuple(inputs), y, causal, True)
        kernels.attend_grad(grad, residuals, tuple(targets), causal)
        right = attended(*map(backend.to_host, places), causal)
        for ours, value in zip((y, *targets), right, strict=True):
            error = np.abs(backend.to_host(ours).astype(np.float64) - value).max()
            assert error <= (3e-2 if dtype == BFLOAT16 else 4e-3) * max(1.0, np.abs(value).max())
    expected = set() if "sdpa" in refused else {"sdpa", "sdpa_backward"} - {*refused}
    assert set(double.EXECUTED) == expected


def test_attention_that_cudnn_does_not_compute(backend, double):
    """Other features, float32, a gradient that is one number in many places, a single token."""
    xp, kernels = backend.xp, Kernels(backend.xp)

    def run(dtype, features, queries=4, keep=True):
        q, k, v = (
            backend.asarray(RNG.uniform(-1, 1, (1, 2, time, features)).astype(dtype))
            for time in (queries, 4, 4)
        )
        y = backend.zeros(q.shape, dtype)
        residuals = kernels.attend((q, k, v), y, False, keep)
        if keep:
            one = xp.broadcast_to(backend.asarray(np.ones(1, dtype)), y.shape)
            targets = tuple(xp.empty_like(x) for x in (q, k, v))
            kernels.attend_grad(one, residuals, targets, False)
            right = attended(*(backend.to_host(x) for x in (q, k, v, one)), False)
            for ours, value in zip(targets, right[1:], strict=True):
                assert np.abs(backend.to_host(ours).astype(np.float64) - value).max() < 0.05

    run(FLOAT32, 8)
    run(BFLOAT16, 7)
    run(BFLOAT16, 8, queries=1, keep=False)
    assert not double.EXECUTED
    run(BFLOAT16, 8)
    assert list(double.EXECUTED) == ["sdpa", "sdpa_backward"]


# ---- without cuDNN


def test_why_there_is_none(backend, double, monkeypatch):
    """The frontend may lack, or the library behind it."""
    assert module.describe() == "cuDNN 9.19.0"

    def lacking():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    monkeypatch.setattr(double, "backend_version", lacking)
    assert module.describe().startswith("without cuDNN: libcudnn is missing (Unable to find symbol")
    assert cudnn_of(backend.xp) is None
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert "nvidia-cudnn-frontend cannot be imported" in module.describe()
    assert len(convolved(backend, FLOAT32)) == 4


def test_a_graph_that_cudnn_does_not_know(backend, double, monkeypatch):
    """It says so in the words of its status, too; any other failure is one."""
    words = ["CUDNN_STATUS_BAD_PARAM_DATATYPE_MISMATCH"]

    def failing(graph):
        raise RuntimeError(f"detail::finalize(...) failed with message: , and code: {words[0]}")

    expected = convolved(backend, FLOAT32)
    double.EXECUTED.clear()
    monkeypatch.setattr(double.pygraph, "build_operation_graph", failing)
    cudnn_of.cache_clear()
    for ours, right in zip(convolved(backend, FLOAT32), expected, strict=True):
        np.testing.assert_array_equal(ours, right)
    assert not double.EXECUTED
    words[0] = "CUDNN_STATUS_INTERNAL_ERROR"
    cudnn_of.cache_clear()
    refuses(
        DeviceError,
        r"cannot prepare conv_fprop of shapes \(2, 4, 6, 5\), .*INT",
        convolved,
        backend,
        FLOAT32,
    )


def test_attention_needs_a_cudnn_that_can_be_captured(backend, double, monkeypatch):
    """Older ones copy from the host."""
    monkeypatch.setattr(double, "backend_version", lambda: 91500)
    q = backend.zeros((1, 1, 4, 8), BFLOAT16)
    assert not operations(backend).attend((q, q, q), q.copy(), None, False)
    cudnn_of.cache_clear()
    monkeypatch.undo()
    assert operations(backend).attend((q, q, q), q.copy(), None, False)


# ---- the double itself


def test_the_double_notices(backend, double):
    """Memory that is gone or too small, an address between, another stream, and a wrong form."""
    xp, kind = backend.xp, double.data_type.FLOAT

    def graph(size, results):
        handle = double.create_handle()
        made = double.pygraph(
            io_data_type=kind, intermediate_data_type=kind, compute_data_type=kind, handle=handle
        )
        forms = (
            ([1, 3, size, size], [3 * size * size, 1, 3 * size, 3]),
            ([2, 3, 3, 3], [27, 1, 9, 3]),
        )
        tensors = [made.tensor(dim=dim, stride=stride, data_type=kind) for dim, stride in forms]
        y = made.conv_fprop(*tensors, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        y.set_output(True).set_dim([1, 2, results, results])
        y.set_stride([2 * results**2, 1, 2 * results, 2]).set_data_type(kind)
        made.validate()
        made.build_operation_graph()
        made.deselect_numeric_notes([double.numerical_note.NONDETERMINISTIC])
        made.create_execution_plans([double.heur_mode.A, double.heur_mode.FALLBACK])
        made.check_support()
        made.build_plans()
        return made, [*tensors, y]

    refuses(ValueError, "gives", graph, 6, 5)
    made, tensors = graph(6, 6)
    x, kernels, y, room = (xp.zeros(size, FLOAT32) for size in (6 * 6 * 3 + 1, 54, 72, 250))

    def execute(x, workspace=room.data.ptr, stream=0):
        handle = double.create_handle()
        double.set_stream(handle, stream)
        places = dict(zip(tensors, (x, kernels.data.ptr, y.data.ptr), strict=True))
        made.execute(places, workspace, handle)

    execute(x.data.ptr)
    refuses(RuntimeError, "no multiple of 16", execute, x.data.ptr + 4)
    refuses(RuntimeError, "not in the device's memory", execute, x.data.ptr + 16)
    refuses(RuntimeError, "another stream", execute, x.data.ptr, stream=5)
    refuses(RuntimeError, "workspace", execute, x.data.ptr, kernels.data.ptr)
    address = x.data.ptr
    del x
    refuses(RuntimeError, "not in the device's memory", execute, address)
    unbuilt = double.pygraph("", kind, kind, kind, double.create_handle())
    refuses(
        AssertionError,
        "not been built",
        lambda: unbuilt.execute({}, room.data.ptr, double.create_handle()),
    )


NAMES = """
import cudnn, json
kinds = "data_type", "numerical_note", "heur_mode", "diagonal_alignment"
names = {kind: list(getattr(cudnn, kind).__members__) for kind in kinds}
graph = cudnn.pygraph
names["graph"] = [name for name in dir(graph) if name[0] != "_"]
plain = cudnn._pybind_module.backend_graph
names["words"] = {name: getattr(plain, name).__doc__ for name in dir(plain) if name[0] != "_"}
names["functions"] = dir(cudnn)
print(json.dumps(names))
"""


def test_the_double_has_the_frontends_names(double):
    """And the parameters of its operations."""
    paths = [path for path in sys.path if Path(path) != library.FOLDER]
    code = f"import sys; sys.path[:] = {paths!r}\n{NAMES}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    assert not done.returncode, done.stderr
    real = json.loads(done.stdout)
    for kind in ("data_type", "numerical_note", "heur_mode", "diagonal_alignment"):
        assert {item.name for item in getattr(double, kind)} <= {*real[kind]}
    public = {name for name in vars(double.pygraph) if name[0] != "_"}
    assert public <= {*real["graph"]}
    for name in ("conv_fprop", "conv_dgrad", "conv_wgrad", "sdpa", "sdpa_backward"):
        code = getattr(double.pygraph, name).__code__
        for word in code.co_varnames[1 : code.co_argcount]:
            assert f"{word}: " in real["words"][name], word
    functions = ("create_handle", "set_stream", "backend_version", "backend_version_string")
    assert {*functions, "cudnnGraphNotSupportedError"} <= {*real["functions"]}
