"""What a run has left is used: loaded, evaluated and asked, under every layout with what training
printed.
"""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import nnmpi
from nnmpi import NnmpiError, data, simulate
from nnmpi.base.errors import CheckpointError, DataError, DivergenceError, UsageError
from nnmpi.commands.evaluate import main as evaluate
from nnmpi.commands.export import main as export
from nnmpi.commands.predict import main as predict
from nnmpi.data.dataset import as_yes_or_no
from nnmpi.lab.report import main as report
from nnmpi.models.torch_weights import read_torch, save_arrays, to_torch
from nnmpi.train.cli import main as train
from nnmpi.train.evaluating import match_samples
from tests.harness.commands import on_ranks
from tests.harness.refusals import data_error, refuses, usage_error

TABLE = [[float(i % 7), float(i % 5), float(i % 3)] for i in range(60)]


def files(folder):
    """Return a data set of each kind: images of bytes, a table with names, a text."""
    draw = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (draw.integers(0, 60, (60, 8, 6)) + 90 * np.eye(3, 48)[y].reshape(60, 8, 6)).astype(
        np.uint8
    )
    result = {name: folder / f"{name}" for name in ("images.npz", "table.csv", "text.txt")}
    np.savez(result["images.npz"], x=x, y=y)
    names = ("oak", "ash", "elm")
    rows = [",".join(map(str, [*row, names[i % 3]])) for i, row in enumerate(TABLE)]
    result["table.csv"].write_text("\n".join(["a,b,c,tree", *rows]) + "\n")
    result["text.txt"].write_text("to be or not to be, that is the question\n" * 12)
    return result


@pytest.mark.parametrize(
    "name, options",
    [
        ("images.npz", "--model cnn --hidden 8"),
        ("table.csv", "--model mlp --hidden 6 --dtype float64 --dropout 0.5"),
        ("text.txt", "--model lstm --features 8 --text-samples sentences"),
        ("text.txt", "--model gpt --features 8 --heads 2 --context 12 --layers 1"),
    ],
)
def test_evaluate_says_what_training_printed(tmp_path, run, said, name, options):
    """On one rank and several, by their replicas, pipelines and shards."""
    folder, printed = run(f"--dataset {files(tmp_path)[name]} {options}")
    layouts = [(1, ""), (3, ""), (2, "--pp 2"), (4, "--tp 2"), (2, "--sp 2"), (4, "--pp 2 --sp 2")]
    for ranks, layout in layouts[: 3 if "lstm" in options else 6 if "gpt" in options else 4]:
        result = said(evaluate, f"{folder} --backend numpy {layout}", ranks)
        assert printed.partition(" (")[0] in result, layout
        losses = [float(re.findall(r"loss ([0-9.]+)", text)[0]) for text in (printed, result)]
        # float32's rounding may show in the last digit
        assert abs(losses[0] - losses[1]) < 1.5e-4, layout


def test_bytes_are_scaled_as_the_runs_own(tmp_path, run, said):
    """Digits are multiplied by 1/16, and those of a file of bytes by 1/255."""
    folder, printed = run("--dataset digits --model mlp --hidden 8")
    _, test = data.load("digits")
    np.savez(tmp_path / "same.npz", x_train=test.x, y_train=test.y, x_test=test.x, y_test=test.y)
    assert printed in said(evaluate, f"{folder} --dataset {tmp_path}/same.npz --backend numpy")


