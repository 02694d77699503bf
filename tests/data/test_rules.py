"""Tables are read by rules: of file, columns and run; what two rules fit is refused."""

from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

from nnmpi.base.errors import DataError, UsageError
from nnmpi.data import Dataset, load
from nnmpi.data.cells import split_words
from nnmpi.data.dataset import split_indices
from nnmpi.data.tables import READERS, TableRules, read_csv, to_dataset
from tests.data.test_items import Frame
from tests.harness.refusals import data_error, usage_error


def write(folder, lines, name="t.csv"):
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def full(folder, lines, name="t.csv", **options):
    rules = TableRules(**options)
    return to_dataset(read_csv(write(folder, lines, name), rules), "t", predicts="any")


def other(folder, lines, like, labelled=False, **options):
    """Return another table, read by the rules of the first."""
    rules = TableRules(encoding=like.encoding, **options)
    return read_csv(write(folder, lines, "o.csv"), rules, labelled)


def refused(folder, match, lines, **options):
    data_error(match, full, folder, lines, **options)


def column(cells, separator=",", name="v"):
    """Return a table with these cells in its first column."""
    rows = [f"{cell}{separator}{i % 7}{separator}{'xy'[i % 2]}" for i, cell in enumerate(cells)]
    return [f"{name}{separator}w{separator}kind", *rows]


# ---- one convention for a file ----


@pytest.mark.parametrize(
    "separator, cells, values",
    [
        (";", ["999,5", "1.000", "1.200,5", "12.500", "500"], [999.5, 1000, 1200.5, 12500, 500]),
        (";", ["1.5", "1,000", "2"], [1.5, 1000, 2]),
        ("\t", ["1,5", "1.000", "-2.000.000"], [1.5, 1000, -2000000]),
        (",", ['"1.200,5"', '"1.000"', "7"], [1200.5, 1000, 7]),  # a comma needs quotes
        (
            ",",
            ["1.000", "12.500", "7"],
            [1, 12.5, 7],
        ),  # between commas a point is none of thousands
        (",", ['"1,000"', "0.5", "7"], [1000, 0.5, 7]),
        (",", ["1'000.5", "−3", "+2"], [1000.5, -3, 2]),
        (";", ["1\u202f200,5", "3", "4"], [1200.5, 3, 4]),
        (";", ["1 234,5", "98 765,0", "3"], [1234.5, 98765, 3]),
        (";", ["1,5e3", "2,25E-1", "3"], [1500, 0.225, 3]),
        ("\t", ["1 234", "98 765"] * 9 + ["999"], [1234, 98765] * 9 + [999]),
        (";", ["5,99 EUR", "1.000 EUR", "12 EUR"], [5.99, 1000, 12]),
    ],
)
def test_a_file_has_one_decimal_mark(tmp_path, separator, cells, values):
    assert full(tmp_path, column(cells, separator)).x[:, 0].tolist() == pytest.approx(values)


def test_columns_of_numbers_show_the_mark_and_no_others(tmp_path):
    """No text, no dropped column, no date; one typing error is refused by its line."""
    assert full(tmp_path, column(["1,5", "2,5"], ";", "v.x")).x[0, 0] == 1.5
    refused(tmp_path, "'0,5' is no number", column(["0,5", "1,5"], ";"), decimal=".")
    sales = [f'"1,{200 + i}"' for i in range(40)]
    texts = [f'"1,{200 + i}",{"S" if i else chr(34) + "3,5" + chr(34)},{i % 2}' for i in range(40)]
    assert full(tmp_path, ["sales,size,k", *texts]).x[0, 0] == 1200
    junk = [f'{cell},"3,5",{i % 2}' for i, cell in enumerate(sales)]
    assert full(tmp_path, ["sales,junk,k", *junk], drop=("junk",)).x[0, 0] == 1200
    refused(tmp_path, r"line 42, column 1 \(v\): '12,5' is no number", column([*sales, '"12,5"']))
    german = [
        "Monat;g;k",
        *(f"{i % 12 + 1:02}.2024;{1 + i % 7},{100 + i};{i % 2}" for i in range(40)),
    ]
    refused(tmp_path, r"line 2, column 2: '1,100' is 1100 or 1.1; name the dec", german)
    refused(
        tmp_path,
        "line 2, column 1: '0.5' and line 2, column 2: '0,5'; name",
        ["a;b;k", *(f"{i}.5;{i},5;{i % 2}" for i in range(9))],
    )
    motors = ["m;v;k", *(f"1.{i % 3} TDI;{i},5;{i % 2}" for i in range(40))]
    assert full(tmp_path, motors).columns == ("m=1.0 TDI", "m=1.1 TDI", "m=1.2 TDI", "v")


