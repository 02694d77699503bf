"""A user's formula computes what NumPy does with it: what it reads, it reads in each call, compiled
kernels or not, eagerly and in a compiled step.
"""

import functools
import types
from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn, optim
from nnmpi.backend import activations, plain
from nnmpi.backend.activations import Activation, Saves
from nnmpi.backend.kernels import PLAIN, kernels_of
from nnmpi.backend.trace import is_printable
from nnmpi.tensor.elementwise import activated
from nnmpi.tensor.function import Elementwise
from tests.device.here import here, on_device
from tests.harness.slow import KERNELS

jits = pytest.mark.parametrize(
    "jit",
    [
        pytest.param(
            True, marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
        ),
        False,
    ],
    ids=["compiled", "plain"],
)

# Each defines `formula(x)` and `change(k)`, which sets what the formula reads.
READ = {
    "a global": "K = 1.0\ndef formula(x): return (x * K,)\ndef change(k): global K; K = k",
    "a number of NumPy's": """
K = numpy.float32(1)
def formula(x): return (x * K,)
def change(k): global K; K = numpy.float32(k)
""",
    "a class": """
class Config: k = 1.0
def formula(x): return (x * Config.k,)
def change(k): Config.k = k
""",
    "an object": """
class Config:
    def __init__(self): self.k = 1.0
    @property
    def twice(self): return 2 * self.k
config = Config()
def formula(x): return (x * config.twice,)
def change(k): config.k = k
""",
    "a dictionary": """
D = {"k": 1.0}
def formula(x): return (x * D["k"],)
def change(k): D["k"] = k
""",
    "a module": """
module = types.ModuleType("module"); module.act = numpy.tanh
def formula(x): return (module.act(x),)
def change(k): module.act = lambda x: x * k
""",
    "a helper that is defined again": """
def act(x): return numpy.tanh(x)
def formula(x): return (act(x),)
def change(k): exec(f"def act(x): return x * {k}", globals())
""",
    "None that becomes a number": """
K = None
def formula(x): return (x if K is None else x * K,)
def change(k): global K; K = k
""",
    "a partial function": """
act = functools.partial(numpy.multiply, 1.0)
def formula(x): return (act(x),)
def change(k): global act; act = functools.partial(numpy.multiply, k)
""",
    "a variable around it": """
def make():
    factor = 1.0
    def formula(x): return (x * factor,)
    def change(k): nonlocal factor; factor = k
    return formula, change
formula, change = make()
""",
    "a default": """
def formula(x, k=1.0): return (x * k,)
def change(k): formula.__defaults__ = (k,)
""",
    "an attribute of its own": """
def formula(x): return (x * formula.k,)
formula.k = 1.0
def change(k): formula.k = k
""",
    "a global, beside what is sorted": """
K = 1.0
def formula(x): return (numpy.partition(numpy.sort(x, axis=-1), 1) * K,)
def change(k): global K; K = k
""",
    "code that is replaced": """
def formula(x): return (x * 1.0,)
def change(k):
    scope = {}
    exec(f"def other(x): return (x * {k!r},)", scope)
    formula.__code__ = scope["other"].__code__
""",
}
NUMBERS = (1.0, 3.0, -0.0, 0.0, True)


def defined(text, name="users"):
    """Return the formula that a module defines, and what changes its numbers."""
    scope = {"__name__": name, "numpy": np, "types": types, "functools": functools}
    exec(text, scope)
    return scope["formula"], scope["change"]


def compiled(jit):
    """Compute with compiled kernels, or without those that can be switched off."""
    return nnmpi.jit() if jit and not on_device() else nullcontext() if jit else nnmpi.jit(False)


def rows_of(formula, x):
    """Return the first result of a formula, by the kernels for this run's arrays."""
    given = here(x)
    return Tensor(kernels_of(given).rows(formula, given)[0]).numpy()


def same(found, right):
    """Compare dtypes and bits."""
    assert found.dtype == right.dtype
    assert found.tobytes() == np.ascontiguousarray(right).tobytes()


@jits
@pytest.mark.parametrize("name", READ)
def test_what_it_reads_may_change(name, jit):
    """Between any two calls."""
    x = np.array([[-1.0, 0.5, 3.0]], np.float32)
    formula, change = defined(READ[name])
    with compiled(jit):
        for number in NUMBERS:
            change(number)
            right = formula(x)[0]
            for _ in range(2):
                same(rows_of(formula, x), right)


