"""The rows of the table for nnmpi.tensor: every differentiable function there, as test_operations
sees to.
"""

import operator
from functools import cache

import numpy as np
from hypothesis import strategies as st

from nnmpi import Tensor, tensor
from nnmpi.backend.array import namespace
from nnmpi.tensor import gather_shards
from tests.tensor.draws import (
    Case,
    anywhere,
    array,
    arrays,
    axes_of,
    between,
    broadcasting,
    distinct,
    nonzero,
    positive,
    table,
)
from tests.tensor.draws import shape as draw_shape


def unary(function, domain=anywhere):
    """Return a builder for an elementwise function of one tensor."""
    return lambda draw: Case(function, [array(draw, domain, draw_shape(draw))])


def binary(function, domain=anywhere):
    """Return a builder for a function of two tensors that broadcast."""
    return lambda draw: Case(function, arrays(draw, domain, broadcasting(draw, 2)))


def extremum(function):
    """Return a builder for two tensors that broadcast and are equal nowhere."""

    def build(draw):
        a, b = broadcasting(draw, 2)
        return Case(function, [array(draw, distinct, a), array(draw, between, b)])

    return build


def once(mask):
    """Return a function of a tensor: the mask where it is, copied there by the first call."""
    copied = cache(lambda library: library.asarray(mask))
    return lambda x: copied(namespace(x.data))


def where(draw):
    """Two tensors and a condition, all broadcast."""
    condition, a, b = broadcasting(draw, 3)
    mask = array(draw, anywhere, condition) > 0
    there = once(mask)
    return Case(lambda x, y: tensor.where(there(x), x, y), arrays(draw, anywhere, (a, b)))


def where_number(draw):
    """A tensor and a number on either side."""
    x = array(draw, anywhere, draw_shape(draw))
    mask, left = once(np.asarray(x > 0.5)), draw(st.booleans())
    return Case(lambda t: tensor.where(mask(t), *((1.5, t) if left else (t, 1.5))), [x])


def power_number(draw):
    """A tensor to the power of a number."""
    exponent = draw(st.sampled_from((2, 3, 0, 1, -1, 0.5, 2.5, -1.5)))
    domain = positive if exponent % 1 else nonzero
    return Case(lambda x: operator.pow(x, exponent), [array(draw, domain, draw_shape(draw))])


def matmul(draw):
    """Vectors, matrices and stacks of them."""
    n, k, m = (draw(st.integers(0, 3)) for _ in range(3))
    left, right = broadcasting(draw, 2) if draw(st.booleans()) else ((), ())
    a = draw(st.sampled_from(((k,), (*left, n, k))))
    b = draw(st.sampled_from(((k,), (*right, k, m))))
    return Case(operator.matmul, arrays(draw, anywhere, (a, b)))


def reduction(function, domain=anywhere, side=0, **options):
    """Return a builder for a reduction over some axes."""

    def build(draw):
        x = array(draw, domain, draw_shape(draw, side=side))
        axis, keepdims = axes_of(draw, x.ndim), draw(st.booleans())
        return Case(lambda t: function(t, axis, keepdims, **options), [x])

    return build


def method(name, arguments, **sizes):
    """Return a builder for a method of one tensor, whose arguments are drawn for it."""

    def build(draw):
        x = array(draw, anywhere, draw_shape(draw, **sizes))
        given = arguments(draw, x)
        return Case(lambda t: getattr(t, name)(*given), [x])

    return build


def another_shape(draw, x):
    """Another shape of the same number of elements, one size left open where it can be."""
    expected = list(draw(st.permutations(x.shape))) + [1] * draw(st.integers(0, 1))
    i = draw(st.integers(0, len(expected) - 1))
    if all(n for j, n in enumerate(expected) if j != i) and draw(st.booleans()):
        expected[i] = -1
    return (expected,)


def an_order(draw, x):
    """Any order of the axes, counted from either end."""
    return [i - x.ndim if draw(st.booleans()) else i for i in draw(st.permutations(range(x.ndim)))]


def two_axes(draw, x):
    """Two axes, which may be the same."""
    return [draw(st.integers(-x.ndim, x.ndim - 1)) for _ in range(2)]


