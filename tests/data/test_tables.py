"""Tables are read by one rule; what it does not fit is refused, with the line of pandas."""

import csv
import gzip
import sys
import tracemalloc
from decimal import Decimal
from functools import partial

import numpy as np
import pytest

from nnmpi.base.errors import DataError, NnmpiError, UsageError
from nnmpi.data import Dataset, load
from nnmpi.data.cells import split_words
from nnmpi.data.columns import MOST_OF_TEXTS, SURE_INDEX, TEXTS_SHARE
from nnmpi.data.dataset import MISSING, split_indices
from nnmpi.data.readers import BY_PANDAS, read_table
from nnmpi.data.tables import TableRules, to_dataset
from tests.data.test_items import Frame
from tests.harness.refusals import data_error, usage_error


def write(folder, text, name="t.csv"):
    path = folder / name
    path.write_bytes(text.encode())
    return path


def table(folder, text, predicts="any", **rules):
    return to_dataset(read_table(write(folder, text), TableRules(**rules)), "t", predicts=predicts)


def other(folder, text, like, labelled=False, **rules):
    """Return another table, read by the rules of the first."""
    rules = TableRules(encoding=like.encoding, **rules)
    return read_table(write(folder, text, "o.csv"), rules, labelled)


def refused(folder, match, text, **rules):
    data_error(match, table, folder, text, **rules)


def column(cells, separator=",", name="v"):
    """Return a table with these cells in its first column."""
    rows = [f"{cell}{separator}{i % 7}{separator}{'xy'[i % 2]}" for i, cell in enumerate(cells)]
    return "\n".join([f"{name}{separator}w{separator}kind", *rows, ""])


# ---- what becomes of columns ----

MIXED = """\
age,sex,member,seen,income,k
31,f,TRUE,2024-03-01,1000.5,a
?,m,false,2024-03-02,9e2,b
35,f,true,,NA,a
"""


def test_each_kind_of_column_becomes_features(tmp_path):
    data = table(tmp_path, MIXED)
    assert data.columns == ("age", "sex=f", "sex=m", "member", "seen", "income")
    expected = [
        [31, 1, 0, 1, 19783, 1000.5],
        [33, 0, 1, 0, 19784, 900],  # the median of 31 and 35
        [35, 1, 0, 1, 19783.5, 950.25],
    ]
    np.testing.assert_array_equal(data.x, np.array(expected, np.float32))
    assert data.notes == (
        "a feature for each text of sex (2)",
        "3 missing numbers replaced by the column's median",
    )


def test_dates_have_times_and_zones(tmp_path):
    cells = ["2024-03-01", "2024-03-01T12:00", "2024-03-02 01:00:00.5+01:00", "2024-03-09Z"]
    days = table(tmp_path, column([*cells[:3], "2024-03-09T00:00Z"])).x[:, 0]
    assert days.tolist() == pytest.approx([19783, 19783.5, 19784, 19791])
    for odd in ("2024-02-30", "unknown", "03/04/2024", "12", "2024-W01"):
        text = column([*(f"2024-02-{i % 28 + 1:02}" for i in range(39)), odd])
        refused(tmp_path, rf"line 41, column 1 \(v\): '{odd}' is no date, as o", text)


def test_an_odd_cell_is_refused_by_its_line_with_remedies(tmp_path):
    text = column([*range(100, 110), "oops"])
    remedy = r"dtype=\{'v': str\}\), and give nnmpi.data.load the frame, .* drop=\['v'\]"
    refused(tmp_path, rf"line 12, column 1 \(v\): 'oops' is no number.*{remedy}", text)
    text = column([*range(100, 200), "oops", *["oh"] * 4])
    refused(tmp_path, "line 102, column 1", text)
    # a tenth is no error, but a column of texts
    data = table(tmp_path, column([*range(5), *["A1", "B2"]] * 3))
    assert data.encoding[0].values == ("0", "1", "2", "3", "4", "A1", "B2")


def test_codes_among_texts_are_texts_as_they_are_written(tmp_path):
    codes = ["007", "7", "1e2", "100", "A1", "B2", "C3", "D4", *(str(2**53 + i) for i in (0, 1))]
    data = table(tmp_path, column(codes * 4))
    assert data.encoding[0].values == tuple(sorted(codes))
    assert np.flatnonzero(data.x[0, :10]).tolist() == [sorted(codes).index("007")]
    new = other(tmp_path, "w,v\n0,7\n0,1e2\n0,07\n", data)
    assert [np.flatnonzero(row[:-1]).tolist() for row in new.features] == [
        [sorted(codes).index("7")],
        [sorted(codes).index("1e2")],
        [],
    ]
    assert new.notes == ("texts that training has not seen, as if missing: '07' in v",)
    # a frame's numbers among texts, and numbers of one text, have their shortest spelling
    assert read_table(
        {"v": [7, 7.0, "007"], "w": [0, 0, 0]}, TableRules(encoding=data.encoding), False
    ).features[:, :-1].argmax(1).tolist() == [
        sorted(codes).index(code) for code in ("7", "7", "007")
    ]


@pytest.mark.parametrize(
    "cells",
    ["5a 10b 7c", "2019Q1 2018Q4", "1920x1080 1366x768", "2:1 0:0 3:2", "Jan-05 Feb-05", "5% 10%"]
    + ["$5 $6", "3/1/2024 4/1/2024", "08:30 09:30", "18-25 26-40", "1_000 2_000", "0x10 0x20"]
    + ["٣ ٤", "0 1;2 3", "1'000 2'000", "12.5.3 1.2.3"],
)
def test_what_is_no_number_is_a_text(tmp_path, cells):
    texts = cells.split(";") if ";" in cells else cells.split()
    data = table(tmp_path, column([texts[i % len(texts)] for i in range(40)]))
    assert data.encoding[0].values == tuple(sorted(texts))
    assert data.notes == (f"a feature for each text of v ({len(texts)})",)


