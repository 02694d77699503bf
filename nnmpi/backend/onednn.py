"""oneDNN, called through its C interface: products, and convolutions that read bfloat16.

    float32 operands ---reorder: each element is rounded---> bfloat16
    bfloat16 operands ---matmul, convolution: sums in float32---> float32

bfloat16 is taken where it is a gain: on processors with instructions that multiply it (`UNITS`). On
Intel's processors large float32 products are oneDNN's, too (`takes`), which are faster there than
NumPy's OpenBLAS. Shapes alone decide, not timings: a repeated command has the same bits.

`find` looks for the library where pip and Conda put it, then where the system's loader looks, which
knows Debian's packages and a cluster's modules.

A primitive is oneDNN's word for compiled code for given shapes and strides. Each thread keeps the
primitives that it used last, with the memory objects to which each call gives its arrays: simulated
ranks are threads, and neither a memory object nor a primitive's scratch memory can be shared.
"""

from __future__ import annotations

import ctypes
import os
import platform
import site
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np

from nnmpi.backend.array import Array, Matrices, Shape
from nnmpi.backend.blas import blas_threads, is_intel
from nnmpi.base.errors import DeviceError

VARIABLE = "NNMPI_ONEDNN"
NAME = "libdnnl.so.3"
OLDEST = (3, 2)
REMEDY = "pip install onednn-cpu-gomp"
# The bits of oneDNN's instruction sets, best first: what multiplies bfloat16, as /proc/cpuinfo
# names it. Intel's avx512_bf16 is no gain: with AMX switched off, products took an Emerald Rapids
# twice the time of float32's.
AMX, AVX512 = "amx_bf16", "avx512_bf16"
UNITS = {AMX: 0xFEF, AVX512: 0xE7}
PRIMITIVES = 512  # of a thread

# Multiplications of a float32 product that oneDNN computes. On an Emerald Rapids, one thread, GF/s
# by OpenBLAS, MKL and oneDNN: 125, 153, 152 for (64 x 784) x 128; 118, 123, 123 for 128 cubed; 133,
# 33, 24 for 64 cubed. In 15 larger products oneDNN had 1.02 to 1.35 of OpenBLAS's speed and 0.93 to
# 1.15 of MKL's. Of a transposed first matrix it reads larger ones slowly: (1536 x 2048) x 384 took
# 109 to OpenBLAS's 138.
LEAST, MOST_TURNED = 2**21, 2**27

# Constants of dnnl_types.h
_CPU, _IN_ORDER = 1, 1
_BFLOAT16, _FLOAT32 = 2, 3
_SOURCE, _RESULT, _WEIGHTS = 1, 17, 33
_TO_SOURCE, _TO_RESULT, _TO_WEIGHTS = 129, 145, 161
_IMPLEMENTATION_QUERY, _WEIGHTS_QUERY, _TO_WEIGHTS_QUERY = 8, 131, 132
_TRAINING, _DIRECT, _ANY = 64, 1, 1
_SEQUENTIAL, _OPENMP = 1, 2
_NAMES = {1: "out of memory", 2: "invalid arguments", 3: "not supported", 6: "a runtime error"}
_UNSUPPORTED = (2, 3)

FLOAT32 = np.dtype(np.float32)
_POINTER, _INT, _LENGTH = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_MOST_AXES = 12

T = TypeVar("T")


class _Argument(ctypes.Structure):
    _fields_: ClassVar = [("which", _INT), ("memory", _POINTER)]


class _Version(ctypes.Structure):
    _fields_: ClassVar = [
        ("major", _INT),
        ("minor", _INT),
        ("patch", _INT),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    ]


class Library(NamedTuple):
    """The library.

    Attributes:
        functions: of its C interface.
        version: such as "3.2".
        unit: the instructions that multiply bfloat16, a name in `UNITS`; "" if none are a gain.
        threaded: whether it has threads of OpenMP, whose number it takes from the calling thread.
    """

    functions: ctypes.CDLL
    version: str
    unit: str
    threaded: bool

    @cache  # noqa: B019 (there is one)
    def engine(self) -> Any:
        """Return the engine of all threads, which is for the process."""
        result = _POINTER()
        check(self.functions.dnnl_engine_create(_at(result), _CPU, ctypes.c_size_t(0)), "its start")
        return result

    def __str__(self) -> str:
        """Return it as the header names it."""
        return f"{self.unit} by oneDNN {self.version}"


