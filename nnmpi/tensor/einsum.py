"""einsum: products and sums of tensors by the names of their axes.

    einsum("bik,bkj->bij", x, y)       batches of matrix products
    einsum("bi,bi->b", x, y)           a scalar product for each row
    einsum("...ij->...ji", x)          any axes in front

It is made of the operations that there are: two tensors become stacks of matrices, whose product is
`a @ b`, or an elementwise product if no axis is summed over. So its precision, layouts, devices,
replays and nodes in ONNX are theirs. Several tensors are multiplied from left to right.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.tensor.tensor import Tensor

# names of the axes that "..." stands for, the last one first: no letters, so no user's names
_REST = tuple(chr(0xE000 + i) for i in range(32))


def einsum(subscripts: str, *tensors: Any) -> Tensor:
    """Return the sums of products that Einstein's notation names.

    Args:
        subscripts: a letter for each axis of each tensor, such as "ij,jk->ik"; axes that the result
            does not name are summed over. Without "->" it has the letters that occur once, in
            alphabetical order. "..." stands for any further axes, which broadcast.
        tensors: one or more; arrays become tensors.

    Raises:
        UsageError: for subscripts that are none, or name another number of tensors.
        ShapeError: for a tensor with another number of axes, or axes of one letter and several
            lengths.
        DtypeError: for dtypes that may not meet.
    """
    if not isinstance(subscripts, str):
        raise UsageError('einsum takes its subscripts first, such as einsum("ij,jk->ik", x, y)')
    inputs = [x if isinstance(x, Tensor) else Tensor(x) for x in tensors]
    terms, result = _parsed(subscripts, [x.ndim for x in inputs])
    _check_lengths(subscripts, terms, [x.shape for x in inputs])
    x, names = _diagonal(inputs[0], terms[0])
    for i, (y, others) in enumerate(zip(inputs[1:], terms[1:], strict=True), start=1):
        later = {*result, *"".join(terms[i + 1 :])}
        y, others = _diagonal(y, others)
        x, names = _product(x, names, y, others, later)
    x, names = _summed(x, names, {*result})
    return x.permute([names.index(name) for name in result]) if names != result else x


def _parsed(subscripts: str, axes: Sequence[int]) -> tuple[list[str], str]:
    """Return the names of each tensor's axes, and of the result's.

    Args:
        axes: the number of each tensor's.
    """
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    for term in (*terms, right):
        plain = term.replace("...", "", 1)
        if plain and not (plain.isascii() and plain.isalpha()):
            raise UsageError(
                f"einsum's subscripts {subscripts!r} are no letters with commas between the tensors"
                ' and one "->"'
            )
    if len(terms) != len(axes):
        raise UsageError(
            f"einsum's subscripts {subscripts!r} name {len(terms)} tensors, but it got {len(axes)}"
        )
    named, most = [], 0
    for term, count in zip(terms, axes, strict=True):
        rest = count - len(term.replace("...", ""))
        if rest < 0 or (rest and "..." not in term) or rest > len(_REST):
            raise ShapeError(f"einsum's subscripts {term!r} do not fit a tensor of {count} axes")
        most = max(most, rest)
        named.append(term.replace("...", "".join(_REST[:rest][::-1])))
    letters = "".join(named)
    rest_names = "".join(_REST[:most][::-1])
    if not arrow:
        once = sorted(name for name in {*letters} if letters.count(name) == 1 and name.isascii())
        return named, rest_names + "".join(once)
    result = right.replace("...", rest_names)
    unknown = [name for name in result if name not in letters]
    if unknown or len({*result}) != len(result):
        raise UsageError(
            f"einsum's result in {subscripts!r} has to name axes of the tensors, each once"
        )
    return named, result


def _check_lengths(subscripts: str, terms: Sequence[str], shapes: Sequence[Any]) -> None:
    lengths = dict[str, int]()
    for term, shape in zip(terms, shapes, strict=True):
        for name, length in zip(term, shape, strict=True):
            known = lengths.setdefault(name, length)
            if known == length or (not name.isascii() and 1 in (known, length)):
                lengths[name] = max(known, length)  # what "..." stands for broadcasts
                continue
            axis = repr(name) if name.isascii() else "..."
            raise ShapeError(
                f"einsum of {subscripts!r} and shapes {', '.join(map(str, shapes))}: {axis} is"
                f" {known} and {length}"
            )


def _diagonal(x: Tensor, names: str) -> tuple[Tensor, str]:
    """Return the tensor with each name once: of two axes of one name, the diagonal."""
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            order = [i for i in range(len(names)) if i not in (first, second)]
            places = np.arange(x.shape[first])
            x = x.permute([first, second, *order])[places, places]
            names = name + "".join(names[i] for i in order)
    return x, names


def _summed(x: Tensor, names: str, kept: set[str]) -> tuple[Tensor, str]:
    """Return the tensor summed over the axes that nobody needs any more."""
    axes = tuple(i for i, name in enumerate(names) if name not in kept)
    return (x.sum(axes) if axes else x), "".join(name for name in names if name in kept)


def _product(x: Tensor, names: str, y: Tensor, others: str, later: set[str]) -> tuple[Tensor, str]:
    """Return the product of two tensors, summed over the axes that only these two have.

    Args:
        names, others: of their axes.
        later: the names that the result or another tensor has.
    """
    x, names = _summed(x, names, {*others} | later)
    y, others = _summed(y, others, {*names} | later)
    both = [name for name in names if name in others]
    inner = [name for name in both if name not in later]
    for name in inner:  # of length 1 in one of them, as "..." may be: times the other's sum
        at, other = names.index(name), others.index(name)
        if x.shape[at] == 1:
            y = y.sum(other, keepdims=True)
        elif y.shape[other] == 1:
            x = x.sum(at, keepdims=True)
    stack = [name for name in both if name in later]
    rows = [name for name in names if name not in others]
    columns = [name for name in others if name not in names]
    x = x.permute([names.index(name) for name in (*stack, *rows, *inner)])
    y = y.permute([others.index(name) for name in (*stack, *inner, *columns)])
    before, left, right = len(stack), x.shape, y.shape
    row_lengths = left[before : before + len(rows)]
    column_lengths = right[before + len(inner) :]
    if not inner:
        x = x.reshape(*left, *(1,) * len(columns))
        y = y.reshape(*right[:before], *(1,) * len(rows), *column_lengths)
        return x * y, "".join((*stack, *rows, *columns))
    length = prod(left[before + len(rows) :])
    product = x.reshape(*left[:before], prod(row_lengths), length) @ y.reshape(
        *right[:before], length, prod(column_lengths)
    )
    product = product.reshape(*product.shape[:before], *row_lengths, *column_lengths)
    return product, "".join((*stack, *rows, *columns))
