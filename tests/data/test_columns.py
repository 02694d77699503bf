"""Tables as people have them: what becomes of their columns, and that the rules are kept."""

import gzip
from functools import partial

import numpy as np
import pytest

from nnmpi.data.columns import SURE_INDEX, TEXTS_SHARE
from nnmpi.data.tables import TableRules, read_csv, to_dataset
from tests.harness.refusals import data_error, usage_error


def table(folder, text, predicts="any", **rules):
    path = folder / "t.csv"
    path.write_text(text)
    return to_dataset(read_csv(path, TableRules(**rules)), "t", predicts=predicts)


MIXED = """\
age,sex,member,seen,income,k
31,f,TRUE,2024-03-01,"1,000.5",a
?,m,false,2024-03-02,900,b
35,f,true,,NA,a
"""


def test_each_kind_of_column_becomes_features(tmp_path):
    data = table(tmp_path, MIXED)
    assert data.columns == ("age", "sex=f", "sex=m", "member", "seen", "income")
    np.testing.assert_array_equal(
        data.x,
        np.array(
            [
                [31, 1, 0, 1, 19783, 1000.5],
                [33, 0, 1, 0, 19784, 900],  # the median of 31 and 35
                [35, 1, 0, 1, 19783.5, 950.25],
            ],
            np.float32,
        ),
    )
    assert data.notes == (
        "a feature for each text of sex (2)",
        "3 missing numbers replaced by the column's median",
    )


def test_another_table_is_read_by_the_rules_of_the_first(tmp_path):
    """By name, whatever the order; medians, texts and dates are those of the training table."""
    encoding = table(tmp_path, MIXED).encoding
    other = tmp_path / "other.csv"
    other.write_text("sex,age,more,seen,member,income\nm,,x,2024-03-05,0,1\nd,1,y,,,\n")
    read_other = partial(read_csv, other, TableRules(encoding=encoding), labelled=False)
    read = read_other()
    np.testing.assert_array_equal(
        read.features, [[33, 0, 1, 0, 19787, 1], [1, 0, 0, 1, 19783.5, 950.25]]
    )
    assert read.notes == (
        "4 missing numbers replaced by the column's median",
        "texts that training has not seen, as if missing: 'd' in sex",
    )
    other.write_text("age,sex,member,seen,income\n1,f,1,soon,2\n")
    data_error(r"column 4 \(seen\): 'soon' is no date, as other cells of the column", read_other)


@pytest.mark.parametrize(
    "text, features",
    [
        ("a;b;k\n1,5;2.000,5;x\n2;3;y\n", [[1.5, 2000.5], [2, 3]]),
        ("a\tb\tk\n1\t\tx\n2\t3\ty\n", [[1, 3], [2, 3]]),
        ("1 2  x\n  3   4 y\n", [[1, 2], [3, 4]]),
        ("a|b|k\n1|2|x\n3|4|y\n", [[1, 2], [3, 4]]),
        ('a, b, k\n1, 2, "x, y"\n3, 4, "z"\n', [[1, 2], [3, 4]]),
        ('"a","k"\n"one",1,"x"\n"two",3,"y"\n', [[1], [3]]),  # R's names of rows
        (",a,k\n0,1,x\n1,3,y\n", [[1], [3]]),  # pandas' index
        ("a,a,,k\n1,2,,x\n3,4,,y\n", [[1, 2], [3, 4]]),
        ("a,k\n100000001,x\n100000003,y\n", [[-1], [1]]),  # which float32 cannot tell apart
    ],
)
def test_forms_of_tables(text, features, tmp_path):
    assert table(tmp_path, text).x.tolist() == features


def test_scikit_learns_first_line_gives_the_classes_their_names(tmp_path):
    rows = "".join(f"{i * i},{-i},{i % 2}\n" for i in range(12))
    data = table(tmp_path, f"12,2,setosa,virginica\n{rows}")
    assert (data.class_names, data.x.shape) == (("setosa", "virginica"), (12, 2))
    # a row that looks like one is none
    assert len(table(tmp_path, "12,3,5,0\n13,3,5,1\n")) == 2


def test_an_index_is_found_by_its_values(tmp_path):
    rows = [f"{i},{i * i % 7},{'xy'[i % 2]}" for i in range(1, SURE_INDEX + 1)]
    for header in ("", "nr,v,k\n"):
        data = table(tmp_path, header + "\n".join(rows))
        assert data.sample_shape == (1,) and "index and left out" in data.notes[0]
        # one of its rows is missing: a feature
        assert table(tmp_path, header + "\n".join([*rows[:3], *rows[4:]])).sample_shape == (2,)
    alone = "\n".join(f"{i},{'xy'[i % 2]}" for i in range(SURE_INDEX))
    assert table(tmp_path, alone).sample_shape == (1,), "there is nothing else to learn from"


