"""Convolution and attention by NVIDIA's cuDNN, through the graphs of its frontend.

    operation          reads                                   writes
    convolve           images, kernels                         images
    input_gradient     the result's gradient, kernels          images
    weight_gradient    images, the result's gradient           kernels
    attend             q, k, v                                 y, statistics of the softmax
    attend_grad        q, k, v, y, dy, the statistics          dq, dk, dv

A graph is one operation on tensors of given shapes, strides and dtypes. It is built at its first
call: cuDNN's heuristics choose among kernels whose results are the same in every run, and nothing
is timed. Later calls pass addresses. Nothing waits for the device, so a stream that is being
captured may call what was built before.

Images are (n, h, w, c). cuDNN names the axes in the order (n, c, h, w) and reads any strides, so it
gets views. Its kernels are (o, kh, kw, c / groups) in memory, which is another order than nnmpi's.
Attention saves the logarithm of each row's sum in place of a matrix of probabilities (Dao et al.,
"FlashAttention", 2022).
"""

import importlib
import threading
from functools import lru_cache, partial, partialmethod
from math import sqrt
from types import ModuleType
from typing import Any, TypeAlias

from nnmpi.backend.array import Array, Matrices
from nnmpi.backend.precision import is_low, precision
from nnmpi.backend.recording import call
from nnmpi.backend.windows import RowsAndColumns
from nnmpi.base.errors import DeviceError

ALIGNED = 16  # bytes; cuDNN takes each address for a multiple
# Before 9.16 a graph of attention copies lengths from the host at each call, whose memory a capture
# would read after its end.
ATTENTION_VERSION = 91600
# Of the frontend's errors: what cuDNN says of a graph that it does not know.
UNKNOWN = ("CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_BAD_PARAM")

TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
# Each operation's tensors that are read, by cuDNN's names.
OPERATIONS = {
    "conv_fprop": ("image", "weight"),
    "conv_dgrad": ("loss", "filter"),
    "conv_wgrad": ("image", "loss"),
    "sdpa": ("q", "k", "v"),
    "sdpa_backward": ("q", "k", "v", "o", "dO", "stats"),
}
# Kernels that are not chosen. Transforms would round whole numbers, whose sums of products are
# exact.
REFUSED = (
    "NONDETERMINISTIC",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
ROUNDING = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")  # what rounds float32 to TF32
# Engines of the frontend's own, which it compiles for seconds where CUTLASS is installed.
COMPILED = ("sdpa_fwd", "sdpa_bwd", "frost")

# stride, padding and dilation
Windows: TypeAlias = tuple[RowsAndColumns, RowsAndColumns, RowsAndColumns]


class Cudnn:
    """cuDNN's operations on one library's arrays, with their plans.

    The methods return False, and write nothing, when cuDNN has no plan for the arrays, or one of
    them has no elements. An address that is no multiple of 16 is the caller's to avoid, except in
    attention, which is then refused.

    Args:
        xp: cupy.
        library: the package `cudnn`.
    """

    def __init__(self, xp: ModuleType, library: ModuleType) -> None:
        self._xp, self._library = xp, library
        self._attends = library.backend_version() >= ATTENTION_VERSION
        self._handles = threading.local()  # of this thread, by the number of the device
        # Never dropped: a graph that was captured runs the kernels that belong to them.
        self._plans: dict[Any, Any] = {}

    # ---- convolution

    def _convolution(
        self, name: str, first: Array, second: Array, result: Array, windows: Windows
    ) -> bool:
        """Write a convolution or a gradient of it, see the head of this file.

        Args:
            name: cuDNN's, of the operation.
            first, second: contiguous. Images are (n, h, w, c), float32 or 16 bits wide, kernels
                (o, kh, kw, c / groups), of the images' dtype.
            result: out, of that dtype; gradients of kernels may be float32.
            windows: of the convolution.
        """
        options = tuple(zip(("stride", "padding", "dilation"), windows, strict=True))
        arrays = [item.transpose(0, 3, 1, 2) for item in (first, second, result)]
        return self._run(name, options, *arrays)

    convolve = partialmethod(_convolution, "conv_fprop")
    input_gradient = partialmethod(_convolution, "conv_dgrad")
    weight_gradient = partialmethod(_convolution, "conv_wgrad")

    # ---- attention

    def attend(
        self, inputs: tuple[Array, ...], y: Array, statistics: Array | None, causal: bool
    ) -> bool:
        """Write softmax(q k^T / sqrt(features)) v.

        Args:
            inputs: q (batch, heads, queries, features), k and v (batch, heads, keys, features),
                with any strides, 16 bits wide.
            y: out, like q.
            statistics: out, (batch, heads, queries, 1), float32; None if no gradient is needed.
            causal: whether query i sees the keys up to i + keys - queries alone.
        """
        late = causal and y.shape[2] > inputs[1].shape[2]  # some queries would see no key
        if late or not self._attends or not _heads_fit(*inputs, y):
            return False
        options = (*self._mask(inputs, causal), ("generate_stats", statistics is not None))
        outputs = (y,) if statistics is None else (y, statistics)
        return self._run("sdpa", options, *inputs, *outputs)

    def attend_grad(
        self,
        grad: Array,
        inputs: tuple[Array, ...],
        y: Array,
        statistics: Array,
        targets: tuple[Array, ...],
        causal: bool,
    ) -> bool:
        """Write the gradients of q, k and v, given that of y."""
        if not _heads_fit(grad, *targets):
            return False
        options = (*self._mask(inputs, causal), ("use_deterministic_algorithm", True))
        return self._run("sdpa_backward", options, *inputs, y, grad, statistics, *targets)

    def _mask(self, inputs: tuple[Array, ...], causal: bool) -> tuple[tuple[str, Any], ...]:
        (q, k, _), sides = inputs, self._library.diagonal_alignment
        scale = ("attn_scale", 1 / sqrt(q.shape[3]))
        if not causal:
            return (scale,)
        side = sides.TOP_LEFT if q.shape[2] == k.shape[2] else sides.BOTTOM_RIGHT
        return (scale, ("diagonal_alignment", side), ("diagonal_band_right_bound", 0))

    # ---- plans

    def _run(self, name: str, options: tuple[tuple[str, Any], ...], *arrays: Array) -> bool:
        """Run an operation; return False if there is no plan for it."""
        if not all(item.size for item in arrays):
            return False
        tf32 = precision() == "tf32"
        forms = tuple([(item.shape, item.strides, item.dtype.name) for item in arrays])
        key = (self._xp.cuda.runtime.getDevice(), name, options, tf32, forms)
        plan = self._plans.get(key, self)
        if plan is self:
            plan = self._plans[key] = self._plan(name, dict(options), tf32, arrays)
        if plan is None:
            return False
        call(plan, (), arrays)
        return True

    def _plan(
        self, name: str, options: dict[str, Any], tf32: bool, arrays: tuple[Array, ...]
    ) -> Any:
        """Return a function of such arrays, or None if cuDNN does not support them.

        Raises:
            DeviceError: when cuDNN fails for another reason.
        """
        library = self._library
        kinds = [getattr(library.data_type, TYPES[item.dtype.name]) for item in arrays]
        wide = library.data_type.FLOAT
        graph = library.pygraph(
            io_data_type=kinds[0],
            intermediate_data_type=wide,
            compute_data_type=wide,
            handle=self._handle(),
        )
        names = OPERATIONS[name]
        forms = [(list(item.shape), list(Matrices.of(item).strides)) for item in arrays]
        tensors = [
            graph.tensor(dim=dim, stride=stride, data_type=kind)
            for (dim, stride), kind in zip(forms, kinds[: len(names)], strict=False)
        ]
        given = dict(zip(names, tensors, strict=True))
        lists = {key: list(item) if type(item) is tuple else item for key, item in options.items()}
        results = getattr(graph, name)(**given, **lists)
        for result, (dim, stride), kind in zip(
            results if isinstance(results, list) else [results],
            forms[len(names) :],
            kinds[len(names) :],
            strict=False,  # without statistics the second result is None
        ):
            result.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
            tensors.append(result)
        exact = kinds[0] == wide and not tf32
        notes = [getattr(library.numerical_note, item) for item in REFUSED + ROUNDING * exact]
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.deselect_numeric_notes(notes)
            graph.deselect_engines(list(COMPILED))
            graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except library.cudnnGraphNotSupportedError:
            return None
        except RuntimeError as error:
            if any(map(str(error).__contains__, UNKNOWN)):
                return None
            raise DeviceError(
                f"cuDNN cannot prepare {name} of shapes"
                f" {', '.join(str(item.shape) for item in arrays)} ({error}); without the package"
                " nvidia-cudnn-frontend nnmpi computes by its own kernels"
            ) from error
        return partial(self._execute, graph, tensors, graph.get_workspace_size())

    def _execute(self, graph: Any, tensors: list[Any], room: int, *arrays: Array) -> None:
        """Queue a plan on the current stream."""
        workspace = self._xp.empty((max(room, 1),), "uint8")  # its memory is used again in order
        places = {tensor: _address(item) for tensor, item in zip(tensors, arrays, strict=True)}
        graph.execute(places, _address(workspace), handle=self._handle())

    def _handle(self) -> Any:
        """Return this thread's handle for the current device, on the current stream."""
        handles, cuda = self._handles.__dict__, self._xp.cuda
        device = str(cuda.runtime.getDevice())
        if device not in handles:
            handles[device] = self._library.create_handle()
        self._library.set_stream(handle=handles[device], stream=cuda.get_current_stream().ptr)
        return handles[device]


def is_aligned(x: Array) -> bool:
    """Whether cuDNN may read an array where it is."""
    return _address(x) % ALIGNED == 0


def _address(x: Any) -> int:
    return int(x.data.ptr)


def _heads_fit(*heads: Array) -> bool:
    """Whether attention may read and write heads (batch, heads, time, features) where they are."""
    return all(
        is_low(item.dtype)
        and item.strides[3] == item.itemsize
        and is_aligned(item)
        and not any(stride % ALIGNED for stride in item.strides[:3])
        for item in heads
    )


@lru_cache(4)
def cudnn_of(xp: ModuleType) -> Cudnn | None:
    """Return cuDNN's operations on a library's arrays; None where `problem` is not empty."""
    return None if problem() else Cudnn(xp, _library())


def _library() -> ModuleType:
    return importlib.import_module("cudnn")


def problem() -> str:
    """Return why cuDNN cannot be used, with a remedy, or an empty text."""
    try:
        _library().backend_version()
    except ImportError as error:
        return f"nvidia-cudnn-frontend cannot be imported ({error}); pip install it"
    except RuntimeError as error:  # the frontend is there, and the library is not
        return f"libcudnn is missing ({error}); pip install nvidia-cudnn-cu13, or -cu12"
    return ""


def describe() -> str:
    """Return which library computes convolutions and attention on a device, as text."""
    reason = problem()
    return f"without cuDNN: {reason}" if reason else f"cuDNN {_library().backend_version_string()}"