def test_another_table_has_a_mark_of_its_own(tmp_path):
    """The training table's decides only if it shows none; an earlier run's has none."""
    lines = column(["1,5", "2,5", "1,250"], ";")
    data = full(tmp_path, lines)
    earlier = replace(data, encoding=tuple(replace(item, mark="") for item in data.encoding))

    def first(lines, like=data, **options):
        table = other(tmp_path, lines, like, **options)
        return float(table.features[-1, 0]), "the training table's decimal mark" in str(table.notes)

    assert first(["v;w", "1.5;1", "1,250;2"]) == (1250, False)
    assert first(["v;w", "1,250;2"]) == (1.25, True)
    assert first(["v;w", "1,250;2"], decimal=".") == (1250, False)
    assert first(["v;w", "1,5;2"], earlier) == (1.5, False)
    data_error("'1,250' is 1250 or 1.25; name the decimal mark", first, ["v;w", "1,250;2"], earlier)
    rows = [[Decimal("1.500"), "2,5"], ["1,500", np.array(2.5)]]
    read = read_csv(rows, TableRules(encoding=data.encoding), labelled=False)
    assert read.features.tolist() == [[1.5, 2.5]] * 2
    for odd in ({"v": [1, 2], "w": [1]}, [{"v": 1, "w": 2}, {"v": 1}], [1, 2]):
        with pytest.raises(DataError, match="is no table; give a Da.*rows with the same columns$"):
            read_csv(odd, TableRules(encoding=data.encoding), labelled=False)
    data_error("has several columns 'v'; rename all but one", first, ["v;w;v", "1,5;2;3"])
    sizes = full(tmp_path, ["v;size;k", "1,5;S;x", "2,5;M;y"])
    assert other(tmp_path, ["v;size", "1,5;0.5"], sizes).features.tolist() == [[1.5, 0, 0]]


@pytest.mark.parametrize(
    "cells",
    ["5a 10b 7c", "1A 8F 2B", "2019Q1 2018Q4", "1920x1080 1366x768", "2:1 0:0 3:2", "Jan-05"]
    + ["5km 6km 7", "1st 2nd 3rd", "18-25 26-40 41-65", "Q1 Q2 Q3"],
)
def test_codes_are_texts(tmp_path, cells):
    texts = cells.split()
    data = full(tmp_path, column([texts[i % len(texts)] for i in range(40)]))
    assert data.encoding[0].values == tuple(sorted(texts))
    assert data.notes == (f"a feature for each text of v ({len(texts)})",)


def test_numbers_that_read_as_two_are_refused_with_the_option(tmp_path):
    for separator in ";\t":
        lines = column(["1.000", "12.500", "7"], separator)
        refused(tmp_path, r"line 2, column 1: '1.000' is 1 or 1000; .*decimal='.' or dec", lines)
        assert full(tmp_path, lines, decimal=",").x[0, 0] == 1000
        assert full(tmp_path, lines, decimal=".").x[0, 0] == 1
    refused(
        tmp_path, r"line 2, column 1 \(v\): '1,5' is no number", column(["1,5", "1.5", "2"], ";")
    )
    usage_error(
        "decimal='x' is no decimal mark", lambda: full(tmp_path, column(["1"]), decimal="x")
    )


def test_what_may_be_a_list_or_a_number_is_refused(tmp_path):
    cells = [f"{100 + i} {200 + i}" for i in range(9)]
    refused(tmp_path, "'100 200' in column 'v' may be a list or one number; wri", column(cells))
    assert full(tmp_path, column(["0 12", *cells])).columns == ("v 1", "v 2", "w")


