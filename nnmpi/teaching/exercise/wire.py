"""Calls between a solution's process and the judge: one line of JSON per message, no pickle.

Unpickling runs code, so a solution could have attacked the judge with it.

    judge                                                       a rank's process
    function(group, x)    -- "ask", None, "", [lent, x] ---->   row_linear(group, x)
    group.all_reduce(y)   <- "ask", 0, "all_reduce", [y] ----   group.all_reduce(y)
                          -- "result", None, [y] ----------->
                          <- "result", y, [x] ---------------

A "result", or "raised" with the reason, also returns the call's array arguments as the call left
them. Each message starts with the secret word of its check. JSON's types stand for themselves; any
other value is an object with one key, its type:

    tuple, range, slice, dict       their items
    array                           dtype, shape, bytes in base64, True if it is not contiguous
    Step, Instruction, Kind         their fields
    lent                            number, methods and attributes of an object that stays there
    other                           the type name of a value that cannot be passed
"""

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple
from operator import attrgetter
from types import MappingProxyType, SimpleNamespace
from typing import IO, Any

import numpy as np

from nnmpi.base.errors import NnmpiError
from nnmpi.comm.collective import Step
from nnmpi.schedule.schedule import Instruction, Kind

MOST_BYTES = 16 << 20  # of a message
MOST_NUMBERS = 1 << 20  # of all ranges in a message: a long range takes few bytes


class WireError(ValueError):
    """The input is not a message: the process has ended, or wrote something else."""


class WrongAnswer(NnmpiError):
    """A mistake in a solution, in a sentence for its author.

    Attributes:
        drawing: of the solution's rounds or schedule; may be empty.
        best: the drawing of the package's; only notebooks show it, because it is the answer.
    """

    def __init__(self, sentence: str, drawing: str = "") -> None:
        super().__init__(sentence)
        self.drawing, self.best = drawing, ""

    def _render_traceback_(self) -> list[str]:  # IPython shows this instead of a traceback
        pictures = {"Yours:": self.drawing, "As few and as short as they can be:": self.best}
        return [str(self), *(f"\n{title}\n\n{text}" for title, text in pictures.items() if text)]


def _array(dtype: str, shape: list[int], text: str, gaps: bool) -> Any:
    array = np.frombuffer(b64decode(text), np.dtype(dtype)).reshape(shape).copy()
    return np.repeat(array, 2, axis=-1)[..., ::2] if gaps and shape else array


# Types with items: how to take a value apart, and how to make it again.
PARTS: Mapping[type, Callable[[Any], Iterable[Any]]] = MappingProxyType(
    {
        Kind: lambda kind: [kind.value],
        tuple: iter,
        dict: dict.items,
        **dict.fromkeys((range, slice), attrgetter("start", "stop", "step")),
        **dict.fromkeys((Step, Instruction), astuple),
    }
)


def _dict(pairs: tuple[list[Any], ...]) -> dict[Any, Any]:
    """Return a dictionary, unless most keys have one hash: a million of them took hours."""
    if len({hash(key) for key, _ in pairs}) < len(pairs) / 2:
        raise TypeError("most keys of a dictionary have the same hash")
    return dict(map(tuple, pairs))


MADE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {kind.__name__: kind for kind in (Kind, slice, Step, Instruction)}
    | {
        "tuple": lambda *values: values,
        "dict": lambda *pairs: _dict(pairs),
        "range": lambda *values: range(*values),
        "array": _array,
    }
    | {"other": lambda name: type(name, (), {})()}
)


