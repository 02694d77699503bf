"""Data sets of other libraries in a Loader, by their interface, and by the libraries where they are
installed.
"""

import numpy as np
import pytest

from nnmpi.base.errors import DataError, UsageError
from nnmpi.data import IGNORED, Dataset, Loader
from tests.harness.refusals import data_error, refuses

X = np.arange(14.0).reshape(7, 2)
Y = np.arange(7) % 3


def assert_same(*batches):
    for field in ("x", "y"):
        np.testing.assert_array_equal(*(getattr(batch, field) for batch in batches))


class Counted:
    """A map-style data set, which counts how often an item is read."""

    def __init__(self, item):
        self.item, self.read = item, [0] * 7

    def __len__(self):
        return 7

    def __getitem__(self, i):
        self.read[i] += 1
        return self.item(i)


class Frame:
    """What pandas' and polars' DataFrames have in common."""

    def __init__(self, table):
        self.table = table

    @property
    def columns(self):
        return [*self.table]

    def __len__(self):
        return len(self.table[self.columns[0]])

    def __getitem__(self, key):
        return (
            Frame({name: self.table[name] for name in key})
            if isinstance(key, list)
            else self.table[key]
        )

    def to_numpy(self):
        return np.array([*zip(*self.table.values(), strict=True)], object)

    def __array__(self, dtype=None, copy=None):
        return self.to_numpy()


TABLE = {"a": X[:, 0], "b": X[:, 1], "kind": Y}


@pytest.mark.parametrize(
    "item",
    [
        lambda i: (X[i], Y[i]),
        lambda i: [X[i].tolist(), int(Y[i])],
        lambda i: {"pixels": X[i], "label": Y[i]},
        lambda i: {"a": X[i, 0], "target": Y[i], "b": X[i, 1]},
    ],
)
def test_batches_are_those_of_a_data_set_of_the_same_samples(item):
    """On each of three ranks, one of which has none of the last batch; each item of a batch is read
    once.
    """
    source = Counted(item)
    for rank in range(3):
        options = {"rank": rank, "world": 3, "seed": 4}
        result, made = Loader(source, 5, **options), Loader(Dataset("d", X, Y, 3), 5, **options)
        next(result.epoch(0))
        source.read = [0] * 7
        for ours, theirs in zip(result.epoch(1), made.epoch(1), strict=True):
            assert_same(ours, theirs)
            assert (ours.x.dtype, ours.y.dtype, ours.targets) == (
                theirs.x.dtype,
                theirs.y.dtype,
                theirs.targets,
            )
        assert max(source.read) == 1
    assert (
        Loader(source, 5).dataset.identity
        != Loader(Counted(lambda i: (X[i], Y[0])), 5).dataset.identity
    )


def test_ignored_labels_of_items_do_not_count():
    """Nor in microbatches: a batch's targets are those of a data set of the same arrays."""
    x, y = np.arange(28, dtype="uint32").reshape(7, 4), np.arange(28).reshape(7, 4)
    y[1, 2:] = y[4] = IGNORED
    for rank in range(2):
        options = {"rank": rank, "world": 2, "microbatches": 2}
        loaders = (
            Loader(source, 5, **options)
            for source in ([*zip(x, y, strict=True)], Dataset("d", x, y, 28))
        )
        for ours, theirs in zip(*(loader.epoch(0) for loader in loaders), strict=True):
            assert ours.targets == theirs.targets and ours.own_targets == theirs.own_targets


def test_hugging_faces_tokens_are_tokens():
    """Also with one label for all of them: they were quantities, whose embedding is refused."""
    batch = next(Loader([{"input_ids": [5, 2, 7], "label": 1}] * 2, 2).epoch(0))
    assert batch.x.dtype == np.int64 and batch.x.tolist() == [[5, 2, 7]] * 2


def test_bytes_are_images_and_floats_are_targets():
    batch = next(Loader([(np.full((4, 3), 51, np.uint8), 0.5)] * 2, 2).epoch(0))
    assert batch.x.shape == (2, 4, 3, 1) and batch.x[0, 0, 0, 0] == pytest.approx(0.2)
    assert batch.y.dtype == np.float32 and batch.global_targets == 2


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_columns_of_a_table_are_samples(library):
    table = pytest.importorskip(library).DataFrame(TABLE)
    result = Dataset("mine", table[["a", "b"]], table["kind"], 3)
    assert result.columns == ("a", "b")
    np.testing.assert_array_equal(result.x, X)
    np.testing.assert_array_equal(result.y, Y)
    refuses(UsageError, "a DataFrame is a table; give what data.load", lambda: Loader(table, 3))