@pytest.mark.parametrize("form", ["{}", ".{}", "-.{}", "2.{}e-05", "1,{}"])
def test_numbers_are_no_units(tmp_path, form):
    """Neither their exponents nor what begins with the mark; as target and as feature."""
    cells = [form.format(100 + i) for i in range(30)]
    lines = ["a;y", *(f"{cell};{cell}" for cell in cells)]
    data = to_dataset(
        read_csv(write(tmp_path, [*lines, "0,5;0,5"] if "," in form else lines)),
        "t",
        predicts="quantities",
    )
    expected = [float(cell.replace(",", ".")) for cell in cells]
    assert data.y[:30].tolist() == pytest.approx(expected)
    assert (data.x[:30, 0] - data.x[0, 0]).tolist() == pytest.approx(
        [value - expected[0] for value in expected], rel=1e-3
    )


def test_labels_are_compared_by_all_their_digits(tmp_path):
    labels = [str(2**53 + i) for i in (0, 1, 2)]
    data = full(
        tmp_path, ["a,k", *(f"{i},{labels[i % 3]}" for i in range(9)), f"1,+{labels[1]}", "  "]
    )
    assert data.class_names == tuple(labels) and data.y.tolist() == [0, 1, 2] * 3 + [1]


def test_the_mark_holds_for_the_target_and_for_the_second_table(tmp_path):
    lines = ["a;price", "1,5;1.000,25", "2,5;3"]
    data = to_dataset(read_csv(write(tmp_path, lines)), "t", predicts="quantities")
    assert data.y.tolist() == [1000.25, 3]
    assert other(tmp_path, ["a", "1.000"], data).features.tolist() == [[1000]]
    rules = TableRules(encoding=data.encoding)
    assert read_csv([[1.5]], rules, labelled=False).features.tolist() == [[1.5]]
    prices = read_csv(write(tmp_path, ["a,p", "1,$2", "2,$5.5"]))
    assert to_dataset(prices, "t", predicts="any").classes == 2
    assert to_dataset(prices, "t", predicts="quantities").y.tolist() == [2, 5.5]
    data_error(
        "'1 km' is not a finite number",
        lambda: to_dataset(replace(prices, labels=("1 km", "2 mi")), "t", predicts="quantities"),
    )


@pytest.mark.parametrize(
    "form", ["{}%", "${}.99", "-${}", "{} km", "{}kg", "EUR {}", "{} m2", "€{}", "{} °C"]
)
def test_a_unit_is_read_or_said(tmp_path, form):
    cells = [form.format(i) for i in range(60)]
    data = full(tmp_path, column(cells))
    assert data.sample_shape == (2,)
    assert np.abs(np.diff(data.x[:, 0])) == pytest.approx(1, rel=1e-4)
    cells[30] = "unknown"
    refused(tmp_path, r"line 32, column 1 \(v\): 'unknown' is no number with", column(cells))
    cells[30] = "30"
    refused(tmp_path, "line 32.*'30' is no number with", column(cells))


def test_two_units_and_two_forms_of_dates_are_refused(tmp_path):
    refused(
        tmp_path,
        "line 2, column 1.*'0 mi' is no number with 'km', as oth",
        column([f"{i} {'km' if i % 3 else 'mi'}" for i in range(60)]),
    )
    days = [f"2024-03-{i % 28 + 1:02}" if i % 2 else f"{i % 28 + 1:02}/03/2024" for i in range(60)]
    refused(tmp_path, "is no date, as other|the month or the day first", column(days))
    known = r"in column 'v' may have the month or the day first.*drop="
    refused(tmp_path, known, column(["3/1/2024", "4/2/2024"]))
    # between commas: the other mark
    refused(
        tmp_path, "line 32.*'0.5' is no number", column([f'"{i},5"' for i in range(30)] + ["0.5"])
    )