def test_pixels_have_one_scale_in_every_command(tmp_path, run, said):
    """Bytes as whole numbers of another dtype, and scaled ones, are the same samples; others are
    refused. A model of other numbers takes no bytes.
    """
    bytes_ = files(tmp_path)["images.npz"]
    folder, _ = run(f"--dataset {bytes_} --model mlp --hidden 8")
    x, y = np.load(bytes_)["x"], np.load(bytes_)["y"]
    evaluated = "loss \\d[0-9.]*"
    forms = {"whole": x.astype("int64"), "float": x.astype("float64"), "scaled": x / 255}
    results, losses = [], []
    for name, values in {"bytes": x, **forms}.items():
        file = tmp_path / f"{name}.npz"
        np.savez(file, x_train=values, y_train=y, x_test=values, y_test=y)
        np.savez(tmp_path / "only.npz", x=values)
        results.append(said(predict, f"{folder} {tmp_path}/only.npz"))
        text = said(evaluate, f"{folder} --dataset {file} --backend numpy")
        losses += re.findall(evaluated, text)
    assert len(set(losses)) == 1 and len(losses) == 4
    numbers = [
        [list(map(float, row.split(",")[1:])) for row in text.splitlines()[1:]] for text in results
    ]
    np.testing.assert_allclose(numbers, [numbers[0]] * 4, rtol=1e-4)
    for values in (x / 255 - 0.5, x * 2.0, x / 2):
        np.savez(tmp_path / "other.npz", x=values, y=y)
        for command, words in ((predict, ""), (evaluate, "--backend numpy --dataset")):
            data_error(
                "but the model's were bytes, and then from 0 to 1",
                said,
                command,
                f"{folder} {words} {tmp_path}/other.npz",
            )
    learned = tmp_path / "learned.npz"
    np.savez(learned, x=x / 255, y=y)
    folder, _ = run(f"--dataset {learned} --model mlp --hidden 8", tmp_path / "floats")
    for command, words in ((predict, ""), (evaluate, "--backend numpy --dataset")):
        data_error(
            "are bytes, but learned had float32 ones", said, command, f"{folder} {words} {bytes_}"
        )


def test_what_learned_from_a_table_of_texts_is_evaluated_on_a_plain_one(tmp_path, run, said):
    """By the run and by the files that it leaves for others, which know of no steps."""
    text, table = files(tmp_path)["text.txt"], tmp_path / "sums.csv"
    table.write_text(
        "problem,solution\n" + "".join(f"what is {i} and {i}?,{2 * i}\n" for i in range(30))
    )
    words = (
        "--model gpt --features 8 --heads 2 --context 12 --layers 1 --tokenizer bytes"
        " --text-columns"
    )
    folder, _ = run(f"--dataset {table} {words} problem,solution")
    result = [
        said(evaluate, f"{item} --dataset {text} --backend numpy")
        for item in (folder, folder / "model")
    ]
    assert " on text, with the weights after step 2 of " in result[0]
    assert result[1].strip() == result[0].strip().replace(" after step 2", "") + "/model"


def test_what_learned_from_a_plain_text_is_evaluated_on_a_table(tmp_path, run, said):
    """By columns of its own, as the run had none; or other ones than the run's."""
    text, table = files(tmp_path)["text.txt"], tmp_path / "sums.csv"
    table.write_text(
        "problem,solution\n" + "".join(f"what is {i} and {i}?,{2 * i}\n" for i in range(30))
    )
    same = tmp_path / "problems.jsonl"
    same.write_text(
        "".join(json.dumps({"problem": f"what is {i} and {i}?"}) + "\n" for i in range(30))
    )
    words = "--model gpt --features 8 --heads 2 --context 12 --layers 1 --tokenizer bytes"
    folder, _ = run(f"--dataset {text} {words}")
    usage_error(
        "name its columns with --text-columns",
        said,
        evaluate,
        f"{folder} --dataset {table} --backend numpy",
    )
    result = [
        said(evaluate, f"{folder} --dataset {file} --text-columns problem --backend numpy", ranks)
        for file, ranks in ((table, 1), (same, 2))
    ]
    assert result[0].replace(" sums, ", " problems, ") == result[1]
    usage_error(
        "has no columns", said, evaluate, f"{folder} --text-columns problem --backend numpy"
    )


def test_a_loaded_run_predicts_what_the_command_says(tmp_path, run, said):
    """Its model, classes and transformation; the same from a table, from JSON, and on two ranks."""
    data = files(tmp_path)["table.csv"]
    folder, printed = run(f"--dataset {data} --model mlp --hidden 6")
    result = nnmpi.load(folder)
    assert result.class_names == ("ash", "elm", "oak")
    x = np.array(TABLE, np.float32)
    logits = result.model(result.transform(x)).numpy()
    assert abs(result.transform(x).mean()) < 0.3
    probabilities = result.predict(x)
    assert np.allclose(probabilities.sum(axis=1), 1)
    assert (probabilities.argmax(1) == logits.argmax(1)).all()
    usage_error("a masked array", lambda: result.predict(np.ma.asarray(x)))
    lines = said(predict, f"{folder} {data}").splitlines()
    assert lines[0] == "class,ash,elm,oak" and len(lines) == 61
    assert [line.partition(",")[0] for line in lines[1:]] == [
        result.class_names[i] for i in logits.argmax(1)
    ]
    values = json.loads(said(predict, f"{folder} {data} --format json --pp 2", 2))
    assert np.allclose(
        [row["probabilities"] for row in values["samples"]], probabilities, atol=1e-6
    )
    assert repr(result) == f"Run({str(folder)!r}: mlp on table, after {result.step} steps)"