class Frames:
    """One end of the two streams between two processes.

    Args:
        reader, writer: the streams.
        do: (lent object, method name, arguments, keyword arguments, caller's line) -> result.
        borrows: True if this end calls methods of objects that the other end lends.

    Attributes:
        word: the secret prefix of each message: input without it is refused.
    """

    def __init__(
        self, reader: IO[bytes], writer: IO[bytes], do: Callable[..., Any], borrows: bool = False
    ) -> None:
        self._reader, self._writer, self._do, self._borrows = reader, writer, do, borrows
        self.word = "begin"
        self._lent: list[Any] = [None]
        self._received: list[Any] = []  # arrays in the last message

    def send(self, *message: Any) -> list[Any]:
        """Send a message; return the arrays in it.

        Raises:
            WireError: for a message above MOST_BYTES.
        """
        arrays: list[Any] = []
        text = json.dumps(self._pack([*message], arrays)).encode()
        if len(text) > MOST_BYTES:
            raise WireError(f"it returns {len(text):,} bytes, but {MOST_BYTES:,} is the limit")
        self._writer.write(b"%s %s\n" % (self.word.encode(), text))
        self._writer.flush()
        return arrays

    def receive(self) -> list[Any]:
        """Return the next message.

        Raises:
            WireError: for other input, and at the end of the stream.
            NnmpiError: for an invalid step.
        """
        word, _, text = self._reader.readline(MOST_BYTES + 100).partition(b" ")
        self._received, self._numbers = [], 0
        if word != self.word.encode():
            raise WireError("its output is not a message" if word else "the process has ended")
        try:
            message = json.loads(text, object_hook=self._unpack)
            if isinstance(message, list) and message:
                return message
        except (TypeError, KeyError, OverflowError, RecursionError) as error:
            raise WireError(f"{type(error).__name__}: {error}") from None
        raise WireError("its output is not a message")

    def ask(self, *call: Any) -> Any:
        """Call the other end, and serve its calls until the result arrives.

        Args:
            call: number of a lent object, method name, arguments, keyword arguments, line.

        Raises:
            WrongAnswer: if the call raised.
            WireError: see `receive`.
        """
        del self._lent[1:]
        arrays = self.send("ask", *call)
        while (answer := self.receive())[0] == "ask":
            self.answer(*answer[1:])
        kind, result, after = answer
        if kind == "raised":
            raise WrongAnswer(str(result))
        for array, new in zip(arrays, after, strict=False):
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = new
        return result

    def answer(self, number: int, *call: Any) -> None:
        """Serve a call of the other end."""
        arrays = self._received
        self.send("result", self._do(self._lent[number], *call), arrays)

    def _pack(self, value: Any, arrays: list[Any]) -> Any:
        """Return a value for JSON, iterators as tuples; append its arrays to `arrays`, in order."""

        def parts(items: Iterable[Any]) -> list[Any]:
            return [self._pack(item, arrays) for item in items]

        kind: Any = tuple if isinstance(value, Iterator) else type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, list):
            return parts(value)
        if kind in PARTS:
            return {kind.__name__: parts(PARTS[kind](value))}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            arrays.append(value)
            text = b64encode(value.tobytes()).decode()
            return {"array": [value.dtype.str, value.shape, text, not value.flags.c_contiguous]}
        if not hasattr(kind, "lent"):
            return {"other": [kind.__name__]}
        self._lent.append(value)
        methods = [name for name in kind.lent if callable(getattr(value, name))]
        attributes = {name: getattr(value, name) for name in kind.lent if name not in methods}
        return {"lent": parts([len(self._lent) - 1, methods, attributes])}

    def _unpack(self, value: dict[str, Any]) -> Any:
        ((name, given),) = value.items()
        if name == "lent" and self._borrows:
            number, methods, attributes = given
            calls = {method: self._method(number, method) for method in methods}
            return type("group", (SimpleNamespace,), {})(**attributes, **calls)
        made = MADE[name](*given)
        self._numbers += len(made) if name == "range" else 0
        if self._numbers > MOST_NUMBERS:
            raise WireError(f"{made} has more than {MOST_NUMBERS} numbers")
        if name != "array":
            return made
        self._received.append(made)
        return made if made.shape else made[()]

    def _method(self, number: int, name: str) -> Callable[..., Any]:
        return lambda *values, **named: self.ask(
            number, name, [*values], named, sys._getframe(1).f_lineno
        )
