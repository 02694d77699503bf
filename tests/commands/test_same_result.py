"""A result does not depend on its neighbours: each sample's is bit for bit the same alone, in any
company and order, from a file and from Python.
"""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

import nnmpi
from nnmpi import data
from nnmpi.base.errors import DataError
from nnmpi.commands.evaluate import main as evaluate
from nnmpi.commands.predict import main as predict
from nnmpi.train.signature import ModelSignature

Draw = np.random.Generator


def asked(said, folder, files, ranks=1):
    """Return the probabilities that the command prints for files, in float32."""
    words = " ".join(map(str, files))
    answer = json.loads(said(predict, f"{folder} {words} --format json", ranks))
    return np.array([sample["probabilities"] for sample in answer["samples"]], "f4")


def companies(draw, count):
    """Return each sample alone, and draws of samples in any order and number."""
    some = [draw.permutation(count)[: draw.integers(1, count + 1)].tolist() for _ in range(8)]
    return [*([i] for i in range(0, count, 7)), *some, [0] * 20]


def check(draw, count, right, ask):
    for places in companies(draw, count):
        np.testing.assert_array_equal(ask(places), right[places], strict=True)


# ---- images ----


@pytest.fixture
def pictures():
    draw = np.random.default_rng(1)
    x = draw.integers(0, 256, (40, 28, 28)).astype("u1")
    x[::5] = draw.integers(0, 2, (8, 28, 28))  # nearly black ones: they are bytes, too
    x[7] = 0
    return x


@pytest.mark.parametrize(
    "model", ["cnn --hidden 8", "mlp --dtype float64", "mlp --no-normalize --hidden 128"]
)
def test_images(tmp_path, run, said, pictures, model):
    draw, y = np.random.default_rng(0), np.arange(40) % 3
    np.savez(tmp_path / "a.npz", x=pictures, y=y)
    folder, _ = run(f"--dataset {tmp_path}/a.npz --model {model}")
    model_ = nnmpi.load(folder)
    right = model_.predict(pictures)
    for kind in ("u1", "i2", "i8", "u4"):
        check(draw, 40, right, lambda some, kind=kind: model_.predict(pictures[some].astype(kind)))
    check(draw, 40, right, lambda some: model_.predict(json.loads(str(pictures[some].tolist()))))
    matrices = []
    for kind in ("u1", "i8"):
        np.savez(tmp_path / "b.npz", x=pictures.astype(kind), y=y)
        words = f"{folder} --dataset {tmp_path}/b.npz --part train --json"
        matrices.append(json.loads(said(evaluate, words))["confusion"])
        for some in ([3], [5], [10, 9, 8, 5, 0]):
            np.savez(tmp_path / "c.npz", x=pictures[some].astype(kind))
            found = asked(said, folder, [tmp_path / "c.npz"])
            np.testing.assert_array_equal(found, right[some].astype("f4"))
    assert matrices[0] == matrices[1]
    # floats: by their own values alone, or refused
    bright = [i for i in range(40) if pictures[i].max() > 1]
    check(
        draw, len(bright), right[bright], lambda some: model_.predict(pictures[bright][some] / 1.0)
    )
    for others in ([5], [5, 1, 2]):
        with pytest.raises(DataError, match=r"samples\[0\] is from 0 to 1.*give bytes as integers"):
            model_.predict(pictures[others].astype("f4"))


def test_the_rule_of_a_run_tells_bytes_from_scaled_floats():
    """Digits' 16 is white, so that 15.0 is a byte; of bytes that are not scaled all is the same."""
    train = data.load("digits")[0]
    dark = np.minimum(train.x[:20], 15)
    for scale, floats in ((1 / 16, dark / 1.0), (1 / 16, dark / 16), (1.0, dark / 1.0)):
        signature = ModelSignature.of(replace(train, scale=scale), None)
        np.testing.assert_array_equal(signature.scaled(floats), dark * np.float32(scale))


# ---- tables ----


def rows(draw, count):
    """Return a table as people have it: decimal commas, dates, texts, codes, gaps, big numbers."""
    header = ["Id", "Preis", "Code", "Tag", "Farbe", "Notiz", "Menge"]
    result = []
    for _ in range(count):
        price = f"{draw.integers(1, 3000)},{draw.integers(0, 99):02}"
        cells = [
            str(1_700_000_000 + draw.integers(0, 10**9)),
            price if draw.random() < 0.9 else "",
            str(draw.choice(["007", "7", "A1", "1e2"])),
            f"2024-03-{draw.integers(1, 28):02}" if draw.random() < 0.9 else "NA",
            str(draw.choice(["rot", "grün", "blau", ""])),
            str(draw.choice(["sehr gut", "nicht gut", "schlecht", "好看的电影"])),
            str(draw.choice(["1000", "20", "3,5"])),
        ]
        result.append(cells)
    return header, result


