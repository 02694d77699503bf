"""A double of cuDNN's frontend: graphs of one operation, computed by NumPy from the addresses that
are given when they are executed.

It has the frontend's names, and is as strict as a device is silent: an address that no array has
any more, or that is no multiple of 16, a tensor that reaches beyond its memory, a handle on another
stream than the current one, and a workspace that is too small are errors. TF32 rounds, where a
graph allows it.

`REFUSED` holds the names of operations for which there is to be no plan, or none for a type of the
result ("conv_wgrad FLOAT"); `BUILT` and `EXECUTED`
hold the graphs that were built, and the operation of each call.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

import ml_dtypes
import numpy as np
from cupy import _capture, _streams
from cupy._address import bytes_at
from cupy.cuda import memory

from cudnn._arithmetic import COMPUTE, result_shape

ALIGNED = 16
ROOM = 1000  # bytes of every plan's workspace

REFUSED = set()
BUILT = []
EXECUTED = deque(maxlen=1000)


class cudnnGraphNotSupportedError(RuntimeError):
    """There is no plan for a graph."""


class data_type(Enum):
    """The types of elements."""

    FLOAT = np.dtype("f4")
    DOUBLE = np.dtype("f8")
    HALF = np.dtype("f2")
    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


heur_mode = Enum("heur_mode", "A B FALLBACK OPENSOURCE")
diagonal_alignment = Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
numerical_note = Enum(
    "numerical_note",
    "TENSOR_CORE DOWN_CONVERT_INPUTS REDUCED_PRECISION_REDUCTION FFT NONDETERMINISTIC WINOGRAD"
    " WINOGRAD_TILE_4x4 WINOGRAD_TILE_6x6 WINOGRAD_TILE_13x13 STRICT_NAN_PROP",
)


class Handle:
    """A handle, and the stream on which it works."""

    def __init__(self):
        self.stream = 0


def backend_version():
    """Return cuDNN's version as a number."""
    return 91900


def backend_version_string():
    """Return cuDNN's version."""
    return "9.19.0"


def create_handle():
    """Return a new handle, on the null stream."""
    return Handle()


def set_stream(handle, stream):
    """Let a handle work on a stream."""
    handle.stream = stream


class Tensor:
    """A tensor of a graph: no memory yet."""

    def __init__(self, dim, stride, kind, uid):
        self.dim, self.stride, self.data_type, self.uid, self.is_output = (
            dim,
            stride,
            kind,
            uid,
            False,
        )

    def set_output(self, value):
        """Let the operation write it."""
        self.is_output = value
        return self

    def set_dim(self, dim):
        """Set its shape."""
        self.dim = dim
        return self

    def set_stride(self, stride):
        """Set its strides, in elements."""
        self.stride = stride
        return self

    def set_data_type(self, dtype):
        """Set its type."""
        self.data_type = dtype
        return self

    def view(self, address):
        """Return the memory at an address as an array of this form."""
        assert self.data_type is not None
        dtype = self.data_type.value
        size = dtype.itemsize * (
            1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        )
        if address % ALIGNED:
            raise RuntimeError(f"the address of tensor {self.uid} is no multiple of {ALIGNED}")
        if memory.base_of(address, size) is None:
            raise RuntimeError(
                f"tensor {self.uid} of shape {self.dim} is not in the device's memory"
            )
        strides = [step * dtype.itemsize for step in self.stride]
        return np.ndarray(self.dim, dtype, bytes_at(address, size), 0, strides)