@pytest.mark.parametrize("odd", ["2024-02-30", "unknown", "03/04/2024", "12"])
def test_an_odd_date_is_refused_by_its_line(tmp_path, odd):
    cells = [f"2024-02-{i % 28 + 1:02}" for i in range(100)]
    assert full(tmp_path, column(cells)).sample_shape == (2,)
    cells[7] = odd
    refused(tmp_path, rf"line 9, column 1 \(v\): '{odd}' is no date, as o", column(cells))


@pytest.mark.parametrize(
    "first, second, days",
    [
        ("1949-01", "1949-02", 31),
        ("Jan 1990", "Feb 1990", 31),
        ("1-Jan-90", "2-Jan-90", 1),
        ("January 2, 2020", "January 4, 2020", 2),
        ("08:30", "20:30", 0.5),
        ("8:30 AM", "8:30 PM", 0.5),
        ("2024-3-1", "2024-3-31", 30),
        *((first, first.replace("1", "31", 1), 30) for first in ("1.3.2024", "Mar 1 2024")),
        ("3/1/2024", "3/31/2024", 30),
    ],
)
def test_forms_of_dates(tmp_path, first, second, days):
    x = full(tmp_path, column([f'"{first}"', f'"{second}"'])).x
    assert x[1, 0] - x[0, 0] == pytest.approx(days, abs=1e-3)


# ---- the first row, and names ----


def test_a_first_row_of_texts_that_occur_below_is_a_row(tmp_path):
    draw = np.random.default_rng(0)
    rows = [",".join(draw.choice([*"xob"], 5)) + f",{'pn'[i % 2]}" for i in range(50)]
    data = full(tmp_path, rows)
    assert len(data) == 50 and data.encoding[0].name == "1"
    data = full(tmp_path, ["alpha,beta,g,h,i,k", *rows])
    assert len(data) == 50 and data.encoding[0].name == "alpha"
    assert "line 1 is taken as the names of the columns" in data.notes
    for first in ("A,1,2,3,yes", "A,1961,1975,3,yes"):
        assert len(full(tmp_path, [first, *["B,7,2,4,no", "A,9,9,9,yes"] * 6])) == 13


@pytest.mark.parametrize("begin", [0, 1])
def test_numbers_behind_an_index_without_a_name_are_names(tmp_path, begin):
    """As pandas writes an array, and R a matrix."""
    header = ",".join(["", *(str(begin + k) for k in range(4))])
    rows = [f"{begin + i},{i * 7 % 5},{i},{i + 1},{i % 2}" for i in range(12)]
    data = full(tmp_path, [header, *rows])
    assert (len(data), data.class_names, data.sample_shape) == (12, ("0", "1"), (3,))


def test_a_number_of_a_column_is_no_name(tmp_path):
    data = full(tmp_path, ["1,5,2,x", "3,6,4,y", "5,7,6,x"], target="4", drop=("2",))
    assert data.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    named = full(tmp_path, ["a,b,k", "c,d,x", "a,b,y"], target="k")
    assert len(named) == 2


@pytest.mark.parametrize(
    "header", ["2019,2020,2021,c", "2019,2020,c", "land,2019,2020,c", "2019,2021,2030,c"]
)
def test_years_are_names(tmp_path, header):
    width = header.count(",")
    rows = [",".join(f"{i * 3 + k}.5" for k in range(width)) + f",{'xy'[i % 2]}" for i in range(8)]
    data = full(tmp_path, [header, *rows])
    assert (len(data), data.class_names) == (8, ("x", "y"))
    bare = full(tmp_path, ["2019,2020,2021", *(f"{i}.5,{i},{i % 3}" for i in range(9))])
    assert (len(bare), bare.class_names) == (9, ("0", "1", "2"))
    rare = ["2000,2001,alpha", "7,8,beta", "9,5,gamma"]
    assert len(full(tmp_path, rare)) == 3, "no word shows that the first row is names"
    years = [f"{1950 + i},{1980 + i},{1990 + i % 3}" for i in range(8)]
    assert len(full(tmp_path, years)) == 8, "years above years are a row"
    assert len(full(tmp_path, ["1,2,3", "7,9,4", "5,8,4"])) == 3, "and so are other numbers"


