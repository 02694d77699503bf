"""A row formula's arithmetic as numbered lines, from which loops and kernels are printed.

    def powers(x):                                  0  operand(0)      an element of a row
        below = x - x.max(axis=-1, keepdims=True)   1  max(0)          a number of each row
        return (np.exp(below),)                     2  subtract(0, 1)
                                                    3  exp(2)

A formula is written as one writes NumPy: rows (..., n), what is repeated for each row or column and
numbers go in, rows and numbers of rows come out. It is called once with symbols. What it does to
them becomes lines; what is no arithmetic on whole rows raises TypeError, and then it is not
printed.

A trace keeps what the formula has read. So only nnmpi's own formulas are printed, which read their
operands and constants alone (see `is_printable`). A user's may read anything, and runs as it is
written, in each call.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nnmpi.backend.array import Dtype
from nnmpi.backend.precision import FLOAT32

# What a line has: a number for all rows, for each row, for each column, for each element
NUMBER, CELL, VECTOR, ROW = range(4)

STATIC = {bool, np.ufunc}  # operands that are no arrays and no numbers
OPERATORS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "greater": ">",
    "greater_equal": ">=",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
}
CHOICES = [*OPERATORS][4:]  # 1 or 0
_FUNCTIONS = (
    "logical_not negative maximum minimum absolute sign copysign sqrt exp expm1 log log1p tanh"
)


def is_printable(formula: Any) -> bool:
    """Return whether a function is nnmpi's own, and closes over nothing.

    It is asked for its globals, the module in which it was defined: a decorator of a user's copies
    a function's `__module__`.
    """
    if type(formula) is not FunctionType or formula.__closure__:
        return False
    module = formula.__globals__.get("__name__")
    return isinstance(module, str) and module.partition(".")[0] == "nnmpi"


FormulaFunction = TypeVar("FormulaFunction", bound=Callable[..., Any])


def rounds_alike(formula: FormulaFunction) -> FormulaFunction:
    """Note of a formula that NumPy and compiled loops compute it with the same bits.

    So few elements may be left to NumPy. It holds of what compares, chooses, and rounds each
    element in one operation or in the same ones; not of exponentials.
    """
    formula.rounds_alike = True  # type: ignore[attr-defined]
    return formula


class Trace:
    """The lines of a formula.

    Args:
        formula: the function.
        kinds: of its operands.
        dtype: in which it is computed.

    Attributes:
        lines: a name and the numbers of earlier lines each; or the value of a constant, or the
            number of an operand.
        kinds: of each line.
        levels: of each line: how many sums or maxima along the rows come before it.
        results: the lines that the formula returns.
        written: by operand, the lines that it writes there, in place.

    Raises:
        TypeError: when it is no formula of rows.
    """

    def __init__(self, formula: Callable[..., Any], kinds: Sequence[Any], dtype: Dtype) -> None:
        self.dtype = dtype
        self.lines: list[tuple[Any, ...]] = []
        self.kinds: list[int] = []
        self.levels: list[int] = []
        self._numbers: dict[str, int] = {}
        given = [
            self.add(("operand", i), kind) if type(kind) is int else kind[0]
            for i, kind in enumerate(kinds)
        ]
        results = formula(*given) or ()
        self.results = [x.number for x in results if isinstance(x, Symbol)]
        if len(self.results) < len(results):
            raise TypeError("a row formula returns what it computes of its rows")
        self.written = {
            i: x.number
            for i, x in enumerate(given)
            if isinstance(x, Symbol) and self.lines[x.number] != ("operand", i)
        }
        if any({self.kinds[x], kinds[i]} != {ROW} for i, x in self.written.items()):
            raise TypeError("a row formula writes rows to rows")

    def add(self, line: tuple[Any, ...], kind: int | None = None, level: int = 0) -> "Symbol":
        """Return the symbol of a line; equal lines are one."""
        text = repr(line)  # 0.0 and -0.0 are equal, their texts are not
        if text not in self._numbers:
            if kind is None:
                kinds = {self.kinds[i] for i in line[1:]}
                kind = ROW if kinds >= {CELL, VECTOR} else max(kinds)
            self._numbers[text] = len(self.lines)
            self.levels.append(level + max((self.levels[i] for i in self.read(line)), default=0))
            self.lines.append(line)
            self.kinds.append(kind)
        return Symbol(self, self._numbers[text])

    def number_of(self, x: Any) -> int:
        """Return the number of a symbol's line, or of a constant's."""
        return (x if isinstance(x, Symbol) else self.add(("constant", float(x)), NUMBER)).number

    def read(self, line: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the lines that a line reads."""
        return () if line[0] in ("constant", "operand", "width") else line[1:]

    def needed(self, targets: Iterable[int], known: Collection[int] = ()) -> list[int]:
        """Return the lines from which others follow, and these, in order, but for the known."""
        found: set[int] = set()
        left = [*targets]
        while left:
            number = left.pop()
            if number not in found and number not in known:
                found.add(number)
                left += self.read(self.lines[number])
        return sorted(found)


