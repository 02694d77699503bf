"""Batches with equally many samples of each class, and splits of each class."""

import numpy as np

from nnmpi.data import Dataset, Loader, load, split
from nnmpi.data.sampler import balanced_order
from tests.harness.refusals import usage_error


def test_balanced_orders_have_each_class_equally_often():
    labels = np.repeat([0, 1, 3], [90, 9, 4])
    orders = [balanced_order(labels, 0, epoch) for epoch in range(3)]
    for order in orders:
        assert len(order) == 103
        counts = np.bincount(labels[order])
        assert sorted(counts) == [0, 34, 34, 35]
        rare = np.bincount(order, minlength=103)[99:]
        assert rare.max() - rare.min() <= 1  # none once more before all
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[2], balanced_order(labels, 0, 2))


def test_what_cannot_be_balanced_is_refused():
    x = np.zeros((6, 2), "float32")
    numbers = Dataset("numbers", x, np.zeros(6, "float32"), 0)
    usage_error("balance draws classes .* and numbers has none", Loader, numbers, 2, balance=True)
    classes = Dataset("classes", x, np.arange(6) % 2, 2)
    usage_error("shuffle=False has an order", Loader, classes, 2, balance=True, shuffle=False)
    usage_error("the partition 'iid' has", Loader, classes, 2, balance=True, partition="iid")
    usage_error("shuffle_block=3 has", Loader, classes, 2, balance=True, shuffle_block=3)


def test_a_stratified_split_holds_out_the_same_share_of_each_class():
    y = np.repeat([0, 1, 3], [90, 9, 4])
    dataset = Dataset("classes", np.arange(103.0)[:, None], y, 4)
    train, test = split(dataset, 0.2, 5, stratify=True)
    assert np.bincount(test.y).tolist() == [18, 2, 0, 1]
    both = np.concatenate([train.x, test.x]).ravel()
    assert sorted(both) == list(range(103)) and list(both) != sorted(both)
    again, _ = split(dataset, 0.2, 5, stratify=True)
    assert np.array_equal(again.x, train.x)
    numbers = Dataset("numbers", dataset.x, y.astype("float32"), 0)
    usage_error("stratify splits each class, and numbers has none", split, numbers, 0.2, 0, True)


def test_tables_are_split_class_by_class(tmp_path):
    """A missing number becomes the median of the rows that are trained on, by that split."""
    kinds = ["true", "TRUE", "false", "rare"] + ["true", "false"] * 20 + ["rare"] * 4
    lines = [f"{n * n % 41 if n % 6 else ''},{kind}" for n, kind in enumerate(kinds)]
    (tmp_path / "t.csv").write_text("\n".join(["size,kind", *lines]))
    train, test = load(tmp_path / "t.csv", stratify=True, test_fraction=0.25)
    assert np.bincount(test.y).tolist() == [5, 1, 6]
    known = [n * n % 41 for n in np.setdiff1d(np.arange(len(kinds)), test.places) if n % 6]
    plain, _ = load(tmp_path / "t.csv", test_fraction=0.25)
    assert train.encoding[0].fill == np.median(known) != plain.encoding[0].fill
    np.savez(tmp_path / "a.npz", x_train=train.x, y_train=train.y, x_test=test.x, y_test=test.y)
    usage_error("a test part of its own", load, tmp_path / "a.npz", stratify=True)