@jits
def test_formulas_of_one_text_are_two(jit):
    """With helpers of their own, in modules whose lines are equal."""
    text = "act = numpy.{}\ndef formula(x): return (act(x),)\ndef change(k): pass"
    x = np.array([[1.0, 2.0]], np.float32)
    with compiled(jit):
        for name in ("tanh", "expm1"):
            found = rows_of(defined(text.format(name))[0], x)
            np.testing.assert_allclose(found, getattr(np, name)(x), rtol=1e-6)


def decorated(function):
    """Return the function with its results doubled, in disguise."""

    @functools.wraps(function)
    def doubled(*args):
        return tuple(2 * x for x in function(*args))

    return doubled


def around(k):
    """Return nnmpi's own formula within one of a user's."""
    return lambda x: (activations._silu(x, False)[0] * k,)


@jits
def test_own_formulas_within_a_users(jit):
    """A decorator, a partial function and a function around it are the user's."""
    x = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    with compiled(jit):
        for formula in (
            decorated(lambda x: activations._silu(x, False)),
            functools.wraps(activations._silu)(lambda x: (x * 5,)),
            functools.partial(plain._affine, factors=2.0, shifts=1.0),
            around(2.0),
            around(3.0),
        ):
            assert not is_printable(formula)
            np.testing.assert_allclose(rows_of(formula, x), formula(x)[0], rtol=2e-6)
    assert is_printable(activations._silu)


ODD = {
    "booleans that are added up": lambda x: (((x > 0) + (x > 1)) * x,),
    "two infinities": lambda x: (np.logaddexp(x * np.inf, x * np.inf),),
    "the other axis": lambda x: (x - x.sum(axis=0, keepdims=True),),
    "values that decide": lambda x: (x if x.max() > 4 else -x,),
    "the position of a row": lambda x: (x * np.arange(len(x), dtype="f4").reshape(-1, 1),),
    "rows that overlap": lambda x: (np.add(x[1:], x[:-1], out=x[1:].copy()),),
    "rows backwards": lambda x: (x[::-1, ::-1] - x,),
    "numbers of float64": lambda x: (x * np.float64(0.1),),
}


@jits
@pytest.mark.host_only("NumPy's results, bit for bit")
@pytest.mark.parametrize("rows", [0, 1, 5, 65_537])
@pytest.mark.parametrize("name", ODD)
def test_it_is_computed_as_it_is_written(name, rows, jit):
    """Whole, however many rows there are, whatever it does with them."""
    if name == "values that decide" and not rows:
        return
    x = np.random.default_rng(0).standard_normal((rows, 3), dtype=np.float32)
    for given in (x, x[::-1, ::-1], x.astype(np.float16), x.astype(np.float64)):
        with compiled(jit), np.errstate(all="ignore"):
            same(kernels_of(given).rows(ODD[name], given)[0], ODD[name](given)[0])


@pytest.mark.host_only("blocks are NumPy's")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_vector_is_one_row(dtype):
    """Of nnmpi's own formulas, which are computed in blocks of rows, too."""
    x = np.random.default_rng(0).standard_normal(300_000).astype(dtype)
    for given in (x, x[::-1], x[::2]):
        powers, sums, top = PLAIN.rows(plain._powers, given, False)
        assert sums.shape == top.shape == (1,) and top == given.max()
        np.testing.assert_allclose(
            sums, np.sum(powers, dtype=float), rtol=0.2 if dtype == "float16" else 1e-5
        )


@jits
def test_an_activation(jit):
    """An activation of one's own, whose derivative is computed with the value."""
    factor = 1.0

    def formula(x, keep, scale):
        return x * x * scale * factor, 2 * x * scale * factor

    own = Activation("own", formula, Saves.DERIVATIVE, None, "")
    x = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    with compiled(jit):
        for factor in NUMBERS:  # noqa: B007
            leaf = Tensor(x, requires_grad=True)
            y = activated(own, leaf, 0.5)
            y.sum().backward()
            same(y.numpy(), formula(x, True, 0.5)[0])
            same(Tensor(leaf.grad).numpy(), formula(x, True, 0.5)[1])


class Config:
    """What an optimizer and an operation read."""

    factor = 1.0
    kept = np.float32(0.5)


class Own(optim.Optimizer):
    """Reads a class, and has numbers of NumPy's."""

    def __init__(self, storage, lr):
        super().__init__(storage, lr, slots=("m",))

    def numbers(self, lr, decay):
        return np.float32(lr / np.sqrt(self.steps)), self.steps

    @staticmethod
    def formula(w, grad, m, rate, step):
        m *= Config.kept
        m += grad * Config.factor
        w -= rate * m / step


