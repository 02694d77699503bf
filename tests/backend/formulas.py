"""Row formulas of tests: on the host (`test_rows`), and on a device (tests/gpu/test_rows.py)."""

import numpy as np


def print_all(monkeypatch):
    """Let kernels print formulas of tests, too, which otherwise run as they are written."""
    for module in ("plain", "printed"):
        monkeypatch.setattr(f"nnmpi.backend.{module}.is_printable", lambda formula: True)


def loops_of(kernels, formula):
    """Return what was printed of a formula; None where it is left to the library."""
    return [loop for known, loop in kernels._loops.items() if known[0] is formula]


SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1e-7, -1e-7, 0.5, -0.5, 87, -87]


def rows(*shape, seed=0):
    """Return random rows, among them what functions treat apart."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, dtype=np.float32) * np.float32(3)
    x.reshape(-1)[: len(SPECIAL)] = SPECIAL[: x.size]
    return x


ONE = {
    "exp": lambda x: (np.exp(np.minimum(x, 80)), np.expm1(np.minimum(x, 80)), np.tanh(x)),
    "log": lambda x: (np.log(abs(x)), np.log(x), np.log1p(np.maximum(x, -0.9)), np.sqrt(x)),
    "choices": lambda x: (
        *(np.maximum(x, -x * 0.5), np.maximum(0.25, x), np.minimum(x, 1 - x), np.clip(x, -1, 2)),
        *(np.where(x > 0, x / 3, x * 2), np.where(np.logical_not(x <= 1), 0, x), np.sign(x)),
        *((x == 0) * 2.0 + (x != x) * 3.0 + (x >= 0.5), -x + (x < 0), np.copysign(2, x)),
    ),
}


def mish(x):
    """An activation, and its derivative."""
    t = np.tanh(np.maximum(x, 0) + np.log1p(np.exp(-abs(x))))
    return x * t, t + x * (1 - t * t) / (1 + np.exp(-x))


def own_norm(x, eps, scale):
    """A norm by the largest and the mean."""
    away = x - x.mean(axis=-1, keepdims=True)
    size = abs(away).max(axis=-1, keepdims=True) + eps
    away /= size  # in place
    return away * scale, size


def mixed(x, each, column, number):
    """Numbers of rows and columns, read and returned."""
    y = x * each + column * number
    total = y.sum(axis=-1, keepdims=True)
    return y / (abs(total) + 1), total, y, each * column


def late(x):
    """Rows that are read after a first result."""
    y = x * 2
    return y, x - y.sum(axis=-1, keepdims=True)


def updates(x, y):
    """Rows that are written in place, where they were read before."""
    y += x * x.sum(axis=-1, keepdims=True)
    x -= y.sum(axis=-1, keepdims=True)


def too_early(x, y):
    """Rows that are read after they were written."""
    above = x + 1
    x *= 2
    y -= above - above.sum(axis=-1, keepdims=True)


def in_place(x, y):
    """Rows that are written and returned, and temporary ones."""
    z = x * 2
    np.multiply(z, y, out=z)
    x *= 0.5
    x -= z
    return (x + y,)


SPECIAL_ROW = np.ones(40, np.float32)
LEFT = {
    "values decide": lambda x: (x if x.max() > 0 else -x,),
    "other axes": lambda x: (x - x.mean(axis=0, keepdims=True),),
    "parts of rows": lambda x: (x[:, ::-1] * 1,),
    "other functions": lambda x: (np.sort(x, axis=-1),),
    "powers": lambda x: (x**3,),
    "axes that go": lambda x: (x.sum(axis=-1),),
    "arrays around": lambda x, table=SPECIAL_ROW: (x * table,),
}


STEPS = [
    lambda a, b, total, scale: a / total + b,
    lambda a, b, total, scale: np.tanh(a) * b,
    lambda a, b, total, scale: np.exp(-abs(a)) + b * 0.5,
    lambda a, b, total, scale: np.maximum(a, b) - total,
    lambda a, b, total, scale: np.where(a > b, a, b * scale),
    lambda a, b, total, scale: np.log1p(abs(a)) - b / (abs(a).max(axis=-1, keepdims=True) + 1),
    lambda a, b, total, scale: np.sqrt(a * a + 1) - total,
    lambda a, b, total, scale: np.clip(a, -1, 1) * total,
]


def chain(steps):
    """Return a formula of some steps."""

    def formula(x, scale, each):
        values = [x, x * scale, x * 0.5 + each]
        for i, step in enumerate(steps):
            a = values[-1]
            total = abs(a).mean(axis=-1, keepdims=True) + 1
            values.append(step(a, values[i % len(values)], total, scale))
        return (*values[-2:], total)

    return formula
