"""An optimizer for a part of another one's buffers, with that part of its state."""

from collections.abc import Callable

import numpy as np
import pytest

from nnmpi.errors import ShapeError
from nnmpi.optim.adam import Adam, AdamW
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.sgd import SGD
from nnmpi.optim.storage import Arrays

LENGTHS = (11, 0, 6)
CUTS = (
    (slice(0, 4), slice(0, 0), slice(0, 0)),
    (slice(4, 11), slice(0, 0), slice(0, 5)),
    (slice(11, 11), slice(0, 0), slice(5, 6)),
)
DECAY = {"a": 0.1, "b": 0.2}

CASES: dict[str, Callable[[Arrays], Optimizer]] = {
    "sgd": lambda storage: SGD(storage, 0.1, weight_decay=DECAY),
    "nesterov": lambda storage: SGD(storage, 0.1, momentum=0.9, nesterov=True, weight_decay=DECAY),
    "adam": lambda storage: Adam(storage, 0.01, betas=(0.8, 0.99), eps=1e-3),
    "adamw": lambda storage: AdamW(storage, 0.01, weight_decay=DECAY),
}
every_optimizer = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())


def storage_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Arrays:
    """Return random weights and gradients in three groups."""
    generator = np.random.default_rng(seed)
    data, grads = ([generator.standard_normal(length) for length in lengths] for _ in range(2))
    return Arrays(data, grads, ["a", "b", "c"][: len(lengths)])


def part_of(storage: Arrays, parts: tuple[slice, ...]) -> Arrays:
    """Return copies of parts of a storage's arrays."""
    data, grads = (
        [array[part].copy() for array, part in zip(arrays, parts, strict=True)]
        for arrays in (storage.data, storage.grads)
    )
    return Arrays(data, grads, storage.groups)


@every_optimizer
def test_the_parts_together_are_the_whole(make: Callable[[Arrays], Optimizer]) -> None:
    """Updates in turn, one by the whole and one by the parts, with one state: the bits of whole updates alone."""
    expected, storage = make(storage_of()), storage_of()
    whole = make(storage)
    for optimizer in (expected, expected, expected, whole):
        optimizer.step()
    for _ in range(2):
        for parts in CUTS:
            copies = part_of(storage, parts)
            optimizer = whole.over(copies, parts)
            assert type(optimizer) is type(whole)
            assert optimizer.steps == whole.steps
            optimizer.step()
            for array, part, copy in zip(storage.data, parts, copies.data, strict=True):
                array[part] = copy
        whole.steps += 1
    for mine, theirs in zip(storage.data, expected.storage.data, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for name, slot in expected.slots().items():
        for mine, theirs in zip(whole.slots()[name], slot, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_state_loaded_later_counts() -> None:
    """As when a run resumes: the values are written into the whole one's arrays."""
    whole = SGD(storage_of(), 0.1, momentum=0.5)
    part = whole.over(part_of(storage_of(), CUTS[0]), CUTS[0])
    whole.slots()["momentum"][0][...] = 3.0
    np.testing.assert_array_equal(part.slots()["momentum"][0], np.full(4, 3.0))


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [((4, 0, 1), CUTS[0]), ((4, 0), CUTS[0][:2]), ((4, 0, 0), CUTS[0][:2]), ((4, 0), CUTS[0])],
)
def test_arrays_that_are_not_the_parts_are_refused(lengths: tuple[int, ...], parts: tuple[slice, ...]) -> None:
    """With the shapes of both."""
    whole = SGD(storage_of(), 0.1)
    with pytest.raises(ShapeError, match=r"arrays of \(4,\) float64, .* are not the parts"):
        whole.over(storage_of(lengths), parts)
