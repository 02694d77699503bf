"""Folders of .npy files, and Parquet: what the same numbers in an .npz, and a DataFrame, give."""

import datetime
import sys

import numpy as np
import pytest

from nnmpi import data
from nnmpi.data.lazy import is_lazy
from tests.harness.refusals import data_error, usage_error

X = np.random.default_rng(0).integers(0, 256, (60, 4, 4), dtype=np.uint8)
Y = np.arange(60) % 3
FOLDERS = {
    "one": {"x": X, "Y": Y},
    "parts": {"x_train": X[:40], "y_train": Y[:40], "x_val": X[40:], "y_val": Y[40:]},
    "folders": {"Train/x": X[:40], "Train/y": Y[:40], "test/x": X[40:], "test/y": Y[40:]},
}


def contents(parts):
    return [(part.rows(np.arange(len(part))).tobytes(), part.y.tolist()) for part in parts]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_arrays_is_read_as_an_archive_of_them(name, tmp_path):
    values = FOLDERS[name]
    for item, array in values.items():
        file = tmp_path / "set" / f"{item}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, array)
    names = {"Train/x": "x_train", "Train/y": "y_train", "test/x": "x_test", "test/y": "y_test"}
    np.savez(tmp_path / "set.npz", **{names.get(item, item): each for item, each in values.items()})
    ours, theirs = data.load(tmp_path / "set"), data.load(tmp_path / "set.npz")
    assert contents(ours) == contents(theirs) and ours[0].name == theirs[0].name
    assert is_lazy(ours[0].x)


def test_a_folder_without_targets_and_damaged_files_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", X)
    data_error("holds x; needs x and y", data.load, tmp_path)
    data_error("x.npy: holds x; needs x and y", data.load, tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.array([{}] * 60))
    data_error("y.npy: not a complete .npy file", data.load, tmp_path)
    np.save(tmp_path / "y.npy", Y)
    whole = (tmp_path / "x.npy").read_bytes()
    for count in (0, 40, len(whole) - 1):
        (tmp_path / "x.npy").write_bytes(whole[:count])
        data_error("x.npy: (not a complete .npy file|truncated)", data.load, tmp_path)


def table(pandas):
    return pandas.DataFrame(
        {
            "length": [1.5, np.nan, 3.0, 4.5] * 5,
            "count": [1, 2, 3, 4] * 5,
            "kind": ["7", "b", None, "b"] * 5,
            "day": [datetime.date(2024, 3, day + 1) for day in range(20)],
            "label": ["yes", "no"] * 10,
        }
    )


def test_a_parquet_file_is_read_as_its_frame(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    frame, file = table(pandas), tmp_path / "table.parquet"
    frame.to_parquet(file, row_group_size=7)
    monkeypatch.setattr("nnmpi.data.parquet.BATCH_ROWS", 3)
    ours, theirs = data.load(file), data.load(frame)
    assert contents(ours) == contents(theirs)
    assert ours[0].columns == theirs[0].columns and ours[0].class_names == ("no", "yes")
    numbers = data.load(file, target="length", predicts="quantities", drop="label")
    assert numbers[0].predicts == "quantities"
    usage_error("leave decimal out", data.load, file, decimal=",")
    frame.assign(lists=[[1]] * 20).to_parquet(file)
    data_error("the column 'lists' holds list<.*>, which is no cell", data.load, file)
    assert contents(data.load(file, drop="lists")) == contents(data.load(frame))
    frame.set_index("kind").rename_axis(None).to_parquet(file)
    data_error("__index_level_0__ is an index of pandas'", data.load, file)
    frame[:0].to_parquet(file)
    data_error("the table has no rows of data", data.load, file)
    for content in (b"", b"PAR1", b"PAR1" * 9):
        file.write_bytes(content)
        data_error("not a complete Parquet file", data.load, file)


def test_parquet_needs_its_library(tmp_path, monkeypatch):
    (tmp_path / "table.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    usage_error("needs pyarrow: pip install pyarrow", data.load, tmp_path / "table.parquet")
