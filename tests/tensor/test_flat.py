"""Flat storage: parameters and gradients as views of long arrays, and what is known about them."""

import copy

import numpy as np
import pytest

from nnmpi.base.errors import GraphError, ShapeError
from nnmpi.ops.linear import linear
from nnmpi.tensor.parameter import ALIGNMENT_BYTES, FlatStorage, Parameter
from nnmpi.tensor.tensor import Tensor
from tests.device.here import here, zeros
from tests.harness.refusals import refuses, usage_error

SHAPES = {
    "a.weight": (3, 5),
    "a.bias": (5,),
    "b.weight": (5, 2),
    "b.bias": (2,),
    "scale": (),
    "none.weight": (0, 4),
}


def parameter(shape):
    """Return an empty parameter."""
    return Parameter(shape, lambda generator, size: np.zeros(size))


def make(dtype="float32", group=None, allocate=zeros):
    """Return a storage of some parameters, whose values count upwards."""
    parameters = {name: parameter(shape) for name, shape in SHAPES.items()}
    values = {
        name: here(np.arange(p.size, dtype=dtype).reshape(p.shape) + 1)
        for name, p in parameters.items()
    }
    return FlatStorage(
        parameters, values, lambda n, kind: allocate(n, dtype=kind), group
    ), parameters


def by_kind(name, parameter):
    """Return the optimizer group: weights, or the rest."""
    return "weights" if name.endswith("weight") else "rest"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients_are_views(dtype):
    """What is written to the flat array is seen in the parameter, and the other way round."""
    storage, parameters = make(dtype)
    assert [len(storage.data), len(storage.grads), storage.groups] == [1, 1, ["default"]]
    assert storage.data[0].dtype == storage.grads[0].dtype == dtype
    for name, p in parameters.items():
        assert p.name == name
        assert (p.data.shape, p.buffer.shape, p.data.dtype) == (SHAPES[name], SHAPES[name], dtype)
        if p.size:
            assert np.shares_memory(p.data, storage.data[0])
            assert np.shares_memory(p.buffer, storage.grads[0])
        np.testing.assert_array_equal(p.data.ravel(), np.arange(p.size) + 1)
    storage.data[0] *= 2
    np.testing.assert_array_equal(parameters["b.bias"].data, [2, 4])
    parameters["scale"].data[...] = 7
    assert 7 in storage.data[0]
    assert storage.size == 15 + 5 + 10 + 2 + 1


def test_each_begins_at_a_multiple_of_the_alignment():
    """They follow one another, do not overlap, and the gaps hold zeros."""
    storage, _ = make()
    itemsize, end = 4, 0
    used = np.zeros(storage.data[0].size, bool)
    for span in storage.spans:
        assert span.start * itemsize % ALIGNMENT_BYTES == 0
        assert end <= span.start <= end + ALIGNMENT_BYTES // itemsize
        assert span.stop - span.start == span.parameter.size
        used[span.start : span.stop] = True
        end = span.stop
    assert used.sum() == storage.size
    np.testing.assert_array_equal(storage.data[0][~used], 0)


def test_groups():
    """One array each, in order of first appearance; spans stay in order of registration."""
    storage, parameters = make(group=by_kind)
    assert storage.groups == ["weights", "rest"]
    assert [span.buffer for span in storage.spans] == [0, 1, 0, 1, 1, 0]
    assert [span.parameter for span in storage.spans] == list(parameters.values())
    assert [flat.size for flat in storage.data] == [flat.size for flat in storage.grads] == [32, 48]
    for span in storage.spans:
        assert span.parameter.size == 0 or np.shares_memory(
            storage.data[span.buffer], span.parameter.data
        )


def test_values_of_another_shape_are_refused():
    """The parameter is named."""
    refuses(
        ShapeError,
        r"w got values of shape \(2,\), not \(3,\)",
        lambda: FlatStorage(
            {"w": parameter((3,))}, {"w": np.zeros(2)}, lambda n, dtype: np.zeros(n, dtype)
        ),
    )