class Symbol(np.lib.mixins.NDArrayOperatorsMixin):
    """A line of a formula, in place of an array."""

    __slots__ = ("number", "trace")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number

    @property
    def dtype(self) -> Dtype:
        """In which the formula is computed."""
        return self.trace.dtype

    @property
    def shape(self) -> tuple[Any, Any]:
        """The length of a row is known; the number of rows is none of a formula's business."""
        return None, self.trace.add(("width",), NUMBER)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None) -> Any:
        name = ufunc.__name__
        if method != "__call__" or name not in (*OPERATORS, *_FUNCTIONS.split()):
            raise TypeError(f"a row formula has no {name}")
        result = self.trace.add((name, *map(self.trace.number_of, inputs)))
        if out is None:
            return result
        out[0].number = result.number  # in place
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, words: Any) -> Any:
        if function is np.where:
            return self.trace.add(("where", *map(self.trace.number_of, args)))
        compute = getattr(Symbol, function.__name__, None)
        if compute is None:
            raise TypeError(f"a row formula has no {function.__name__}")
        return compute(*args, **words)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return np

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise TypeError("a row formula is traced before there are values")

    def __bool__(self) -> bool:
        raise TypeError("a row formula does not decide by values")

    def _along(self, name: str, axis: Any, keepdims: bool) -> "Symbol":
        if axis != -1 or not keepdims or self.trace.kinds[self.number] < VECTOR:
            raise TypeError("a row formula's sums have axis=-1 and keepdims=True")
        return self.trace.add((name, self.number), CELL, 1)

    def clip(self, low: Any, high: Any) -> Any:
        """Return the elements within these bounds."""
        return np.minimum(np.maximum(self, low), high)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        """Return each row's sum."""
        return self._along("sum", axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Any:
        """Return each row's largest element."""
        return self._along("max", axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Any:
        """Return each row's mean."""
        return self.sum(axis, keepdims) / self.shape[1]


class RowPass(NamedTuple):
    """A loop over a row's elements.

    Attributes:
        cells: the lines of one number that are computed before it.
        body: those of elements, computed in it.
        ends: the sums and maxima that it computes.
        written: what it writes: (name, line) of results and of terms.
        later: the lines that later loops compute.
    """

    cells: list[int]
    body: list[int]
    ends: list[int]
    written: list[tuple[str, int]]
    later: list[int]


class Printed:
    """A formula's lines as loops, from which a loop of numba or a kernel of CUDA is printed.

    Args:
        formula, kinds, dtype: as for `Trace`.
        sums: how many of its results, the last ones, are added up over the rows.
        reuse: how many of the first results take the memory of the first operands.

    Attributes:
        name: for a profiler.
        kept: rows that earlier loops left in memory, by their lines.
        outs: (name, line) of the results: x0, x1 ... in the operands' memory, then y1, y2 ...; and
            of what the formula writes to operands.
        count: how many of them it returns.
        terms: (name, line) of what is added up.
        is_flat: whether rows do not matter.

    Raises:
        TypeError: when it is no formula of rows, or a row would be read after it was overwritten.
    """

    def __init__(
        self, formula: Any, kinds: Sequence[Any], sums: int, reuse: int, dtype: Dtype = FLOAT32
    ) -> None:
        self.trace = trace = Trace(formula, kinds, dtype)
        self.kinds, self.kept = kinds, dict[int, str]()
        self.count = count = len(trace.results) - sums
        names = [f"{'x' if k < reuse else 'y'}{k}" for k in range(count)]
        self.outs = [*zip(names, trace.results, strict=False)]
        self.outs += [(f"x{i}", x) for i, x in trace.written.items()]
        if len(dict(self.outs)) < len(self.outs):
            raise TypeError("a row formula writes where its first result is to be")
        self.terms = [(f"t{k}", i) for k, i in enumerate(trace.results[count:])]
        self.forms = [trace.kinds[i] for _, i in self.outs]
        if {NUMBER, VECTOR} & {*self.forms}:
            raise TypeError("a row formula returns rows, or a number for each row")
        self.is_flat = not sums and {*trace.kinds} <= {NUMBER, ROW}
        parts = formula, *(kind[0] for kind in kinds if type(kind) is tuple)
        self.name = "_".join(x.__name__.strip("_<>") for x in parts if callable(x))

    def loops(self, targets: Sequence[tuple[str, int]]) -> Iterator[RowPass]:
        """Yield the loops that compute some results and terms."""
        lines, levels, kinds = self.trace.lines, self.trace.levels, self.trace.kinds
        needed = self.trace.needed(i for _, i in targets)
        ends = [i for i in needed if lines[i][0] in ("sum", "max")]
        cells = [i for i in needed if kinds[i] <= CELL]
        whole = [(name, i) for name, i in targets if kinds[i] == ROW or name[0] == "t"]

        def wanted(start: int, stop: int) -> list[int]:
            some = [lines[i][1] for i in ends if start < levels[i] <= stop]
            return some + [i for _, i in whole if start <= levels[i] < stop]

        most, gone = 1 + max((levels[i] for i in needed), default=0), set[Any]()
        for level in range(most):
            known = {*cells, *self.kept}
            body = self.trace.needed(wanted(level, level + 1), known)
            if gone & {lines[i] for i in body}:
                raise TypeError("a row is read after it was overwritten")
            written = [(name, i) for name, i in whole if levels[i] == level]
            gone |= {("operand", int(name[1:])) for name, _ in written if name[0] == "x"}
            yield RowPass(
                [i for i in cells if levels[i] == level and lines[i][0] != "constant"],
                body,
                [i for i in ends if levels[i] == level + 1],
                written,
                self.trace.needed(wanted(level + 1, most), known),
            )

    def fits(self, operands: Sequence[Any]) -> bool:
        """Return whether it can write where the formula does."""
        return all(operands[i].flags.c_contiguous for i in self.trace.written)


@cache
def name_of(dtype: Dtype) -> str:
    """Return a dtype's name, which NumPy puts together anew at each request."""
    return dtype.name


def kinds_of(
    operands: tuple[Any, ...], dtypes: Collection[str] = ("float32",), sampled: bool = False
) -> tuple[Any, ...]:
    """Return what the operands of a row formula are, the first rows; nothing if they are others.

    A setting's kind has itself: it is a part of the formula.

    Args:
        operands: of the formula.
        dtypes: that they may have.
        sampled: whether a vector may be one for each sample, (samples, 1, n) of (samples, rows, n).
    """
    shape, found = operands[0].shape, list[Any]()
    forms = {(*shape[:-1], 1): CELL, shape[-1:]: VECTOR, shape: ROW}
    if sampled and len(shape) == 3 and shape[1] > 1:
        forms = {(shape[0], 1, shape[2]): VECTOR} | forms
    for x in operands:
        if type(x) is float:
            found.append(NUMBER)
        elif type(x) in STATIC:
            found.append((x,))
        elif not hasattr(x, "dtype") or name_of(x.dtype) not in dtypes or x.shape not in forms:
            return ()
        else:
            found.append(forms[x.shape])
    return tuple(found)