def test_spaces_around_texts_do_not_count_unless_they_make_the_difference(tmp_path):
    data = table(tmp_path, "s, v, k\na , 1, x\nb, 2, y\na , 3, x\n")
    assert (data.columns, data.class_names) == (("s=a", "s=b", "v"), ("x", "y"))
    refused(
        tmp_path, r"line 4, .*'a' and 'a ' differ by spaces alone", "s,v,k\na ,1,x\nb,2,y\na,3,x\n"
    )
    refused(tmp_path, "line 3: the label 'x ' and 'x' differ by spaces", "v,k\n1,x\n2,x \n3,y\n")
    refused(tmp_path, "skipinitialspace=True", 's,v,k\n"a",1,x\n "b",2,y\n')
    refused(tmp_path, r"double the mark .*escapechar", 's,v,k\na\\"b,1,x\nc,2,y\n')


def test_numbers_that_float32_cannot_tell_apart_are_refused(tmp_path):
    text = "a,k\n100000001,x\n100000003,y\n"
    refused(tmp_path, r"column 'a': float32 cannot tell .*frame\[name\].min.*drop=\['a'\]", text)
    for cell in ("inf", "-inf", "1e400", "1e39", "9" * 400):
        text = column([1, 2, cell])
        refused(tmp_path, r"line 4, column 1 \(v\): -?(inf|1e\+39) is not a finite float32", text)
    with pytest.raises(DataError, match="inf is not a finite"):
        read_table({"v": [1, 10**400], "k": ["x", "y"]})


# ---- separators, names, decimal marks ----


@pytest.mark.parametrize(
    "text, features",
    [
        ("a\tb\tk\n1\t\tx\n2\t3\ty\n", [[1, 3], [2, 3]]),
        ("a|b|k\r\n1|2|x\r\n\r\n3|4|y", [[1, 2], [3, 4]]),
        ("a;b;k\r1;2;x\r3;4;y\r", [[1, 2], [3, 4]]),
        ('\ufeff"a; b","k"\n1,"x\ny"\n3,"say ""z"""\n', [[1], [3]]),
        (",a,k\nr1,1,x\nr2,3,y\n", [[1], [3]]),  # pandas' index, R's names of rows
        ("Unnamed: 0,a,k\n0,1,x\n1,3,y\n", [[1], [3]]),
        ("a,,k\n1,,x\n3,,y\n", [[1], [3]]),
        ("a;b;k\n1;1,5;x\n2;1,250;y\n", [[1, 1.5], [2, 1.25]]),
        ("a;k\n0,125;x\n1e3;y\n", [[0.125], [1000]]),
        ('a,k\n"1,5",x\n"2,5",y\n', [[1.5], [2.5]]),
        ("a,k\n1.000,x\n12.500,y\n", [[1], [12.5]]),
        ("a;k\n1.000;x\n2.5;y\n", [[1], [2.5]]),
    ],
)
def test_forms_of_tables(text, features, tmp_path):
    assert table(tmp_path, text).x.tolist() == features


@pytest.mark.parametrize(
    "cells", [("red;blue", "green;red"), ("a|b", "c|d"), ("1;2", "2;3"), ("x\ty", "z\ty")]
)
def test_a_separator_must_occur_in_the_first_row(tmp_path, cells):
    rows = [f"{'SML'[i % 3]},{cells[i % 2]},{('yes', 'no')[i // 2 % 2]}\n" for i in range(48)]
    data = table(tmp_path, "size,colors,bought\n" + "".join(rows))
    assert data.class_names == ("no", "yes") and data.encoding[1].values == tuple(sorted(cells))


@pytest.mark.parametrize(
    "text, match",
    [
        ("a,b;c,k\n1,2;3,x\n", r"the first line has ';' and ',', .*pandas.read_csv\(.*sep=';'\)"),
        ("a b k\n1 2 x\n", r"line 1: 1 cell; .*pandas.read_csv\(.*sep=...\)"),
        ("sep=;\na;k\n1;x\n2;y\n", r"names a separator .*sep=';', skiprows=1\)"),
        ("1,2,x\n3,4,y\n", r"line 1, column 1: '1' is no name .* give header=False"),
        ("a,2019,k\n1,2,x\n3,4,y\n", "column 2: '2019' is no name .* such as 'column 2019'"),
        ("a,2024-01-01,k\n1,2,x\n3,4,y\n", "column 2: '2024-01-01' is no name"),
        ("150,4,setosa,virginica\n1,2,3,4\n", "'150' is no name"),
        ("red,S,yes\nblue,M,no\nred,L,yes\n", "line 1: 'red' occurs again below in column 1"),
        ("red,S,yes\nblue,M,no\ngreen,L,yes\n", "line 1: 'yes' occurs again below in column 3"),
        ("a,a,k\n1,2,x\n3,4,y\n", "columns 1 and 2 are both named 'a'; rename"),
        ("a,k\none,1,x\ntwo,3,y\n", r"line 2: 3 cells, but the .*read_csv\(.*, index_col=0\)"),
        ("a,b,k\n1,x\n", "line 2: 2 cells, but the first line has 3; put"),
        ("a\tb\tk\nc\td\td\n\t\tclass\n1\tm\ty\n2\tf\tn\n", r"Orange's .*skiprows=\[1, 2\]\)"),
        ("a,b,k\nc,d,d\n1,m,y\n2,f,n\n3,f,n\n", "second line names kinds of columns"),
        ("a,k\n1,x\n2.5\r,y\n", "carriage return within a line"),
        ('a,k\n1,"x\n2,y\n', "line 2: not CSV .a quotation mark that begins a cell is not closed"),
        ('a,k\n"1" 2,x\n2,y\n', "line 2: not CSV .a separator or the line's end must follow"),
        ("a,k\n1\0,x\n", "zero bytes, as UTF-16 text has"),
        ('a,k\n"1,000",x\n"2,000",y\n', r"'1,000' may have a mark .*thousands=','\)"),
        ("a;k\n1.000;x\n2.500;y\n", r"'1.000' may have a .*decimal=',', thousands='.'\)"),
        ("a;k\n1.000,5;x\n2,5;y\n", r"'1.000,5' may have a mark between thousands"),
        ("a;b;k\n1,5;2.5;x\n2;3;y\n", r"two decimal marks are shown, in line 2, column 2: '2.5' a"),
        ("a;b\nx;1,5\ny;1.5\n", "two decimal marks are shown, in line 3, column 2: '1.5' and"),
        ("", "no rows"),
        ("\n\n", "no rows"),
        ("a,b,c\n", "no rows"),
        ("a,b\n1,\n2,NA\n", "no row has a label in column 'b'; give another column"),
    ],
)  # fmt: skip
def test_what_is_no_such_table_is_refused_in_a_sentence(text, match, tmp_path):
    data_error(match, table, tmp_path, text)


