"""The error function, which NumPy lacks."""

from typing import Any

from nnmpi.backend.array import Array, namespace

# erfc(x) = t exp(-x^2 + P(t)) for x >= 0, t = 2 / (2 + x): P is smooth, and this is its Chebyshev series in 2 t - 1,
# computed with 60 digits. In float64 the result is within 4e-16 of the true value.
_SERIES = (
    -0.6513268598908547,
    0.6419697923564902,
    0.019476473204185836,
    -0.009561514786808632,
    -0.0009465953444820369,
    0.00036683949785276145,
    4.252332480690777e-05,
    -2.0278578112534242e-05,
    -1.6242900046470256e-06,
    1.3036558355805232e-06,
    1.5626441722066142e-08,
    -8.523809591492654e-08,
    6.5290544390988515e-09,
    5.059343495551469e-09,
    -9.91364156493033e-10,
    -2.273651222931836e-10,
    9.646791102015527e-11,
    2.3940380830391146e-12,
    -6.886027526497553e-12,
    8.944879273090725e-13,
    3.130921399342958e-13,
    -1.1270822361367252e-13,
    3.810905255189232e-16,
    7.106097613609237e-15,
    -1.5230282014571043e-15,
    -9.457494571291233e-17,
    1.210237189224279e-16,
)


def erf(x: Array, xp: Any = None, out: Array | None = None) -> Array:
    """Return the error function of x, elementwise, in the dtype of x (Clenshaw's recurrence for the series above).

    Args:
        x: any shape.
        xp: the module whose functions are called; by default that of x.
        out: where to write the result; it may be x.
    """
    xp = namespace(x) if xp is None else xp
    size, t, u, high, higher, spare = (xp.empty(x.shape, x.dtype) for _ in range(6))
    xp.absolute(x, out=size)
    xp.minimum(size, 100, out=size)  # it is 1 long before; the square of a larger number may be beyond the range
    xp.divide(2, xp.add(size, 2, out=t), out=t)
    xp.subtract(xp.multiply(t, 4, out=u), 2, out=u)  # twice the point, as the recurrence wants it
    terms = _SERIES if x.dtype.itemsize > 4 else _SERIES[:13]  # float32 ends at 1e-8
    xp.copyto(high, terms[-1])
    xp.copyto(higher, 0)
    for coefficient in reversed(terms[1:-1]):
        xp.multiply(u, high, out=spare)
        xp.subtract(spare, higher, out=spare)
        xp.add(spare, coefficient, out=spare)
        high, higher, spare = spare, high, higher
    series = xp.multiply(u, high, out=spare)
    xp.multiply(series, 0.5, out=series)
    xp.subtract(series, higher, out=series)
    xp.add(series, terms[0], out=series)
    xp.subtract(series, xp.multiply(size, size, out=size), out=series)
    xp.multiply(t, xp.exp(series, out=series), out=t)
    xp.subtract(1, t, out=t)
    result: Array = xp.multiply(xp.sign(x, out=u), t, out=t if out is None else out)
    return result
