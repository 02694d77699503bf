"""Row formulas as CUDA kernels, printed from their traces (see `backend.trace`).

    arrays of one shape     the grid's threads divide the elements, 16 bytes each
    rows and vectors        columns along x, rows along y: a vector is read once for all rows; sums
                            over the rows, with a second kernel over the blocks
    sums along rows         a warp or a block per row reads it before each sum that later lines
                            need; sums over the rows are the business of a kernel of columns

Elements are computed in float32, or in float64 if an array has that; a row's sums and what follows
from them in float64, so that the mean of equal elements is that element.
"""

from collections.abc import Iterable, Sequence
from string import Template
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.backend.cuda.launch import (
    BLOCKS,
    NAMES,
    NULL,
    ROWS_EACH,
    SUM_BLOCKS,
    Dims,
    flat_grid,
    options,
    refuse_host,
    row_grid,
    sample_grid,
    source,
)
from nnmpi.backend.recording import call
from nnmpi.backend.trace import CELL, NUMBER, OPERATORS, ROW, VECTOR, Printed, RowPass

FORMS = {name: f"(A)({{}} {sign} {{}})" for name, sign in OPERATORS.items()} | {
    "negative": "(-{})",
    "absolute": "abs({})",
    "where": "({} != 0 ? {} : {})",
    "logical_not": "(A)({} == 0)",
}
VALUES = {"max": "a{}", "sum": "a{}", "width": "n"}
WORDS = {"inf": "infinity()", "-inf": "-infinity()", "nan": "not_a_number()"}
# of sums and maxima along a row: a thread's start, its step, and those of all threads
STARTS = {"sum": "double s{} = 0;", "max": "A s{} = -infinity();"}
STEPS = {"sum": "s{0} += {1};", "max": "s{0} = Largest()(s{0}, {1});"}
ENDS = {
    "sum": "double a{0} = combine<BLOCK>(s{0}, Add(), shared);",
    "max": "double a{0} = combine<BLOCK>((double)s{0}, Largest(), shared);",
}
OPERANDS = "x{}", "widen(x{}[r])", "(A)widen(p{}.at[k])", "(A)widen(p{}.at[k])"

ELEMENTS = """
extern "C" __global__ void __launch_bounds__(256)
    ${name}($parameters, const double* guard, long long n) {
    if (refuses(guard)) return;
    $numbers
    over_packs(n, $aligned, [&](long long i, auto count) {
        constexpr int N = decltype(count)::value;
        $body
    });
}
"""
ROWS = """
template <bool BLOCK>
__device__ __forceinline__ void of_rows($parameters, long long rows, long long n, double* shared) {
    bool packed = $aligned;
    $numbers
    for (long long r = first_row<BLOCK>(); r < rows; r += row_step<BLOCK>()) {
        int skew = packed ? (int)(r * n % PACK) : -1;
        $loops
    }
}
extern "C" __global__ void __launch_bounds__(256)
    ${name}_warps($parameters, long long rows, long long n) {
    of_rows<false>($names, rows, n, nullptr);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    ${name}_blocks($parameters, long long rows, long long n) {
    __shared__ double shared[32];
    of_rows<true>($names, rows, n, shared);
}
"""
LOOP = """
        $cells
        $starts
        along(0, n, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            long long i = r * n + c;
            $body
        });
        $ends
"""
COLUMNS = """
template <int N>
__device__ __forceinline__ void of_columns($parameters$more, long long s, long long rows,
                                           long long n, A* shared) {
    $numbers
    $over [&](long long c) {
        $vectors
        return [=](long long i, long long r$sums) {
            i += s * rows * n, r += s * rows;
            $cells
            $body
        };
    });
}
extern "C" __global__ void __launch_bounds__(256)
    ${name}_columns($parameters$more, long long rows, long long n, long long samples) {
    __shared__ A shared[256 * PACK];
    bool packed = $aligned && n % PACK == 0;
    over_samples(samples, [&](long long s) {
        if (packed) of_columns<PACK>($names$totals, s, rows, n, shared);
        else of_columns<1>($names$totals, s, rows, n, shared);
    });
}
"""
OVER = """
    P* const result[] = {$results};
    A* parts = partial + s * $count * gridDim.y * n;
    sum_columns<N, $count>(rows, n, result, parts, shared,"""