@pytest.mark.parametrize("third", ["\t\tclass", "\t", "m\tclass\t", "a=1\t\tclass", "20\tm\ty"])
def test_oranges_tables_are_refused_whatever_their_third_line_is(tmp_path, third):
    rows = "".join(f"{20 + i}\t{'mf'[i % 2]}\t{'ny'[i % 3 == 0]}\n" for i in range(40))
    for kinds in ("continuous\tm f\tdiscrete", "c\td\td", "C\t\tclass"):
        path = write(tmp_path, f"age\tsex\twon\n{kinds}\n{third}\n{rows}", "t.tab")
        data_error("Orange's tables|cells, but the first line", read_table, path)


def test_other_encodings_are_refused(tmp_path):
    for name, coding, match in (
        ("w.csv.gz", "cp1252", r"not UTF-8 text .*pandas.read_csv\(.*encoding=...\)"),
        ("u.csv", "utf-16", "UTF-16 text"),
    ):
        content = "München,k\n1,x\n2,y\n".encode(coding)
        (tmp_path / name).write_bytes(gzip.compress(content) if "gz" in name else content)
        data_error(match, read_table, tmp_path / name)


def test_a_named_decimal_mark_is_the_tables(tmp_path):
    text = 'a;b;k\n1,5;2.5;x\n2;"3.5";y\n'
    data = table(tmp_path, text, decimal=",")
    assert data.columns == ("a", "b=2.5", "b=3.5") and data.x[:, 0].tolist() == [1.5, 2]
    assert table(tmp_path, "a;k\n1.000;x\n2.500;y\n", decimal=".").x.tolist() == [[1], [2.5]]
    usage_error("decimal='x' is no decimal mark", table, tmp_path, text, decimal="x")
    # of the label, too; a dropped column shows nothing
    data = table(tmp_path, "a;c;b\n1;0.5;2,5\n2;1.5;3\n", "quantities", drop=("c",))
    assert data.y.tolist() == [2.5, 3] and data.encoding[0].mark == ","
    assert other(tmp_path, "a\n1,250\n", data).features.tolist() == [[1.25]]
    data_error("'1.5' is no number", other, tmp_path, "a\n1.5\n", data)


def test_a_table_without_a_header(tmp_path):
    data = table(tmp_path, "5,red,7,yes\n6,blue,8,no\n", header=False, drop=("3",))
    assert data.columns == () and data.target == "4" and len(data) == 2
    for text in ("9,red,1,no\n", "9,red\n"):
        new = other(tmp_path, text, data, header=False)
        assert new.features.tolist() == [[9, 0, 1]] and new.notes == ()
    data_error("3 columns; the model needs 1, 2", other, tmp_path, "9,red,1\n", data, header=False)
    data_error("'9' is no name of a column", other, tmp_path, "9,red\n8,red\n", data)
    new = other(tmp_path, "9,red,1,no\n", data, True, header=False, target="4")
    assert new.labels == ("no",)
    # the label may stand before a column that was left out
    first = table(tmp_path, "yes,5,7\nno,6,8\n", header=False, target="1", drop=("2",))
    new = other(tmp_path, "no,1,2\n", first, True, header=False, target="1")
    assert (new.labels, new.features.tolist()) == (("no",), [[2]])
    usage_error("leave header out", load, Frame({"a": [1], "k": ["x"]}), header=False)


def test_an_index_is_left_out_and_said(tmp_path):
    for first in (0, 1):
        rows = [f"{first + i},{i * i % 7},{'xy'[i % 2]}" for i in range(SURE_INDEX)]
        data = table(tmp_path, "\n".join(["nr,v,k", *rows]))
        assert data.columns == ("v",) and data.notes == ("column 'nr' is an index and left out",)
        # one of its rows is missing: a feature
        assert table(tmp_path, "\n".join(["nr,v,k", *rows[:3], *rows[4:]])).sample_shape == (2,)
    alone = "\n".join(["nr,k", *(f"{i},{'xy'[i % 2]}" for i in range(SURE_INDEX))])
    assert table(tmp_path, alone).sample_shape == (1,), "there is nothing else to learn from"


