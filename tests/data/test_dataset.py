import numpy as np
import pytest

from nnmpi.data.dataset import IGNORED, Dataset, check_pair, split
from tests.harness.refusals import data_error, usage_error


def table(n, classes=3):
    return Dataset(
        "made up", np.arange(2 * n, dtype=np.float32).reshape(n, 2), np.arange(n) % classes, classes
    )


def test_rows_are_scaled_floats_of_the_dtype_asked_for():
    data = Dataset(
        "bytes", np.arange(256, dtype=np.uint8).reshape(-1, 1), np.zeros(256, np.int64), 1, 1 / 255
    )
    for dtype in ("float32", "float64"):
        rows = data.rows(np.array([255, 0, 51]), dtype)
        assert rows.dtype == dtype
        np.testing.assert_allclose(rows[:, 0], [1.0, 0.0, 0.2], rtol=1e-7)


def test_rows_of_floats_are_copies():
    data = table(4)
    data.rows(np.array([0, 1]))[:] = 7
    assert data.x[0, 0] == 0


def test_rows_of_no_index_keep_the_sample_shape():
    assert table(4).rows(np.array([], np.int64)).shape == (0, 2)


X = np.zeros((3, 2), np.float32)
Y = np.zeros(3, np.int64)


@pytest.mark.parametrize(
    "x, y, classes, sentence",
    [
        (
            np.array([["red", 1.0]], object),
            Y[:1],
            1,
            "'red' is not a finite float32 number.*data.load encodes",
        ),
        (np.array([[None, 1.0]], object), Y[:1], 1, "the value is missing"),
        (
            X.astype("float64") + 1e300,
            Y,
            1,
            "sample.0, 0.: .*1e[+]300.* is not a finite float32 number",
        ),
        (X, ["a", "b", "c"], 3, "'a' is not a finite.*number classes .*numpy.unique.labels"),
        (X, Y[:2], 1, "as many labels"),
        (np.zeros((3, 8, 8), "uint16"), Y, 3, "are tokens, .* of 16 bits as .x / 65535."),
        (X[:, 0], Y, 1, "of shape"),
        (X, np.array([0, 1, 3]), 3, "label 3 of sample 2 is not in 0..2"),
        (X, np.array([0, 1, -1]), 3, "label -1 of sample 2 is not in 0..2"),
        (X, np.array([[0], [0], [-2]]), 4, "label -2 of sample 2 is not in 0..3"),
        (X, Y.astype("float32"), 3, "quantities are predicted in 3 classes"),
        (
            X,
            np.array([0, np.inf, 1], "float32"),
            0,
            "target inf of sample 1 is not a finite number",
        ),
        (X, np.array([0, 1.5, 1], "float32"), 2, "target 1.5 of sample 1 is not from 0 to 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, y, classes, sentence):
    data_error(f"made up.*: .*{sentence}", Dataset, "made up", x, y, classes)


def test_each_class_has_a_name():
    data_error("1 class names for 2 classes", Dataset, "made up", X, Y, 2, class_names=("one",))


@pytest.mark.parametrize(
    "x, y, dtypes",
    [
        (X.astype("float64"), Y.astype("int32"), ("float32", "int64")),
        (X.astype("int64"), Y.astype("bool"), ("float32", "int64")),
        (X.astype("bool"), Y.astype("float64"), ("float32", "float32")),
        (X.tolist(), Y.tolist(), ("float32", "int64")),
        (X.astype("uint8"), Y.astype("uint64"), ("uint8", "int64")),
        (X.astype("uint32"), Y, ("uint32", "int64")),
        (X.astype("int32"), X.astype("int32"), ("int32", "int64")),
    ],
)
def test_columns_become_what_a_model_takes(x, y, dtypes):
    """Whole numbers are quantities, unless their dtype or a label for each says that they are
    tokens.
    """
    made = Dataset("made up", x, y, 0 if np.asarray(y).dtype.kind == "f" else 2)
    assert (
        (made.x.dtype, made.y.dtype) == dtypes
        and np.array_equal(made.x, x)
        and np.array_equal(made.y, y)
    )
    assert made.is_tokens is (dtypes[0] in ("uint32", "int32"))


@pytest.mark.parametrize(
    "n, fraction, tests", [(150, 0.2, 30), (10, 0.25, 2), (3, 0.01, 1), (3, 0.99, 2)]
)
def test_split_partitions_the_samples(n, fraction, tests):
    train, test = split(table(n), fraction, seed=0)
    assert len(test) == tests
    assert sorted([*train.x[:, 0], *test.x[:, 0]]) == sorted(table(n).x[:, 0])
    for part in (train, test):  # each label stays with its sample
        np.testing.assert_array_equal(part.y, part.x[:, 0].astype(int) // 2 % 3)


def test_split_depends_on_the_seed_alone():
    first, again, other = (split(table(50), 0.2, seed)[1].x for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_split_refuses_fractions_without_sense(fraction):
    usage_error("test_fraction is", lambda: split(table(10), fraction, 0))


def test_split_refuses_a_single_sample():
    data_error("1 samples cannot be split", lambda: split(table(1), 0.5, 0))


def test_pair_must_have_samples_of_one_shape():
    wide = Dataset("wide", np.zeros((3, 5), np.float32), np.zeros(3, np.int64), 1)
    data_error(r"shape \(2,\).*shape \(5,\)", lambda: check_pair(table(3), wide))
    data_error(
        "test part has no samples",
        lambda: check_pair(table(3), table(3).take(np.array([], np.int64))),
    )


def test_tokens_stay_whole_numbers_and_labels_may_be_several():
    x = np.array([[3, 1, 2], [0, 2, 1]], np.uint16)
    result = Dataset("tokens", x, np.array([[1, 2, IGNORED], [2, 1, 0]]), 4)
    assert result.is_tokens and result.vocabulary == 4
    assert result.rows(np.array([1, 0])).tolist() == [[0, 2, 1], [3, 1, 2]]
    assert result.rows(np.array([1]), "float64").dtype == np.int64
    assert result.targets is not None and result.targets.tolist() == [2, 3]
    assert result.labels(np.array([0])).tolist() == [[1, 2, -1]]
    assert Dataset("images", np.zeros((2, 4), np.uint8), np.zeros(2, np.int64), 1).targets is None