class Found(NamedTuple):
    """The library; and why bfloat16 is slow here, to go on with after "oneDNN"."""

    library: Library | None
    reason: str = ""


@cache
def find() -> Found:
    """Return the library, or None, and the reason if it does not make bfloat16 fast here."""
    given = os.environ.get(VARIABLE)
    reason = f"is not installed: {REMEDY}"
    for place in [given] if given else [*_installed(), NAME]:
        try:
            functions = ctypes.CDLL(place)
            functions.dnnl_version.restype = ctypes.POINTER(_Version)
            known = functions.dnnl_version().contents
        except (OSError, AttributeError) as error:
            if place != NAME:  # it is there, and lacks something, such as libgomp
                source = f" from {VARIABLE}={given}" if given else ""
                reason = f"cannot be loaded{source} ({error})"
            continue
        library = _library(functions, known)
        if isinstance(library, Library):
            return Found(library, "" if library.unit else _no_unit(library))
        reason = library
    return Found(None, reason)


def _no_unit(library: Library) -> str:
    return f"{library.version} finds no instructions for bfloat16 in this processor that are a gain"


def _library(functions: ctypes.CDLL, known: Any) -> Library | str:
    """Return a loaded library, or the reason why it is of no use."""
    version = f"{known.major}.{known.minor}"
    if not OLDEST <= (known.major, known.minor) < (OLDEST[0] + 1, 0):
        return f"{version} is not 3.2 to 3.x: {REMEDY}"
    if known.cpu_runtime not in (_SEQUENTIAL, _OPENMP):
        return f"{version} here has other threads than OpenMP's: {REMEDY}"
    functions.dnnl_get_effective_cpu_isa.restype = ctypes.c_uint
    # the bits of another architecture mean something else
    isa = functions.dnnl_get_effective_cpu_isa() if platform.machine() == "x86_64" else 0
    unit = next((name for name, bits in UNITS.items() if isa & bits == bits), "")
    if unit == AVX512 and is_intel():
        unit = ""
    functions.dnnl_memory_set_data_handle.argtypes = [_POINTER, _POINTER]
    functions.dnnl_primitive_execute.argtypes = [_POINTER, _POINTER, _INT, _POINTER]
    functions.dnnl_primitive_desc_query_md.restype = _POINTER
    functions.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
    order, factor, matrix = ctypes.c_char, ctypes.c_float, (_POINTER, _LENGTH)
    sizes = _LENGTH, _LENGTH, _LENGTH
    functions.dnnl_sgemm.argtypes = (
        order,
        order,
        *sizes,
        factor,
        *matrix,
        *matrix,
        factor,
        *matrix,
    )
    return Library(functions, version, unit, known.cpu_runtime == _OPENMP)


def installed() -> Library | None:
    """Return the library if it makes bfloat16 fast here, else None."""
    library = find().library
    return library if library is not None and library.unit else None


@cache
def for_float32() -> Library | None:
    """Return the library if its float32 products are taken: on Intel's processors, if installed."""
    return find().library if is_intel() else None


def _installed() -> Iterator[str]:
    """Yield the files that pip or Conda installed."""
    for folder in dict.fromkeys((sys.prefix, sys.base_prefix, site.getuserbase())):
        file = Path(folder, "lib", NAME)
        if file.exists():
            yield str(file)