@pytest.mark.parametrize("first", [0.125, 5, 1960, 5001])
def test_what_only_looks_like_an_index_is_a_feature(tmp_path, first):
    rows = "".join(f"{first + i},{i * i % 7},{'xy'[i % 2]}\n" for i in range(20))
    assert table(tmp_path, f"a,b,k\n{rows}").sample_shape == (2,)


# ---- another table ----


def test_another_table_is_read_by_the_rules_of_the_first(tmp_path):
    """By name, whatever the order; medians and texts are those of the training table."""
    data = table(tmp_path, MIXED)
    read = other(tmp_path, "Sex,age,x,seen,member,income\nm,,x,2024-03-05,0,1\nd,1,y,,,\n", data)
    expected = [[33, 0, 1, 0, 19787, 1], [1, 0, 0, 1, 19783.5, 950.25]]
    np.testing.assert_array_equal(read.features, expected)
    assert read.notes == (
        "4 missing numbers replaced by the column's median",
        "texts that training has not seen, as if missing: 'd' in sex",
    )
    soon = partial(other, tmp_path, "age,sex,member,seen,income\n1,f,1,soon,2\n", data)
    data_error(
        r"column 4 \(seen\): 'soon' is no date, as other cells of the column are; .*ng$", soon
    )
    data_error(
        "has no column 'income'; the mod", other, tmp_path, "age,sex,member,seen\n1,f,1,\n", data
    )
    data_error("no column 'age'; .*header=False", other, tmp_path, "f,m,d,x,y\n1,f,2,,3\n", data)
    data_error("3 columns; the mod", other, tmp_path, "1,2,3\n", data, header=False)
    usage_error("has no column 'l'", other, tmp_path, MIXED, data, labelled=True, target="l")
    bare = other(tmp_path, "31,f,1,2024-03-01,2\n", data, header=False)
    assert bare.notes == ("the columns are taken in the order of the training table",)
    dropped = table(tmp_path, "a,b,c,k\n1,2,3,x\n4,5,6,y\n", drop=("b",))
    data_error(
        "unclear which is the label", other, tmp_path, "1,2,3,x\n", dropped, True, header=False
    )
    both = table(tmp_path, "a,A,k\n1,2,x\n3,4,y\n")
    data_error("one column for 'a' and 'A'", other, tmp_path, "a,k\n1,x\n", both)
    spare = partial(other, tmp_path, "a,A,k\n1,2,x\n", both, True)
    usage_error("takes no column k; name the label's, target='k'", spare)
    data_error("each column is a feature", other, tmp_path, "a,A\n1,2\n", both, True)


@pytest.mark.parametrize("mark", [".", ","])
def test_a_table_of_one_column_has_a_row_for_each_line(tmp_path, mark):
    rows = "1,5;2\n2,5;3\n-0,5;1\n" if mark == "," else "1.5;2\n2.5;3\n-0.5;1\n"
    data = table(tmp_path, "x;price\n" + rows * 8, "quantities", target="price")
    text = 'x\n1,5\n""\n7,25\n0,125\n'.replace(",", mark)
    assert other(tmp_path, text, data).features.tolist() == [[1.5], [1.5], [7.25], [0.125]]
    assert other(tmp_path, text[2:], data, header=False).features.shape == (4, 1)
    wrong = "x\n1,5\n2,5\n".replace(",", "," if mark == "." else ".")
    data_error("line 2.*'1.5' is no number", other, tmp_path, wrong, data)
    for blank in ("\n", "  \n"):
        data_error(r"line 3 is blank; .* as \"\"", other, tmp_path, f"x\n1\n{blank}2\n", data)
    rows = "two words;1\none;0\nthree, words here;1\n"
    texts = table(tmp_path, "x;k\n" + rows * 3)
    new = other(tmp_path, 'x\ntwo words\n"three, words here"\nthree, words here\none\n', texts)
    assert new.features.argmax(1).tolist() == [2, 1, 1, 0]
    data_error("line 3: not CSV", other, tmp_path, 'x\none\n"one",two\n', texts)


def test_blank_lines_are_no_rows_and_empty_cells_are(tmp_path):
    data = table(tmp_path, "a,b,k\n1,2,x\n3,4,y\n")
    new = other(tmp_path, "\na,b\n5,6\n\n  \n,\n7,8\n\n", data)
    assert new.features.tolist() == [[5, 6], [2, 3], [7, 8]] and list(new.lines) == [3, 6, 7]


def test_a_test_table_beside_a_training_table_is_matched_by_name(tmp_path):
    write(tmp_path, "y,a,b\n0,1,red\n1,,blue\n0,5,red\n", "train.csv")
    write(tmp_path, "B,A,Y\nred,,1\n", "test.csv")
    train, test = load(str(tmp_path), target="y")
    assert train.columns == test.columns == ("a", "b=blue", "b=red")
    assert (test.x.tolist(), test.y.tolist()) == ([[3, 0, 1]], [1])
    write(tmp_path, "B,C,Y\n20,10,1\n", "test.csv")
    data_error("has no column 'a'", load, str(tmp_path), target="y")
    write(tmp_path, "0,1,x\n1,2,y\n", "train.csv")
    write(tmp_path, "3,4,y\n", "test.csv")
    assert load(str(tmp_path), header=False)[1].x.tolist() == [[3, 4]]


# ---- tables in memory ----