TOTALS = """
extern "C" __global__ void __launch_bounds__(256)
    ${name}_totals(A* partial$targets, long long parts, long long n, long long samples) {
    __shared__ A shared[256];
    over_samples(samples, [&](long long s) {
        P* const result[] = {$results};
        column_totals<$count>(partial + s * parts * $count * n, parts, n, result, shared);
    });
}
"""


class RowKernel(Printed):
    """The kernels of a row formula, see `PlainKernels.rows`.

    Args:
        formula, kinds, sums, reuse: as for `Printed`.
        types: of each operand: the name of its dtype, and whether it is one for each sample; None
            of what is no array.
        total: the dtype of the sums over the rows.

    Attributes:
        code: CUDA C++: the kernel of elements, which has the formula's name; or those of rows
            (_warps, _blocks) and of columns (_columns, _totals).
        options: for the compiler.
        low, wide: the dtypes of rows and of numbers of rows that it returns.
        along: whether there are sums along rows.
    """

    def __init__(
        self,
        formula: Any,
        kinds: Sequence[Any],
        types: Sequence[tuple[str, bool] | None],
        total: str,
        sums: int,
        reuse: int,
    ) -> None:
        arrays = [x for x in types if x]
        self.types: Any = types
        self.low, names = arrays[0][0], {total, *(name for name, _ in arrays)}
        self.wide = "float64" if "float64" in names else "float32"
        super().__init__(formula, kinds, sums, reuse, np.dtype(self.wide))
        if {x[0] for i, x in enumerate(types) if x and i in self.trace.written} - {self.low}:
            raise TypeError("a kernel writes to rows of the first ones' dtype")
        self.options = options(self.low, total, self.wide)
        self.along = any(line[0] in STARTS for line in self.trace.lines)
        later = any(self.trace.levels[i] for _, i in self.terms)
        if self.along and (later or any(sampled for _, sampled in arrays)):
            raise TypeError("sums along rows are not for samples, and not before those over rows")
        self._module: Any = None
        self._launches: dict[str, Any] = {}
        self._across: set[int] = set()  # lines of columns, computed once for all rows
        results = dict(zip((out for out, _ in self.outs), self.forms, strict=True))
        self._types = {}
        for i, (kind, x) in enumerate(zip(kinds, types, strict=True)):
            if type(kind) is int:
                const = "" if f"x{i}" in results else "const "
                self._types[f"x{i}"] = f"{const}{NAMES[x[0]]}*" if x else "double"
        news = {y: "T*" if kind == ROW else "A*" for y, kind in results.items() if y[0] == "y"}
        self._types |= news
        self.name = f"rows_{self.name}".encode("ascii", "replace").decode().replace("?", "_")
        self.code = source()
        if self.is_flat:
            self.code += self._elements()
        elif self.along and self.outs:
            self.code += self._rows()
        if self.terms or not (self.along or self.is_flat):
            self.code += self._columns([] if self.along else self.outs)

    # ---- lines

    def text(self, i: int, wide: bool = False) -> str:
        """Return a line's value: of an element; or of a row, in float64."""
        name, *args = self.trace.lines[i]
        if name == "constant":
            return f"({'double' if wide else 'A'}){WORDS.get(str(args[0]), repr(args[0]))}"
        if self.trace.kinds[i] <= CELL:
            return f"{'c' if wide else 'f'}{i}"
        return f"e{i}[k]" if i in self._across else f"e{i}"

    def value(self, i: int, wide: bool = False) -> str:
        """Return the expression that computes a line."""
        name, *args = self.trace.lines[i]
        if name == "operand":
            return OPERANDS[self.trace.kinds[i]].format(args[0])
        if name in VALUES:
            return VALUES[name].format(i)
        form = FORMS.get(name) or f"{name}({', '.join(['{}'] * len(args))})"
        if wide:
            form = form.removeprefix("(A)")
        return form.format(*(self.text(arg, wide) for arg in args))

    def _numbers(self, lines: Iterable[int], kinds: tuple[int, ...]) -> str:
        return "".join(
            f"[[maybe_unused]] double c{i} = {self.value(i, True)};"
            f" [[maybe_unused]] A f{i} = (A)c{i};"
            for i in lines
            if self.trace.kinds[i] in kinds
        )

    def _loads(self, lines: Iterable[int], kind: int, at: str) -> str:
        found: Any = [self.trace.lines[i] for i in lines if self.trace.kinds[i] == kind]
        return "".join(
            f"auto p{x} = load<N>(x{x} + {at}{' + s * n' if self.types[x][1] else ''});"
            for name, x, *_ in found
            if name == "operand"
        )

    def _each(self, lines: Iterable[str]) -> str:
        return "\n".join(["\n#pragma unroll", "for (int k = 0; k < N; ++k) {", *lines, "}"])

    def _body(self, loop: RowPass) -> str:
        """Return what is done to a pack of N elements at i, those of columns at c."""
        lines = [f"A e{i} = {self.value(i)};" for i in loop.body if i not in self._across]
        for i in loop.ends:
            name, arg = self.trace.lines[i]
            lines.append(STEPS[name].format(i, self.text(arg)))
        results = [out for out, _ in loop.written if out[0] != "t"]
        for out, i in loop.written:
            form = "set(w{}.at[k], {});" if out in results else "sums[{}][k] += {};"
            lines.append(form.format(out.lstrip("t"), self.text(i)))
        texts = [f"Pack<T, N> w{y};" for y in results]
        return "".join(
            [
                self._loads(loop.body, ROW, "i"),
                *([] if self._across else [self._loads(loop.body, VECTOR, "c")]),
                *texts,
                self._each(lines),
                *(f"store<N>({y} + i, w{y});" for y in results),
            ]
        )

    def _cells(self) -> str:
        pairs = zip(self.outs, self.forms, strict=True)
        return "".join(f"{y}[r] = f{i};" for (y, i), kind in pairs if kind == CELL)

    # ---- kernels

    def _printed(self, form: str, found: Sequence[RowPass], packs: str = "", **texts: str) -> str:
        """Return a kernel of this form."""
        cells = {f"x{i}" for i, kind in enumerate(self.kinds) if kind == CELL}
        arrays = [x for x, kind in self._types.items() if kind[-1] == "*" and kind != "A*"]
        texts = {
            "name": self.name,
            "parameters": ", ".join(f"{kind} {x}" for x, kind in self._types.items()),
            "names": ", ".join(self._types),
            "aligned": f"{packs}aligned({', '.join(x for x in arrays if x not in cells)})",
            "numbers": self._numbers((i for loop in found for i in loop.cells), (NUMBER,)),
        } | texts
        return Template(form).substitute(texts)

    def _elements(self) -> str:
        loops = [*self.loops(self.outs)]
        return self._printed(ELEMENTS, loops, body=self._body(loops[0]))

    def _rows(self) -> str:
        loops, texts = [*self.loops(self.outs)], list[str]()
        for loop in loops:
            found = [(self.trace.lines[i][0], i) for i in loop.ends]
            texts.append(
                Template(LOOP).substitute(
                    cells=self._numbers(loop.cells, (CELL,)),
                    starts="".join(STARTS[name].format(i) for name, i in found),
                    body=self._body(loop),
                    ends="".join(ENDS[name].format(i) for name, i in found),
                )
            )
        texts.append(f"if (threadIdx.x == 0) {{ {self._cells()} }}")
        packs = "n % PACK == 0 && " if VECTOR in self.kinds else ""
        return self._printed(ROWS, loops, packs, loops="".join(texts))

    def _columns(self, outs: Sequence[tuple[str, int]]) -> str:
        (loop,), count = [*self.loops([*outs, *self.terms])], len(self.terms)
        vectors = [i for i in loop.body if self.trace.kinds[i] == VECTOR]
        loads = self._loads(vectors, VECTOR, "c") + "".join(f"A e{i}[N];" for i in vectors)
        self._across = {*vectors}
        targets = "".join(f", P* t{k}" for k in range(count))
        words = {
            "count": f"{count}",
            "targets": targets,
            "results": ", ".join(f"t{k} + s * n" for k in range(count)),
            "more": targets and targets + ", A* partial",
            "totals": targets and targets.replace("P* ", "") + ", partial",
            "sums": targets and f", A(&sums)[{count}][N]",
            "vectors": loads + self._each(f"e{i}[k] = {self.value(i)};" for i in vectors),
            "cells": self._numbers(loop.cells, (CELL,)),
            "body": self._body(loop) + (self._cells() if outs else ""),
        }
        over = Template(OVER).substitute(words) if count else "over_columns<N>(rows, n,"
        totals = self._printed(TOTALS, [], **words) if count else ""
        return self._printed(COLUMNS, [loop], over=over, **words) + totals

    # ---- launches

    def __call__(
        self, kernels: Any, operands: Sequence[Any], sums: Sequence[Array], guard: Any = None
    ) -> list[Array]:
        """Launch the kernels; return the results, and write the sums.

        Args:
            kernels: a device's.
            operands: of the formula.
            sums: receive the sums over the rows: (n,), or (samples, n) of (samples, rows, n).
            guard: a number on the device: if it is not finite, elements are not computed.
        """
        first = operands[0]
        xp, shape, size = namespace(first), first.shape, first.size
        n = shape[-1] if shape else 1
        given = {
            f"x{i}": kernels.contiguous(x) if kind else x
            for i, (x, kind) in enumerate(zip(operands, self.kinds, strict=True))
            if type(kind) is int
        }
        forms = {ROW: (shape, self.low), CELL: ((*shape[:-1], 1), self.wide)}
        results = [
            given[y] if y in given else xp.empty(*forms[kind])
            for (y, _), kind in zip(self.outs, self.forms, strict=True)
        ]
        args = [*given.values()]
        args += [x for x, (y, _) in zip(results, self.outs, strict=True) if y[0] == "y"]
        results = results[: self.count]
        if not size:
            for target in sums:
                target.fill(0)
            return results
        if self.is_flat:
            sizes = flat_grid(size, first.dtype.itemsize)
            self._run(kernels, "", *sizes, *args, guard, size)
        elif self.terms or not self.along:
            samples = any(x and x[1] for x in self.types) or any(x.ndim > 1 for x in sums)
            self._run_columns(kernels, args, sums, shape[0] if samples else 1, size, n)
        if self.along and self.outs:
            rows = size // n
            self._run(kernels, *row_grid(rows, n), *args, rows, n)
        return results

    def _run_columns(
        self, kernels: Any, args: list[Any], sums: Sequence[Array], samples: int, size: int, n: int
    ) -> None:
        rows, count, width = size // (samples * n), len(sums), args[0].dtype.itemsize
        limits = (SUM_BLOCKS, ROWS_EACH) if sums else (BLOCKS, ROWS_EACH // 2)
        grid, block = sample_grid((rows, n, samples), width, *limits)
        partial = None
        if sums and grid[1] > 1:
            partial = namespace(args[0]).empty((samples, grid[1], count, n), self.wide)
        more = [*sums, partial] if sums else []
        self._run(kernels, "_columns", grid, block, *args, *more, rows, n, samples)
        if partial is not None:
            across = 1 + (count * n - 1) // 32, 1, min(samples, 65535)
            args = [partial, *sums, grid[1], n, samples]
            self._run(kernels, "_totals", across, (32, 8), *args)

    def _run(self, kernels: Any, form: str, grid: Dims, block: Dims, *args: Any) -> None:
        for x in args:
            refuse_host(self.name, x)
        launch = self._launches.get(form)
        if launch is None:
            if self._module is None:
                self._module = kernels.xp.RawModule(code=self.code, options=self.options)
            launch = self._launches[form] = self._module.get_function(self.name + form)
        call(launch, (grid, block), (tuple([NULL if x is None else x for x in args]),))