def write(file, lines):
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter=";").writerows(lines)
    return file


def test_tables(tmp_path, run, said):
    draw = np.random.default_rng(2)
    header, table = rows(draw, 80)
    labelled = [[*header, "Ziel"], *([*row, "ny"[i % 2]] for i, row in enumerate(table))]
    write(tmp_path / "a.csv", labelled)
    words = f"--dataset {tmp_path}/a.csv --model mlp --hidden 8 --target Ziel --text-columns Notiz"
    folder, _ = run(words)
    model = nnmpi.load(folder)
    table = table[:40]
    right = asked(said, folder, [write(tmp_path / "b.csv", [header, *table])], 2)
    assert len({*map(bytes, right)}) > 30, "different rows"

    def columns(some, order=range(7)):
        return {header[k].upper(): [table[i][k] for i in some] for k in order}

    with pytest.warns(UserWarning, match="missing number|not seen"):
        check(draw, 40, right, lambda some: model.predict([table[i] for i in some]))
        check(draw, 40, right, lambda some: model.predict(columns(some, draw.permutation(7))))
        names = [dict(zip(header, row, strict=True)) for row in table]
        check(draw, 40, right, lambda some: model.predict([names[i] for i in some]))
    for some in companies(draw, 40)[-4:]:
        order = draw.permutation(7).tolist()
        lines = [[row[k] for k in order] for row in [header, *(table[i] for i in some)]]
        found = asked(said, folder, [write(tmp_path / "c.csv", lines)])
        np.testing.assert_array_equal(found, right[some])
        bare = write(tmp_path / "c.csv", [table[i] for i in some])
        found = asked(said, folder, [bare, "--no-header", "--decimal", ","])
        np.testing.assert_array_equal(found, right[some])


def test_numbers_of_python_are_those_of_the_file(tmp_path, run, said):
    """Also of pandas, where it is installed; and in a table without names."""
    draw = np.random.default_rng(3)
    x = np.round(draw.normal(size=(60, 3)) * [1, 1e5, 1e-3], 6)
    lines = [",".join(map(repr, row)) + f",{'ab'[i % 2]}" for i, row in enumerate(x.tolist())]
    for name, header in (("named", ["u,v,w,k"]), ("bare", [])):
        file = tmp_path / f"{name}.csv"
        file.write_text("\n".join([*header, *lines]) + "\n")
        words = "" if header else "--no-header"
        folder, _ = run(f"--dataset {file} --model mlp --hidden 8 {words}", tmp_path / name)
        model = nnmpi.load(folder)
        right = asked(said, folder, [file])
        check(draw, 60, right, lambda some, model=model: model.predict(x[some]))
        check(draw, 60, right, lambda some, model=model: model.predict(x[some].tolist()))
        if header:
            pandas = pytest.importorskip("pandas")
            frame = pandas.DataFrame({"W": x[:, 2], "u": x[:, 0], "extra": "?", "v": x[:, 1]})
            check(draw, 60, right, lambda some, of=frame, model=model: model.predict(of.iloc[some]))


# ---- texts ----


def test_tokens(tmp_path, run, said):
    """Of a model of one's own that classifies sequences."""
    draw = np.random.default_rng(4)
    (tmp_path / "m.py").write_text(
        "from nnmpi import nn\n"
        "def model(shape, classes):\n"
        "    return nn.Sequential(nn.Embedding(11, 6), nn.Flatten(), nn.Linear(shape[0] * 6,"
        " classes))\n"
    )
    x = draw.integers(0, 11, (40, 9)).astype("u2")
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 3)
    words = f"--dataset {tmp_path}/a.npz --model {tmp_path}/m.py:model"
    folder, _ = run(words)
    model = nnmpi.load(folder, trust=True)
    right = model.predict(x)
    for kind in ("u2", "i8", "u1"):
        check(draw, 40, right, lambda some, kind=kind: model.predict(x[some].astype(kind)))
    np.savez(tmp_path / "b.npz", x=x[[7, 3]].astype("i4"))
    (found,) = [json.loads(said(predict, f"{folder} {tmp_path}/b.npz --trust --format json"))]
    np.testing.assert_array_equal(
        np.array([sample["probabilities"] for sample in found["samples"]], "f4"), right[[7, 3]]
    )
