"""What a compiled step must do anew each time, or refuse, though its first call decided something else."""

import gc
import weakref

import numpy as np
import pytest

import nnmpi
from nnmpi import nn, ops
from nnmpi.errors import ShapeError, UsageError
from nnmpi.optim.clip import clip_by_global_norm, global_norm
from nnmpi.tensor.tensor import Tensor

X = np.arange(6, dtype="float32").reshape(2, 3)


def eager(step):
    """Return a step that is called like a compiled one."""
    return lambda *inputs: step(*map(Tensor, inputs))


@pytest.mark.host_only("labels and indices that are looked at; a device's kernels answer with NaN")
def test_bad_indices_are_found_in_a_replay():
    """A negative index would pick a row from the end."""
    table = Tensor(np.ones((5, 2), "float32"))
    step = nnmpi.compile(lambda places: ops.embedding(table, places))
    step(np.array([0, 1]))
    for wrong in (-1, 5):
        with pytest.raises(ShapeError, match=f"index {wrong} is outside"):
            step(np.array([0, wrong]))


def test_indices_that_are_numbers_are_refused():
    """x[i] would pick the first step's row for ever; an array of one index may change."""
    with pytest.raises(UsageError, match="index"):
        nnmpi.compile(lambda x, i: x[i])(X, np.array(0))
    step = nnmpi.compile(lambda x, i: x[i])
    for i in (0, 1):
        np.testing.assert_array_equal(step(X, np.array([i])).data, X[[i]])


def test_shapes_that_depend_on_values_are_found():
    """One row in the place of two would be spread over both."""
    step = nnmpi.compile(lambda x, mask: x[mask])
    step(X, np.array([True, True]))
    with pytest.raises(ShapeError, match="cannot be compiled"):
        step(X, np.array([False, True]))


def test_a_mode_inside_leads_back_to_that_of_the_time():
    """After a block in evaluation, masks are those of the step that runs now."""
    model, ones = nn.Sequential(nn.Dropout(0.5)).initialize(), np.ones((8, 8), "float32")

    def both(x):
        with nn.evaluation():
            kept = model(x)
        return kept, model(x)

    step = nnmpi.compile(both)
    for number in range(3):
        with nn.training(seed=1, step=number):
            for ours, plain in zip(step(ones), both(Tensor(ones)), strict=True):
                np.testing.assert_array_equal(ours.data, plain.data)


def test_gradients_are_clipped_each_time():
    """As is everything that the step does to them; the norm itself is a number, which is refused."""
    results = []
    for wrap in (eager, nnmpi.compile):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).initialize()

        def step(x, model=model):
            model.zero_grad()
            model[0](x).sum().backward()
            model.storage.finish_gradients()  # zeros for the second layer
            clip_by_global_norm(model.storage.grads, 1.0)

        wrapped = wrap(step)
        for number in range(3):
            wrapped(X + number)
            model.storage.grads[0][-1] += 1  # what finishing clears
        results.append(model.storage.grads[0].copy())
        with pytest.raises(UsageError, match="norm"):
            nnmpi.compile(lambda x, model=model: global_norm(model.storage.grads))(X)
    np.testing.assert_array_equal(*results)


def test_memory_goes_with_its_recording():
    """At once, not when Python looks for cycles: there are few objects, and they are large."""
    step = nnmpi.compile(lambda x: ops.linear(x, Tensor(np.eye(3, dtype="float32"))).sum())
    step(X)
    (held,) = step._held.values()
    recorder = weakref.ref(held.recorder)
    gc.disable()
    try:
        del held, step
        assert recorder() is None
    finally:
        gc.enable()
