"""Calls between a solution's process and the one that judges it: a line of JSON for each message,
and no pickle.

    judge                                                       a rank's process
    function(group, x)    -- "ask", None, "", [lent, x] ---->   row_linear(group, x)
    group.all_reduce(y)   <- "ask", 0, "all_reduce", [y] ----   group.all_reduce(y)
                          -- "result", None, [y] ----------->
                          <- "result", y, [x] ---------------

A result, or with "raised" why there is none, comes with the arrays among the values of the call, as
it has left them. Before each message stands the word of its check. What JSON has stands for itself.
All else is an object with one key that names it:

    tuple, range, slice, dict       their parts
    array                           dtype, shape, bytes in base64, whether there are gaps between
                                    its elements
    Step, Instruction, Kind         their fields
    lent                            number, methods and attributes of an object that stays there
    other                           the type of what cannot be handed over
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

from nnmpi.comm.collective import Step
from nnmpi.errors import NnmpiError
from nnmpi.schedule.schedule import Instruction, Kind

MOST_BYTES = 16 << 20  # of a message
MOST_NUMBERS = 1 << 20  # of all ranges in a message, which take no bytes


class WireError(ValueError):
    """What came is no message: the process has ended, or somebody else wrote."""


class WrongAnswer(NnmpiError):
    """What is wrong with a solution, in a sentence for the one who wrote it.

    Attributes:
        drawing: of the solution's own rounds or schedule; empty where there is none.
        best: of the package's, which is an answer: for those who work alone, in a notebook.
    """

    def __init__(self, sentence: str, drawing: str = "", best: str = "") -> None:
        super().__init__(sentence)
        self.drawing, self.best = drawing, best

    def _render_traceback_(self) -> list[str]:  # what IPython shows in place of a traceback
        pictures = {"Yours:": self.drawing, "As few and as short as they can be:": self.best}
        return [str(self), *(f"\n{title}\n\n{each}" for title, each in pictures.items() if each)]


def _array(dtype: str, shape: list[int], text: str, gaps: bool) -> Any:
    array = np.frombuffer(b64decode(text), np.dtype(dtype)).reshape(shape).copy()
    return np.repeat(array, 2, axis=-1)[..., ::2] if gaps and shape else array


# What has parts: how they are taken out of a value, and how it is made of them.
PARTS: Mapping[type, Callable[[Any], Iterable[Any]]] = MappingProxyType(
    {
        Kind: lambda kind: [kind.value],
        tuple: iter,
        dict: dict.items,
        **dict.fromkeys((range, slice), attrgetter("start", "stop", "step")),
        **dict.fromkeys((Step, Instruction), astuple),
    }
)
MADE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {each.__name__: each for each in (Kind, slice, Step, Instruction)}
    | {
        "tuple": lambda *values: values,
        "dict": lambda *pairs: dict(pairs),
        "range": lambda *values: range(*values),
        "array": _array,
    }
    | {"other": lambda name: type(name, (), {})()}
)


class Frames:
    """One end of two streams between two processes.

    Args:
        reader, writer: the streams.
        do: (object that was lent, name of its method, values, values by name, line of the caller)
            -> what it gives.
        borrows: whether this end calls methods of objects that the other one has lent.

    Attributes:
        word: with which each message begins: who does not know it is not heard.
    """

    def __init__(
        self, reader: IO[bytes], writer: IO[bytes], do: Callable[..., Any], borrows: bool = False
    ) -> None:
        self._reader, self._writer, self._do, self._borrows = reader, writer, do, borrows
        self.word = "begin"
        self._lent: list[Any] = [None]
        self._came: list[Any] = []  # arrays in the last message

    def send(self, *message: Any) -> list[Any]:
        """Send a message of values, and return the arrays in it.

        Raises:
            WireError: for one that is too long.
        """
        arrays: list[Any] = []
        text = json.dumps(self._pack([*message], arrays)).encode()
        if len(text) > MOST_BYTES:
            raise WireError(f"it hands over {len(text):,} bytes, and {MOST_BYTES:,} are the limit")
        self._writer.write(b"%s %s\n" % (self.word.encode(), text))
        self._writer.flush()
        return arrays

    def receive(self) -> list[Any]:
        """Return the next message.

        Raises:
            WireError: for what is none, and at the end.
            NnmpiError: for a step that means nothing.
        """
        word, _, text = self._reader.readline(MOST_BYTES + 100).partition(b" ")
        self._came, self._numbers = [], 0
        if word != self.word.encode():
            raise WireError("what it wrote is no message" if word else "the process has ended")
        try:
            message = json.loads(text, object_hook=self._unpack)
            if isinstance(message, list) and message:
                return message
        except (TypeError, KeyError, OverflowError, RecursionError) as error:
            raise WireError(f"{type(error).__name__}: {error}") from None
        raise WireError("what it wrote is no message")

    def ask(self, *call: Any) -> Any:
        """Return what the other end makes of a call, and do what it asks for until then.

        Args:
            call: number of an object that it has lent, name, values, values by name, line.

        Raises:
            WrongAnswer: where there is no result.
            WireError: see `receive`.
        """
        del self._lent[1:]
        arrays = self.send("ask", *call)
        while (answer := self.receive())[0] == "ask":
            self.answer(*answer[1:])
        kind, result, after = answer
        if kind == "raised":
            raise WrongAnswer(str(result))
        for own, new in zip(arrays, after, strict=False):
            if isinstance(own, np.ndarray) and own.flags.writeable:
                own[...] = new
        return result

    def answer(self, number: int, *call: Any) -> None:
        """Do what the other end asks for."""
        came = self._came
        self.send("result", self._do(self._lent[number], *call), came)

    def _pack(self, value: Any, arrays: list[Any]) -> Any:
        """Return a value as JSON has it, iterators as tuples; `arrays` gets the arrays in it, in
        order.
        """

        def parts(some: Iterable[Any]) -> list[Any]:
            return [self._pack(each, arrays) for each in some]

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
        found = {name: getattr(value, name) for name in kind.lent}
        methods = [name for name, each in found.items() if callable(each)]
        return {
            "lent": parts(
                [
                    len(self._lent) - 1,
                    methods,
                    {name: found[name] for name in {*found} - {*methods}},
                ]
            )
        }

    def _unpack(self, value: dict[str, Any]) -> Any:
        """Return what an object of JSON stands for."""
        ((name, given),) = value.items()
        if name == "lent" and self._borrows:
            number, methods, attributes = given
            return SimpleNamespace(
                **attributes, **{each: self._method(number, each) for each in methods}
            )
        made = MADE[name](*given)
        self._numbers += len(made) if name == "range" else 0
        if self._numbers > MOST_NUMBERS:
            raise WireError(f"{made} has more than {MOST_NUMBERS} numbers")
        if name != "array":
            return made
        self._came.append(made)
        return made if made.shape else made[()]

    def _method(self, number: int, name: str) -> Callable[..., Any]:
        return lambda *values, **named: self.ask(
            number, name, [*values], named, sys._getframe(1).f_lineno
        )