def test_a_table_in_memory_is_read_as_a_file_is(tmp_path):
    data = table(tmp_path, "age,sex,seen,k\n31,f,2024-03-01,a\n33,m,2024-03-02,b\n35,f,,a\n")
    rules = TableRules(encoding=data.encoding)
    expected = other(tmp_path, "sex,age,seen\nm,,2024-03-05\nd,1.5,\n", data)
    rows = [[None, "m", np.datetime64("2024-03-05")], [Decimal("1.5"), "d", float("nan")]]
    columns = {"SEX": ["m", "d"], "age": [None, np.array(1.5)], "seen": ["2024-03-05", None]}
    mappings = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for source in (rows, columns, mappings, Frame(columns)):
        result = read_table(source, rules, labelled=False)
        np.testing.assert_array_equal(result.features, expected.features)
        assert result.notes == expected.notes
    for wrong in ({"sex": ["m", "f"], "age": [1]}, [{"sex": 1, "age": 2}, {"sex": 1}], [1, 2]):
        data_error("is no table; give a Da", read_table, wrong, rules, labelled=False)
    comma = table(tmp_path, "v;k\n1,5;x\n2,5;y\n")
    read = read_table([["1,5"], [1.5]], TableRules(encoding=comma.encoding), labelled=False)
    assert read.features.tolist() == [[1.5], [1.5]]


def test_a_frame_is_loaded_by_the_rule_and_its_texts_remain_texts():
    rows = range(40)
    frame = Frame(
        {
            "code": [("250", "007", "7")[i % 3] for i in rows],
            "v": [None if i == 3 else i / 4 for i in rows],
            "day": [f"2024-01-{i % 28 + 1:02}" for i in rows],
            "is": [i % 2 == 0 for i in rows],
            "k": ["yn"[i % 2] for i in rows],
        }
    )
    train, test = load(frame)
    assert (len(train), len(test), train.class_names) == (32, 8, ("n", "y"))
    assert train.columns == ("code=007", "code=250", "code=7", "v", "day", "is")
    texts = Frame({name: frame[name] for name in ("code", "k")})  # and nothing else
    assert load(texts)[0].columns == ("code=007", "code=250", "code=7")
    train, _ = load(frame, target="v", predicts="quantities", drop=["day"])
    assert train.predicts == "quantities" and train.target == "v"
    assert load(frame, encoding=load(frame)[0].encoding, target="k")[0].columns[0] == "code=007"
    data_error("both named 'a'", load, Frame({"a": [1], "a ": [2]}))
    data_error("^Frame: 1 column; needs", load, Frame({"a": [1]}))
    spans = [np.timedelta64(i % 2, "h") for i in rows]  # have a unit, so they are no numbers
    assert load(Frame({"span": spans, "k": frame["k"]}))[0].columns[0] == "span=0 hours"


def test_columns_of_a_frame_are_given_as_they_are_called():
    rows = range(40)
    frame = Frame({0: ["yn"[i % 2] for i in rows], 1: [i % 7 for i in rows], 2: [*rows]})
    for target in (0, "0"):
        train, _ = load(frame, target=target, drop=[2])
        assert (train.target, train.columns) == ("0", ("1",))
    train, _ = load(frame, target=1, predicts="quantities", drop="2")  # a name before a number
    assert (train.target, train.columns) == ("1", ("0=n", "0=y"))


def test_what_load_does_not_take_is_refused():
    frame = Frame({"a": [1, 2], "k": [0, 1]})
    usage_error("predicts='numbers' is none of 'classes'", load, frame, predicts="numbers")
    for wrong in ({"a": [1]}, np.zeros((2, 2)), [[1, 2]]):
        usage_error("is no data set; give a name, a path or a D", load, wrong)


# ---- labels, missing cells, words, pixels ----


def test_labels_are_compared_by_all_their_digits_and_booleans_in_any_capitals(tmp_path):
    labels = [str(2**53 + i) for i in (0, 1, 2)]
    rows = "".join(f"{i},{labels[i % 3]}\n" for i in range(9))
    data = table(tmp_path, f"a,k\n{rows}1,+{labels[1]}\n  \n")
    assert data.class_names == tuple(labels) and data.y.tolist() == [0, 1, 2] * 3 + [1]
    data = table(tmp_path, "a,k\n1,True\n2,TRUE\n3,False\n4,true\n")
    assert (data.class_names, data.y.tolist()) == (("False", "TRUE"), [1, 1, 0, 1])
    ones = other(tmp_path, "a,k\n1,1\n2,0\n", data, True, target="k")
    words = other(tmp_path, "a,k\n1,True\n2,false\n", data, True, target="k")
    for read, names in ((words, ("0", "1")), (ones, data.class_names)):
        assert to_dataset(read, "t", names).y.tolist() == [1, 0]
    data_error("'1' is not among the training labels", to_dataset, ones, "t", ("no", "yes"))


def test_labels_that_are_no_classes_are_refused_or_said(tmp_path):
    prices = "a,price\n" + "".join(f"{i % 3},{1000 + 7 * (i % 30)}\n" for i in range(90))
    (note,) = table(tmp_path, prices).notes
    assert note.startswith("column 'price': 30 labels are a class each; to predict numbers, give")
    assert not table(tmp_path, prices, predicts="quantities").notes
    few = "a,k\n" + "".join(f"{i % 3},{100 + i}\n" for i in range(16))
    refused(tmp_path, "16 different labels in 16 rows.*predicts='quantities'", few)
    cars = "mpg,make,name\n" + "".join(f"{i / 7},n{i % 2},car {i}\n" for i in range(50))
    refused(tmp_path, "50 different labels in 50 rows.*such as target='make'", cars)
    match = "'car 0' is not a finite number; .*predicts='classes'"
    refused(tmp_path, match, cars, predicts="quantities")

    def arrays(y):
        np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).random((len(y), 2)), y=y)
        return load(str(tmp_path / "a.npz"))[0]

    numbers = np.arange(100)
    assert arrays(numbers % 10 + 1).notes == ("y: no sample of class 0; number the classes from 0",)
    assert arrays(numbers % 10).notes == ()
    for y in (numbers % 10 * 10, numbers + 1_700_000_000, numbers[:16] + 1):
        data_error(r"a.npz: y has \d+ different labels", arrays, y)
    one_hot = np.eye(3, dtype=int)[numbers % 3]
    data_error(r"y has a 1 in each row and else 0; .*y.argmax\(1\)", arrays, one_hot)
    assert arrays(one_hot | 1).classes == 2
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 3, 8, 8), "u1"), y=numbers[:9] % 3)
    assert "if the channels are first" in load(str(tmp_path / "a.npz"))[0].notes[0]
    y = np.array([[0, -100], [1, 0]])
    data_error(
        "does not count is -1, nnmpi.data.IGNORED", Dataset, "d", np.ones((2, 3), "f4"), y, 5
    )