class _Session:
    """What a thread has of oneDNN: a stream, the primitives of late, and rooms for bfloat16."""

    def __init__(self, library: Library) -> None:
        functions = library.functions
        self.functions, self._threaded = functions, library.threaded
        self.engine, self.stream = library.engine(), _POINTER()
        check(functions.dnnl_stream_create(_at(self.stream), self.engine, _IN_ORDER), "its start")
        weakref.finalize(self, functions.dnnl_stream_destroy, self.stream)
        self._made: OrderedDict[Any, Any] = OrderedDict()
        self._rooms: dict[int, tuple[Array, int]] = {}

    def threads(self) -> int:
        """Let the next primitives run on as many threads as NumPy's BLAS; return their number."""
        count = blas_threads() if os.getpid() == _PROCESS else 1
        if self._threaded:
            self.functions.omp_set_num_threads(count)
        return count

    def made(self, key: Any, make: Callable[[], T]) -> T:
        """Return what was made for a key, or make it; the longest unused one goes."""
        table = self._made
        if key in table:
            table.move_to_end(key)
            return table[key]
        result = table[key] = make()
        if len(table) > PRIMITIVES:
            table.popitem(last=False)
        return result

    def room(self, number: int, size: int) -> int:
        """Return the address of a room for so many bfloat16, whose contents nobody needs."""
        room, address = self._rooms.get(number, (None, 0))
        if room is None or room.size < size:
            room = np.empty(size, np.uint16)
            address = room.ctypes.data  # which takes a microsecond
            self._rooms[number] = room, address
        return address

    def rounded_room(self, number: int, x: Array) -> int:
        """Return the address of the bfloat16 of a contiguous array, in its order: of a room with
        them, or of the array's own from `lower`.
        """
        if x.dtype == np.uint16:
            return x.ctypes.data
        room, flat = self.room(number, x.size), x.reshape(1, x.size)
        self.made((self.threads(), x.size), lambda: _rounding(self, flat)[0])(x.ctypes.data, room)
        return room

    # ---- making

    def description(self, shape: Shape, strides: Shape, dtype: int) -> Any:
        """Return the description of an array, with strides in elements."""
        result = _POINTER()
        functions, lengths = self.functions, _LENGTH * _MOST_AXES
        check(
            functions.dnnl_memory_desc_create_with_strides(
                _at(result), len(shape), lengths(*shape), dtype, lengths(*strides)
            ),
            f"an array of shape {shape}",
        )
        return self.freed(result, functions.dnnl_memory_desc_destroy)

    def free_description(self, shape: Shape, dtype: int) -> Any:
        """Return the description of an array whose order the library may choose."""
        result, functions = _POINTER(), self.functions
        create, lengths = functions.dnnl_memory_desc_create_with_tag, _LENGTH * _MOST_AXES
        status = create(_at(result), len(shape), lengths(*shape), dtype, _ANY)
        check(status, f"an array of shape {shape}")
        return self.freed(result, functions.dnnl_memory_desc_destroy)

    def freed(self, pointer: Any, destroy: Any) -> Any:
        """Return a pointer whose object ends with it."""
        weakref.finalize(pointer, destroy, _POINTER(pointer.value))
        return pointer

    def reordering(self, what: str, before: Any, after: Any) -> _Primitive:
        """Return the primitive that copies from one description to another."""
        return self.primitive(
            "dnnl_reorder_primitive_desc_create",
            what,
            (before, self.engine, after, self.engine, None),
            {_SOURCE: before, _RESULT: after},
        )

    def primitive(
        self, create: str, what: str, arguments: Sequence[Any], arrays: Mapping[int, Any]
    ) -> _Primitive:
        """Return a primitive.

        Args:
            create: the function that makes its description.
            what: its work, for errors.
            arguments: that function's, after the first.
            arrays: descriptions of the arrays, by oneDNN's numbers for them; or the number of the
                query for the one that it has chosen.

        Raises:
            DeviceError: when the library refuses it.
        """
        functions, description, primitive = self.functions, _POINTER(), _POINTER()
        check(getattr(functions, create)(_at(description), *arguments), what)
        try:
            check(functions.dnnl_primitive_create(_at(primitive), description), what)
            known = {
                number: self._chosen(description, item) if isinstance(item, int) else item
                for number, item in arrays.items()
            }
            name = ctypes.c_char_p()
            query = functions.dnnl_primitive_desc_query
            check(query(description, _IMPLEMENTATION_QUERY, 0, _at(name)), what)
        finally:
            functions.dnnl_primitive_desc_destroy(description)
        return _Primitive(self, primitive, what, known, name.value or b"")

    def _chosen(self, primitive: Any, query: int) -> Any:
        """Return the description of an array that the library has chosen."""
        functions, result = self.functions, _POINTER()
        chosen = _POINTER(functions.dnnl_primitive_desc_query_md(primitive, query, 0))
        check(functions.dnnl_memory_desc_clone(_at(result), chosen), "a description")
        return self.freed(result, functions.dnnl_memory_desc_destroy)