def test_what_only_looks_like_an_index_is_a_feature(tmp_path):
    for first, size in ((1, 1), (5001, 1), (1960, 2), (20, 2)):
        text = "".join(f"{first + i},{i * i % 7},{'xy'[i % 2]}\n" for i in range(20))
        assert table(tmp_path, text).sample_shape == (size,), first


def test_many_whole_numbers_are_classes_with_a_note(tmp_path):
    text = "a,price\n" + "".join(f"{i % 3},{1000 + 7 * (i % 30)}\n" for i in range(90))
    (note,) = table(tmp_path, text).notes
    assert note.startswith("column 'price': 30 labels are a class each; to predict numbers, give")
    assert not table(tmp_path, text, predicts="quantities").notes


def test_texts_that_are_nearly_all_different_are_left_out_and_said(tmp_path):
    rows = "".join(f'Mr {i},"of, {i} a",{i % 3},a{i % 2}\n' for i in range(40))
    text = f'name,"from, where",v,k\n{rows}'
    data = table(tmp_path, text)
    assert data.columns == ("v",)
    assert data.notes == (
        "left out, with too many different texts: name (40 of 40), from, where (40 of 40); to learn"
        " from words: text_columns=['2'] target='k'",
    )
    assert table(tmp_path, text, drop=("name", "2")).notes == ()
    data_error(
        "no column is left to learn from; left out, with too", table, tmp_path, text, drop=("v",)
    )
    few = "".join(f"n{i % int(TEXTS_SHARE * 80)},{i % 2}\n" for i in range(80))
    assert table(tmp_path, f"name,k\n{few}").sample_shape == (20,)
    usage_error(
        "has no column 'nam'; its first line is name, from, where",
        table,
        tmp_path,
        text,
        drop=("nam",),
    )


def test_advice_of_another_target(tmp_path):
    rows = "".join(f"{i / 7},n{i % 2},car {i}\n" for i in range(50))
    data_error(
        "50 different labels in 50 rows.*such as target='make'",
        table,
        tmp_path,
        f"mpg,make,name\n{rows}",
    )
    data_error(
        "'car 0' is not a finite number; .*predicts='classes'",
        table,
        tmp_path,
        f"mpg,make,name\n{rows}",
        predicts="quantities",
    )
    few = "".join(f"{i / 7},car {i % 20}\n" for i in range(50))
    assert table(tmp_path, f"mpg,name\n{few}").classes == 20


def test_rows_without_a_label_are_left_out(tmp_path):
    data = table(tmp_path, "a,k\n1,x\n2,\n3,NA\n4,none\n")
    assert (data.x.tolist(), data.class_names) == ([[1], [4]], ("none", "x"))
    assert data.notes == ("2 rows without a label left out",)


def test_words_of_documents_are_features(tmp_path):
    data = table(
        tmp_path,
        'review,stars,k\n"Good, very GOOD",5,1\n"good film",4,1\n"bad film",1,0\n"bad ...",2,0\n',
        text_columns=("review",),
    )
    assert data.columns == ("review~bad", "review~film", "review~good", "stars")
    assert data.x[:, :3].tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]]


def test_pixels_become_images(tmp_path):
    """In a column each, or all in one."""
    for text in ("a,b,c,d,k\n0,1,2,255,x\n9,8,7,6,y\n", "p,k\n0 1 2 255,x\n9 8 7 6,y\n"):
        data = table(tmp_path, text, sample_shape=(2, 2, 1))
        assert (data.x.dtype, data.scale, data.x.shape) == (np.uint8, 1 / 255, (2, 2, 2, 1))
        assert data.x[0, :, :, 0].tolist() == [[0, 1], [2, 255]]
    other = tmp_path / "o.csv"
    other.write_text("p\n1 2 3 0.5\n")
    rules = TableRules(sample_shape=(2, 2, 1), encoding=data.encoding, as_bytes=True)
    data_error("line 2: a pixel is none of 0..255", read_csv, other, rules, labelled=False)
    other.write_text("p\n1 2 3\n")
    data_error("'1 2 3' is not a list of 4 numbers", read_csv, other, rules, labelled=False)
    text = "use,a,b,c,d,k\ntrain,0,1,2,255,x\ntest,9,8,7,6,y\n"
    usage_error(
        r"6 features, but samples of 2 x 2 x 1 .*drop=\['use'\]",
        table,
        tmp_path,
        text,
        sample_shape=(2, 2, 1),
    )
    floats = table(tmp_path, "a,b,k\n0.5,1,x\n1,2,y\n", sample_shape=(1, 2, 1))
    assert floats.x.dtype == np.float32


def test_a_table_of_windows(tmp_path):
    (tmp_path / "w.csv.gz").write_bytes(
        gzip.compress("s,v,k\nMünchen,1,ä\nKöln,2,b\n".encode("cp1252"))
    )
    data = to_dataset(read_csv(tmp_path / "w.csv.gz"), "t")
    assert data.columns == ("s=Köln", "s=München", "v") and data.class_names == ("b", "ä")
