"""Row formulas as compiled loops, printed from their traces (see `backend.trace`).

    def powers(x):                                  for r in range(rows):
        below = x - x.max(axis=-1, keepdims=True)       for i in range(n): a1 = max(a1, x0[r, i])
        return (np.exp(below),)                     for i in range(n): y0[r, i] = exp(x0[r, i] - a1)

A row is read once before each sum or maximum that later lines need, while it is in the cache. What
is dear to compute again is kept until then.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import float64

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.jit import loops
from nnmpi.backend.jit.build import build, read, write
from nnmpi.backend.recording import call
from nnmpi.backend.trace import CELL, CHOICES, NUMBER, OPERATORS, ROW, VECTOR, Printed

FORMS = {name: f"({{}} {sign} {{}})" for name, sign in OPERATORS.items()}
FORMS |= {name: f"(ONE if {FORMS[name]} else ZERO)" for name in CHOICES}
FORMS |= {
    "negative": "(-{})",
    "maximum": "({0} if ({0} >= {1}) | ({0} != {0}) else {1})",  # either NaN stays
    "minimum": "({0} if ({0} <= {1}) | ({0} != {0}) else {1})",
    "absolute": "abs({})",
    "sign": "(ONE if {0} > ZERO else -ONE if {0} < ZERO else {0})",
    "where": "({1} if {0} != ZERO else {2})",
    "logical_not": "(ONE if {} == ZERO else ZERO)",
    "sqrt": "math.sqrt({})",
    "copysign": "math.copysign({}, {})",
    "sum": "{} + {}",
    "max": "max({}, order({}))",
    "greater of a number": "({1} if {0} < {1} else {0})",  # NaN stays
    "less of a number": "({1} if {0} > {1} else {0})",
}
TALL = 16  # times as many rows as elements of one: then elements are one row
DEAR = {"exp", "expm1", "log", "log1p", "tanh"}
SIMPLE = {"maximum": "greater of a number", "minimum": "less of a number"}
VALUES = {"max": "ordered(a{})", "sum": "a{}", "width": "n"}
STARTS = {"sum": "0.0", "max": "LEAST"}
SCOPE = {"F": np.float32, "ZERO": np.float32(0), "ONE": np.float32(1), "float64": np.float64}
SCOPE |= {
    "launch": call,
    "math": math,
    "LEAST": np.int32(-(2**31)),
    "inf": np.inf,
    "nan": np.nan,
    "__name__": __name__,
}


class RowLoop(Printed):
    """The compiled loop of a row formula, see `PlainKernels.rows`.

    Args:
        formula, kinds, sums, reuse: as for `Printed`.
        sampled: whether the first of three axes is samples, which have sums and vectors each.
    """

    def __init__(
        self, formula: Any, kinds: Sequence[Any], sampled: bool, sums: int, reuse: bool
    ) -> None:
        super().__init__(formula, kinds, sums, reuse)
        self.sampled = sampled
        self.written = [i for i in range(len(kinds)) if f"x{i}" in dict(self.outs)]
        self._compile()

    def text(self, i: int, wide: bool = False) -> str:
        """Return a line's value: in a loop over elements, or `wide`, in float64, outside of it."""
        name, *args = self.trace.lines[i]
        if name == "constant":
            return repr(args[0]) if wide else f"F({args[0]!r})"
        if self.trace.kinds[i] <= CELL:
            return f"{'c' if wide else 'f'}{i}"
        return self.kept.get(i, f"e{i}")

    def value(self, i: int, wide: bool = False) -> str:
        """Return the expression that computes a line."""
        name, *args = self.trace.lines[i]
        if name == "operand":
            return f"x{args[0]}{('', '[r, 0]', '[i]', 'r[i]')[self.trace.kinds[i]]}"
        if name in VALUES:
            return VALUES[name].format(i)
        if name in SIMPLE and self.trace.lines[args[1]][0] == "constant":
            name = SIMPLE[name]
        form = FORMS.get(name) or f"{'math.' if wide else ''}{name}({{}})"
        return form.format(*(self.text(arg, wide) for arg in args))

    def body(self) -> list[str]:
        """Return the lines for a row."""
        lines, texts = self.trace.lines, list[str]()
        for cells, body, ends, written, later in self.loops([*self.outs, *self.terms]):
            for i in cells:
                texts += [f"c{i} = float64({self.value(i, True)})", f"f{i} = F(c{i})"]
            inner, kept = [f"e{i} = {self.value(i)}" for i in body], dict[int, str]()
            for i in ends:
                name, arg = lines[i]
                texts.append(f"a{i} = {STARTS[name]}")
                inner.append(f"a{i} = {FORMS[name].format(f'a{i}', self.text(arg))}")
            for out, i in written:
                if out[0] == "t":
                    inner.append(f"p{out[1:]}[i] += {self.text(i)}")
                else:
                    inner.append(f"{out}r[i] = {self.text(i)}")
                    kept[i] = f"{out}r[i]"
            for i in body:
                if lines[i][0] in DEAR and i in later and i not in kept:
                    kept[i] = f"s{i}[i]"
                    inner.append(f"s{i}[i] = e{i}")
            self.kept |= kept
            if inner:
                texts += ["for i in range(n):", *(f"    {line}" for line in inner)]
        pairs = zip(self.outs, self.forms, strict=True)
        return texts + [f"{out}[r, 0] = f{i}" for (out, i), kind in pairs if kind == CELL]

    def _compile(self) -> None:
        given = [(f"x{i}", kind) for i, kind in enumerate(self.kinds) if type(kind) is int]
        outs = [out for out, _ in self.outs]
        news = [x for x in zip(outs, self.forms, strict=True) if x[0][0] == "y"]
        given.sort(key=lambda x: x[0] in outs)  # what is written to comes last
        sums = range(len(self.terms))
        body = self.body()
        names = [name for name, _ in given + news] + [f"t{k}" for k in sums]
        lines = ["rows, n = x0.shape"]
        lines += [f"{text[:-3]} = np.empty(n, F)" for text in self.kept.values() if text[0] == "s"]
        lines += [f"p{k}, t{k}[:] = np.zeros(n, F), ZERO" for k in sums]
        lines += ["for r in range(rows):"]
        lines += [f"    {name}r = {name}[r]" for name, kind in given + news if kind == ROW]
        lines += [f"    {line}" for line in body]
        if sums:
            lines.append(f"    if r % {loops.ROWS} == {loops.ROWS - 1} or r == rows - 1:")
            lines += [f"        empty_into(p{k}, t{k})" for k in sums]
        if self.sampled:
            many = [name for name in names if (name, NUMBER) not in given]
            each = [f"{name} = {name}s[s]" for name in many]
            lines = ["for s in range(len(x0s)):", *(f"    {line}" for line in each + lines)]
            names = [f"{name}s" if name in many else name for name in names]
        text = "\n    ".join(lines)
        # it tells formulas apart in numba's cache on disk, where this file outdates them
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        name = f"{self.name}_{digest}"
        arrays = [x if kind == NUMBER else f"array({x})" for x, kind in given]
        arrays, count = arrays + [y for y, _ in news], len(given) - len(self.written)
        reads, writes = ("".join(map("{}, ".format, x)) for x in (arrays[:count], arrays[count:]))
        lines = [
            f"def {name}({', '.join(names)}):\n    {text}",
            f"def call(xp, sums, {', '.join(f'x{i}' for i in range(len(self.kinds)))}):",
            "    array, empty = xp.ascontiguousarray, xp.empty",
            *(
                f"    {y} = empty({'x0.shape' if kind == ROW else '(*x0.shape[:-1], 1)'}, F)"
                for y, kind in news
            ),
            f"    launch(kernel, ({reads}), [{writes} *sums])",
            f"    return [{', '.join(outs[: self.count])}]",
        ]
        scope: dict[str, Any] = {**vars(loops), **SCOPE}
        exec(compile("\n".join(lines), __file__, "exec"), scope)
        axes = self.sampled
        types: list[Any] = [
            (float64, read(2 + axes), read(1 + axes), read(2 + axes))[kind] for _, kind in given
        ]
        types[count:] = [write(2 + axes)] * (len(arrays) - count)
        types += [write(1 + axes)] * len(sums)
        self.kernel = scope["kernel"] = build(scope[name], *types)
        self._call = scope["call"]

    def __call__(self, operands: Sequence[Any], sums: Sequence[Array]) -> Any:
        """Return the results, and write the sums."""
        first = operands[0]
        xp, shape = namespace(first), first.shape
        pairs = zip(operands, self.kinds, strict=True)
        if self.sampled:
            each = len(first), shape[-1]
            given = (
                np.broadcast_to(x.reshape(-1, each[1]), each) if kind == VECTOR else x
                for x, kind in pairs
            )
            return self._call(xp, sums, *given)
        if len(shape) == 2 and not (self.is_flat and shape[0] > TALL * shape[1]):
            return self._call(xp, sums, *operands)
        n = first.size if self.is_flat else shape[-1]
        count = first.size // n
        forms = {CELL: (count, 1), VECTOR: (n,), ROW: (count, n)}
        given = (x.reshape(forms[kind]) if kind in forms else x for x, kind in pairs)
        results = zip(self._call(xp, sums, *given), self.forms, strict=False)
        return [x.reshape(shape if kind == ROW else (*shape[:-1], 1)) for x, kind in results]