class _Primitive:
    """Compiled code for given shapes, and the memory objects of its arrays."""

    def __init__(
        self,
        session: _Session,
        primitive: Any,
        what: str,
        arrays: Mapping[int, Any],
        implementation: bytes,
    ) -> None:
        functions = session.functions
        self._functions, self._stream, self._primitive = functions, session.stream, primitive
        self._what, self._memories, self._places = what, list[Any](), [0] * len(arrays)
        self.descriptions, self.implementation = arrays, implementation
        session.freed(primitive, functions.dnnl_primitive_destroy)
        for description in arrays.values():
            memory = _POINTER()
            create = functions.dnnl_memory_create
            check(create(_at(memory), description, session.engine, _POINTER()), what)
            self._memories.append(session.freed(memory, functions.dnnl_memory_destroy))
        pairs = zip(arrays, self._memories, strict=True)
        self._arguments = (_Argument * len(arrays))(*(_Argument(*pair) for pair in pairs))

    def __call__(self, *addresses: int) -> None:
        """Run it on arrays, in the order in which they were described."""
        for i, address in enumerate(addresses):
            if address != self._places[i]:
                self._functions.dnnl_memory_set_data_handle(self._memories[i], address)
                self._places[i] = address
        count, arguments = len(addresses), self._arguments
        execute = self._functions.dnnl_primitive_execute
        check(execute(self._primitive, self._stream, count, arguments), self._what)


def check(status: int, what: str) -> None:
    """Raise an error for a status of the library that is not 0.

    Raises:
        DeviceError: naming the work and its shapes.
    """
    if status:
        raise DeviceError(f"oneDNN failed at {what}: {_NAMES.get(status, f'status {status}')}")


def _at(pointer: Any) -> Any:
    return ctypes.byref(pointer)


class _Local(threading.local):
    session: _Session | None = None


_local = _Local()
_PROCESS = os.getpid()  # which has libgomp's threads: a forked child would wait for them forever


def _session() -> _Session:
    session = _local.session
    if session is None:
        library = find().library
        assert library is not None
        session = _local.session = _Session(library)
    return session


# ---- products


def takes(a: Array, b: Array, out: Array | None) -> bool:
    """True for float32 matrices, row- or column-major, that `multiply_exactly` multiplies faster.

    Smaller products, and stacks of matrices, are NumPy's. `out` must be row-major.
    """
    multiplications = a.size * b.shape[-1]
    if multiplications < LEAST or a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        return False
    left, right = Matrices.of(a).form, Matrices.of(b).form
    if left is None or right is None or not a.dtype == b.dtype == FLOAT32:
        return False
    if left[0] and multiplications > MOST_TURNED:
        return False
    if out is None:
        return True
    form = Matrices.of(out).form
    fits = out.shape == (a.shape[0], b.shape[1]) and out.dtype == FLOAT32
    return fits and form is not None and not form[0]


def multiply_exactly(a: Array, b: Array, out: Array, add: bool) -> None:
    """Write a @ b to `out`, or add it, all in float32; for arguments that `takes` accepts.

    Raises:
        DeviceError: when the library fails.
    """
    session = _session()
    session.threads()
    (left, a_row), (right, b_row), (_, out_row) = (_lines(x) for x in (a, b, out))
    (n, k), m = a.shape, b.shape[1]
    status = session.functions.dnnl_sgemm(
        left,
        right,
        n,
        m,
        k,
        1.0,
        a.ctypes.data,
        a_row,
        b.ctypes.data,
        b_row,
        float(add),
        out.ctypes.data,
        out_row,
    )
    check(status, f"the product of shapes {a.shape} and {b.shape}")


def _lines(x: Array) -> tuple[bytes, int]:
    """Return BLAS's letter for a matrix's order, and the elements from one line to the next."""
    form = Matrices.of(x).form
    assert form is not None
    return (b"T" if form[0] else b"N"), form[1]


def multiply(a: Array, b: Array, out: Array, add: bool) -> None:
    """Write a @ b to `out`, or add it: operands rounded to bfloat16, sums in float32.

    Args:
        a: (..., n, k), b: (..., k, m), float32, with any strides, or from `rounded`. Leading axes
            are broadcast.
        out: (..., n, m), float32, with any strides.
        add: add the product to `out`.

    Raises:
        DeviceError: when the library fails.
    """
    if not a.size or not b.size:
        if not add:
            out[...] = 0
        return
    session = _session()
    arrays = (a.shape, a.strides, b.shape, b.strides, out.shape, out.strides)
    key = (session.threads(), add, a.itemsize, b.itemsize, *arrays)
    session.made(key, lambda: _Product(session, a, b, out, add))(a, b, out)