def test_what_is_left_out_is_said(tmp_path):
    rows = "".join(f'Mr {i},"of, {i} a",{i % 3},,a{i % 2}\n' for i in range(40))
    text = f'name,"from, where",v,none,k\n{rows}'
    data = table(tmp_path, text)
    assert data.columns == ("v",)
    assert data.notes == (
        "left out, without a value: none",
        "left out, with too many different texts: name (40 of 40), from, where (40 of 40)",
    )
    assert table(tmp_path, text, drop=("name", "2", "none")).notes == ()
    refused(tmp_path, "no column is left to learn from; left out", text, drop=("v",))
    usage_error("no column 'nam'; its first line is name", table, tmp_path, text, drop=("nam",))
    few = "".join(f"n{i % int(TEXTS_SHARE * 80)},{i % 2}\n" for i in range(80))
    assert table(tmp_path, f"name,k\n{few}").sample_shape == (20,)
    data = table(tmp_path, "a,k\n1,x\n2,\n3,NA\n4,none\n")
    assert (data.x.tolist(), data.class_names) == ([[1], [4]], ("none", "x"))
    assert data.notes == ("2 rows without a label left out",)
    wide = [
        ",".join("ab"[i % 2] * (MOST_OF_TEXTS // 2 + 1)) + ",xy"[:1] + "xy"[i % 2] for i in (0, 1)
    ]
    names = ",".join(f"c{i}" for i in range(MOST_OF_TEXTS // 2 + 1))
    refused(tmp_path, f"would be {MOST_OF_TEXTS + 2} features", "\n".join([f"{names},k", *wide]))


def test_missing_cells_become_what_the_training_rows_say(tmp_path):
    rows = "".join(f"{'' if i % 5 == 0 else i},{'xy'[i % 2]}\n" for i in range(40))
    train, _ = load(str(write(tmp_path, f"a,k\n{rows}")), seed=3)
    known = [i for i in split_indices(40, 0.2, 3)[0] if i % 5]
    assert train.encoding[0].fill == np.median(known) != np.median([i for i in range(40) if i % 5])


def test_words_of_documents_are_features(tmp_path):
    text = 'review,stars,k\n"Good, very GOOD",5,1\n"good film",4,1\n"bad film",1,0\n"bad ...",2,0\n'
    data = table(tmp_path, text, text_columns=("review",))
    assert data.columns == ("review~bad", "review~film", "review~good", "stars")
    assert data.x[:, :3].tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]]
    data = table(tmp_path, "review,k\n7 good,0\n7,1\n", text_columns=("review",))
    assert data.columns == ("review~7",), "a number is a word, too"
    once = "review,k\none two,0\nthree four,1\n"
    refused(tmp_path, "no word of column 'review' occurs in 2 r", once, text_columns=("review",))


def test_words_of_scripts_without_spaces_are_pairs():
    assert split_words("好看的电影 Good") == {"好看", "看的", "的电", "电影", "good"}
    assert split_words("の") == {"の"}
    assert split_words("हिन्दी में, é") == {"हिन्दी", "में", "é"}
    assert "ไท" in split_words("ภาษาไทย") and len(split_words("ภาษาไทย")) == 6


def test_pixels_become_images(tmp_path):
    rules = {"sample_shape": (2, 2, 1)}
    data = table(tmp_path, "a,b,c,d,k\n0,1,2,255,x\n9,8,7,6,y\n", **rules)
    assert (data.x.dtype, data.scale, data.x.shape) == (np.uint8, 1 / 255, (2, 2, 2, 1))
    assert data.x[0, :, :, 0].tolist() == [[0, 1], [2, 255]]
    half = partial(other, tmp_path, "a,b,c,d\n1,2,3,0.5\n", data, as_bytes=True, **rules)
    data_error("line 2: a pixel is none of 0..255", half)
    text = "use,a,b,c,d,k\ntrain,0,1,2,255,x\ntest,9,8,7,6,y\n"
    usage_error(r"6 features, but samples of 2 x .*drop=\['use'\]", table, tmp_path, text, **rules)
    floats = table(tmp_path, "a,b,k\n0.5,1,x\n1,2,y\n", sample_shape=(1, 2, 1))
    assert floats.x.dtype == np.float32


@pytest.mark.parametrize("suffix", [*sorted(BY_PANDAS), "csv.bz2", "csv.zip", "fits"])
def test_other_files_are_refused_with_the_code_that_reads_them(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"PAR1")
    match = r"a\..* files are not read; .*(pandas|numpy)\..*nnmpi.data.load\("
    with pytest.raises(UsageError, match=match) as raised:
        load(str(path))
    assert BY_PANDAS.get(suffix, "pandas.read_csv(").partition("(")[0] in str(raised.value)
    assert repr(str(path)) in str(raised.value) and "\n" not in str(raised.value)


# ---- many tables, and large ones ----

TEXTS = 'a|b|red|grün|x,y|p;q|t\tu|say "hi"|two\nlines|NA|none|-|007|7|1e2|100|A1|1_0|٣| lead|True'
PIECES = [*TEXTS.split("|"), "b|c", "1,5", "1.000", "2024-03-01", "inf", "sep=;", "c", "'", "\\"]
NAMES = ["a", "Größe", "x,y", "p;q", "", "two\nlines", "2019", "NA", "c", "x|y"]


def random_cells(draw, count, mark):
    """Return the cells of a column, and what they are: a number, a date, or a text."""
    kind = draw.choice(["int", "float", "date", "text", "code", "bool"])
    if kind == "int":
        values = draw.integers(-50, 50, count).tolist()
        return [str(value) for value in values], values
    if kind == "float":
        values = (draw.normal(size=count) * 10.0 ** draw.integers(-4, 5)).tolist()
        return [repr(value).replace(".", mark) for value in values], values
    if kind == "bool":
        values = (draw.random(count) < 0.5).tolist()
        return [str(value) for value in values], values
    if kind == "date":
        values = (np.datetime64("2024-01-01") + draw.integers(0, 900, count)).tolist()
        return [str(value) for value in values], values
    pool = PIECES if kind == "text" else ["007", "7", "A1", "B2", "1e2", "100"]
    texts = [pool[i] for i in draw.integers(0, draw.integers(1, len(pool)) + 1, count)]
    return texts, texts


def expected_of(rule, values):
    """Return the features of a column's values by its rule, NaN for a missing number."""
    if rule.kind == "text":
        texts = [str(value).strip() for value in values]
        assert {*texts} - {text for text in texts if text.lower() in MISSING} == {*rule.values}
        return np.array([[text == item for item in rule.values] for text in texts], float)
    if rule.kind == "date":
        return np.array(values, "M8[D]").astype(float)[:, None]
    words = {"true": 1.0, "false": 0.0, **dict.fromkeys(MISSING, np.nan)}

    def number_in(value):
        if not isinstance(value, str):
            return float(value)
        text = value.strip().replace(rule.mark, ".")
        return words.get(value.strip().lower()) if text.lower() in words else float(text)

    return np.array([[number_in(value)] for value in values])


def test_random_tables_are_read_as_they_were_written_or_refused(tmp_path):
    """Each quoting, separator, mark and end of a line; again as a table without labels."""
    counts = {"equal": 0, "refused": 0}
    for seed in range(400):
        draw = np.random.default_rng(seed)
        count, width = int(draw.choice([2, 3, 12, 40])), int(draw.integers(1, 5))
        mark, header = str(draw.choice([".", ","])), bool(draw.random() < 0.8)
        columns = [random_cells(draw, count, mark) for _ in range(width)]
        names = [f"c{i}" for i in range(width)]
        if draw.random() < 0.3:
            names = [NAMES[i] for i in draw.integers(0, len(NAMES), width)]
        rows = [*zip(*(cells for cells, _ in columns), strict=True)]
        labels = [("yes", "no")[i] for i in draw.integers(0, 2, count)]
        options = {
            "delimiter": str(draw.choice([*",;\t|"])),
            "quoting": int(draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])),
            "lineterminator": str(draw.choice(["\n", "\r\n", "\r"])),
        }
        path = tmp_path / "t.csv"

        def save(lines, path=path, options=options):
            with path.open("w", newline="", encoding="utf-8") as stream:
                csv.writer(stream, **options).writerows(lines)

        save(
            [[*names, "label"]] * header
            + [[*row, label] for row, label in zip(rows, labels, strict=True)]
        )
        given = mark if draw.random() < 0.5 else ""
        try:
            read = read_table(path, TableRules(header=header, decimal=given))
        except NnmpiError as error:
            assert "\n" not in str(error)
            counts["refused"] += 1
            continue
        counts["equal"] += 1
        assert read.labels == tuple(labels) and len(read.lines) == count
        told = " ".join(read.notes)
        assert len(read.encoding) == width or "left out" in told, seed
        at = 0
        for rule in read.encoding:
            part = read.features[:, at : at + len(rule.features)]
            expected = expected_of(rule, columns[rule.place][1])
            if rule.fill is not None:
                expected = np.where(np.isnan(expected), rule.fill, expected)
            np.testing.assert_array_equal(part, expected.astype(np.float32), f"seed {seed}")
            at += len(rule.features)
        save([names] * header + rows)
        new = read_table(path, TableRules(encoding=read.encoding, header=header), labelled=False)
        np.testing.assert_array_equal(new.features, read.features, f"seed {seed}")
    assert counts["equal"] > 150 and counts["refused"] > 50, counts


