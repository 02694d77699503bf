"""What the tests of training share: a small model, some data, and an optimizer."""

import numpy as np

from nnmpi import nn, optim
from nnmpi.data import Dataset

ROWS, BATCH = 62, 12  # five batches of 12 rows and one of 2, which is less than there are workers
BATCHES = -(-ROWS // BATCH)


def dataset(rows=ROWS):
    x = np.random.default_rng(3).normal(size=(rows, 6)).astype(np.float32)
    return Dataset("drawn", x, (x[:, :3].argmax(axis=1)).astype(np.int64), 3)


def build(dtype="float64", norm=False, dropout=0.0, backend=None):
    body = [nn.Linear(6, 7), *([nn.BatchNorm(7)] if norm else []), nn.ReLU()]
    if dropout:
        body.append(nn.Dropout(dropout))
    return nn.Sequential(*body, nn.Linear(7, 3)).initialize(0, dtype, backend)


def optimizer_of(model, name="sgd"):
    if name == "adam":
        return optim.Adam(model.storage, lr=0.01, weight_decay=0.01)
    return optim.SGD(model.storage, lr=0.1, momentum=0.9 if name == "momentum" else 0.0)


def weights(model):
    return np.concatenate([np.ravel(array) for array in model.storage.data])