def rounded(x: Array) -> Array:
    """Return the bfloat16 of float32 values, as whole numbers of 16 bits, in the order of x.

    Raises:
        DeviceError: when the library fails.
    """
    if not _is_readable(x):
        x = np.ascontiguousarray(x)
    session = _session()
    out = np.empty(x.size, np.uint16)
    if x.size:
        key = (session.threads(), x.shape, x.strides)
        session.made(key, lambda: _rounding(session, x)[0])(x.ctypes.data, out.ctypes.data)
    return np.lib.stride_tricks.as_strided(out, x.shape, [2 * n for n in _compact(x)])


def lower(x: Array, out: Array) -> None:
    """Write the bfloat16 of float32 values to a contiguous array of 16 bits, of their shape.

    Raises:
        DeviceError: when the library fails.
    """
    if not x.size:
        return
    session = _session()
    if x.flags.c_contiguous or not _is_readable(x):
        x = np.ascontiguousarray(x).reshape(1, x.size)
        rounding = session.made((session.threads(), x.size), lambda: _rounding(session, x)[0])
    else:  # its axes change their order as they are rounded
        key = (session.threads(), "lower", x.shape, x.strides)
        rounding = session.made(key, lambda: _lowering(session, x))
    rounding(x.ctypes.data, out.ctypes.data)


def round_into(x: Array, out: Array) -> None:
    """Write float32 values rounded to bfloat16 to a contiguous float32 array of their shape.

    Raises:
        DeviceError: when the library fails.
    """
    x, session = np.ascontiguousarray(x), _session()
    room = session.rounded_room(0, x)

    def back() -> _Primitive:
        kinds = (_BFLOAT16, _FLOAT32)
        return session.reordering(
            f"rounding an array of shape {x.shape}",
            *(session.description((1, x.size), (x.size, 1), kind) for kind in kinds),
        )

    session.made((session.threads(), "back", x.size), back)(room, out.ctypes.data)


def _rounding(session: _Session, x: Array) -> tuple[_Primitive, Shape]:
    """Return the primitive that rounds arrays like x, and the strides of its result."""
    strides = _compact(x)
    exact = session.description(*_matrices(x.shape, _elements(x)), _FLOAT32)
    low = session.description(*_matrices(x.shape, strides), _BFLOAT16)
    return session.reordering(f"rounding an array of shape {x.shape}", exact, low), strides


def _lowering(session: _Session, x: Array) -> _Primitive:
    """Return the primitive that rounds arrays of these strides into contiguous ones."""
    order = tuple(prod(x.shape[i + 1 :]) for i in range(x.ndim))
    exact = session.description(*_matrices(x.shape, _elements(x)), _FLOAT32)
    low = session.description(*_matrices(x.shape, order), _BFLOAT16)
    return session.reordering(f"rounding an array of shape {x.shape}", exact, low)


class _Product:
    """A product of arrays of given shapes and strides: the rounding of two, and their product."""

    def __init__(self, session: _Session, a: Array, b: Array, out: Array, add: bool) -> None:
        self._session, self._add = session, add
        self._copies = tuple(not _is_readable(x) for x in (a, b))
        self._apart = not (_is_written(out) or _is_written(out.swapaxes(-1, -2)))
        a, b, result = self._prepared(a, b, out)
        # a column-major result is written as the transposed product b^T a^T
        self._turned = not _is_written(result)
        what = f"the product of shapes {a.shape} and {b.shape}"
        self._rounding: list[_Primitive | None] = []
        operands = []
        for x in (a, b):
            is_low = x.dtype == np.uint16
            primitive, strides = (None, _elements(x)) if is_low else _rounding(session, x)
            self._rounding.append(primitive)
            missing = result.ndim - x.ndim
            # axes of length 1, which the library broadcasts
            operands.append(((1,) * missing + x.shape, (x.size,) * missing + strides))
        operands.append((result.shape, _elements(result)))
        if self._turned:
            left, right, product = (_transposed(*operand) for operand in operands)
            operands = [right, left, product]
        types = (_BFLOAT16, _BFLOAT16, _FLOAT32)
        left, right, product = (
            session.description(*_matrices(shape, strides), dtype)
            for dtype, (shape, strides) in zip(types, operands, strict=True)
        )
        adding = _adding(session) if add and not self._apart else None
        self._product = session.primitive(
            "dnnl_matmul_primitive_desc_create",
            what,
            (session.engine, left, right, None, product, adding),
            {_SOURCE: left, _WEIGHTS: right, _RESULT: product},
        )

    def __call__(self, a: Array, b: Array, out: Array) -> None:
        """Multiply arrays of the shapes and strides for which it was made."""
        a, b, result = self._prepared(a, b, out)
        left, right = (self._low(i, x) for i, x in enumerate((a, b)))
        if self._turned:
            left, right = right, left
        self._product(left, right, result.ctypes.data)
        if self._apart and self._add:
            np.add(out, result, out=out)
        elif self._apart:
            np.copyto(out, result)

    def _low(self, number: int, x: Array) -> int:
        """Return the address of an operand's bfloat16."""
        rounding, address = self._rounding[number], x.ctypes.data
        if rounding is None:
            return address
        room = self._session.room(number, x.size)
        rounding(address, room)
        return room

    def _prepared(self, a: Array, b: Array, out: Array) -> tuple[Array, Array, Array]:
        """Return arrays whose strides the library takes: those given, or copies and a new one."""
        a, b = (
            np.ascontiguousarray(x) if copy else x
            for x, copy in zip((a, b), self._copies, strict=True)
        )
        return a, b, np.empty(out.shape, out.dtype) if self._apart else out


