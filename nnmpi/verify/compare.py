"""What differs between two runs, and by how much it may.

Sums in another order differ by their rounding, which grows with the square root of their length and from step to step.
Errors are relative to the largest value of the array, or to a hundredth of the largest of all arrays of its kind: what
is 0 but for rounding (a bias before a batch norm, say) has no relative error of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, sqrt

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.verify.trial import Trial

LAYERS = 30  # whose rounding adds up
GROWTH = 2.0  # of rounding, by each step: gradients divide by batch statistics, Adam's updates by sizes (`trial.EPS`)
LEAST_SCALE = 1e-2


@dataclass(frozen=True)
class Finding:
    """One thing that was compared.

    Attributes:
        what: in words.
        error: the largest, relative; NaN where a value is no number.
        tolerance: how large it may be; 0 where all bits must be equal.
        bitwise: whether all bits are.
        where: the array with the largest error, where there are several.
    """

    what: str
    error: float
    tolerance: float
    bitwise: bool
    where: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is as it must be."""
        return self.bitwise or self.error <= self.tolerance


def tolerance(dtype: str, samples: int, steps: int) -> float:
    """Return the relative error that is allowed.

    Args:
        dtype: of the arithmetic.
        samples: of a batch: so long are the sums, whose rounding grows with the root of it.
        steps: updates before; rounding grows from step to step.
    """
    return float(LAYERS * sqrt(samples) * np.finfo(dtype).eps * GROWTH**steps)


def compare(ours: Trial, serial: Trial, dtype: str, samples: int, exact: bool) -> list[Finding]:
    """Return what was compared.

    Args:
        ours: the run under the layout.
        serial: the run on one rank.
        dtype: of both.
        samples: of a batch.
        exact: whether the bits must be equal. The evaluation's sums have no fixed order, and are excepted.
    """
    steps = len(serial.losses)
    first, last = (0.0 if exact else tolerance(dtype, samples, n) for n in (0, steps))
    evaluated = tolerance(dtype, samples, 0 if exact else steps)
    found = [
        _numbers("loss of step 1", ours.losses[:1], serial.losses[:1], first),
        _arrays("gradients of step 1", ours.gradients, serial.gradients, first),
        _numbers(f"losses of {steps} steps", ours.losses, serial.losses, last),
        _numbers("lengths of the gradients", ours.norms, serial.norms, last),
        _arrays(f"weights after step {steps}", ours.weights, serial.weights, last),
    ]
    if serial.statistics:
        found.append(_arrays(f"statistics after step {steps}", ours.statistics, serial.statistics, last))
    return [*found, _numbers("evaluation", ours.evaluation, serial.evaluation, evaluated)]


def _numbers(what: str, ours: Sequence[float], theirs: Sequence[float], limit: float) -> Finding:
    one = _arrays(what, {"": np.array(ours)}, {"": np.array(theirs)}, limit)
    return Finding(what, one.error, limit, one.bitwise)


def _arrays(what: str, ours: Mapping[str, Array], theirs: Mapping[str, Array], limit: float) -> Finding:
    largest = max((_size(array) for array in theirs.values()), default=0.0)
    worst, where, bitwise = 0.0, "", ours.keys() == theirs.keys()
    for name, array in theirs.items():
        bitwise = bitwise and bool(np.array_equal(ours[name], array))
        error = _size(ours[name] - array) / (max(_size(array), LEAST_SCALE * largest) or 1.0)
        if not isnan(worst) and not error <= worst:  # NaN is the worst
            worst, where = error, name
    return Finding(what, worst, limit, bitwise, where)


def _size(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))