def test_results_that_a_full_disk_lost(tmp_path, run, monkeypatch):
    data = files(tmp_path)["table.csv"]
    folder, _ = run(f"--dataset {data} --model mlp --hidden 6")
    whole = str(folder)
    for program, words in (
        (predict, [whole, str(data)]),
        (evaluate, [whole]),
        (export, [whole]),
        (train, ["--resume", whole]),
    ):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr("sys.stdout", full)
            with pytest.raises(NnmpiError, match="could not be written: No space left"):
                simulate(partial(program, words), 2)


def test_an_image_file_is_read_as_the_data_was(tmp_path, run, said):
    """A picture of a sample's bytes gives what the sample gives; a larger one is resized, and what
    is none is named.
    """
    images = pytest.importorskip("PIL.Image")
    data = files(tmp_path)["images.npz"]
    folder, _ = run(f"--dataset {data} --model cnn --hidden 8")
    x = np.load(data)["x"]
    x[1] = x[1] > 50  # nearly black ones are bytes, too
    for name, shown in (("one", x[0]), ("black", x[1])):
        images.fromarray(shown).save(tmp_path / f"{name}.png")
        np.savez(tmp_path / "one.npz", x=shown[None])
        first = said(predict, f"{folder} {tmp_path}/one.npz")
        assert said(predict, f"{folder} {tmp_path}/{name}.png", 2) == first
    images.fromarray(255 - x[1]).convert("RGB").save(tmp_path / "dark.png")
    assert said(predict, f"{folder} {tmp_path}/dark.png --invert") == first
    (tmp_path / "no.png").write_text("no image")
    (tmp_path / "half.ppm").write_bytes(b"P6 8 6 255 x")
    # more pixels than Pillow takes, in 50 KB
    images.new("1", (20000, 20000)).save(tmp_path / "huge.png")
    for name in ("no.png", "half.ppm", "huge.png"):
        data_error(
            f"{name}: cannot be read as an image", said, predict, f"{folder} {tmp_path}/{name}"
        )
    data_error(
        "do not fit a model that takes", said, predict, f"{folder} {files(tmp_path)['table.csv']}"
    )


def test_the_best_weights_stay(tmp_path, said):
    """With --keep-best, whichever is the last; and the metadata says what they are."""
    data = files(tmp_path)["table.csv"]
    out = tmp_path / "run"
    words = (
        f"--dataset {data} --model mlp --hidden 6 --epochs 6 --lr 0.3 --save-every 3 --keep-best"
        f" --out {out}"
    )
    on_ranks(train, words)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    scores = {
        record["global_step"]: record["accuracy"] for record in records if record["kind"] == "eval"
    }
    best = max(scores, key=lambda step: (scores[step], -step))
    result = json.loads(said(evaluate, f"{out} --best --json"))
    assert (result["step"], result["accuracy"]) == (best, scores[best])


