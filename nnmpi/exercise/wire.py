"""Values between a solution's process and the one that judges it: JSON in frames, and no pickle.

    3f9a... 31\\n{"tuple": [1, {"Step": [...]}]}        the check's word, bytes, and the value

What JSON has stands for itself. All else is an object with one key that names it:

    tuple, range, slice, dict       their parts
    array                           dtype, shape, bytes in base64, whether there are gaps between its elements
    Step, Instruction, Kind         their fields
    lent                            number, methods and attributes of an object that stays there
    other                           the type of what cannot be handed over
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType
from typing import IO, Any

import numpy as np

from nnmpi.comm.collective import Step
from nnmpi.errors import NnmpiError
from nnmpi.schedule.schedule import Instruction, Kind

MOST_BYTES = 16 << 20  # of a message
MOST_NUMBERS = 1 << 20  # of a range, which takes no bytes


def _range(*values: int) -> range:
    made = range(*values)
    if len(made) > MOST_NUMBERS:
        raise WireError(f"{made} has more than {MOST_NUMBERS} numbers")
    return made


# What has parts: how they are taken out of a value, and how it is made of them.
PARTS: Mapping[type, Callable[[Any], Iterable[Any]]] = MappingProxyType(
    {
        Kind: lambda kind: [kind.value],
        tuple: iter,
        dict: lambda table: table.items(),
        **dict.fromkeys((range, slice), attrgetter("start", "stop", "step")),
        **dict.fromkeys((Step, Instruction), lambda one: [getattr(one, each.name) for each in fields(one)]),
    }
)
MADE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {each.__name__: each for each in (Kind, slice, Step, Instruction)}
    | {"tuple": lambda *values: values, "dict": lambda *pairs: dict(pairs), "range": _range}
)


class WireError(NnmpiError):
    """What came is no message: the process has ended, or somebody else wrote."""


def pack(value: Any, arrays: list[Any], lend: Callable[[Any], Any] = lambda value: None) -> Any:
    """Return a value as JSON has it.

    Args:
        value: numbers, texts, lists, tuples, dicts, arrays, ranges, slices, steps, instructions;
            iterators become tuples.
        arrays: gets the arrays in it, in order.
        lend: number, name and attributes of what stays here; None for what does not.
    """

    def parts(some: Any) -> list[Any]:
        return [pack(each, arrays, lend) for each in some]

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return parts(value)
    kind = tuple if isinstance(value, Iterator) else type(value)
    if kind in PARTS:
        return {kind.__name__: parts(PARTS[kind](value))}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        arrays.append(value)
        text = b64encode(value.tobytes()).decode()
        return {"array": [value.dtype.str, value.shape, text, not value.flags.c_contiguous]}
    lent = lend(value)
    return {"other": type(value).__name__} if lent is None else {"lent": parts(lent)}


def unpack(value: Any, arrays: list[Any], borrow: Callable[..., Any] | None = None) -> Any:
    """Return what `pack` was given; what it cannot be is refused.

    Args:
        value: from `json.loads`.
        arrays: gets the arrays in it, in order.
        borrow: makes an object of the three things that `lend` returned.

    Raises:
        WireError: for what `pack` does not make.
        NnmpiError: for a step that means nothing.
    """

    def parts(some: Any) -> list[Any]:
        return [unpack(each, arrays, borrow) for each in some]

    if isinstance(value, list):
        return parts(value)
    if not isinstance(value, dict):
        return value
    try:
        ((name, given),) = value.items()
        if name in MADE:
            return MADE[name](*parts(given))
        if name == "array":
            return _array(arrays, *given)
        if name == "lent" and borrow is not None:
            return borrow(*parts(given))
        return type(str(value["other"]), (), {})()
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from None


def _array(arrays: list[Any], dtype: str, shape: list[int], text: str, gaps: bool) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in "biufc":
        raise WireError(f"an array of {dtype}")
    array = np.frombuffer(b64decode(text), kind).reshape(shape).copy()
    if gaps and array.ndim:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    arrays.append(array)
    return array if shape else array[()]


class Frames:
    """Two streams between two processes.

    Args:
        reader, writer: the streams.
        word: with which each message begins: who does not know it is not heard.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes], word: str) -> None:
        self._reader, self._writer, self.word = reader, writer, word

    def send(self, message: dict[str, Any]) -> None:
        """Send a message of values that JSON has.

        Raises:
            WireError: for one that is too long.
        """
        text = json.dumps(message).encode()
        if len(text) > MOST_BYTES:
            raise WireError(f"it hands over {len(text):,} bytes, and {MOST_BYTES:,} are the limit")
        self._writer.write(f"{self.word} {len(text)}\n".encode() + text)
        self._writer.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            WireError: for what is none, and at the end.
        """
        word, _, length = self._reader.readline(100).decode("ascii", "replace").strip().partition(" ")
        if word != self.word or not length.isdecimal() or int(length) > MOST_BYTES:
            raise WireError("the process has ended" if not word else "what it wrote is no message")
        try:
            message = json.loads(self._reader.read(int(length)))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise WireError("what it wrote is no message")
        return message
