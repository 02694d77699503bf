"""mpi4py's datatypes and memory.

INT, DOUBLE ...           a dtype of NumPy's
Create_vector ...         blocks of bytes at offsets; the next element begins an extent later
SUM, MAXLOC ...           a function of two objects, and one of two arrays
"""

import ctypes
import operator
import os
import re
from typing import Any, NamedTuple

import numpy as np

from nnmpi.teaching.mpi_front.handles import Exception, FrontHandle

BYTE = np.dtype("u1")

# MPI's datatypes, and NumPy's codes.
_TYPES = """
    BYTE u1  PACKED u1  UNSIGNED_CHAR u1  UINT8_T u1  CHAR i1  SIGNED_CHAR i1  INT8_T i1
    CHARACTER i1  BOOL ?  C_BOOL ?  CXX_BOOL ?  LOGICAL i4  WCHAR i4
    SHORT i2  INT16_T i2  INTEGER2 i2  UNSIGNED_SHORT u2  UINT16_T u2
    INT i4  INTEGER i4  INTEGER4 i4  INT32_T i4  UNSIGNED u4  UNSIGNED_INT u4  UINT32_T u4
    LONG i8  LONG_LONG q  INT64_T i8  INTEGER8 i8  AINT i8  OFFSET i8  COUNT i8
    UNSIGNED_LONG u8  UNSIGNED_LONG_LONG Q  UINT64_T u8
    FLOAT f4  REAL f4  REAL4 f4  DOUBLE f8  DOUBLE_PRECISION f8  REAL8 f8  LONG_DOUBLE g
    COMPLEX c8  C_COMPLEX c8  C_FLOAT_COMPLEX c8  C_DOUBLE_COMPLEX c16  DOUBLE_COMPLEX c16
    C_LONG_DOUBLE_COMPLEX G
    FLOAT_INT f4,i4  DOUBLE_INT f8,i4  LONG_INT i8,i4  INT_INT i4,i4  TWOINT i4,i4  SHORT_INT i2,i4
"""


class ElementBytes(NamedTuple):
    """The bytes of one element of a datatype.

    Attributes:
        name: MPI's; empty for one that the program made.
        dtype: of all its numbers; BYTE for a mixture.
        blocks: (offset, bytes), in the order of sending.
        lower: the offset at which the extent begins.
        extent: bytes from one element to the next.
        is_ready: whether it may be sent: MPI's own, or one that is committed.
    """

    name: str
    dtype: np.dtype[Any]
    blocks: tuple[tuple[int, int], ...]
    lower: int
    extent: int
    is_ready: bool = False

    @property
    def size(self):
        """Bytes that are sent."""
        return sum(nbytes for _, nbytes in self.blocks)

    def find_bytes(self, begin, count):
        """Return the bytes of some elements: a slice, or their positions if there are gaps.

        Args:
            begin: the position of the first element.
            count: of elements.
        """
        if self.blocks == ((0, self.extent),):
            return slice(begin, begin + count * self.extent)
        within = [np.arange(offset, offset + nbytes) for offset, nbytes in self.blocks]
        one = np.concatenate(within) if within else np.empty(0, int)
        return (begin + np.arange(count)[:, None] * self.extent + one).reshape(-1)