def _adding(session: _Session) -> Any:
    """Return the attribute of a primitive that adds its result to an array."""
    functions, attribute, following = session.functions, _POINTER(), _POINTER()
    what = "a sum"
    check(functions.dnnl_primitive_attr_create(_at(attribute)), what)
    session.freed(attribute, functions.dnnl_primitive_attr_destroy)
    check(functions.dnnl_post_ops_create(_at(following)), what)
    check(functions.dnnl_post_ops_append_sum(following, ctypes.c_float(1), _INT(0), _INT(0)), what)
    check(functions.dnnl_primitive_attr_set_post_ops(attribute, following), what)
    functions.dnnl_post_ops_destroy(following)
    return attribute


def _transposed(shape: Shape, strides: Shape) -> tuple[Shape, Shape]:
    """Return the shape and the strides of a stack of transposed matrices."""
    shape, strides = ((*item[:-2], item[-1], item[-2]) for item in (shape, strides))
    return shape, strides


def _matrices(shape: Shape, strides: Shape) -> tuple[Shape, Shape]:
    """Return a stack's shape, and its strides as those of a contiguous one in axes of one element.

    The library takes descriptions that differ in no other strides for equal, finds the primitive
    that was made for one of them, and refuses the other's arrays.
    """
    known: Shape = ()
    for stride, length in reversed(list(zip(strides, shape, strict=True))):
        inner = shape[len(shape) - len(known) :]
        ends = (a * b for a, b in zip(known, inner, strict=True))
        known = (stride if length > 1 else max(ends, default=1), *known)
    return shape, known


