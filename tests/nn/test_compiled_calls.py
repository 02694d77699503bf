"""Compiled steps: how they are called, what they return, and who may call them."""

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn, ops
from nnmpi.errors import ShapeError, UsageError
from nnmpi.tensor.function import Function
from nnmpi.tensor.index import take_along_axis


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


def test_names_of_arguments():
    step = nnmpi.compile(lambda x, factor=3.0, *, last=None: x * factor)
    ones = np.ones(2)
    for _ in range(2):
        assert step(x=ones).data.tolist() == [3, 3]
        assert step(ones, factor=2.0).data.tolist() == [2, 2]
    assert step.recordings == 2
    with pytest.raises(UsageError, match="unexpected keyword argument 'y'"):
        step(ones, y=1)
    with pytest.raises(UsageError, match="last can be given by name only"):
        step(ones, last=1)


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


@pytest.mark.host_only("indices that are looked at")
@pytest.mark.parametrize("pick", [lambda x, i: x[i.data], lambda x, i: take_along_axis(x, i, 0)])
def test_indices_that_do_not_fit(pick):
    """They are found in a replay as they are in the first call."""
    step, x = nnmpi.compile(pick), np.arange(4.0)
    assert step(x, np.array([1, 3])).data.tolist() == [1, 3]
    assert step(x, np.array([2, 0])).data.tolist() == [2, 0]
    with pytest.raises(ShapeError, match="4 is out of bounds"):
        step(x, np.array([1, 4]))
    with pytest.raises(ShapeError, match="4 is out of bounds"):
        nnmpi.compile(pick)(x, np.array([1, 4]))


class Pair(NamedTuple):
    loss: Any
    extra: Any


def test_results_keep_their_containers():
    step = nnmpi.compile(lambda x: Pair(x.sum(), {"all": [x * 2, None], "more": (x,)}))
    for value in (1.0, 2.0):
        result = step(np.full(2, value))
        assert isinstance(result, Pair) and result.loss.item() == 2 * value
        assert isinstance(result.extra["all"], list) and result.extra["all"][1] is None
        assert result.extra["all"][0].data.tolist() == [2 * value] * 2
        assert result.extra["more"][0].data.tolist() == [value] * 2
    with pytest.raises(UsageError, match="returned a float"):
        nnmpi.compile(lambda x: [x, 1.0])(np.ones(2))


def test_a_callable_objects_own_names_are_left_alone():
    class Step:
        def __init__(self) -> None:
            self.calls = self._held = self._step = self._record = 5

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.calls

    step = nnmpi.compile(Step())
    assert step(np.ones(1)).item() == 5
    assert step(np.ones(1)).item() == 5 and step.calls == 1


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


def test_what_an_operation_returns_of_its_own_is_not_written_to():
    """As a row of a table, in either direction."""
    bank = np.arange(6.0).reshape(2, 3)

    class Row(Function):
        def forward(self, x: Any, number: Any) -> Any:
            self.number = int(number[0])
            return bank[self.number]

        def backward(self, grad: Any) -> Any:
            return bank[1 - self.number], None

    before = bank.copy()
    x = Tensor(np.zeros(3), requires_grad=True)

    def step(number: Tensor) -> Tensor:
        y = Row()(x, number.data)
        y.backward(np.ones(3))
        return y

    compiled = nnmpi.compile(step)
    for number in (0, 1, 0):
        x.grad = None
        result = compiled(np.array([number]))
        np.testing.assert_array_equal(bank, before)
        np.testing.assert_array_equal(result.data, before[number])
        np.testing.assert_array_equal(x.grad, before[1 - number])


def test_gradients_of_a_part_can_be_forgotten_in_the_step():
    """As those of the whole model: it is recorded once."""
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.Linear(2, 2)).initialize(seed=0, dtype="float64")

    def step(x: Tensor) -> Tensor:
        for part in model:
            part.zero_grad()
        loss = ops.mse(model(x), np.zeros((4, 2)))
        loss.backward()
        return loss

    compiled, held = nnmpi.compile(step), []
    for value in (1.0, 2.0, 3.0):
        compiled(np.full((4, 3), value))
        found = [each.grad.copy() for each in model.parameters()]
        held += compiled._held.values()
        step(Tensor(np.full((4, 3), value)))
        for ours, right in zip(found, model.parameters(), strict=True):
            np.testing.assert_array_equal(ours, right.grad)
    assert held[0] is held[1] is held[2]


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
