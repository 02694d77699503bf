"""Random programs of whole steps, as source: what people write in Python around a model's call.

A step takes x (rows, 4) and y (rows,); each of its parts turns h (rows, 4) into another such
Tensor. Parts compute the same in each call, however they do it; a change is one to what a part
reads.
"""

import random
from textwrap import indent

PARTS = {
    "a set": "for n in sorted({3.0, 0.5, 1.5}):\n    h = h * n",
    "a frozenset of texts": "h = h * len(frozenset(('a', 'b', 'c')) | {'d'})",
    "an equal object": "h = h * Point(1.5, 2.0).x",
    "an equal dataclass": "pair = Pair(0.5, [1, 2])\nh = h * pair.factor + sum(pair.numbers)",
    "an index": "number = 2\nh = h + h[:, number : number + 1]",
    "indices in a list": "h = h + h[:, [3, 0, 1, 2]] * 0.5",
    "a rebuilt list": "weights = [0.1 * n for n in range(1, 5)]\nfor w in weights:\n    h = h + w",
    "a generator": "h = h * sum(n for n in (1, 2, 3))",
    "a function that yields": "for scale in halves(3):\n    h = h * scale",
    "a formatted name": "number = 2\nh = h * TABLE[f'k{number}']",
    "a local lambda": "scale = lambda t, by=0.25: t * by\nh = scale(h)",
    "a sorted lambda": "h = h * sorted([3, 1, 2], key=lambda n: -n)[0]",
    "a partial": "h = partial(shift, by=0.5)(h)",
    "a new array": "h = h * np.linspace(0.5, 1.5, 4)",
    "a new tensor": "h = h + nnmpi.Tensor(np.full(4, 0.25))",
    "the shape": "h = h * (1.0 / h.shape[0])",
    "ones of the shape": "h = h + np.ones(h.shape) * 0.5",
    "a dictionary": "parts = {name: h * n for name, n in TABLE.items()}\nh = h + parts['k2']",
    "pairs": "for n, part in enumerate(zip((0.5, 1.0), (2.0, 3.0))):\n    h = h * (part[0] + n)",
    "a class of the call": "class Local:\n    gain = 1.25\nh = h * Local().gain",
    "a recursive function": "h = halved(h, 3)",
    "an object that is called": "h = Gain(0.75)(h)",
    "a property": "h = h * Gain(2.0).half",
    "an enum": "h = h * Kind.SMALL.value",
    "a cached function": "h = h * cached(3)",
    "a memo": "if 'scale' not in MEMO:\n    MEMO['scale'] = 1.5\nh = h * MEMO['scale']",
    "a first call": (
        "if not hasattr(STATE, 'ready'):\n    STATE.ready = True\n    h = h * 1.0\nh = h + 0.5"
    ),
    "an exception": "try:\n    n = {}['missing']\nexcept KeyError:\n    n = 0.5\nh = h * n",
    "a context": "with entered() as n:\n    h = h * n",
    "a reduction": "h = reduce(lambda a, b: a * b, (0.5, 1.5), h)",
    "keywords": "h = shift(h, **{'by': -0.5})",
    "a namedtuple": "both = Both(h, 2.0)\nh = both.t * both.n",
    "a deque": "queue = deque([h], maxlen=2)\nqueue.append(h * 0.5)\nh = queue[0] + queue[1]",
    "a seeded draw": "h = h + np.random.default_rng(7).normal(size=4)",
    "a fraction": "h = h * float(Fraction(1, 3))",
    "a slice": "where = slice(0, 2)\nh = h + h[:, where].sum() * 0.01",
    "a match": (
        "match (1, 'b'):\n    case (n, 'b'):\n        h = h * n\n    case _:\n        h = h - 1"
    ),
    "a branch of flags": "h = nnmpi.ops.relu(h) if FLAGS & 1 else h * 2",
    "an operation of one's own": "h = Cube()(h) * 0.1 + h",
    "an operation with a setting": "h = Scaled([0.5, 0.5])(h)",
    **{
        f"an operation that holds {name}": f"h = Holds({value})(h)"
        for name, value in {
            "a set": "{'a', 'b', 'c'}",
            "a set of numbers": "{n for n in range(5)}",
            "an object": "Point(1, Pair(2.0, [3]))",
            "a lambda": "lambda t: t * 2",
            "a closure": "(lambda t, n=[1, 2]: t * n[0])",
            "the tensor": "h",
            "what closes over the tensor": "lambda: h",
            "the tensor's array": "h.data",
            "a generator": "(n for n in (1, 2))",
            "an iterator": "iter([1, 2])",
            "pairs": "zip((1, 2), 'ab')",
            "a map": "map(str, (1, 2))",
            "a dictionary": "{'k': [1.0, (2, None)], 3: Kind.SMALL}",
            "its view": "{'k': 1}.items()",
            "a text": "f'{len(h.shape)} axes'",
            "a large number": "10**20 + len(h.shape)",
            "a NumPy number": "np.float32(0.5)",
            "an array": "np.arange(3)",
            "a range": "range(3)",
            "a partial": "partial(shift, by=Point(1, 2))",
            "a method": "Point(1, 2).__init__",
            "a class": "type('Made', (), {'n': 1})",
            "its object": "type('Made', (), {'n': 1})()",
            "an exception": "ValueError('no')",
            "a function": "shift",
            "a module": "np",
            "a fraction": "Fraction(1, 3)",
            "a namedtuple": "Both(1, 2)",
            "a deque": "deque([1, 2], maxlen=3)",
            "a counter": "Counter('aab')",
            "bytes": "bytearray(b'12')",
            "a draw": "np.random.default_rng(3)",
            "a random": "random.Random(3)",
            "a date": "datetime(2020, 1, 2)",
            "a path": "Path('a') / 'b'",
            "a pattern": "re.compile('a+')",
            "a reference": "ref(GAIN)",
            "an object with slots": "Slots(1.5)",
            "a layer": "layer",
            "NaN": "float('nan')",
            "a lock": "Lock()",
            "an ordered dictionary": "OrderedDict(b=1, a=2)",
            "a view of memory": "memoryview(b'12')",
            "a decimal": "Decimal('0.1')",
            "a context": "entered()",
            "an object of its own": "SimpleNamespace(n=1, more=SimpleNamespace(m=[2]))",
        }.items()
    },
    "a layer": "h = h + layer(h)",
    "layers in a list": "for one in layers:\n    h = one(h)",
    "dropout": "h = drop(h)",
    "a mean": "h = h - h.mean(axis=0)",
    "a text of numbers": "h = h * float('0.5') + len(str(12345)) * 0.1",
    "a bytes object": "h = h * bytes([1, 2])[1]",
    "a complex factor": "h = h * abs(3 + 4j) * 0.2",
    "several results": "a, *rest = h * 1.0, h * 0.5, h * 0.25\nh = a + rest[0] + rest[-1]",
    "a weak reference": "h = h * ref(GAIN)().by",
    "the norm of a weight": "h = h + (layer.weight * layer.weight).sum() * 0.001",
    "identity of a type": "h = h * (2.0 if type(h) is nnmpi.Tensor and id(h) else 3.0)",
    "hash of a text": "h = h * (1.0 if hash('a') == hash('a') else 2.0)",
}
# what is read, and how it is changed; `None`: read by NumPy or C alone, so that only audits see it
CHANGES = {
    "a global": ("h = h * RATE", "global RATE\nRATE = 0.5"),
    "a list's item": ("h = h * LIST[1]", "LIST[1] = 0.5"),
    "a dictionary's": ("h = h * TABLE['rate']", "TABLE['rate'] = 0.5"),
    "an attribute": ("h = h * GAIN.by", "GAIN.by = 0.5"),
    "a short array": ("h = h * float(SHORT[1])", "SHORT[1] = 0.5"),
    "a long array": ("h = h * float(LONG[77])", "LONG[77] = 0.5"),
    "a plateau": ("h = h * plateau.lr", "plateau(1.0)\nplateau(2.0)"),
    "a loader": ("h = h * (1 / loader.batch_size)", "loader.batch_size = 7"),
    "a data set": ("h = h * float(dataset.x[3, 1])", "dataset.x[:] = 0.5"),
    "the environment": (
        "h = h * float(os.environ['STEP_RATE'])",
        "os.environ['STEP_RATE'] = '0.5'",
    ),
    "a global by name": ("h = h * globals()['RA' + 'TE']", "global RATE\nRATE = 0.5"),
    "a branch": ("h = h * 2 if FLAGS & 2 else h - 1", "global FLAGS\nFLAGS = 3"),
    "a dtype": ("h = h * np.ones(4, KINDS[0]).sum()", "KINDS[0] = 'float32'\nTABLE['rate'] = 0.5"),
    "a layer's rate": ("h = rare(h)", "rare.p = 0.5"),
}
HEAD = """
import os
import random
import re
from collections import Counter, OrderedDict, deque, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial, reduce
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from weakref import ref

import numpy as np

import nnmpi
from nnmpi import data, nn, ops, optim
from nnmpi.tensor import Function

RATE, FLAGS, LIST, KINDS = 1.0, 1, [2.0, 1.0], ["float64"]
TABLE, MEMO, STATE = {"k1": 0.5, "k2": 1.5, "rate": 1.0}, {}, SimpleNamespace()
SHORT, LONG = np.ones(3), np.ones(20_000)
os.environ["STEP_RATE"] = "1.0"
plateau = optim.ReduceOnPlateau(1.0, factor=0.5, patience=0)
dataset = data.Dataset("d", np.ones((90, 2), "f4"), np.zeros(90, int), 2)
loader = data.Loader(dataset, 5, workers=0)
Both = namedtuple("Both", "t n")
Kind = Enum("Kind", {"SMALL": 0.5, "LARGE": 2.0})


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y


@dataclass
class Pair:
    factor: float
    numbers: list


class Gain:
    def __init__(self, by):
        self.by = by

    def __call__(self, t):
        return t * self.by

    @property
    def half(self):
        return self.by / 2


GAIN = Gain(1.0)


class Cube(Function):
    def forward(self, x):
        self.saved = (x,)
        return x * x * x

    def backward(self, grad):
        (x,) = self.saved
        return (3 * x * x * grad,)


class Scaled(Function):
    def __init__(self, by):
        self.by = by

    def forward(self, x):
        return x * sum(self.by)

    def backward(self, grad):
        return (grad * sum(self.by),)


class Holds(Function):
    def __init__(self, thing):
        self.thing = thing

    def forward(self, x):
        return x * 1.5

    def backward(self, grad):
        return (grad * 1.5,)


class Slots:
    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n


def halves(count):
    for n in range(count):
        yield 1 / (n + 1)


def halved(t, n):
    return t if n == 0 else halved(t * 0.5, n - 1)


def shift(t, by):
    return t + by


@lru_cache
def cached(n):
    return n / 2


@contextmanager
def entered():
    yield 1.25


layer, drop, rare = nn.Linear(4, 4), nn.Dropout(0.25), nn.Dropout(0.1)
layers = [nn.Linear(4, 4), nn.Tanh()]
model = nn.Sequential(layer, *layers, drop, rare).initialize(seed=0, dtype="float64")
optimizer = optim.SGD(model.storage, lr=0.01, momentum=0.9)

"""


