"""Compiled steps: how they are called, what they return, and who may call them."""

import threading

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn, ops
from nnmpi.errors import UsageError


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2)).initialize(seed=0, dtype="float64")


def test_one_within_another_is_refused_when_it_was_called_before():
    """Its replay would not be noted by the outer one."""
    inner = nnmpi.compile(lambda x: x * 2)
    inner(np.ones(3))
    outer = nnmpi.compile(lambda x: inner(x) + 1)
    with pytest.raises(UsageError, match="compile the outer one alone"):
        outer(np.ones(3))


def test_threads_take_turns():
    """One step has one set of places and results."""
    model = linear()
    step = nnmpi.compile(lambda x: model(x).sum())
    wrong: list[int] = []

    def work(number: int) -> None:
        x = np.full((40, 3), float(number))
        right = model(Tensor(x)).sum().item()
        wrong.extend(i for i in range(300) if step(x).item() != right)

    step(np.zeros((40, 3)))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_numbers_of_numpys_and_in_tuples_are_values():
    step = nnmpi.compile(lambda x, factors: x * factors[0])
    ones = np.ones(2)
    for factors, right in (((2.0,), 2), ((2,), 2), ((0.0,), 0.0), ((-0.0,), -0.0), ((np.float64(5),), 5)):
        result = step(ones, factors).data
        np.testing.assert_array_equal(result, [right, right])
        assert np.signbit(result[0]) == np.signbit(right)
    assert step.recordings == 5
    scaled = nnmpi.compile(lambda x, factor: x * factor)
    for factor in (np.float32(2), np.float32(3), np.float64(2)):
        result = scaled(np.ones(2, "float32"), factor)
        assert (result.data == factor).all() and result.dtype == "float32"


@pytest.mark.parametrize(
    "size", [3, 4000]
)  # short arrays have memory of their own in a recording, long ones the pool's
def test_gradients_of_loose_leaves_are_the_callers(size):
    """What is no parameter has no place of its own for its gradient: each step gives another array."""
    leaf = Tensor(np.arange(float(size)), requires_grad=True)

    def step(x: Tensor) -> None:
        (leaf * x).sum().backward()

    compiled, kept = nnmpi.compile(step), []
    for value in (1.0, 2.0, 3.0):
        leaf.grad = None
        compiled(np.full(size, value))
        kept.append(leaf.grad)
    assert [set(each.tolist()) for each in kept] == [{1.0}, {2.0}, {3.0}]
    for total in (7.0, 11.0, 15.0):  # now it adds up
        compiled(np.full(size, 4.0))
        assert set(leaf.grad.tolist()) == {total}


def test_a_hook_that_is_set_later_is_called():
    model = linear()
    weight = model[0].weight

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = ops.mse(model(x), np.zeros((4, 2)))
        loss.backward()
        return loss

    compiled, seen = nnmpi.compile(step), []
    compiled(np.ones((4, 3)))
    weight.hook = seen.append
    compiled(np.ones((4, 3)))
    compiled(np.ones((4, 3)))
    assert seen == [weight, weight]
    weight.hook = None
    compiled(np.ones((4, 3)))
    assert len(seen) == 2