def borders(draw, x):
    """Borders of different widths."""
    return [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(x.ndim)], 0.5


def concatenate(draw):
    """One to three tensors of different lengths along the axis; the first one comes again at the
    end.
    """
    before, after = draw_shape(draw, most=1), draw_shape(draw, most=1)
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    axis = draw(st.sampled_from((len(before), -len(after) - 1)))
    inputs = arrays(draw, anywhere, [(*before, n, *after) for n in lengths])
    return Case(lambda *tensors: tensor.concatenate([*tensors, tensors[0]], axis), inputs)


def stack(draw):
    """Tensors of one shape along a new axis."""
    item = draw_shape(draw, most=2)
    axis = draw(st.integers(-len(item) - 1, len(item)))
    inputs = arrays(draw, anywhere, [item] * draw(st.integers(1, 3)))
    return Case(lambda *tensors: tensor.stack(tensors, axis), inputs)


def einsum(draw):
    """Products of two and three tensors, traces, transpositions and any axes in front."""
    lengths = {name: draw(st.integers(0, 3)) for name in "bijk"}
    subscripts = draw(
        st.sampled_from(
            ("bij,bjk->bik", "bi,bi->b", "ij,jk,kb->bi", "ij,k->kji", "iij->j", "ij->", "ik,jk,kb")
        )
    )
    terms = subscripts.partition("->")[0].split(",")
    shapes = [[lengths[name] for name in term] for term in terms]
    if draw(st.booleans()):
        subscripts = ",".join(f"...{term}" for term in terms) + "->..." + subscripts.split("->")[-1]
        front = broadcasting(draw, len(terms))
        shapes = [[*axes, *shape] for axes, shape in zip(front, shapes, strict=True)]
        if "," in subscripts.split("->")[-1]:
            subscripts = subscripts.split("->")[0]
    return Case(lambda *x: tensor.einsum(subscripts, *x), arrays(draw, anywhere, shapes))


def on_axis(function):
    """Return a builder for a function of a tensor of different elements, and an axis."""

    def build(draw):
        x = array(draw, distinct, draw_shape(draw, least=1))
        axis = draw(st.integers(-x.ndim, x.ndim - 1))
        return Case(lambda t: function(t, axis), [x])

    return build


def moves(draw, x):
    """One or several axes and how far their elements move, or all elements in order."""
    some = draw(st.permutations(range(x.ndim)))[: draw(st.integers(0, x.ndim))]
    shifts = [draw(st.integers(-4, 4)) for _ in some]
    return (shifts, some) if some else (draw(st.integers(-4, 4)),)


def parts(draw, x):
    """The sizes of the parts of an axis; the parts are joined in another order."""
    axis = draw(st.integers(-x.ndim, x.ndim - 1))
    first = draw(st.integers(0, x.shape[axis]))
    size = draw(st.sampled_from(([first, x.shape[axis] - first], draw(st.integers(1, 3)))))
    return size, axis


def split(draw):
    """Parts of one size and of several sizes."""
    x = array(draw, anywhere, draw_shape(draw, least=1))
    size, axis = parts(draw, x)
    return Case(lambda t: tensor.concatenate(t.split(size, axis)[::-1], axis), [x])


def sliced(draw):
    """Slices of any step, integers, new axes and an ellipsis."""
    x = array(draw, anywhere, draw_shape(draw, least=1, side=1))
    key = []
    for n in x.shape:
        gather_shards = slice(
            draw(st.integers(-n, n)),
            draw(st.integers(-n, n)),
            draw(st.sampled_from((1, 2, -1, -2))),
        )
        key.append(
            draw(st.sampled_from((gather_shards, slice(None), draw(st.integers(-n, n - 1)))))
        )
    if draw(st.booleans()):
        key[-1] = Ellipsis
    if draw(st.booleans()):
        key.insert(draw(st.integers(0, len(key))), None)
    return Case(lambda t: t[tuple(key)], [x])


def picked(draw):
    """Integer arrays, which may name a place twice, beside slices."""
    x = array(draw, anywhere, (3, *draw_shape(draw, least=1, most=2, side=1)))
    first = np.array(draw(st.lists(st.integers(-3, 2), max_size=4)), dtype=int)
    n = x.shape[1]
    second = np.array([draw(st.integers(-n, n - 1)) for _ in first], dtype=int)
    key = draw(
        st.sampled_from(
            (first, (first, second), (first[:, None], second), (slice(None), second), (first, 0))
        )
    )
    return Case(lambda t: t[key], [x])