@pytest.mark.parametrize(
    "columns, sentence",
    [
        ({"Unnamed: 0": [0, 1], "a": [1.0, 2.0]}, "the first column has no name.*index_col=0"),
        ({"a": ["red", "blue"]}, "'red' is not a finite.*data.load encodes"),
        ({"a": [1.0, np.nan]}, "sample.1, 0.: the value is missing.*dropna"),
    ],
)
def test_columns_that_are_no_numbers_are_refused(columns, sentence):
    data_error(sentence, lambda: Dataset("mine", Frame(columns), [0, 1], 2))


@pytest.mark.parametrize(
    "source, sentence",
    [
        (iter([1]), "a Loader takes a data set, with a length and items .*, not a list_iterator"),
        ([], "the list has no items; give"),
        (X, "item [0-9] is neither .x, y. nor a mapping"),
        (
            [{"image": X[0], "kind": 1}],
            "item 0 is neither .x, y. nor a mapping of samples and a label",
        ),
        ([(X[0], 0), (X[0, :1], 1)], r"have the shapes \(1,\) and \(2,\)"),
        (
            [{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2]}],
            r"has input_ids and attention_mask, .* sample; .*columns\(\['input_ids', 'labels'\]\)",
        ),
        ([{"id": 7, "image": X[:2], "label": 0}], "has id and image, of which one alone"),
        ([{"idx": 7, "a": 1.0, "label": 0}], "has idx and a, of which one alone"),
        ([{"image": X[0], "label": 0, "target": 1}], "has label and target, .* the label; leave"),
        ([("red", 0)], "item 0: 'red' is not a finite"),
        ([(X[0], 0), (X[1], 1.5)], "item 1 is float64 with labels float64, but item 0 .* int64"),
        ([(X[0], 0), (X[1].astype("uint8"), 0)], "item 1 is uint8 .*, but item 0 float64 "),
        (
            TABLE,
            (
                "one data set, not a dict of a, b, kind; give one of its values, or columns as a"
                " table: data.load.pandas.D"
            ),
        ),
    ],
)
def test_what_gives_no_samples_is_refused(source, sentence):
    refuses((DataError, UsageError), sentence, lambda: next(Loader(source, 2).epoch(0)))


def test_pytorchs_data_sets_and_loaders():
    torch = pytest.importorskip("torch")
    source = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    for ours, theirs in zip(Loader(source, 3), Loader(Dataset("d", X, Y, 3), 3), strict=True):
        assert_same(ours, theirs)


def used_up():
    return next(iter(()))


class Lazy:
    """A label that is computed when it is read."""

    def __array__(self, dtype=None, copy=None):
        return used_up()


class Rows(Dataset):
    """A data set of one's own, which reads many samples at once."""

    def pair(self, indices, *rest):
        return used_up() if 4 in indices else super().pair(indices, *rest)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(
    "source, transform, text",
    [
        (Counted(lambda i: used_up() if i == 4 else (X[i], Y[i])), None, "Counted: item 4 raised"),
        (Counted(lambda i: (X[i], Lazy() if i == 4 else Y[i])), None, "Counted: item 4 raised"),
        (
            Dataset("rows", X, Y, 3),
            lambda x, indices, *_: used_up() if 4 in indices else x,
            r"the transform <function .* of items 3, 4, 5 raised StopIteration, as next",
        ),
        (Rows("rows", X, Y, 3), None, "batch 1 raised StopIteration"),
    ],
    ids=["item", "label", "transform", "samples"],
)
def test_a_stop_iteration_is_no_end_of_the_data(source, transform, text, workers):
    """An iterator that is used up within an item ended the epoch, with nothing said."""
    loader = Loader(source, 3, shuffle=False, transform=transform, workers=workers)
    for batches in (loader, loader.epoch(0)):
        data_error(text, list, batches)