def test_what_pandas_writes_is_read_as_its_frame(tmp_path):
    """Numbers and dates of each dtype; beside what pandas itself makes of the frame."""
    pandas = pytest.importorskip("pandas")
    path, read = tmp_path / "t.csv", 0
    for seed in range(60):
        draw = np.random.default_rng(seed)
        count, mark = int(draw.choice([2, 12, 50])), str(draw.choice([".", ","]))
        some = draw.integers(0, 100, count)
        frame = pandas.DataFrame(
            {
                "whole": some.astype(draw.choice(["i1", "u2", "i8", "f4"])),
                "real": np.where(some % 3 == 0, np.nan, draw.normal(size=count)),
                "maybe": pandas.array(np.where(some % 5 == 0, None, some % 7), "Int64"),
                "is": some % 2 == 0,
                "day": pandas.Timestamp("2024-01-01", tz="UTC") + pandas.to_timedelta(some, "D"),
                "Größe, kg": pandas.Categorical(np.array(["groß", "klein"])[some % 2]),
            }
        )[draw.permutation(["whole", "real", "maybe", "is", "day", "Größe, kg"])[: seed % 6 + 1]]
        frame["label"] = np.array(["a", "b"])[draw.integers(0, 2, count)]
        index, quoting = bool(draw.random() < 0.3), int(draw.integers(0, 3))
        sep = str(draw.choice([*",;\t|"]))
        na_rep = str(draw.choice(["", "NA", "nan"]))
        frame.to_csv(path, index=index, quoting=quoting, sep=sep, na_rep=na_rep, decimal=mark)
        parts = {name: frame[name] for name in frame.columns[:-1]}
        if "day" in parts:
            parts["day"] = (parts["day"] - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta("1D")
        numbers = [
            pandas.get_dummies(part) if name.startswith("Gr") else part.astype(float).to_frame()
            for name, part in parts.items()
            if part.notna().any()
        ]
        x = np.hstack([part.fillna(part.median()).to_numpy(float) for part in numbers])
        for source in (path, frame):
            try:
                table = read_table(source, TableRules(decimal=mark))
            except DataError as error:
                assert "unclear what separates" in str(error) or "no column is left" in str(error)
                continue
            read += 1
            if "an index" not in " ".join(table.notes[-2:]) or index:
                np.testing.assert_array_equal(table.features, x.astype(np.float32), str(seed))
            assert table.labels == tuple(frame["label"])
    assert read > 80


LARGE = {
    "rows": lambda n: "a,b,k\n" + "1.5,2,x\n" * n,
    "columns": lambda n: "\n".join(
        [",".join(f"c{i}" for i in range(n)) + ",k", "1," * n + "x", "2," * n + "y", "3," * n + "x"]
    ),
    "texts": lambda n: "a,k\n" + "".join(f"t{i},{i % 2}\n" for i in range(n)),
    "codes": lambda n: "a,k\n" + "".join(f"{'A' * (i % 3)}{i % 9},{i % 2}\n" for i in range(n)),
    "labels": lambda n: "a,k\n" + "".join(f"{i % 3},{i}.5\n" for i in range(n)),
    "dates": lambda n: "a,k\n" + "2024-01-01 10:00,1\n" * n,
    "one name": lambda n: ",".join("a" * n) + "\n" + ",".join("1" * n),
    "no name": lambda n: "," * n + "k\n" + "," * n + "x\n",
    "a quote": lambda n: 'a,k\n"' + "1,x\n" * n,
    "quotes": lambda n: "a,k\n" + '""' * n + ",x\n",
    "a row": lambda n: "a,k\n" + "1," * n,
    "a number": lambda n: "a,k\n" + "9" * n + ",x\n1,y\n",
    "thousands": lambda n: 'a,k\n"1' + ",000" * n + '",x\n',
    "separators": lambda n: ";," * n + "\n1,2\n",
    "blank lines": lambda n: "a,k\n1,x\n" + "\n" * n + "2,y\n",
}


@pytest.mark.parametrize("kind", LARGE)
def test_ten_times_the_file_costs_ten_times_the_calls_and_memory(tmp_path, kind):
    """And a sentence about it stays short."""
    results = []
    for size in (300, 3000):
        path = write(tmp_path, LARGE[kind](size))
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += "call" in event

        tracemalloc.start()
        sys.setprofile(count)
        try:
            to_dataset(read_table(path), "t", predicts="any")
        except NnmpiError as error:
            assert len(str(error)) < 3000
        finally:
            sys.setprofile(None)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        results.append((calls, peak))
    (calls, peak), (more_calls, more) = results
    assert more_calls < 12 * calls + 1000 and more < 14 * peak + 10**6


# ---- blocks of lines ----

NUMBERS = "".join(f"{i}.5,{i % 3},{'ab'[i % 2]}\n" for i in range(40))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    "text",
    [
        "u,v,k\n" + NUMBERS,
        '"u\n1",v,k\n' + NUMBERS,
        "u,v,k\n" + NUMBERS + '"7","1","a\nb"\n' + NUMBERS,
        "\n\nu,v,k\n" + NUMBERS + "\n" + NUMBERS.rstrip("\n"),
    ],
    ids=["plain", "header of two lines", "cells of two lines", "blank lines"],
)
def test_where_blocks_of_lines_end_changes_nothing(tmp_path, monkeypatch, text, end):
    text = text.replace("\n", end)
    whole = read_table(write(tmp_path, text))
    for characters in (1, 7, 64):
        monkeypatch.setattr("nnmpi.base.files.BLOCK_CHARACTERS", characters)
        small = read_table(tmp_path / "t.csv")
        assert small.lines == whole.lines and small.labels == whole.labels
        np.testing.assert_array_equal(small.features, whole.features)


@pytest.mark.parametrize("row", ["1,2,3,a", "1,a"])
def test_two_wrong_lengths_do_not_make_a_right_one(tmp_path, row):
    text = "u,v,k\n" + NUMBERS + row + "\n" + ("1,a\n" if row.count(",") == 3 else "1,2,3,a\n")
    refused(tmp_path, f"line 42: {row.count(',') + 1} cells", text)


def test_a_row_that_is_too_long_is_no_row_without_its_end(tmp_path):
    """Its first cells and its last one would make a row of numbers and a label."""
    refused(tmp_path, "line 42: 4 cells, but the first line has 3", f"u,v,k\n{NUMBERS}1,2,3,a\n")
