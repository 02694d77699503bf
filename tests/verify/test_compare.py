"""How two runs are compared, and what the table says of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nnmpi.verify.__main__ import table, verdict
from nnmpi.verify.compare import compare, tolerance
from nnmpi.verify.trial import Trial

SERIAL = Trial(
    losses=[2.0, 1.5],
    norms=[1.0, 0.5],
    gradients={"0.weight": np.array([[1.0, -2.0]]), "0.bias": np.array([1e-18])},
    weights={"0.weight": np.array([[0.5, 0.25]]), "0.bias": np.array([0.0])},
    statistics={"1.running_mean": np.array([0.1])},
    evaluation=(1.4, 0.3),
    layout=[],
)


def findings(exact: bool = False, **changes: Any) -> dict[str, Any]:
    found = compare(replace(SERIAL, **changes), SERIAL, "float64", 16, exact)
    return {each.what: each for each in found}


def test_equal_runs_are_equal_to_the_last_bit() -> None:
    found = list(findings(exact=True).values())
    assert all(each.bitwise and each.holds for each in found)
    assert verdict(found) == "equal to the last bit"
    assert [line.split()[-1] for line in table(found)[1:]] == ["bitwise"] * 7


def test_rounding_is_allowed_unless_the_bits_must_be_equal() -> None:
    gradients = {**SERIAL.gradients, "0.weight": SERIAL.gradients["0.weight"] * (1 + 1e-15)}
    one = findings(gradients=gradients)["gradients of step 1"]
    assert one.holds and not one.bitwise and one.where == "0.weight"
    assert verdict([one, one]) == "equal within the tolerance"
    assert not findings(exact=True, gradients=gradients)["gradients of step 1"].holds


@pytest.mark.parametrize("factor", [0.5, 1 + 1e-9, float("nan")])
def test_more_is_not(factor: float) -> None:
    weights = {**SERIAL.weights, "0.weight": SERIAL.weights["0.weight"] * factor}
    found = list(findings(weights=weights).values())
    wrong = [each for each in found if not each.holds]
    assert [each.what for each in wrong] == ["weights after step 2"]
    assert verdict(found) == "NOT EQUAL: weights after step 2"
    assert any("DIFFERS   (most: 0.weight)" in line for line in table(found))


def test_errors_are_relative_but_not_to_what_is_nothing() -> None:
    """A gradient that is 0 but for rounding is measured by the others; a small array by its own size, down to 1 %."""
    noise = {**SERIAL.gradients, "0.bias": np.array([-3e-18])}
    assert findings(gradients=noise)["gradients of step 1"].holds
    small = replace(SERIAL, gradients={"a": np.array([100.0]), "b": np.array([2.0])})
    off = replace(small, gradients={"a": np.array([100.0]), "b": np.array([2.0 + 1e-9])})
    one = compare(off, small, "float64", 16, False)[1]
    assert one.error == pytest.approx(5e-10, rel=1e-3) and not one.holds


def test_tolerance_grows_with_steps_and_the_square_root_of_the_samples() -> None:
    assert tolerance("float64", 64, 0) == 2 * tolerance("float64", 16, 0)
    assert tolerance("float32", 16, 2) == 4 * tolerance("float32", 16, 0)
