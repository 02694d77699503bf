"""What an optimizer accepts as a storage, and the sentences with which it refuses the rest."""

import numpy as np
import pytest

from nnmpi import nn
from nnmpi.errors import DtypeError, ShapeError, UsageError
from nnmpi.optim.storage import Arrays, check


def arrays(*shapes, dtype="float32"):
    return [np.ones(shape, dtype) for shape in shapes]


def test_arrays_of_any_shape_pass():
    storage = Arrays(arrays((), 0, 3, (2, 3)), arrays((), 0, 3, (2, 3)))
    check(storage)
    assert storage.groups == ["default"] * 4


def test_groups_are_kept():
    assert Arrays(arrays(1, 2), arrays(1, 2), ["weights", "biases"]).groups == ["weights", "biases"]


def read_only():
    array = np.ones(3, "float32")
    array.flags.writeable = False
    return array


def broadcast():
    return np.lib.stride_tricks.as_strided(np.ones(1, "float32"), (3,), (0,))


@pytest.mark.parametrize(
    ("storage", "error", "sentence"),
    [
        (arrays(3), UsageError, "model.storage, not on a list"),
        (nn.Linear(3, 2), UsageError, "model.storage, not on a Linear"),
        (Arrays(arrays(3), []), UsageError, "1 buffers, 0 gradients and 1 groups"),
        (Arrays(arrays(3), arrays(3), ["a", "b"]), UsageError, "1 buffers, 1 gradients and 2 groups"),
        (Arrays(arrays(2, 3), arrays(2, 4)), ShapeError, r"buffer 1 has shape \(3,\) and its gradient \(4,\)"),
        (Arrays(arrays(3), arrays((3, 1))), ShapeError, "buffer 0"),
        (Arrays(arrays(3), arrays(3, dtype="float64")), DtypeError, "is float32 and its gradient float64"),
        (Arrays(arrays(3, dtype="float16"), arrays(3, dtype="float16")), DtypeError, "buffer 0 is float16"),
        (Arrays(arrays(3, dtype="int64"), arrays(3, dtype="int64")), DtypeError, "buffer 0 is int64"),
        (Arrays(arrays(3, dtype=">f4"), arrays(3, dtype=">f4")), DtypeError, "buffer 0 is >f4"),
        (Arrays([read_only()], arrays(3)), UsageError, "buffer 0 is read-only"),
        (Arrays([broadcast()], arrays(3)), UsageError, "buffer 0 is broadcast"),
    ],
)
def test_refusals(storage, error, sentence):
    with pytest.raises(error, match=sentence):
        check(storage)


def test_a_gradient_on_another_device_is_refused(device):
    with pytest.raises(DtypeError, match="is a numpy array and its gradient a device one"):
        check(Arrays(arrays(3), [device(np.ones(3, "float32"))]))


def test_a_gradient_may_be_broadcast_because_it_is_only_read():
    check(Arrays(arrays(3), [np.broadcast_to(np.float32(1), (3,))]))