class pygraph:
    """A graph with one operation."""

    def __init__(
        self,
        name="test_graph",
        io_data_type=None,
        intermediate_data_type=None,
        compute_data_type=None,
        handle=None,
    ):
        assert intermediate_data_type is compute_data_type is data_type.FLOAT
        assert handle is not None
        self.io_data_type, self.notes, self.state = io_data_type, set(), 0
        self.tensors = []

    def tensor(self, dim, stride, data_type):
        """Return a new tensor that the operation reads."""
        assert type(dim) is type(stride) is list
        self.tensors.append(Tensor(dim, stride, data_type, len(self.tensors)))
        return self.tensors[-1]

    def _operation(self, name, results, given, **options):
        self.name, self.given, self.options = name, given, options
        self.results = [
            Tensor(None, None, self.io_data_type, len(self.tensors) + i) for i in range(results)
        ]
        return self.results

    def conv_fprop(self, image, weight, padding, stride, dilation):
        """Convolve."""
        return self._convolution("conv_fprop", (image, weight), padding, stride, dilation)

    def conv_dgrad(self, loss, filter, padding, stride, dilation):
        """Return the image's gradient."""
        return self._convolution("conv_dgrad", (loss, filter), padding, stride, dilation)

    def conv_wgrad(self, image, loss, padding, stride, dilation):
        """Return the weight's gradient."""
        return self._convolution("conv_wgrad", (image, loss), padding, stride, dilation)

    def _convolution(self, name, given, padding, stride, dilation):
        assert all(
            type(option) is list and len(option) == 2 for option in (padding, stride, dilation)
        )
        options = {"padding": padding, "stride": stride, "dilation": dilation}
        return self._operation(name, 1, dict(zip("ab", given, strict=True)), **options)[0]

    def sdpa(
        self,
        q,
        k,
        v,
        attn_scale,
        generate_stats,
        diagonal_alignment=diagonal_alignment.TOP_LEFT,
        diagonal_band_right_bound=None,
    ):
        """Attend; the statistics are the logarithms of the sums of the rows' exponentials."""
        results = self._operation(
            "sdpa",
            1 + generate_stats,
            {"q": q, "k": k, "v": v},
            attn_scale=attn_scale,
            shift=_shift(q, k, diagonal_alignment, diagonal_band_right_bound),
        )
        return [*results, None][:2]

    def sdpa_backward(
        self,
        q,
        k,
        v,
        o,
        dO,
        stats,
        attn_scale,
        diagonal_alignment=diagonal_alignment.TOP_LEFT,
        diagonal_band_right_bound=None,
        use_deterministic_algorithm=False,
    ):
        """Return the gradients of q, k and v."""
        assert use_deterministic_algorithm
        return self._operation(
            "sdpa_backward",
            3,
            {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats},
            attn_scale=attn_scale,
            shift=_shift(q, k, diagonal_alignment, diagonal_band_right_bound),
        )

    # -------------------------------------------------------------- the steps of building
    def _reach(self, state):
        """Go on from the step before."""
        assert self.state == state - 1, "the steps of building are out of order"
        self.state = state

    def validate(self):
        """Check the forms of all tensors."""
        self._reach(1)
        for tensor in (*self.given.values(), *self.results):
            assert tensor.data_type is not None
            assert len(tensor.dim) == len(tensor.stride) == 4
            assert min(tensor.dim) > 0
        assert all(tensor.is_output for tensor in self.results)
        shapes = {name: tuple(tensor.dim) for name, tensor in self.given.items()}
        results = [tuple(tensor.dim) for tensor in self.results]
        expected = result_shape(self.name, shapes, results, self.options)
        if expected != results:
            raise ValueError(f"{self.name} of {shapes} gives {expected}, not {results}")

    def build_operation_graph(self):
        """Give the graph to cuDNN."""
        self._reach(2)

    def deselect_numeric_notes(self, notes):
        """Leave out plans with one of the notes."""
        assert self.state < 3
        self.notes.update(notes)
        return self

    def deselect_engines(self, engine_names):
        """Leave out plans by their engines' names; there is none of these here."""
        assert self.state < 3
        return self

    def create_execution_plans(self, heuristics):
        """Ask the heuristics for plans."""
        assert numerical_note.NONDETERMINISTIC in self.notes
        assert heuristics == [heur_mode.A, heur_mode.FALLBACK]
        self._reach(3)

    def check_support(self):
        """Refuse what cuDNN has no plan for."""
        self._reach(4)
        given, results = list(self.given.values()), self.results
        kind = results[0].data_type
        assert kind is not None
        if {self.name, f"{self.name} {kind.name}"} & REFUSED:
            raise cudnnGraphNotSupportedError("No valid engine configs for it")
        if self.name.startswith("conv"):
            if any(tensor.stride[1] != 1 for tensor in (*given, *results)):
                raise cudnnGraphNotSupportedError("channels are not last")
            return
        heads = [item for item in (*given, *results) if item.data_type is not data_type.FLOAT]
        if len(heads) != len(given) + len(results) - (self.name != "sdpa" or len(results) == 2):
            raise cudnnGraphNotSupportedError("heads are float32")
        if any(item.dim[3] % 8 or item.dim[3] > 256 or item.stride[3] != 1 for item in heads):
            raise cudnnGraphNotSupportedError("features are no multiple of 8")

    def build_plans(self):
        """Build the best of the plans."""
        self._reach(5)
        BUILT.append(self)

    def get_workspace_size(self):
        """Return the bytes of memory that a call needs."""
        return ROOM

    # -------------------------------------------------------------- a call
    def execute(self, tensor_dict, workspace, handle):
        """Compute."""
        assert self.state == 5, "the graph has not been built"
        if handle.stream != _streams.current().ptr:
            raise RuntimeError("the handle works on another stream")
        if memory.base_of(workspace, ROOM) is None:
            raise RuntimeError("the workspace is too small")
        given = {name: (item, tensor_dict[item]) for name, item in self.given.items()}
        places = [(item, tensor_dict[item]) for item in self.results]
        assert len(tensor_dict) == len(given) + len(places)
        for tensor, address in (*given.values(), *places):
            tensor.view(address)
        EXECUTED.append(self.name)
        exact = numerical_note.TENSOR_CORE in self.notes

        def compute():
            wide = {
                name: _wide(item.view(address), exact) for name, (item, address) in given.items()
            }
            targets = [item.view(address) for item, address in places]
            results = COMPUTE[self.name](targets, self.options, **wide)
            for target, value in zip(targets, results, strict=True):
                target[...] = value.astype(target.dtype)

        _capture.submit(compute, workspace, *tensor_dict.values())


def _wide(x, exact):
    """Return an array as float32, with TF32's bits if it need not be exact."""
    if x.dtype != np.float32 or exact:
        return x.astype(np.float32)
    bits = np.ascontiguousarray(x).view("u4")
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view("f4")


def _shift(q, k, side, bound):
    """Return how many keys the first query sees besides the first; None if all see all."""
    if bound is None:
        return None
    more = k.dim[2] - q.dim[2] if side is diagonal_alignment.BOTTOM_RIGHT else 0
    if more < 0:
        raise cudnnGraphNotSupportedError("more queries than keys")
    return more + bound