@jits
def test_an_optimizer(jit, monkeypatch):
    """Its formula is read anew in each update, nothing is kept of an update, and it has no guard
    that it would not look at.
    """
    weights, grad = np.ones((2, 4, 3), np.float32)
    momentum = np.zeros_like(weights)
    arrays = [here(x.copy()) for x in (weights, grad)]
    optimizer = Own(optim.Arrays(arrays[:1], arrays[1:]), lr=0.1)
    with compiled(jit):
        for step in range(1, 8):
            monkeypatch.setattr(Config, "factor", float(step % 3))
            grad *= 1.5
            arrays[1][...] = here(grad)
            optimizer.step()
            Own.formula(weights, grad, momentum, *optimizer.numbers(0.1, False))
    np.testing.assert_allclose(Tensor(arrays[0]).numpy(), weights, rtol=1e-6)
    assert not optimizer.can_guard and not optimizer._blocks[0].updates


@jits
def test_an_own_optimizer_with_numbers_of_numpy(jit):
    """What is kept of it does not grow with the updates."""

    class Slower(optim.SGD):
        def numbers(self, lr, decay):
            return np.float64(lr / self.steps), self.steps

    model = nn.Linear(4, 3).initialize(seed=0)
    optimizer = Slower(model.storage, lr=0.1)
    with compiled(jit):
        for _ in range(5):
            optimizer.step()
    assert len(optimizer._blocks[0].updates) == 1


def test_a_formula_in_place_of_an_own_one_has_no_guard(monkeypatch):
    """A device's kernels alone look at it."""
    optimizer = optim.Adam(nn.Linear(4, 3).initialize(seed=0).storage)
    monkeypatch.setattr(plain.PlainKernels, "of_device", True)
    assert optimizer.can_guard
    monkeypatch.setattr(optim.Adam, "formula", staticmethod(lambda w, *_: None))
    assert not optimizer.can_guard


class Scaled(Elementwise):
    """Has a formula of a user's, see `READ`."""

    def __init__(self, formula):
        self.formula = formula

    def forward(self, x):
        return kernels_of(x).rows(self.formula, x)[0]

    def backward(self, grad):
        return (grad * 1,)


@jits
@pytest.mark.host_only("a device's graphs are not compared with one another")
@pytest.mark.parametrize("name", READ)
def test_in_a_compiled_step(name, jit):
    """Between two replays, too, and with numbers that are equal but not the same."""
    formula, change = defined(READ[name])
    step = nnmpi.compile(lambda x: Scaled(formula)(x))
    x = np.array([[-1.0, 0.5, 3.0]], np.float32)
    with compiled(jit):
        for number in NUMBERS:
            change(number)
            for _ in range(5):
                same(step(x).numpy(), formula(x)[0])


EXPRESSIONS = (
    *("np.tanh({})", "np.exp(-abs({}))", "np.maximum({}, 0.1)", "np.logaddexp({}, 1)"),
    *("({} > 0) + ({} > 1)", "{} ** 3", "np.clip({}, -1, 1)", "np.sort({}, axis=-1)"),
    *("{} - {}.mean(axis=0, keepdims=True)", "{} / (1 + abs({}).sum(axis=-1, keepdims=True))"),
    *("({} if {}.max() > 0.5 else -{})", "np.cumsum({}, axis=-1)", "{}[:, ::-1] * K"),
)


@jits
@pytest.mark.slow(KERNELS)
@pytest.mark.host_only("NumPy's results, bit for bit")
@pytest.mark.parametrize("seed", range(20))
def test_random_formulas(seed, jit):
    """Chains of NumPy's functions, and of what changes between calls."""
    rng = np.random.default_rng(seed)
    text = "x"
    for i in rng.integers(0, len(EXPRESSIONS), 3):
        text = f"({EXPRESSIONS[i].replace('{}', f'({text})')}) * K"
    scope = {"np": np, "K": 1.0}
    exec(f"def formula(x): return ({text},)", scope)
    formula = scope["formula"]
    with compiled(jit), np.errstate(all="ignore"):
        for number in rng.choice(NUMBERS, 6):
            scope["K"] = float(number)
            x = rng.standard_normal((rng.choice([2, 9, 30_000]), 5)).astype("f4")
            same(kernels_of(x).rows(formula, x)[0], formula(x)[0])