def program(seed):
    """Return a program's source and the name of its change, which is empty without one.

    Its `step` is one update, and its `change` changes what a part reads.
    """
    draw = random.Random(seed)
    names = draw.sample([*PARTS], draw.randint(3, 8))
    parts = [PARTS[name] for name in names]
    changed, change = "", "pass"
    if draw.random() < 0.4:
        changed = draw.choice([*CHANGES])
        part, change = CHANGES[changed]
        parts.insert(draw.randint(0, len(parts)), part)
    update = draw.choice(
        [
            "optimizer.step()",
            "for p in filter(lambda p: p.grad is not None, model.parameters()):\n"
            "    p.data -= 0.01 * p.grad",
            "optimizer.step()\nnp.clip(model.storage.data[0], -2, 2, out=model.storage.data[0])",
        ]
    )
    loss = draw.choice(
        ["ops.cross_entropy(layer(h), y)", "ops.mse(h, np.zeros(h.shape))", "(h * h).mean()"]
    )
    body = [
        "model.zero_grad()",
        "h = model(x)",
        *parts,
        f"loss = {loss}",
        "loss.backward()",
        update,
    ]
    result = draw.choice(["return loss", "return {'loss': loss, 'both': [h, loss]}"])
    step = indent("\n".join([*body, result]), "    ")
    return (
        f"{HEAD}def step(x, y):\n{step}\n\n\ndef change():\n{indent(change, '    ')}\n",
        changed,
        names,
    )
