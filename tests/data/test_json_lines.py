"""JSON lines as a table: read as a CSV of the same values is; texts stay texts."""

import json

import numpy as np
import pytest

from nnmpi.base.errors import DataError
from nnmpi.data import TextSource, load
from nnmpi.data.catalogue import find_text
from nnmpi.data.readers import READERS, find_reader, read_documents, read_table, suffixes_of
from nnmpi.data.tables import TableRules, to_dataset
from tests.data.locked import lock
from tests.harness.refusals import data_error, usage_error

ROWS = [
    {"length": 1.5, "colour": "red", "seen": True, "kind": "a"},
    {"length": 2, "colour": "blue", "seen": False, "kind": "b"},
    {"length": None, "colour": "red", "kind": "a"},
    {"length": 4e3, "colour": "blue", "seen": True, "kind": "b"},
]


def write(folder, rows, name="t.jsonl"):
    path = folder / name
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def as_csv(folder, rows, name="t.csv"):
    names = [*rows[0]]
    lines = [",".join(names)]
    for row in rows:
        cells = [row.get(name) for name in names]
        lines.append(",".join("" if cell is None else str(cell) for cell in cells))
    path = folder / name
    path.write_text("\n".join([*lines, ""]))
    return path


def test_a_table_is_that_of_the_same_cells_in_csv(tmp_path):
    tables = [read_table(path) for path in (write(tmp_path, ROWS), as_csv(tmp_path, ROWS))]
    lines, delimited = (to_dataset(table, "t") for table in tables)
    np.testing.assert_array_equal(lines.x, delimited.x)
    np.testing.assert_array_equal(lines.y, delimited.y)
    assert lines.columns == delimited.columns and lines.class_names == delimited.class_names
    assert lines.notes == delimited.notes and lines.encoding == delimited.encoding


def test_the_command_and_the_library_load_it_by_its_path(tmp_path):
    many = [{"v": i, "w": -i, "kind": "ab"[i % 2]} for i in range(40)]
    path = str(write(tmp_path, many))
    pairs = [load(name) for name in (path, str(as_csv(tmp_path, many)))]
    for left, right in zip(*pairs, strict=True):
        np.testing.assert_array_equal(left.x, right.x)
        np.testing.assert_array_equal(left.y, right.y)
    assert find_text(path) is None


def test_another_table_is_matched_by_the_names_of_fields(tmp_path):
    data = to_dataset(read_table(write(tmp_path, ROWS)), "t")
    new = [{"seen": False, "spare": [1, 2], "colour": "blue", "length": 3}]
    rules = TableRules(encoding=data.encoding)
    read = [
        read_table(path, rules, labelled=False).features
        for path in (write(tmp_path, new, "o.jsonl"), tmp_path / "o.csv")
        if path.suffix == ".jsonl" or path.write_text("length,colour,seen\n3,blue,False\n")
    ]
    np.testing.assert_array_equal(*read)
    data_error("has no column 'length'", read_table, write(tmp_path, [{"a": 1}]), rules, False)


def test_texts_stay_texts_and_numbers_are_those_of_json(tmp_path):
    rows = [{"code": text, "k": "ab"[i % 2]} for i, text in enumerate(["1", "2", "1", "2"])]
    assert to_dataset(read_table(write(tmp_path, rows)), "t").columns == ("code=1", "code=2")
    rows = [{"v": i if i else "red", "k": "ab"[i % 2]} for i in range(200)]
    data_error("'red' is no number.*make all its cells texts", read_table, write(tmp_path, rows))


@pytest.mark.parametrize(
    "lines, match",
    [
        (['{"a": 1'], "line 1: not JSON"),
        (["[1, 2]"], "line 1: not a JSON object"),
        (['{"a": 1, "k": 2}', '{"a": 1, "a": 2, "k": 3}'], "line 2: not JSON .it names 'a' twice"),
        (['{"a": NaN, "k": 2}'], "line 1: not JSON .NaN is no finite number"),
        (['{"a": [1], "k": 2}'], r"line 1: the field 'a' holds a list.*drop=\['a'\].*text_columns"),
        (['{"k": 2, "a": 1}', '{"a": {"b": 1}, "k": 2}'], "line 2: the field 'a' holds an object"),
        (['{"a ": 1, "a": 2}'], "columns 1 and 2 are both named 'a'"),
        (["{}"], "no rows of data"),
        ([], "no rows of data"),
        (['{"a": 1}'], "1 column; needs at least one feature"),
    ],
)
def test_what_is_no_table_is_refused_in_a_sentence(lines, match, tmp_path):
    data_error(match, read_table, write(tmp_path, lines))