def test_a_tables_columns_are_found_by_their_names(tmp_path, run, said):
    """In another order they mean the same, the label's, too; a missing one is named; without a
    header, the order counts.
    """
    data = files(tmp_path)["table.csv"]
    moved, other, bare = (tmp_path / f"{name}.csv" for name in ("moved", "other", "bare"))
    folder, _ = run(f"--dataset {data} --model mlp --hidden 6")
    a, b, c, tree = zip(*(line.split(",") for line in data.read_text().splitlines()), strict=True)
    moved.write_text("".join(",".join(cells) + "\n" for cells in zip(tree, c, a, b, strict=True)))
    other.write_text(
        "".join(",".join(cells) + "\n" for cells in zip(("d", *c[1:]), a, b, tree, strict=True))
    )
    words = f"{folder} --part train --dataset"
    right, result = (said(evaluate, f"{words} {file}") for file in (data, moved))
    assert result.replace("moved", "table") == right
    bare.write_text("\n".join(data.read_text().splitlines()[1:]))
    data_error("has no column 'a'; .*give --no-header", said, evaluate, f"{words} {bare}")
    result = said(evaluate, f"{words} {bare} --no-header")
    np.savez(tmp_path / "p.npz", x=np.ones((2, 3), "f4"))
    for command, file in ((evaluate, "--dataset iris"), (predict, tmp_path / "p.npz")):
        bad = f"{folder} {file} --no-header"
        usage_error("is no table; leave --header out", said, command, bad)
    note = "bare: the columns are taken in the order of the training table\n"
    assert note in result
    assert result.replace(note, "").replace("bare", "table") == right
    data_error(
        r"other\.csv has no column 'c'; the model needs a, b, c", said, evaluate, f"{words} {other}"
    )
    of_one_class = [
        line for line in moved.read_text().splitlines() if line.startswith((tree[0], tree[1]))
    ]
    other.write_text("\n".join(of_one_class))
    text = said(evaluate, f"{folder} --dataset {other} --json")
    matrix = json.loads(text)["confusion"]
    assert [bool(sum(row)) for row in matrix].count(True) == 1
    printed = said(evaluate, f"{folder} --dataset {other}").partition("true class")[2]
    rows = [line.split()[-len(matrix) :] for line in printed.splitlines()[1 : 1 + len(matrix)]]
    assert [[int(count) for count in row] for row in rows] == matrix


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ranks", [1, 3])
def test_predictions_that_are_not_finite_are_no_predictions(tmp_path, run, said, value, ranks):
    """NaN in the samples or the weights has no class; ReLU would hide that of infinity."""
    table = files(tmp_path)["table.csv"]
    folder, _ = run(f"--dataset {table} --model mlp --hidden 6")
    np.savez(tmp_path / "p.npz", x=np.array([[1, 2, 3], [1, value, 3]], "f4"))
    data_error(
        r"p.npz: samples\[1, 1\] is -?(nan|inf), which is no finite",
        said,
        predict,
        f"{folder} {tmp_path}/p.npz",
        ranks,
    )
    arrays = to_torch(nnmpi.load(folder).model, np.zeros((1, 3), "f4"))
    first, *_ = arrays
    arrays[first] = np.full_like(arrays[first], np.nan)
    weights = tmp_path / "nan.safetensors"
    save_arrays(weights, arrays)
    for main, words in ((evaluate, ""), (predict, f"{table} --format json"), (predict, f"{table}")):
        refuses(
            DivergenceError,
            r"outputs for \d+ of \d+ samples are not finite",
            said,
            main,
            f"{folder} {words} --weights {weights}",
            ranks,
        )
    assert not (folder / "evaluation.json").exists()


def test_a_loss_that_overflows_is_said(tmp_path, run, said):
    """The report stays as good as it was."""
    for name, factor in (("n", 1), ("big", 1e30)):
        rows = "".join(f"{i},{i * factor}\n" for i in range(1, 31))
        (tmp_path / f"{name}.csv").write_text(f"a,y\n{rows}")
    folder, _ = run(f"--dataset {tmp_path}/n.csv --loss mse --model mlp --hidden 4")
    refuses(
        DivergenceError,
        "the loss on big is inf: its targets are too far",
        said,
        evaluate,
        f"{folder} --dataset {tmp_path}/big.csv",
        2,
    )
    report([str(folder)])


MIXED = "id,kind,size,when,note,leaf,price\n" + "".join(
    f"{i},{'elm' if i % 3 else 'oak'},{i % 7 or 'NA'},2024-03-{1 + i % 28:02},"
    f"{'green and tall' if i % 2 else 'dry or dead'} {i},{'TRUE' if i % 2 else 'FALSE'},"
    f"{'high' if i % 2 else 'low'}\n"
    for i in range(60)
)


def test_a_run_keeps_the_rules_of_its_table(tmp_path, run, said):
    """For evaluate, predict and export: of a file in another order, without what nobody needs."""
    data, other = tmp_path / "mixed.csv", tmp_path / "other.csv"
    data.write_text(MIXED)
    words = f"--dataset {data} --model mlp --hidden 6 --text-columns note --target price"
    folder, printed = run(words)
    assert printed.partition(" (")[0] in said(evaluate, str(folder), 2)
    rows = [line.split(",") for line in MIXED.splitlines()]
    other.write_text(
        "".join(",".join(row[place] for place in (4, 6, 3, 2, 1, 5)) + "\n" for row in rows)
    )
    right, moved = (
        said(evaluate, f"{folder} --part train --dataset {file}") for file in (data, other)
    )
    assert moved == right.replace("mixed", "other")
    elms = [line for line in MIXED.splitlines() if ",oak," not in line and "NA" not in line]
    other.write_text("\n".join(elms))  # of which no rules with oaks could be made
    assert " right on other" in said(evaluate, f"{folder} --dataset {other}")
    right = said(predict, f"{folder} {data}")
    other.write_text("".join(",".join(row[1:6]) + "\n" for row in rows))
    assert said(predict, f"{folder} {other}", 2) == right, "a target is not needed"
    other.write_text("kind,size,when,note,leaf\nash,1,2024-03-01,green,TRUE\n")
    said(predict, f"{folder} {other}")
    header, first, *_ = right.splitlines()
    both = said(predict, f"{folder} {data} {other}").splitlines()
    assert both[:2] == [f"file,{header}", f"{data},{first}"] and both[-1].startswith(str(other))
    assert len(both) == 62
    other.write_text("kind,size,note,leaf\nash,1,green,TRUE\n")
    data_error(r"other\.csv has no column 'when'", said, predict, f"{folder} {other}")


