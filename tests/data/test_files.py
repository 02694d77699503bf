import gzip
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from nnmpi.data.csvfile import read_csv, to_dataset
from nnmpi.data.dataset import Dataset
from nnmpi.errors import DataError, UsageError
from nnmpi.files import cache_folder, locked


def test_variable_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNMPI_DATA", "~/some/where")
    assert cache_folder() == Path.home() / "some" / "where"


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {}, "home/.cache/nnmpi"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/nnmpi"),
        ("darwin", {}, "home/Library/Caches/nnmpi"),
    ],
)
def test_platform_chooses_the_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], folder: str
) -> None:
    for name in ("NNMPI_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    assert cache_folder() == Path(folder)


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("NNMPI_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(UsageError, match=r"NNMPI_DATA"):
        cache_folder()
    monkeypatch.setenv("NNMPI_DATA", "~no-such-user/data")
    with pytest.raises(UsageError, match=r"^\$NNMPI_DATA ~no-such-user/data: the system knows no home folder"):
        cache_folder()


def test_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    inside, seen = [], []

    def visit() -> None:
        with locked(tmp_path / "new" / "folder"):
            inside.append(1)
            seen.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [1, 1, 1, 1]


def test_lock_that_is_held_too_long_is_an_error(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UsageError, match="another process"), locked(tmp_path, patience_s=0.1):
        pass


def test_lock_is_free_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path, patience_s=0.1):
        pass


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match=r"file/folder cannot be written .*NNMPI_DATA"),
        locked(tmp_path / "file/folder"),
    ):
        pass


def dataset(tmp_path: Path, text: str) -> Dataset:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return to_dataset(read_csv(path), "t")


@pytest.mark.parametrize("header", ["", "width,height,kind\n"])
def test_text_labels_and_optional_header(tmp_path: Path, header: str) -> None:
    data = dataset(tmp_path, f"{header}1,2.5,cat\n-3e1, 4 ,ant\n\n5,6,cat\n")
    np.testing.assert_array_equal(data.x, np.array([[1, 2.5], [-30, 4], [5, 6]], np.float32))
    assert (data.x.dtype, data.y.tolist(), data.class_names) == (np.float32, [1, 0, 1], ("ant", "cat"))


def test_numeric_labels_are_sorted_by_value_and_may_start_anywhere(tmp_path: Path) -> None:
    data = dataset(tmp_path, "1,10\n1,9\n1,10.0\n1,-2\n")
    assert (data.y.tolist(), data.class_names) == ([2, 1, 2, 0], ("-2", "9", "10"))


def test_labels_of_which_only_some_are_numbers_are_text(tmp_path: Path) -> None:
    data = dataset(tmp_path, "1,1\n1,x\n1,1.0\n")
    assert (data.y.tolist(), data.class_names) == ([0, 2, 1], ("1", "1.0", "x"))


def test_zeros_in_front_make_a_label_text(tmp_path: Path) -> None:
    data = dataset(tmp_path, "1,007\n1,042\n1,10\n")
    assert (data.y.tolist(), data.class_names) == ([0, 1, 2], ("007", "042", "10"))
    for label, names in (("7", data.class_names), ("07", ("7", "8"))):
        (tmp_path / "t.csv").write_text(f"1,{label}\n")
        with pytest.raises(DataError, match=f"label '{label}' is not among the training labels"):
            to_dataset(read_csv(tmp_path / "t.csv"), "t", names)


def test_quotes_windows_lines_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf1,"a, b"\r\n2,"say ""c"""\r\n'))
    assert to_dataset(read_csv(path), "t").class_names == ("a, b", 'say "c"')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n\n", "the table has no rows"),
        ("a,b,c\n", "the table has no rows"),
        ("1\n2\n", "line 1: 1 cell; needs at least one feature"),
        ("1,2,a\n1,2\n", "line 2: 2 cells, and the first line has 3"),
        ("1,2,a\n1,2,3,a\n", "line 2: 4 cells, and the first line has 3"),
        ("1,2,a\n1,oops,a\n", "line 2, column 2: 'oops' is not a finite number"),
        ("a,b,c\n1,2,a\n\n1,nan,b\n", "line 4, column 2: 'nan' is not a finite number"),
        ("1,2,a\nnan,2,a\n", "line 2, column 1: 'nan'"),
        ("1,2,a\n1,inf,b\n", "line 2, column 2: 'inf'"),
        ("1,2,a\n-inf,inf,b\n", "line 2, column 1: '-inf'"),
        ("1,2,a\n1e39,2,b\n", "line 2, column 1: '1e39'"),
        ("1,2,a\n1,,b\n", "line 2, column 2: ''"),
        ("1,2,a\n1,1_0,b\n", "line 2, column 2: '1_0'"),
        ("oops,2,a\n1,2,b\n", "line 1, column 1: 'oops'"),
        ("1,2,a\n1,2,\n", "line 2, column 3: the label is missing"),
        ("1,2,1.5\n1,2,2\n", "label '1.5' is not a whole number"),
        ("1,2,nan\n1,2,2\n", "label 'nan' is not a whole number"),
        ("1,2,01\n1,2,1\n", "the labels '01' and '1' are one number, but zeros in front make them text; write them"),
        ('1,2,"a\n', "not CSV"),
    ],
)
def test_damaged_table_names_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=r"t\.csv") as caught:
        dataset(tmp_path, text)
    assert message in str(caught.value)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"1,2,caf\xe9\n")
    with pytest.raises(DataError, match=r"t\.csv: not UTF-8 text \(.* at byte 7\)"):
        read_csv(path)


def test_test_table_takes_the_classes_of_the_training_table(tmp_path: Path) -> None:
    train = dataset(tmp_path, "1,a\n2,b\n3,c\n")
    (tmp_path / "test.csv").write_text("5,c\n6,a\n")
    test = to_dataset(read_csv(tmp_path / "test.csv"), "t", train.class_names)
    assert (test.y.tolist(), test.classes) == ([2, 0], 3)
    (tmp_path / "test.csv").write_text("5,d\n")
    with pytest.raises(DataError, match="label 'd' is not among the training labels"):
        to_dataset(read_csv(tmp_path / "test.csv"), "t", train.class_names)
