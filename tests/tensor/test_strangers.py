"""Other libraries' arrays, where users give them, and Tensors where other libraries take arrays."""

from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, data, nn, ops
from nnmpi.base.errors import GraphError
from tests.harness.refusals import data_error, refuses, usage_error

X, Y = np.arange(8, dtype=np.float32).reshape(2, 4), np.array([0, 1])


class Stranger:
    """What arrays, tables and columns of other libraries have in common."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


class Sparse(Stranger):
    """A matrix that NumPy would take for one object."""

    def toarray(self):
        return self.values


def _pandas(values):
    pandas = pytest.importorskip("pandas")
    return (pandas.DataFrame if values.ndim > 1 else pandas.Series)(values)


KINDS = {
    "stranger": Stranger,
    "torch": lambda values: pytest.importorskip("torch").tensor(values),
    "jax": lambda values: pytest.importorskip("jax").numpy.asarray(values),
    "pandas": _pandas,
}
LAYER = nn.Linear(4, 3).initialize(seed=0)
USES = {
    "model": lambda x, y: LAYER(x),
    "Tensor": lambda x, y: Tensor(x),
    "right": lambda x, y: Tensor(X) * x,
    "left": lambda x, y: x + Tensor(X) if not isinstance(x, Stranger) else Tensor(X) + x,
    "matmul": lambda x, y: Tensor(X.T) @ x,
    "comparison": lambda x, y: Tensor(X[::-1]) > x,
    "index": lambda x, y: Tensor(X)[y],
    "classes": lambda x, y: ops.cross_entropy(LAYER(X), y),
    "targets": lambda x, y: ops.mse(Tensor(X * 2), x),
    "tokens": lambda x, y: ops.embedding(LAYER.weight, y),
    "Dataset": lambda x, y: data.Dataset("d", x, y, 2).rows(Y),
    "state": lambda x, y: _loaded(nn.Embedding(2, 4).initialize(), x).weight,
    "compiled": lambda x, y: nnmpi.compile(lambda z: z + x)(X),
}


def _loaded(model, weight):
    model.load_state({"weight": weight})
    return model


@pytest.mark.host_only("other libraries' arrays, in the host's memory")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_array_of_another_library_is_as_good_as_numpys(kind, use):
    """JAX's was taken for a device's, a table for a list of columns."""
    if (kind, use) == ("pandas", "comparison"):
        pytest.skip("pandas compares on the left")
    make = KINDS[kind]
    expected, came = USES[use](X, Y), USES[use](make(X), make(Y))
    assert type(came) is type(expected) and came.dtype == expected.dtype
    np.testing.assert_array_equal(getattr(came, "data", came), getattr(expected, "data", expected))


@pytest.mark.host_only("other libraries' arrays, in the host's memory")
@pytest.mark.parametrize("use", sorted({*USES} - {"index", "classes", "tokens"}))
def test_what_numpy_cannot_read_is_refused(use):
    usage_error(r"a Sparse is sparse, .*; give x.toarray\(\)", lambda: USES[use](Sparse(X), Y))
    usage_error(
        r"this tests Stranger \(it is elsewhere\); convert",
        lambda: USES[use](Stranger(RuntimeError("it is elsewhere")), Y),
    )


class ByItem(dict[str, Any]):
    """A usual recipe of a configuration."""

    __getattr__ = dict.__getitem__


def test_objects_are_not_asked_for_names():
    """Such a dictionary raises a KeyError for each that it lacks."""

    class Scaled(nn.Module):
        def __init__(self, config):
            self.config = config

        def forward(self, x):
            return x * self.config.scale

    assert Scaled(ByItem(scale=2.0))(X).numpy().tolist() == (X * 2).tolist()
    usage_error(
        "a Loader takes one data set, not a ByItem of scale",
        lambda: data.Loader(ByItem(scale=2.0), 2),
    )


@pytest.mark.host_only("NumPy's memory, which is lent")
def test_a_tensor_lends_its_memory():
    lent = np.from_dlpack(Tensor(X))
    assert np.shares_memory(lent, X)
    refuses(
        GraphError,
        r"not an array; use x.numpy\(\), x.detach\(\), or loss.item",
        lambda: np.from_dlpack(Tensor(X, requires_grad=True)),
    )
    torch = pytest.importorskip("torch")
    assert torch.from_dlpack(Tensor(X)).data_ptr() == X.ctypes.data


@pytest.mark.parametrize(
    "values, label, right",
    [
        ([["u"], ["v"]], [0, 1], r"columns of categories by pandas.get_dummies\(table\)"),
        ([[np.datetime64("2024-01-01").item()]] * 2, [0, 1], "give days: .column - column.min"),
        (X, [[0, -100]] * 2, "label -100 of sample 0 .* count is -1, nnmpi.data.IGNORED"),
    ],
)
def test_what_other_libraries_mean_is_named(values, label, right):
    data_error(right, data.Dataset, "d", values, np.array(label), 2)