@pytest.mark.parametrize(
    "table",
    [
        "0,1,2,label {i}.5,{k},3,{j}",
        ",0,1,2,label {i},{i}.5,{k},3,{j}",
        "name,1,2,3,cls n{k},{i},{k},7,{c}",
        "label,0,1,2 {k},{i},7,{c}",
        "0,1,cls {i}.5,{k},{c}",
        "1,cls {i}.5,{j}",
        "400.5,401.0,class {i}.25,{k},{j}",
        "wind,play w{k},{p}",
        "play,wind {p},w{k}",
        "land,2019,2020,grow l{k},{y},3,{j}",
    ],
)
def test_names_may_be_numbers_or_a_class(tmp_path, table):
    header, row = table.split()
    rows = [
        row.format(i=i, k=i % 5, j=i % 2, y=1900 + i, c="ab"[i % 2], p=["play", "stay"][i % 2])
        for i in range(40)
    ]
    target = "1" if header.startswith(("label", "play")) else ""
    data = full(tmp_path, [header, *rows], target=target)
    assert len(data) == 40 and data.target in header and not data.target.isdecimal()


def test_booleans_are_one_class_in_any_capitals(tmp_path):
    lines = ["a,k", *(f"{i % 5},{['True', 'TRUE', 'False', 'true'][i % 4]}" for i in range(20))]
    data = full(tmp_path, lines)
    assert (data.class_names, data.y[:4].tolist()) == (("False", "TRUE"), [1, 1, 0, 1])
    ones = other(tmp_path, ["a,k", "1,1", "2,0"], data, True, target="k")
    words = other(tmp_path, ["a,k", "1,True", "2,false"], data, True, target="k")
    for table, names in ((words, ("0", "1")), (ones, data.class_names)):
        assert to_dataset(table, "t", names).y.tolist() == [1, 0]
    data_error("'1' is not among the training labels", to_dataset, ones, "t", ("no", "yes"))


def test_tickets_names_and_cabins_are_left_out_and_said(tmp_path):
    """Kaggle's Titanic: 113803 beside A/5 21171; a cabin for few, and nearly each its own."""
    rows = [
        f"{'PC ' * (i % 4 == 0)}{1000 + i},n{i},{f'C{i}' * (i % 5 == 0)},{i % 7},{i % 2}"
        for i in range(80)
    ]
    data = full(tmp_path, ["ticket,name,cabin,age,k", *rows])
    assert data.columns == ("age",)
    (note,) = data.notes
    assert note == (
        "left out, with too many different texts: ticket (80 of 80), name (80 of 80), cabin (16 of"
        " 16)"
    )
    odd = [f"{i}{'?' * (i % 30 == 7)},{i % 2}" for i in range(400)]
    rooms = [f"{i % 15 + 1} room{'s' * (i % 15 > 0)}" for i in range(80)]
    assert len(full(tmp_path, column(rooms)).columns) == 16
    refused(tmp_path, "line 9, .*'7\\?' is no number, as", ["a,k", *odd])


def test_a_row_of_another_table_does_not_depend_on_those_below(tmp_path):
    lines = ["city,kind,y", *(f"{'ab'[i % 2]},{'cde'[i % 3]},{i % 2}" for i in range(30))]
    for table in (lines, lines[1:]):
        data, rows = full(tmp_path, table), ["x,c", "a,z", "q,e"]
        alone = [other(tmp_path, [row], data).features[0].tolist() for row in rows]
        for order in (rows, rows[::-1]):
            many = other(tmp_path, order, data).features.tolist()
            assert many == [alone[rows.index(row)] for row in order]
    # a run without names: numbers have a header, which no row can be
    bare = full(tmp_path, [f"{i},{i % 7},{i % 2}" for i in range(20, 40)])
    for lines_of in (["x,z", "1,2"], ["1,2"]):
        assert other(tmp_path, lines_of, bare).features.tolist() == [[1, 2]]
    # a cell may be the name of a column
    colours = ["red,name,y", *(f"{i},{['red', 'sky'][i % 2]},{i % 2}" for i in range(9))]
    assert len(other(tmp_path, ["0,red", "1,sky"], full(tmp_path, colours)).features) == 2
    data = full(tmp_path, lines)
    usage_error(
        "no column id; name the label's, target='id'",
        other,
        tmp_path,
        ["id,city,kind", "1,a,c"],
        data,
        labelled=True,
    )
    rules = TableRules(encoding=data.encoding)
    assert len(read_csv([["city", "kind"], ["a", "c"]], rules, False).features) == 2
    data_error("3 columns; the model needs city, kind", read_csv, [["a", "c", 1]], rules, False)