def masked(draw):
    """A boolean mask over the first axes."""
    x = array(draw, anywhere, draw_shape(draw, least=1))
    depth = draw(st.integers(1, x.ndim))
    mask = array(draw, anywhere, x.shape[:depth]) > 0
    return Case(lambda t: t[mask], [x])


def through_longdouble(x):
    """Return x, converted there and back; a device has nothing longer than float64."""
    wide = np.longdouble if isinstance(x.data, np.ndarray) else np.float64
    return x.astype(wide).astype(x.dtype)


TENSOR = table(
    "tensor",
    add={
        "both": binary(operator.add),
        "number": unary(lambda x: 2 + x),
        "twice": unary(lambda x: x + x),
    },
    subtract={
        "both": binary(operator.sub),
        "number": unary(lambda x: 2 - x),
        "twice": unary(lambda x: x - x),
    },
    multiply={
        "both": binary(operator.mul),
        "number": unary(lambda x: x * -3),
        "twice": unary(lambda x: x * x),
    },
    divide={
        "both": binary(operator.truediv, nonzero),
        "over": unary(lambda x: 2 / x, nonzero),
        "by": unary(lambda x: x / 4),
        "twice": unary(lambda x: x / x, nonzero),
    },
    power={
        "both": binary(operator.pow, positive),
        "number": power_number,
        "base": unary(lambda x: 1.5**x),
        "twice": unary(lambda x: x**x, positive),
    },
    maximum={
        "both": extremum(tensor.maximum),
        "number": unary(lambda x: tensor.maximum(x, 0.0), nonzero),
    },
    minimum={
        "both": extremum(tensor.minimum),
        "number": unary(lambda x: tensor.minimum(0, x), nonzero),
    },
    gather_shards=unary(lambda x: gather_shards(x) * 2),
    where={"both": where, "number": where_number},
    negate=unary(operator.neg),
    exp=unary(Tensor.exp),
    log=unary(Tensor.log, positive),
    sqrt=unary(Tensor.sqrt, positive),
    absolute=unary(abs, nonzero),
    sin=unary(Tensor.sin),
    cos=unary(Tensor.cos),
    tanh=unary(Tensor.tanh),
    clip={
        "both": unary(lambda x: x.clip(-0.2, 0.2), nonzero),
        "low": unary(lambda x: x.clip(low=0.1), nonzero),
        "high": unary(lambda x: x.clip(high=0), nonzero),
    },
    astype=unary(through_longdouble),
    matmul={
        "all": matmul,
        "square": lambda draw: Case(lambda x: x @ x, [array(draw, anywhere, (3, 3))]),
    },
    sum=reduction(Tensor.sum),
    mean=reduction(Tensor.mean, side=1),
    var={
        "axes": reduction(Tensor.var, side=1),
        "unbiased": method("var", lambda draw, x: [0, False, 1], least=1, side=2),
    },
    max=reduction(Tensor.max, distinct, side=1),
    min=reduction(Tensor.min, distinct, side=1),
    reshape=method("reshape", another_shape, least=1),
    transpose={"any": method("permute", an_order), "two": method("transpose", two_axes, least=1)},
    flatten=method("flatten", lambda draw, x: [draw(st.integers(0, x.ndim))], least=1),
    concatenate=concatenate,
    stack=stack,
    einsum=einsum,
    cumsum=method("cumsum", lambda draw, x: two_axes(draw, x)[:1], least=1),
    sort={
        "ascending": on_axis(Tensor.sort),
        "descending": on_axis(lambda x, axis: x.sort(axis, descending=True)),
    },
    split=split,
    roll=method("roll", moves),
    repeat=method(
        "repeat",
        lambda draw, x: [draw(st.sampled_from((1, 2, 3, 0))) for _ in (0, *x.shape)],
        most=2,
    ),
    pad=method("pad", borders),
    getitem={"sliced": sliced, "picked": picked, "masked": masked},
)