def test_rules_for_cells_between_separators_are_refused(tmp_path):
    path = str(write(tmp_path, ROWS))
    usage_error("name their fields .* leave header out", load, path, header=False)
    usage_error("name their fields .* leave decimal out", load, path, decimal=",")


def test_a_column_that_is_left_out_may_hold_anything(tmp_path):
    rows = [{**row, "meta": {"page": [1]}} for row in ROWS]
    path = write(tmp_path, [{"meta": 1, **row} for row in rows])
    for column in ("meta", "1"):
        data = to_dataset(read_table(path, TableRules(drop=(column,))), "t")
        assert data.columns[0] == "length" and data.target == "kind"


# ---- who claims a file ----


@pytest.mark.parametrize(
    "row, columns, has_label, gives",
    [
        ({"text": "a", "label": 1}, (), False, "text"),
        ({"text": "a", "label": 1}, (), True, "table"),
        ({"text": "a", "label": 1}, ("text",), True, "table"),
        ({"question": "a", "answer": "b"}, (), False, "table"),
        ({"question": "a", "answer": "b"}, ("question", "answer"), False, "text"),
    ],
)
def test_a_file_is_a_text_by_its_field_or_by_named_columns(
    row, columns, has_label, gives, tmp_path
):
    path = write(tmp_path, [row])
    assert find_reader(path, columns, has_label).gives == gives
    found = find_text(str(path), columns, has_label)
    assert found == (path if gives == "text" else None)


def test_load_says_how_a_text_becomes_a_table(tmp_path):
    rows = [{"text": f"word{i % 4} and", "n": i, "label": "ab"[i % 2]} for i in range(40)]
    path = str(write(tmp_path, rows))
    usage_error("is a text: .*name its column of labels, target=", load, path)
    train, _ = load(path, target="label", text_columns="text")
    assert train.target == "label" and "n" in train.columns
    usage_error("a.md: .md files are not read", lambda: [*read_documents(tmp_path / "a.md")])
    assert [text for text, _ in TextSource(tmp_path / "t.jsonl").pieces()][0] == "word0 and"


def test_a_file_is_claimed_by_its_suffix_in_any_capitals_plain_or_packed(tmp_path):
    for name, gives in (
        ("a.CSV", "table"),
        ("a.tsv.gz", "table"),
        ("a.JSONL", "table"),
        ("a.txt.gz", "text"),
        ("a.Npz", "arrays"),
        ("a.H5", "arrays"),
        ("a.PNG", "image"),
    ):
        assert find_reader(tmp_path / name).gives == gives, name
    for name in ("a.feather", "a.npz.gz", "a"):
        assert find_reader(tmp_path / name) is None, name


def test_a_suffix_has_one_row_of_a_kind():
    for gives in {row.gives for row in READERS}:
        suffixes = suffixes_of(gives)
        assert len({*suffixes}) == len(suffixes)
    both = {*suffixes_of("table")} & {*suffixes_of("text")}
    assert {*suffixes_of("arrays"), *suffixes_of("image")}.isdisjoint(
        {*suffixes_of("table"), *suffixes_of("text")}
    )
    assert both == {".csv", ".jsonl"}


def test_a_folder_has_its_parts_in_files_of_one_kind(tmp_path):
    rows = [{"v": i, "kind": "ab"[i % 2]} for i in range(8)]
    for part in ("train", "test"):
        write(tmp_path, rows, f"{part}.jsonl")
    train, test = load(str(tmp_path))
    assert len(train) == len(test) == 8
    for part in ("train", "test"):
        as_csv(tmp_path, rows, f"{part}.csv")
    usage_error("has tables in train.csv and in train.jsonl", load, str(tmp_path))


def test_a_file_that_may_not_be_read_is_said(tmp_path, monkeypatch):
    path = write(tmp_path, ROWS)
    lock(tmp_path, monkeypatch)
    with pytest.raises((DataError, Exception), match="Permission denied|cannot be read"):
        load(str(path))