class Datatype(FrontHandle):
    """The type of a buffer's elements."""

    @classmethod
    def _plain(cls, dtype, name=""):
        return cls._of(ElementBytes(name, dtype, ((0, dtype.itemsize),), 0, dtype.itemsize, True))

    def _layout(self):
        return self._given()

    @classmethod
    def fromcode(cls, code):
        """Return the datatype of a code of NumPy's or of `array`'s.

        Raises:
            ValueError: for another.
        """
        if code not in _CODES:
            raise ValueError(f"there is no datatype for the code {code!r}")
        return cls._plain(_CODES[code], code)

    def tocode(self):
        """Return the code."""
        return self._layout().dtype.char

    typechar = property(tocode)
    typestr = property(lambda self: self._layout().dtype.str[1:])

    def Get_size(self):
        """Return the bytes of an element that are sent."""
        return self._layout().size

    def Get_extent(self):
        """Return where an element begins, and its bytes until the next one."""
        return self.lb, self.extent

    size = property(Get_size)
    lb = property(lambda self: self._layout().lower)
    extent = property(lambda self: self._layout().extent)
    ub = property(lambda self: self.lb + self.extent)
    name = property(lambda self: self.Get_name())
    is_predefined = property(lambda self: self._value is None or bool(self._value.name))

    def Get_name(self):
        """Return its name."""
        return f"MPI_{self._value.name}" if self else "MPI_DATATYPE_NULL"

    def Commit(self):
        """Make it one that may be sent, and return it."""
        self._value = self._layout()._replace(is_ready=True)
        return self

    def Dup(self):
        """Return a copy."""
        return self._of(ElementBytes(*self._layout()))

    # ---- new datatypes: other ones at offsets ----

    @classmethod
    def Create_struct(cls, blocklengths, displacements, datatypes):
        """Return a sequence of blocks: of some elements of a datatype, at an offset in bytes."""
        if min(blocklengths, default=0) < 0:
            raise Exception("ERR_COUNT", f"a block cannot have {min(blocklengths)} elements")
        blocks: list[tuple[int, int]] = []
        lows, highs, dtypes = [], [], set()
        for length, offset, kind in zip(blocklengths, displacements, datatypes, strict=True):
            one = cls._checked(kind)._layout()
            for at in range(offset, offset + length * one.extent, one.extent or 1):
                for begin, nbytes in one.blocks:
                    if blocks and sum(blocks[-1]) == at + begin:
                        blocks[-1] = blocks[-1][0], blocks[-1][1] + nbytes
                    else:
                        blocks.append((at + begin, nbytes))
                lows.append(at + one.lower)
                highs.append(at + one.lower + one.extent)
                dtypes.add(one.dtype)
        lower = min(lows, default=0)
        dtype = dtypes.pop() if len(dtypes) == 1 else BYTE
        return cls._of(ElementBytes("", dtype, tuple(blocks), lower, max(highs, default=0) - lower))

    def Create_hindexed(self, blocklengths, displacements):
        """Return blocks at offsets in bytes."""
        return self.Create_struct(blocklengths, displacements, [self] * len(blocklengths))

    def Create_indexed(self, blocklengths, displacements):
        """Return blocks at offsets in elements."""
        return self.Create_hindexed(blocklengths, [at * self.extent for at in displacements])

    def Create_indexed_block(self, blocklength, displacements):
        """Return blocks of one length at offsets in elements."""
        return self.Create_indexed([blocklength] * len(displacements), displacements)

    def Create_hindexed_block(self, blocklength, displacements):
        """Return blocks of one length at offsets in bytes."""
        return self.Create_hindexed([blocklength] * len(displacements), displacements)

    def Create_hvector(self, count, blocklength, stride):
        """Return blocks that begin some bytes after one another."""
        if count < 0:
            raise Exception("ERR_COUNT", f"there cannot be {count} blocks")
        return self.Create_hindexed_block(blocklength, [at * stride for at in range(count)])

    def Create_vector(self, count, blocklength, stride):
        """Return blocks that begin some elements after one another."""
        return self.Create_hvector(count, blocklength, stride * self.extent)

    def Create_contiguous(self, count):
        """Return elements that follow one another."""
        return self.Create_vector(1, count, 0)

    def Create_resized(self, lb, extent):
        """Return the same elements with another extent."""
        return self._of(self._layout()._replace(name="", lower=lb, extent=extent, is_ready=False))

    def Create_subarray(self, sizes, subsizes, starts, order=0):
        """Return a part of an array; order is ORDER_C or ORDER_FORTRAN."""
        if order not in (0, 1):
            raise Exception("ERR_ARG", f"the order is {order}; give MPI.ORDER_C or ORDER_FORTRAN")
        letter: Any = "CF"[order]
        for size, length, at in zip(sizes, subsizes, starts, strict=True):
            if not (at >= 0 and 0 < length <= size - at):
                raise Exception("ERR_ARG", f"{length} of {size} elements from {at} on are no part")
        whole = np.arange(np.prod(sizes)).reshape(sizes, order=letter)
        part = whole[tuple(slice(at, at + n) for at, n in zip(starts, subsizes, strict=True))]
        places = part.reshape(-1, order=letter).tolist()
        return self.Create_indexed_block(1, places).Create_resized(0, whole.size * self.extent)


