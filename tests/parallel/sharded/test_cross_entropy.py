"""Cross-entropy over classes that lie on several ranks equals that over all of them."""

import numpy as np
import pytest

from nnmpi import Tensor
from nnmpi.base.errors import DtypeError, ShapeError, UsageError
from nnmpi.base.shard import part
from nnmpi.ops import cross_entropy as whole_cross_entropy
from nnmpi.parallel.sharded.cross_entropy import best_classes, cross_entropy
from tests.parallel.sharded.compare import TOLERANCES

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": -1},
    {"ignore_index": 2, "label_smoothing": 0.1},
    {"reduction": "sum", "ignore_index": 1, "label_smoothing": 0.3},
]


@pytest.mark.simulated
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_like_the_whole_one(group, dtype, options):
    """Losses and gradients, with huge logits, ignored labels, and fewer classes than ranks."""
    problems = []
    for classes in (1, 3, 11):
        generator = np.random.default_rng(classes)
        logits = (generator.standard_normal((2, 5, classes)) * 50).astype(dtype)
        logits[0, 0] += 1e4
        labels = generator.integers(0, classes, (2, 5))
        if options.get("ignore_index") is not None:
            labels[0, 1] = labels[1, 3] = options["ignore_index"]
            if options["ignore_index"] >= classes:
                labels[labels != options["ignore_index"]] = 0
        mine = part(classes, group.size, group.rank)
        full = Tensor(logits, requires_grad=True)
        local = Tensor(
            np.ascontiguousarray(logits[..., mine.start : mine.stop]), requires_grad=True
        )
        expected = whole_cross_entropy(full, labels, **options)
        result = cross_entropy(local, labels, group, classes, **options)
        seed = generator.standard_normal(expected.shape)
        expected.backward(seed)
        result.backward(seed)
        tolerance = TOLERANCES[dtype] * max(1.0, np.abs(expected.data).max())
        if result.shape != expected.shape or np.abs(result.data - expected.data).max() > tolerance:
            problems.append(f"loss of {classes} classes: {result.data} instead of {expected.data}")
        gradient = full.grad[..., mine.start : mine.stop]
        if local.grad.size and np.abs(local.grad - gradient).max() > TOLERANCES[dtype]:
            problems.append(f"gradient of {classes} classes")
        bits = group.gather(result.data.tobytes().hex())
        problems += [] if len(set(bits)) == 1 else [f"{classes} classes: other bits on other ranks"]
        if not np.array_equal(best_classes(local.data, group, classes), logits.argmax(axis=-1)):
            problems.append(f"best of {classes} classes")
    assert not any(group.gather(problems)), problems


@pytest.mark.simulated
def test_equal_logits_and_nothing_left(group):
    """Of equal logits the first class is the best; with all labels ignored the mean is 0, as it is
    for no rows.
    """
    width = len(part(11, group.size, group.rank))
    assert all(group.gather(bool((best_classes(np.zeros((4, width)), group, 11) == 0).all())))
    nothing = cross_entropy(
        Tensor(np.zeros((2, width))), np.array([5, 5]), group, 11, ignore_index=5
    )
    empty = cross_entropy(Tensor(np.zeros((0, width))), np.zeros(0, int), group, 11)
    assert all(group.gather(nothing.item() == empty.item() == 0.0))


@pytest.mark.host_only("labels and indices that are looked at; a device's kernels answer with NaN")
@pytest.mark.simulated
def test_refusals(group):
    """Wrong widths, labels, dtypes and options are refused on all ranks."""
    width = len(part(11, group.size, group.rank))
    logits, labels = Tensor(np.zeros((2, width))), np.array([0, 10])
    attempts = [
        (ShapeError, "part", lambda: cross_entropy(Tensor(np.zeros((2, 12))), labels, group, 11)),
        (ShapeError, "label 11", lambda: cross_entropy(logits, np.array([0, 11]), group, 11)),
        (DtypeError, "integer", lambda: cross_entropy(logits, np.zeros(2), group, 11)),
        (
            UsageError,
            "reduction",
            lambda: cross_entropy(logits, labels, group, 11, reduction="median"),
        ),
        (ShapeError, "labels of shape", lambda: cross_entropy(logits, np.zeros(3, int), group, 11)),
    ]
    for kind, words, attempt in attempts:
        with pytest.raises(kind, match=words):
            attempt()
    group.barrier()