def test_views():
    """Views of any flat arrays of that layout, in the parameters' shapes."""
    storage, parameters = make(group=by_kind)
    momentum = [np.zeros_like(data) for data in storage.data]
    pieces = {span.parameter.name: storage.view(span, momentum) for span in storage.spans}
    pieces["b.weight"][1, 1] = 5
    assert momentum[0].sum() == 5
    assert {name: piece.shape for name, piece in pieces.items()} == SHAPES
    for span in storage.spans:
        np.testing.assert_array_equal(
            storage.view(span, storage.data), parameters[span.parameter.name].data
        )


# ---------------------------------------------------------------- gradients
def test_gradients_are_written_in_place():
    """Computed by whatever operation, in however many uses: the gradient is the view into the flat
    array.
    """
    storage, p = make("float64")
    storage.grads[0][...] = np.nan  # whatever was there
    h = linear(Tensor(np.ones((2, 3))), p["a.weight"], p["a.bias"])
    y = linear(h, p["b.weight"], p["b.bias"]) * p["scale"] + (p["a.bias"] * p["a.bias"]).sum()
    y.sum().backward()
    for name in ("a.weight", "a.bias", "b.weight", "b.bias", "scale"):
        assert p[name].grad is p[name].buffer
        assert np.isfinite(p[name].grad).all()
    np.testing.assert_array_equal(p["b.bias"].grad, [2, 2])
    assert p["none.weight"].grad is None


def test_finish_writes_zeros_where_no_pass_wrote():
    """What was left there from the last step is gone, and what was written is kept."""
    storage, p = make("float64")
    storage.grads[0][...] = 9
    storage.zero_grad()
    p["b.bias"].sum().backward()
    storage.finish_gradients()
    pieces = {span.parameter.name: storage.view(span, storage.grads) for span in storage.spans}
    for name, q in p.items():
        assert q.grad is q.buffer
        np.testing.assert_array_equal(
            pieces[name], np.ones(2) if name == "b.bias" else np.zeros(SHAPES[name])
        )


def test_a_shallow_copy_is_refused():
    """The parameters would lie in two storages."""
    storage, _ = make()
    refuses(GraphError, "load_state", copy.copy, storage)


@pytest.mark.parametrize("what", ["data", "buffer"])
def test_parameter_that_lies_elsewhere_is_noticed(what):
    """An update of this storage would not reach it, and training would stand still."""
    storage, p = make()
    setattr(p["a.bias"], what, np.zeros(5, "float32"))
    usage_error(r"a\.bias is no longer in this storage.*data\[\.\.\.\]", storage.finish_gradients)


# ---------------------------------------------------------------- parameters
def test_a_parameter_knows_its_shape_before_it_has_values():
    """And says what to do to get some."""
    p = parameter((2, 3))
    assert (p.shape, p.size, p.requires_grad, repr(p)) == (
        (2, 3),
        6,
        True,
        "Parameter(unnamed, shape=(2, 3))",
    )
    for use in (
        lambda: p.data,
        lambda: p.dtype,
        lambda: p * 2.0,
        lambda: linear(Tensor(np.ones((1, 2))), p),
        p.numpy,
    ):
        refuses(
            GraphError,
            r"shape \(2, 3\) has no values yet; call model.initialize\(seed=0\) first",
            use,
        )
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = p.colour


def test_parameters_move_to_other_arrays_and_find_their_values_there():
    storage, parameters = make()
    before, old = storage.data[0].copy(), parameters["a.weight"].buffer
    parameters["a.bias"].grad = here(np.ones(5, "float32"))
    data, grads = [before + 1], [before * 0]
    storage.move(data, grads)
    assert (storage.data, storage.grads, storage.moves) == (data, grads, 1)
    assert np.shares_memory(parameters["a.weight"].data, data[0])
    assert np.shares_memory(parameters["a.weight"].buffer, grads[0])
    assert not np.shares_memory(parameters["a.weight"].buffer, old)
    np.testing.assert_array_equal(parameters["b.bias"].data, [2, 3])
    assert parameters["a.bias"].grad is None
    storage.finish_gradients()