# Codes of datatypes: those of `array`, of NumPy, and of Python's buffers.
_CODES = {
    code: np.dtype(code)
    for code in (*"?bBhHiIlLqQefdgFDG", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4")
    + ("f8", "c8", "c16")
} | {
    "c": BYTE,
    "S": np.dtype("i1"),
    "u": np.dtype("u2"),
    **dict.fromkeys("Uw", np.dtype("u4")),
    **dict.fromkeys("pPnNmM", np.dtype("i8")),
    **{f"Z{code}": np.dtype(code.upper()) for code in "fdg"},
}


def datatype_of(dtype):
    """Return the datatype of an array's elements.

    Raises:
        KeyError: for elements that MPI has no datatype for, such as texts.
    """
    if dtype.kind not in "biufc" and dtype.char != "c":
        raise KeyError(
            f"MPI has no datatype for elements of {dtype}; send [array, MPI.BYTE], or use the call"
            " in small letters"
        )
    return Datatype._plain(dtype)


DATATYPES = {
    name: Datatype._plain(np.dtype(code, align=True), name)
    for name, code in re.findall(r"(\w+) (\S+)", _TYPES)
}


class buffer(np.ndarray):  # noqa: N801 (mpi4py's name)
    """Bytes at an address: (n,) uint8."""

    __module__ = "mpi4py.MPI"

    def __new__(cls, *buf):
        """Return the bytes of an object with a buffer, or none."""
        result = cls.frombuffer(*buf or (bytearray(),))
        result.obj = result.obj if buf else None
        return result

    def __array_finalize__(self, source):
        self.obj = getattr(source, "obj", None)
        self._is_over = False

    @classmethod
    def frombuffer(cls, obj, readonly=False):
        """Return the bytes of an object with a buffer."""
        result = find_bytes(obj)[0].view(cls)
        result.obj = obj
        if readonly:
            result.flags.writeable = False
        return result

    @classmethod
    def allocate(cls, nbytes, clear=False):
        """Return new bytes."""
        return cls.frombuffer(bytearray(operator.index(nbytes)))

    @classmethod
    def fromaddress(cls, address, nbytes, readonly=False):
        """Return the bytes at an address."""
        if nbytes < 0 or (nbytes and not address):
            raise ValueError(f"there are no {nbytes} bytes at the address {address}")
        return cls.frombuffer(bytes_at(address, nbytes), readonly)

    address = property(lambda self: 0 if self._is_over or self.obj is None else self.ctypes.data)
    nbytes = property(lambda self: 0 if self._is_over else self.size)
    readonly = property(lambda self: not (self._is_over or self.flags.writeable))
    format = "B"

    def release(self):
        """Give the memory up."""
        self._is_over = True

    def toreadonly(self):
        """Return the same bytes, read-only."""
        return self.frombuffer(self.obj, True)

    def cast(self, format, shape=None):
        """Return a view of other numbers."""
        view = memoryview(self.view(np.ndarray))  # type: ignore[arg-type]
        return view.cast(format) if shape is None else view.cast(format, shape)

    def tobytes(self, order=None):
        """Return a copy."""
        return super().tobytes()

    def __delitem__(self, at):
        raise NotImplementedError("elements of a buffer cannot be deleted")

    def __getitem__(self, at):
        result = super().__getitem__(_one_step(at))
        return result if isinstance(at, slice) else int(result)

    def __setitem__(self, at, value):
        if not self.flags.writeable:
            raise TypeError("the buffer is read-only")
        super().__setitem__(
            _one_step(at), value if isinstance(value, int) else find_bytes(value)[0]
        )


def _one_step(at):
    if isinstance(at, slice):
        if at.step not in (None, 1):
            raise IndexError("a buffer has slices without steps only")
        return at
    return operator.index(at)


def bytes_at(address, nbytes, owner=None):
    """Return the bytes at an address: (nbytes,) uint8, which keep their owner alive.

    Raises:
        ValueError: for an address that the host cannot read, such as that of a device's array.
    """
    if nbytes and not _is_readable(address):
        raise ValueError(
            "simulated ranks send arrays in the host's memory; copy the device's to it first"
        )
    raw = (ctypes.c_ubyte * nbytes).from_address(address)
    raw.owner = owner
    return np.frombuffer(raw, BYTE)


def _is_readable(address):
    reader, writer = os.pipe()  # the system refuses to write what it cannot read
    try:
        return ctypes.CDLL(None).write(writer, ctypes.c_void_p(address), ctypes.c_size_t(1)) == 1
    finally:
        os.close(reader)
        os.close(writer)


def find_bytes(obj):
    """Return an object's bytes, without a copy, and the dtype of its elements.

    Args:
        obj: with Python's buffer interface, DLPack's, or CUDA's on host memory.

    Returns:
        (n,) uint8, and a dtype; None for a byte order that is not the machine's.

    Raises:
        TypeError: for another object, and for memory of a device.
        BufferError: for an array with gaps.
    """
    interface = getattr(obj, "__cuda_array_interface__", None)
    try:
        try:
            array = obj if isinstance(obj, np.ndarray) else np.asarray(memoryview(obj))
        except TypeError:
            if interface:
                address, readonly = interface["data"]
                dtype = np.dtype(interface["typestr"])
                array = bytes_at(address, int(np.prod(interface["shape"])) * dtype.itemsize, obj)
                array = array.view(dtype)
                array.flags.writeable = not readonly
            else:
                array = _find_tensor(obj)
    except (AttributeError, TypeError):
        raise TypeError(
            f"{obj!r} is no array; give one, or send objects by the call in small letters"
        ) from None
    if array.dtype.hasobject:
        raise TypeError("an array of objects is no buffer; send it by the call in small letters")
    if array.dtype.kind in "Mm":
        raise BufferError(f"Python has no buffer of {array.dtype}; send array.view('i8')")
    if array.dtype.kind == "U" and array is not obj:  # of Python's module array
        array = array.view("u4")
    if array.flags.f_contiguous:
        array = array.T
    if not array.flags.c_contiguous:
        raise BufferError(
            f"an array with strides {array.strides} is not contiguous; pass"
            " numpy.ascontiguousarray(array)"
        )
    return array.reshape(-1).view(BYTE), array.dtype if array.dtype.isnative else None


class _Tensor(ctypes.Structure):
    """DLPack's description of an array."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("begin", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    """The same, from DLPack's version 1 on."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("owner", ctypes.c_void_p * 2),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def _find_tensor(obj):
    """Return an object's array by DLPack; NumPy's would be read-only."""
    on_device = obj.__dlpack_device__()[0] != 1
    capsule = obj.__dlpack__(stream=-1) if on_device else obj.__dlpack__()
    call = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    versioned = "dltensor_versioned" in repr(capsule)
    address = call(capsule, b"dltensor_versioned" if versioned else b"dltensor")
    kind = _VersionedTensor if versioned else _Tensor
    found: Any = kind.from_address(address or 0)
    tensor = found.tensor if versioned else found
    # two lanes are for what `bits` has no room, a complex of long doubles
    letter = "iufcVcb"[3 if tensor.lanes == 2 else tensor.code]
    width = tensor.bits * tensor.lanes // 8
    dtype = np.dtype(f"{letter}{width}")
    shape = tensor.shape[: tensor.ndim]
    place = (tensor.data or 0) + tensor.begin
    strides = [dtype.itemsize * item for item in tensor.strides[: tensor.ndim]] if (
        tensor.strides
    ) else None  # fmt: skip
    whole = bytes_at(place, int(np.prod(shape)) * dtype.itemsize, capsule)
    whole.flags.writeable = not (versioned and found.flags & 1)
    return np.ndarray(shape, dtype, whole, 0, strides) if whole.size else whole.view(dtype)