def _elements(x: Array) -> Shape:
    """Return an array's strides in elements."""
    return tuple(stride // x.itemsize for stride in x.strides)


def _compact(x: Array) -> Shape:
    """Return the strides, in elements, of a contiguous stack of matrices in the order of x's."""
    n, m = x.shape[-2:]
    in_columns = x.strides[-2] < x.strides[-1]
    result, size = (1, n) if in_columns else (m, 1), n * m
    for length in x.shape[-3::-1]:
        result, size = (size, *result), size * length
    return result


def _is_written(x: Array) -> bool:
    """Whether the library writes to it fast: a row-major matrix, or a contiguous stack of such."""
    if x.ndim > 2:
        return bool(x.flags.c_contiguous)
    return x.strides[1] == x.itemsize and x.strides[0] >= x.shape[1] * x.itemsize


def _is_readable(x: Array) -> bool:
    """Whether the library takes an array's strides: positive, and no two elements in one place."""
    end = x.itemsize
    for stride, length in sorted(zip(x.strides, x.shape, strict=True)):
        if length > 1 and (stride < end or stride % x.itemsize):
            return False
        end = max(end, stride * length)
    return True


# ---- functions of each element

# dnnl_types.h's numbers: of the function, and of its derivative from its result instead of from x
FUNCTIONS = {
    "relu": (0x20, 0x100),
    "tanh": (0x21, 0x101),
    "elu": (0x22, 0x22),
    "logistic": (0x29, 0x104),
    "gelu_tanh": (0x2B, 0x2B),
    "swish": (0x2C, 0x2C),
    "gelu_erf": (0x31, 0x31),
}


def activate(x: Array, y: Array, name: str, alpha: float = 1) -> None:
    """Write a function of each element of x to y; both are float32 and C-contiguous.

    Args:
        name: the library's, one of `FUNCTIONS`.
        alpha: its parameter.

    Raises:
        DeviceError: when the library fails.
    """
    _elementwise(False, x.size, name, alpha)(x.ctypes.data, y.ctypes.data)


def activation_gradient(
    saved: Array, grad: Array, to_x: Array, name: str, alpha: float = 1
) -> None:
    """Write the gradient of x, given that of the result, and x; or, where the library knows the
    derivative by it, the result.
    """
    addresses = saved.ctypes.data, grad.ctypes.data, to_x.ctypes.data
    _elementwise(True, grad.size, name, alpha)(*addresses)


def _elementwise(backwards: bool, size: int, name: str, alpha: float) -> _Primitive:
    session = _session()
    key = (session.threads(), backwards, size, name, alpha)
    return session.made(key, lambda: _make_elementwise(session, backwards, size, name, alpha))


def _make_elementwise(
    session: _Session, backwards: bool, size: int, name: str, alpha: float
) -> _Primitive:
    what, row = f"{name} of {size} elements", session.description((1, size), (size, 1), _FLOAT32)
    forward, derivative = FUNCTIONS[name]
    numbers = ctypes.c_float(alpha), ctypes.c_float(0)
    create = "dnnl_eltwise_{}_primitive_desc_create"
    given = (session.engine, _TRAINING, forward, row, row, *numbers, None)
    if not backwards:
        return session.primitive(
            create.format("forward"), what, given, {_SOURCE: row, _RESULT: row}
        )
    hint, functions = _POINTER(), session.functions
    check(functions.dnnl_eltwise_forward_primitive_desc_create(_at(hint), *given), what)
    saved = _RESULT if derivative != forward else _SOURCE
    try:
        return session.primitive(
            create.format("backward"),
            what,
            (session.engine, derivative, row, row, row, *numbers, hint, None),
            {saved: row, _TO_RESULT: row, _TO_SOURCE: row},
        )
    finally:
        functions.dnnl_primitive_desc_destroy(hint)


# ---- convolutions


_Pair: TypeAlias = tuple[int, int]
ConvWindows: TypeAlias = tuple[_Pair, _Pair, _Pair, int]  # stride, padding, dilation; groups


def convolves(x: Shape, weight: Shape, y: Shape, windows: ConvWindows) -> bool:
    """Whether the library has fast code for all passes of a convolution of these shapes."""
    if installed() is None or 0 in (*x, *weight, *y):
        return False
    return all(_convolution(kind, x, weight, y, windows).is_fast for kind in _PASSES)


def convolve(x: Array, weight: Array, y: Array, windows: ConvWindows) -> None:
    """Write a convolution to y; x and weight are rounded to bfloat16, sums are in float32.

    Args:
        x: images (n, h, w, c), float32 or from `lower`.
        weight: (kh, kw, c / groups, o), float32.
        y: (n, out_h, out_w, o), float32. All are C-contiguous.
        windows: the convolution's; the padding is on both sides.

    Raises:
        DeviceError: when the library fails.
    """
    _convolution(_FORWARD, x.shape, weight.shape, y.shape, windows)(x, weight, y)


def image_gradient(grad: Array, weight: Array, to_x: Array, windows: ConvWindows) -> None:
    """Write the gradient of the images, for that of the result; see `convolve`."""
    _convolution(_TO_IMAGES, to_x.shape, weight.shape, grad.shape, windows)(grad, weight, to_x)


def weight_gradient(x: Array, grad: Array, to_weight: Array, windows: ConvWindows) -> None:
    """Write the gradient of the weight, for that of the result; see `convolve`."""
    _convolution(_TO_WEIGHT, x.shape, to_weight.shape, grad.shape, windows)(x, grad, to_weight)


_PASSES = _FORWARD, _TO_IMAGES, _TO_WEIGHT = "forward", "backward_data", "backward_weights"


def _convolution(
    kind: str, x: Shape, weight: Shape, y: Shape, windows: ConvWindows
) -> _Convolution:
    session = _session()
    key = (session.threads(), kind, x, weight, y, windows)
    return session.made(key, lambda: _Convolution(session, kind, x, weight, y, windows))


class _Convolution:
    """One of a convolution's passes, for given shapes.

    The library has the weight in an order of its own, so that one more array is copied.
    """

    def __init__(
        self, session: _Session, kind: str, x: Shape, weight: Shape, y: Shape, windows: ConvWindows
    ) -> None:
        self._session, functions = session, session.functions
        what = f"a convolution ({kind}) of images {x} with a weight {weight}"
        stride, padding, dilation, groups = windows
        forwards, to_weight = kind == _FORWARD, kind == _TO_WEIGHT
        images = session.description(*_channels_first(x), _kind_of(kind != _TO_IMAGES))
        results = session.description(*_channels_first(y), _kind_of(not forwards))
        shape, strides = _grouped(weight, groups)
        free = session.free_description(shape, _kind_of(not to_weight))
        pairs = _LENGTH * 2
        border, gaps = pairs(*padding), pairs(*(step - 1 for step in dilation))
        sizes = (pairs(*stride), gaps, border, border)
        arrays: tuple[Any, ...] = (images, free, results)
        if kind != _TO_IMAGES:
            arrays = (images, free, None, results)  # there might be a bias
        hint = None
        if forwards:
            given = (session.engine, _TRAINING, _DIRECT, *arrays, *sizes, None)
            described = {_SOURCE: images, _WEIGHTS: _WEIGHTS_QUERY, _RESULT: results}
        else:
            hint = self._forward_hint(x, weight, y, groups, sizes, what)
            given = (session.engine, _DIRECT, *arrays, *sizes, hint, None)
        # in the order of the call: the two arrays that the pass reads, the one that it writes
        if kind == _TO_IMAGES:
            described = {_TO_RESULT: results, _WEIGHTS: _WEIGHTS_QUERY, _TO_SOURCE: images}
        elif to_weight:
            described = {_SOURCE: images, _TO_RESULT: results, _TO_WEIGHTS: _TO_WEIGHTS_QUERY}
        try:
            create = f"dnnl_convolution_{kind}_primitive_desc_create"
            self._pass = session.primitive(create, what, given, described)
        finally:
            functions.dnnl_primitive_desc_destroy(hint)
        chosen = self._pass.descriptions[_TO_WEIGHTS if to_weight else _WEIGHTS]
        self._bytes = functions.dnnl_memory_desc_get_size(chosen)
        ours = session.description(shape, strides, _FLOAT32)
        self._reorder = session.reordering(what, *((chosen, ours) if to_weight else (ours, chosen)))
        self._to_weight = to_weight

    @property
    def is_fast(self) -> bool:
        """Whether it is more than the library's reference."""
        return not self._pass.implementation.startswith(b"ref")

    def _forward_hint(
        self, x: Shape, weight: Shape, y: Shape, groups: int, sizes: Any, what: str
    ) -> Any:
        """Return the description of the forward pass, which a backward pass asks for."""
        session, result = self._session, _POINTER()
        arrays = (
            session.description(*_channels_first(x), _BFLOAT16),
            session.free_description(_grouped(weight, groups)[0], _BFLOAT16),
            None,
            session.description(*_channels_first(y), _FLOAT32),
        )
        create = session.functions.dnnl_convolution_forward_primitive_desc_create
        given = (session.engine, _TRAINING, _DIRECT, *arrays, *sizes, None)
        check(create(_at(result), *given), what)
        return result

    def __call__(self, first: Array, second: Array, out: Array) -> None:
        """Compute the pass from the two arrays that it reads."""
        session = self._session
        left, room = session.rounded_room(0, first), session.room(2, self._bytes // 2)
        if self._to_weight:
            self._pass(left, session.rounded_room(1, second), room)
            self._reorder(room, out.ctypes.data)
        else:
            self._reorder(second.ctypes.data, room)
            self._pass(left, room, out.ctypes.data)


def _kind_of(is_read: bool) -> int:
    """Return the dtype of an array that a pass reads or writes."""
    return _BFLOAT16 if is_read else _FLOAT32


def _channels_first(images: Shape) -> tuple[Shape, Shape]:
    """Return the shape of images in the library's order of axes, and their strides."""
    n, h, w, c = images
    return (n, c, h, w), (h * w * c, 1, w * c, c)


def _grouped(weight: Shape, groups: int) -> tuple[Shape, Shape]:
    """Return the shape of a weight in the library's order of axes, and its strides."""
    kh, kw, c, o = weight
    shape, strides = (o // groups, c, kh, kw), (1, o, kw * c * o, c * o)
    if groups == 1:
        return shape, strides
    return (groups, *shape), (o // groups, *strides)
