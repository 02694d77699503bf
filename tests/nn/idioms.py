"""What steps read outside of their arguments, how they use it, and when it changes: idioms."""

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from nnmpi import data, nn
from nnmpi.tensor.tensor import Tensor

NUMBER = 1.0  # a global of a module
Source = tuple[Callable[[], Any], Callable[[float], object]]  # reads a number, and changes it


def sources(folder):
    """Return where a step reads a number, by name."""
    table, listed, spaced, local = {"n": 1.0}, [1.0], SimpleNamespace(n=1.0), threading.local()
    small, long, number = np.ones(3), np.ones(20_000), ctypes.c_double(1.0)
    mapped = np.memmap(folder / "numbers", "f8", "w+", shape=(2,))
    packages = folder / "site-packages"
    packages.mkdir(exist_ok=True)
    (packages / "idiom_lab.py").write_text("N = 1.0\ndef read():\n    return N\n")
    sys.path.insert(0, str(packages))
    importlib.invalidate_caches()
    lab = importlib.import_module("idiom_lab")
    sys.path.remove(str(packages))
    loader = data.Loader(
        data.Dataset("d", np.ones((90, 2), "f4"), np.zeros(90, int), 2), 1, workers=0
    )
    tensor, deep = Tensor(np.ones(2)), [{"a": [SimpleNamespace(n=1.0)]}]

    class Own:
        number = 1.0

    def cell():
        held = 1.0

        def put(n):
            nonlocal held
            held = n

        return (lambda: held), put

    def in_file():
        file = folder / "number"
        return (lambda: float(file.read_text())), lambda n: file.write_text(f"{n}")

    local.n = mapped[0] = 1.0
    made = {
        "a variable": cell(),
        "a global": (lambda: NUMBER, lambda n: globals().update(NUMBER=n)),
        "a global by name": (lambda: globals()["NUMBER"], lambda n: globals().update(NUMBER=n)),
        "evaluated": (lambda: eval("NUMBER"), lambda n: globals().update(NUMBER=n)),
        "a dictionary": (lambda: table["n"], lambda n: table.update(n=n)),
        "a list": (lambda: listed[0], lambda n: listed.__setitem__(0, n)),
        "an object": (lambda: spaced.n, lambda n: setattr(spaced, "n", n)),
        "an object deep inside": (
            lambda: deep[0]["a"][0].n, lambda n: setattr(deep[0]["a"][0], "n", n)
        ),
        "a class": (lambda: Own.number, lambda n: setattr(Own, "number", n)),
        "a short array": (lambda: float(small[1]), lambda n: small.__setitem__(1, n)),
        "a long array": (lambda: float(long[77]), lambda n: long.__setitem__(77, n)),
        "a mapped file": (lambda: float(mapped[0]), lambda n: mapped.__setitem__(0, n)),
        "a file": in_file(),
        "the environment": (
            lambda: float(os.environ["IDIOM"]),
            lambda n: os.environ.__setitem__("IDIOM", f"{n}"),
        ),
        "of C": (lambda: number.value, lambda n: setattr(number, "value", n)),
        "of a thread": (lambda: local.n, lambda n: setattr(local, "n", n)),
        "an installed package": (lambda: lab.N, lambda n: setattr(lab, "N", n)),
        "its function": (lab.read, lambda n: setattr(lab, "N", n)),
        "a loader": (
            lambda: float(loader.batch_size),
            lambda n: setattr(loader, "batch_size", int(n)),
        ),
        "a tensor's array": (
            lambda: float(tensor.data[0]), lambda n: tensor.data.__setitem__(0, n)
        ),
    }  # fmt: skip
    for _, put in made.values():
        put(1.0)
    return made


USES = {
    "a factor": lambda x, n: x * n,
    "a branch": lambda x, n: x * 2 if n > 1 else x - 3,
    "a loop": lambda x, n: sum((x for _ in range(int(n))), x * 0),
    "an index": lambda x, n: x[int(n) % 3 :] * 2,
    "a constant": lambda x, n: x + Tensor(np.full(4, float(n))),
    "one-hot rows": lambda x, n: x * Tensor(np.eye(4)[int(n) % 4]),
    "of the input's array": lambda x, n: x * Tensor(x.data * n),
    "decided by the input": lambda x, n: x * n if x.data.sum() > 0 else x * (n + 1),
    "an exponent": lambda x, n: x ** float(n),
    "what is returned": lambda x, n: (x * 1, x * 2)[int(n) % 2],
}


def each(call):
    """A number for each call."""
    return 1.0 + call % 5


def once(at):
    """A number that changes at one call."""
    return lambda call: 1.0 if call < at else 3.0


CHANGES = {
    "never": lambda _: 1.0,
    "in each call": each,
    **{f"at call {at}": once(at) for at in (2, 3, 5, 8)},
    "at calls 4, 5, 9": lambda call: 1.0 + sum(call >= at for at in (4, 5, 9)),
}


class Idiom(NamedTuple):
    """The names of a source, a use and a change."""

    source: str
    use: str
    change: str

    @property
    def text(self):
        """All three."""
        return ", ".join(self)


def all_idioms(folder):
    """Yield all idioms."""
    names = [*sources(folder)]
    return chain.from_iterable(
        (Idiom(source, use, change) for use in USES for change in CHANGES) for source in names
    )


class Reads(nn.Module):
    """A layer that says that nothing decides its operations but the shapes, and is wrong."""

    replayable = True

    def __init__(self, read, use):
        self.layer = nn.Linear(4, 4)
        self.read, self.use = read, use

    def forward(self, x):
        """Return the layer's result, with the number used on it."""
        return self.use(self.layer(x), self.read())