def test_a_loaded_tables_run_takes_rows_as_rows_and_pictures_as_pictures(tmp_path, capfd):
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (20, 2, 2, 1))
    lines = [
        "a,b,c,d,y",
        *(f"{','.join(map(str, row.ravel()))},{i % 2}" for i, row in enumerate(x)),
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    words = f"--dataset {tmp_path / 't.csv'} --model mlp --max-steps 2 --quiet --out {tmp_path}"
    for shape, name in ((" --sample-shape 2,2,1", "/images"), ("", "/rows")):
        simulate(partial(train, (words + name + shape).split()), 1)
        run = nnmpi.load(f"{tmp_path}{name}")
        given = x if shape else x.reshape(-1, 4)
        right = run.predict(given)
        for same in (given.tolist(), [*given], given.astype(object).tolist()):
            np.testing.assert_array_equal(run.predict(same), right)
    data_error("5 columns; the model needs a, b, c, d", run.predict, [[1, 2, 3, 4, 5]])
    # numbers of classes with names
    named = [
        "a,b,c,d,y",
        *(f"{','.join(map(str, row.ravel()))},{'st'[i % 2]}" for i, row in enumerate(x)),
    ]
    (tmp_path / "t.csv").write_text("\n".join(named))
    simulate(partial(train, f"{words}/named".split()), 1)
    np.savez(tmp_path / "n.npz", x=x.reshape(-1, 4).astype("f4"), y=np.arange(20) % 2)
    capfd.readouterr()
    simulate(
        lambda group: evaluate([f"{tmp_path}/named", "--dataset", f"{tmp_path / 'n.npz'}"], group),
        1,
    )
    assert "labels are numbers of the model's classes, 0 for 's'" in "".join(capfd.readouterr())
    signature = replace(run.signature, class_names=(), classes=3)
    for labels, note in (("12", 0), ("st", 1)):
        (tmp_path / "t.csv").write_text(f"a,b,c,d,y\n1,2,3,4,{labels[0]}\n5,6,7,8,{labels[1]}\n")
        rows = data.load(str(tmp_path / "t.csv"), target="y", encoding=signature.encoding)[0]
        matched = match_samples(signature, rows)
        assert ("0 is taken for 's'" in str(matched.notes)) == note
        assert matched.y.tolist() == ([0, 1] if note else [1, 2])[: len(rows)]
    rows = data.Dataset("d", np.zeros((2, 4)), [0, 1], 2, class_names=("true", "0"))
    for names in (("0", "1"), ("False", "True"), ()):
        matched = match_samples(replace(signature, class_names=names, classes=2), rows)
        assert matched.y.tolist() == [1, 0]
    # yes or no, in a file of one of them
    signature = replace(signature, class_names=("s", "t"), classes=2, predicts="yes-or-no")
    for number, name in enumerate("st"):
        rows = data.Dataset("d", np.zeros((2, 4)), [0, 0], 1, class_names=(name,))
        matched = match_samples(signature, as_yes_or_no(rows))
        assert (matched.y.tolist(), matched.notes) == ([number] * 2, ())


def test_a_table_of_pixels_is_images(tmp_path, run, said):
    """Bytes, as in training, and images themselves may be predicted, a folder of them, too."""
    from PIL import Image

    x = (np.arange(60)[:, None] * np.arange(16) % 256).astype(np.uint8)
    rows = (",".join(map(str, [*row, i % 3])) for i, row in enumerate(x))
    data = tmp_path / "pixels.csv"
    data.write_text("\n".join([",".join([*(f"p{i}" for i in range(16)), "k"]), *rows]) + "\n")
    words = f"--dataset {data} --model cnn --hidden 8 --sample-shape 4,4,1"
    folder, printed = run(words)
    assert printed.partition(" (")[0] in said(evaluate, str(folder))
    for number in (3, 5):
        (tmp_path / "digits" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[number].reshape(4, 4)).save(tmp_path / "digits" / "a" / f"{number}.png")
    table = said(predict, f"{folder} {data}").splitlines()
    images = said(predict, f"{folder} {tmp_path / 'digits'}").splitlines()
    assert [line.partition(",")[2] for line in images[1:]] == [table[4], table[6]]
    usage_error(
        "has neither tables nor images", said, predict, f"{folder} {folder / 'checkpoints'}"
    )


def test_what_cannot_be_used(tmp_path, run, said):
    """A sentence each, on all ranks."""
    data = files(tmp_path)
    folder, _ = run(f"--dataset {data['table.csv']} --model mlp --hidden 6")
    for main, words, kind, sentence in (
        (
            evaluate,
            f"{folder} --best",
            CheckpointError,
            "has no best checkpoint; train with --keep-best",
        ),
        (
            evaluate,
            f"{folder} --dataset {data['images.npz']}",
            DataError,
            r"images has samples of shape \(8, 6, 1\)",
        ),
        (evaluate, "--best", UsageError, "give RUN first"),
        (evaluate, f"{folder} --sp 2", UsageError, "--model mlp has none"),
        (predict, f"{folder} {tmp_path}/gone.npz", UsageError, "there is no file"),
        (evaluate, f"{tmp_path}", UsageError, "there is no run"),
    ):
        refuses(kind, sentence, said, main, words, 2)


def test_weights_go_to_pytorch_and_come_back(tmp_path, run, said):
    """As a file, from which every layout reads; of another model it is refused."""
    folder, printed = run(f"--dataset {files(tmp_path)['images.npz']} --model cnn --hidden 8")
    assert "8 arrays" in said(export, f"{folder} --out {tmp_path}/there.safetensors", 2)
    for ranks, layout in ((1, ""), (2, "--pp 2"), (2, "--tp 2")):
        words = f"{folder} --weights {tmp_path}/there.safetensors --backend numpy {layout}"
        result = said(evaluate, words, ranks)
        assert printed.partition(" (")[0] in result
        assert result.rstrip().endswith(f", with the weights of {tmp_path}/there.safetensors")
        assert f'"weights": "{tmp_path}/there' in said(evaluate, f"{words} --json", ranks)
    assert not (Path(folder) / "evaluation.json").exists()  # the page shows it as the run's own
    again = f"{folder} --weights {tmp_path}/there.safetensors --out {tmp_path}/again.safetensors"
    said(export, again)
    there, back = (read_torch(tmp_path / f"{name}.safetensors") for name in ("there", "again"))
    assert there.keys() == back.keys() and all((there[name] == back[name]).all() for name in there)
    usage_error(
        r"missing/there cannot be written \(No such file or directory\)",
        said,
        export,
        f"{folder} --out {tmp_path}/missing/there",
    )
    usage_error(
        r"net\.pt must end in \.safetensors", said, export, f"{folder} --out {tmp_path}/net.pt"
    )
    refuses(
        CheckpointError,
        "cannot be read as safetensors",
        said,
        evaluate,
        f"{folder} --weights {folder}/config.json",
        2,
    )


def test_the_folder_says_how_it_came_about(tmp_path, said, monkeypatch):
    """The commands, what was printed, and where the newest run is; one that is finished says what
    would go on.
    """
    data = files(tmp_path)["table.csv"]
    monkeypatch.chdir(tmp_path)
    words = f"--dataset {data} --model mlp --hidden 6 --epochs 1"
    printed = said(train, words, 2)
    latest = Path("runs/latest")
    assert (latest / "console.txt").read_text() == printed
    assert said(train, f"--resume {latest} --quiet") == ""
    assert (
        "finished, all 1 epochs are done; give more, such as --epochs 2"
        in (latest / "console.txt").read_text()
    )
    starts = [json.loads(line) for line in (latest / "starts.jsonl").read_text().splitlines()]
    assert [(start["ranks"], start["command"][2:]) for start in starts] == [
        (2, words.split()),
        (1, ["--resume", "runs/latest", "--quiet"]),
    ]
    assert re.search("test accuracy", said(evaluate, "runs/latest"))
