"""The samples of the operations' traits, as rows of the table of gradients: so an operation that
states its traits is tested without another list.
"""

import pkgutil
from importlib import import_module

from hypothesis import strategies as st

import nnmpi
from nnmpi import ops
from nnmpi.tensor.function import Function
from tests.tensor.draws import (
    Case,
    Row,
    anywhere,
    array,
    arrays,
    beside,
    distinct,
    nonzero,
    positive,
    probabilities,
)
from tests.tensor.draws import shape as draw_shape

VALUES = {
    "any": anywhere,
    "positive": positive,
    "nonzero": nonzero,
    "distinct": distinct,
    "probability": probabilities,
}


def _subclasses(kind):
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def operations():
    """Return nnmpi's operations by name, but those that are private or only built on."""
    for module in pkgutil.walk_packages(nnmpi.__path__, "nnmpi."):
        if not module.name.endswith(("__main__", "functional")) and "cuda" not in module.name:
            import_module(module.name)
    return {
        kind.__name__: kind
        for kind in sorted(set(_subclasses(Function)), key=lambda kind: kind.__qualname__)
        if kind.__module__.startswith("nnmpi.")
        and not kind.__name__.startswith("_")
        and ("traits" in vars(kind) or not kind.__subclasses__())
    }


OPERATIONS = operations()
SAMPLES = [
    (kind, sample)
    for kind in OPERATIONS.values()
    for sample in (vars(kind)["traits"].samples if "traits" in vars(kind) else ())
]
EACH = {"argvalues": SAMPLES, "ids": [sample.name for _, sample in SAMPLES]}


def public_name(sample):
    """Return the function that a sample calls, by module and name."""
    return f"{'ops' if sample.public in ops.__all__ else 'tensor'}.{sample.public}"


def _fixed(x, like):
    """Return an array of a sample where a tensor is, floating point in its dtype."""
    if like is None:
        return x
    return beside(like, x.astype(like.dtype) if x.dtype.kind == "f" else x)


def _row(sample):
    @st.composite
    def cases(draw):
        values = VALUES[sample.values]
        if sample.shapes is None:
            inputs = [array(draw, values, draw_shape(draw))]
        else:
            inputs = arrays(draw, values, sample.shapes)

        def call(*given):
            like = next((x for x in given if hasattr(x, "data")), None)
            return sample.call(*given, *(_fixed(x, like) for x in sample.arrays))

        return Case(call, inputs)

    return Row(f"sample.{sample.name}", public_name(sample), cases())


ROWS = [_row(sample) for _, sample in SAMPLES]