@pytest.mark.parametrize("third", ["\t\tclass", "\t\tclass meta=1", "", "m\t\tc"])
def test_oranges_header_lines_are_no_samples(tmp_path, third):
    lines = ["age\tsex\twon", "continuous\tm f\tdiscrete", third]
    lines += [f"{20 + i}\t{'mf'[i % 2]}\t{'ny'[i % 3 == 0]}" for i in range(12)]
    data = full(tmp_path, lines, "t.tab")
    assert (len(data), data.class_names) == (12, ("n", "y"))
    assert data.sample_shape == ((2,) if third.startswith("m") else (3,))
    first = ["won\tage", "d\tc", "class\t", *(f"{'ny'[i % 2]}\t{i}.5" for i in range(9))]
    assert full(tmp_path, first, "t.tab").target == "won"


TRAIN = ["h,W,y", *(f"{170 + i},{60 + i}.5,{'st'[i % 2]}" for i in range(20))]


def second(folder, lines, labelled=False, **options):
    return other(folder, lines, full(folder, TRAIN), labelled, **options)


def test_columns_are_found_by_their_names_in_any_capitals(tmp_path):
    for header, row in (("w,H", "1,2"), ("Y,w,H", "s,1,2"), ("more,W,h", "q,1,2")):
        assert second(tmp_path, [header, row]).features.tolist() == [[2, 1]]
    bare = second(tmp_path, ["2,1", "3,4"])
    assert bare.features.tolist() == [[2, 1], [3, 4]]
    assert bare.notes == ("the columns are taken in the order of the training table",)
    for header in ("H,weight", "height,weight", "h,h2"):
        data_error("the model needs h, W", second, tmp_path, [header, "1,2", "3,4"])


def test_a_test_table_beside_a_training_table_is_matched_by_name(tmp_path):
    write(tmp_path, ["y,a,b", "0,1,red", "1,,blue", "0,5,red"], "train.csv")
    write(tmp_path, ["B,A,Y", "red,,1"], "test.csv")
    train, test = load(str(tmp_path), target="y")
    assert train.columns == test.columns == ("a", "b=blue", "b=red")
    assert (test.x.tolist(), test.y.tolist()) == ([[3, 0, 1]], [1])
    write(tmp_path, ["B,C,Y", "20,10,1"], "test.csv")
    data_error("has no column 'a'", load, str(tmp_path), target="y")


def test_a_table_without_the_label_has_none(tmp_path):
    data_error(
        "each column is a feature of the model, so none is the",
        second,
        tmp_path,
        ["h,W", "1,2"],
        labelled=True,
    )
    data_error(
        "each column is a feature of the model", second, tmp_path, ["1,2", "3,4"], labelled=True
    )
    usage_error(
        "has no column 'y'", second, tmp_path, ["h,W,z", "1,2,3"], labelled=True, target="y"
    )
    assert second(tmp_path, ["Y,h,w", "s,1,2"], labelled=True, target="y").labels == ("s",)


# ---- tables in memory ----


def test_a_table_in_memory_is_read_as_a_file_is(tmp_path):
    lines = ["age,sex,seen,k", "31,f,2024-03-01,a", "33,m,2024-03-02,b", "35,f,,a"]
    encoding = full(tmp_path, lines).encoding
    rules = TableRules(encoding=encoding)
    file = write(tmp_path, ["sex,age,seen", "m,,2024-03-05", "d,1.5,"], "o.csv")
    expected = read_csv(file, rules, labelled=False)
    rows = [[None, "m", np.datetime64("2024-03-05")], [1.5, "d", float("nan")]]
    columns = {"SEX": ["m", "d"], "age": [None, 1.5], "seen": ["2024-03-05", None]}
    mappings = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for source in (rows, columns, mappings, Frame(columns)):
        result = read_csv(source, rules, labelled=False)
        np.testing.assert_array_equal(result.features, expected.features)
        assert result.notes == expected.notes
    for wrong, match in (
        ({"sex": ["m"], "age": [1]}, "dict has no column 'seen'"),
        ({"sex": ["m", "f"], "age": [1], "seen": ["", ""]}, "the dict is no table"),
        ([1, 2], "the list is no table"),
    ):
        data_error(match, read_csv, wrong, rules, labelled=False)


