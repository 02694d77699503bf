"""Convolutions by cuDNN, through its frontend: one built graph per operation, shape and dtype. The only file that
imports cudnn, and only when a convolution is computed on a device.

cuDNN names axes in another order than nnmpi and is told the strides, so that memory stays as it is:

    images   (n, h, w, c)         said as (n, c, h, w)     strides (h w c, 1, w c, c)
    kernels  (o, kh, kw, c / g)   said as (o, c / g, kh, kw), likewise; nnmpi's (kh, kw, c / g, o) are copied into it

A graph that cuDNN cannot build, or not without what is ruled out here, is remembered with the reason, and the caller
computes otherwise. Ruled out are sums whose order changes from run to run, sums in half precision, and, in plain
float32, tensor cores (TF32). Of the plans that are left cuDNN recommends one; where tuning is asked for ("tuned"), the
first PLANS are timed when a graph is built, and the fastest is taken. Which one that is may change from run to run, and
with it the last bits.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.windows import Pair
from nnmpi.errors import DeviceError, UsageError

ALGORITHMS = ("auto", "im2col", "cudnn", "tuned")
PLANS = 8
ALIGNMENT = 16  # bytes: what a graph expects of the addresses that it is given
TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "float64": "DOUBLE"}
_algorithm: ContextVar[str] = ContextVar("nnmpi_convolution", default="auto")


def convolution() -> str:
    """Return by which algorithm convolutions are computed on a device in this context, one of ALGORITHMS."""
    return _algorithm.get()


@contextmanager
def use_convolution(algorithm: str) -> Iterator[None]:
    """Compute convolutions on a device by this algorithm inside the block.

    Args:
        algorithm: "im2col", "cudnn", "tuned" (cuDNN, and its fastest plans), or by cuDNN where it is there ("auto").

    Raises:
        UsageError: for an unknown algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise UsageError(f"convolution {algorithm!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
    token = _algorithm.set(algorithm)
    try:
        yield
    finally:
        _algorithm.reset(token)


class Problem(NamedTuple):
    """The sizes of a convolution.

    Attributes:
        images: (n, h, w, c).
        results: (n, out_h, out_w, o).
        kernel, stride, padding, dilation: rows and columns.
        groups: that channels are cut into.
    """

    images: tuple[int, ...]
    results: tuple[int, ...]
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def kernels(self) -> tuple[int, ...]:
        """The shape (o, kh, kw, c / groups) in which cuDNN wants them."""
        return (self.results[3], *self.kernel, self.images[3] // self.groups)

    @property
    def options(self) -> dict[str, list[int]]:
        """The arguments that all three operations share."""
        border = list(self.padding)
        return {
            "pre_padding": border,
            "post_padding": border,
            "stride": list(self.stride),
            "dilation": list(self.dilation),
        }


class Job(NamedTuple):
    """What a graph computes: one of the operations "fprop", "dgrad" and "wgrad" of a problem.

    Attributes:
        inputs, output: dtypes by name.
        bias, relu: what is done to the result of "fprop" at once.
        tensor_cores: whether float32 may be rounded to TF32; half precision may always use them.
        tuned: whether plans are timed.
    """

    operation: str
    problem: Problem
    inputs: str
    output: str
    bias: bool = False
    relu: bool = False
    tensor_cores: bool = True
    tuned: bool = False

    def __str__(self) -> str:
        p, fused = self.problem, "".join((" + bias" * self.bias, " + relu" * self.relu))
        return (
            f"{self.operation}{fused} of {p.images} by {p.kernel} to {p.results}, stride {p.stride}, padding "
            f"{p.padding}, dilation {p.dilation}, groups {p.groups}, {self.inputs} to {self.output}"
        )


class Graph:
    """A built graph.

    Args:
        graph: the frontend's.
        numbers: its tensors' numbers, in the order in which `run` is given their arrays.
        launch: sets the stream and calls the frontend.
    """

    __slots__ = ("_bytes", "_graph", "_launch", "_numbers")

    def __init__(self, graph: Any, numbers: list[int], launch: Callable[[Any, dict[int, int], int], None]) -> None:
        self._graph, self._numbers, self._launch = graph, numbers, launch
        self._bytes: int = graph.get_workspace_size()

    def plan(self, number: int) -> None:
        """Take another of the graph's plans. The frontend raises where there is none, or it cannot be built."""
        self._graph.build_plan_at_index(number)
        self._bytes = self._graph.get_workspace_size()

    def plans(self) -> int:
        """Return how many there are."""
        count: int = self._graph.get_execution_plan_count()
        return count

    def run(self, arrays: tuple[Array, ...]) -> None:
        """Compute, on arrays that lie as the graph expects."""
        pack = {number: array.data.ptr for number, array in zip(self._numbers, arrays, strict=True)}  # type: ignore[attr-defined]
        self._launch(self._graph, pack, self._bytes)


class Cudnn:
    """cuDNN on the device of this process.

    A graph begins with the plan that cuDNN holds for the fastest. Where there is no room for that one's scratch memory
    others are tried, as many as are timed where that is asked for.

    Args:
        frontend: the module cudnn.
        xp: the array library.

    Raises:
        RuntimeError: the frontend's, when cuDNN itself cannot be loaded or started.
    """

    def __init__(self, frontend: ModuleType, xp: ModuleType) -> None:
        self._frontend, self._xp = frontend, xp
        self._handle = frontend.create_handle()
        self.version: str = frontend.backend_version_string()
        self._refusals = (frontend.cudnnGraphNotSupportedError, RuntimeError, ValueError)
        self._graphs: dict[Job, Graph | str] = {}

    def run(self, job: Job, *arrays: Array) -> bool:
        """Do a job on C-contiguous arrays, and return whether cuDNN can; if not, nothing is written.

        Args:
            job: what to do.
            arrays: fprop: images, kernels, the bias if there is one, results out. dgrad: the results' gradient,
                kernels, the images' gradient out. wgrad: images, the results' gradient, the kernels' gradient out.
                Their addresses are multiples of ALIGNMENT.
        """
        found = self._graphs.get(job)
        if isinstance(found, Graph):
            found.run(arrays)
            return True
        if found is None:
            self._graphs[job] = self._first(job, arrays)
        return isinstance(self._graphs[job], Graph)

    def describe(self) -> str:
        """Return in words what cuDNN computes and what it cannot, with the reasons."""
        built = sum(isinstance(each, Graph) for each in self._graphs.values())
        text = f"cuDNN {self.version}" + (f", {built} graphs built" if self._graphs else "")
        refused = [f"{job}: {why}" for job, why in self._graphs.items() if isinstance(why, str)]
        return text if not refused else f"{text}, {len(refused)} refused\n  " + "\n  ".join(refused)

    def _first(self, job: Job, arrays: tuple[Array, ...]) -> Graph | str:
        """Build a job's graph and run it; return it, or why it cannot be had."""
        try:
            graph = self._build(job)
            if job.tuned:
                self._tune(graph, arrays)
            try:
                graph.run(arrays)
            except MemoryError:  # its plan wants more scratch memory than there is; others want less
                self._tune(graph, arrays)
                graph.run(arrays)
        except (*self._refusals, MemoryError) as error:
            return " ".join(str(error).split())[:300] or type(error).__name__
        return graph

    def _tune(self, graph: Graph, arrays: tuple[Array, ...]) -> None:
        """Let the graph have the fastest of its first plans; one that cannot be built, or has no memory, has lost."""
        times: dict[int, float] = {}
        for number in range(min(PLANS, graph.plans())):
            try:
                graph.plan(number)
                times[number] = self._seconds(graph, arrays)
            except (*self._refusals, MemoryError):
                continue
        if times:
            graph.plan(min(times, key=times.__getitem__))

    def _seconds(self, graph: Graph, arrays: tuple[Array, ...]) -> float:
        """Return the time of three runs, after one for warming up."""
        cuda: Any = self._xp.cuda
        begin, end = cuda.Event(), cuda.Event()
        graph.run(arrays)
        begin.record()
        for _ in range(3):
            graph.run(arrays)
        end.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) / 1e3

    def _build(self, job: Job) -> Graph:
        cudnn, inner = self._frontend, "DOUBLE" if job.inputs == "float64" else "FLOAT"
        graph = cudnn.pygraph(
            name=job.operation,
            io_data_type=self._dtype(job.inputs),
            intermediate_data_type=getattr(cudnn.data_type, inner),
            compute_data_type=getattr(cudnn.data_type, inner),
            handle=self._handle,
        )
        tensors = getattr(self, f"_{job.operation}")(graph, job)
        notes = cudnn.numerical_note
        refused = [notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION, notes.DOWN_CONVERT_INPUTS]
        graph.deselect_numeric_notes(refused if job.tensor_cores else [*refused, notes.TENSOR_CORE])
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return Graph(graph, [tensor.get_uid() for tensor in tensors], self._launch)

    def _fprop(self, graph: Any, job: Job) -> list[Any]:
        problem, o = job.problem, job.problem.results[3]
        x = self._tensor(graph, "x", problem.images, job.inputs)
        w = self._tensor(graph, "w", problem.kernels, job.inputs)
        y = graph.conv_fprop(image=x, weight=w, **problem.options)
        inputs = [x, w]
        if job.bias:
            inputs.append(
                graph.tensor(name="b", dim=[1, o, 1, 1], stride=[o, 1, o, o], data_type=self._dtype(job.inputs))
            )
            y = graph.bias(input=y, bias=inputs[2])
        if job.relu:
            y = graph.relu(input=y)
        return [*inputs, self._output(y, problem.results, job.output)]

    def _dgrad(self, graph: Any, job: Job) -> list[Any]:
        dy = self._tensor(graph, "dy", job.problem.results, job.inputs)
        w = self._tensor(graph, "w", job.problem.kernels, job.inputs)
        dx = graph.conv_dgrad(loss=dy, filter=w, **job.problem.options)
        return [dy, w, self._output(dx, job.problem.images, job.output)]

    def _wgrad(self, graph: Any, job: Job) -> list[Any]:
        x = self._tensor(graph, "x", job.problem.images, job.inputs)
        dy = self._tensor(graph, "dy", job.problem.results, job.inputs)
        dw = graph.conv_wgrad(image=x, loss=dy, **job.problem.options)
        return [x, dy, self._output(dw, job.problem.kernels, job.output)]

    def _tensor(self, graph: Any, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        dims, strides = channels_first(shape)
        return graph.tensor(name=name, dim=dims, stride=strides, data_type=self._dtype(dtype))

    def _output(self, tensor: Any, shape: tuple[int, ...], dtype: str) -> Any:
        dims, strides = channels_first(shape)
        return tensor.set_output(True).set_dim(dims).set_stride(strides).set_data_type(self._dtype(dtype))

    def _dtype(self, name: str) -> Any:
        return getattr(self._frontend.data_type, TYPES[name])

    def _launch(self, graph: Any, pack: dict[int, int], size: int) -> None:
        """Start a built graph on the array library's current stream, with scratch memory from its pool."""
        xp: Any = self._xp
        self._frontend.set_stream(handle=self._handle, stream=xp.cuda.get_current_stream().ptr)
        scratch = xp.empty((max(1, size),), np.uint8)
        graph.execute(pack, scratch.data.ptr, handle=self._handle)


def channels_first(shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the sizes and strides, in elements, of C-contiguous (n, h, w, c) named in the order n, c, h, w."""
    n, h, w, c = shape
    return [n, c, h, w], [h * w * c, 1, w * c, c]


@cache
def load(xp: ModuleType) -> Cudnn | str:
    """Return cuDNN for the device of this process, or why it cannot be used, as half a sentence."""
    try:
        return Cudnn(importlib.import_module("cudnn"), xp)
    except ImportError as error:
        return f"cuDNN's frontend cannot be imported ({error})"
    except RuntimeError as error:
        return f"cuDNN itself cannot be loaded ({error})"


def chosen(xp: ModuleType) -> Cudnn | None:
    """Return cuDNN, or None where this context wants im2col, or cuDNN is not there and nobody insists.

    Raises:
        DeviceError: when cuDNN is asked for and cannot be used.
    """
    algorithm = convolution()
    if algorithm == "im2col":
        return None
    found = load(xp)
    if isinstance(found, Cudnn):
        return found
    if algorithm != "auto":
        raise DeviceError(
            f"convolution {algorithm!r} cannot be used: {found}; install nnmpi[cudnn], or choose 'im2col' or 'auto'"
        )
    return None


def describe(xp: ModuleType) -> str:
    """Return in words how convolutions are computed on the device of this process."""
    if convolution() == "im2col":
        return "im2col and cuBLAS, as asked for"
    found = load(xp)
    return found.describe() if isinstance(found, Cudnn) else f"im2col and cuBLAS: {found}"