# ---- labels and missing cells ----


def test_labels_that_are_no_classes_are_refused_or_said(tmp_path):
    lines = ["a,k", *(f"{i % 3},{100 + i}" for i in range(16))]
    refused(tmp_path, "16 different labels in 16 rows.*predicts='quantities'", lines)
    stamps = ["a,k", *(f"{i % 3},{1_700_000_000 + i // 3}" for i in range(4000))]
    refused(tmp_path, "1334 different labels", stamps)

    def arrays(y):
        np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).random((len(y), 2)), y=y)
        return load(str(tmp_path / "a.npz"))[0]

    numbers = np.arange(100)
    assert arrays(numbers % 10 + 1).notes == ("y: no sample of class 0; number the classes from 0",)
    assert arrays(numbers % 10).notes == ()
    for y in (numbers % 10 * 10, numbers + 1_700_000_000, numbers[:16] + 1):
        data_error(r"a.npz: y has \d+ different labels", arrays, y)
    data_error(
        r"y has a 1 in each row and else 0; .*y.argmax\(1\)",
        lambda: arrays(np.eye(3, dtype=int)[numbers % 3]),
    )
    assert arrays(np.eye(3, dtype=int)[numbers % 3] | 1).classes == 2
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 3, 8, 8), "u1"), y=numbers[:9] % 3)
    assert "if the channels are first" in load(str(tmp_path / "a.npz"))[0].notes[0]
    data_error(
        "does not count is -1, nnmpi.data.IGNORED",
        Dataset,
        "d",
        np.ones((2, 3), "f4"),
        np.array([[0, -100], [1, 0]]),
        5,
    )


def test_missing_cells_become_what_the_training_rows_say(tmp_path):
    lines = ["a,k", *(f"{'' if i % 5 == 0 else i},{'xy'[i % 2]}" for i in range(40))]
    train, _ = load(str(write(tmp_path, lines)), seed=3)
    known = [i for i in split_indices(40, 0.2, 3)[0] if i % 5]
    assert train.encoding[0].fill == np.median(known) != np.median([i for i in range(40) if i % 5])


# ---- words and other files ----


def test_words_of_scripts_without_spaces_are_pairs(tmp_path):
    assert split_words("好看的电影 Good") == {"好看", "看的", "的电", "电影", "good"}
    assert split_words("の") == {"の"}
    assert split_words("हिन्दी में, é") == {"हिन्दी", "में", "é"}
    assert "ไท" in split_words("ภาษาไทย") and len(split_words("ภาษาไทย")) == 6
    text = [f"{['这部电影非常好看', '这部电影太难看了'][i % 2]},{i % 2}" for i in range(20)]
    data = full(tmp_path, ["review,k", *text], text_columns=("review",))
    assert {"review~好看", "review~难看"} <= {*data.columns}
    refused(
        tmp_path,
        "no word of column 'review' occurs in 2 rows",
        ["review,k", "one two,0", "three four,1"],
        text_columns=("review",),
    )


@pytest.mark.parametrize(
    "suffix", [*sorted({*READERS} - {"jsonl"}), "csv.bz2", "csv.zip", "dat", "tar.xz", "fits"]
)
def test_other_files_are_refused_with_the_code_that_reads_them(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"PAR1")
    with pytest.raises(
        UsageError, match=r"a\..* files are not read; .*(pandas|numpy)\..*Loader\("
    ) as raised:
        load(str(path))
    assert READERS.get(suffix, "pandas.read_csv(").partition("(")[0] in str(raised.value)
    assert repr(str(path)) in str(raised.value) and "\n" not in str(raised.value)
