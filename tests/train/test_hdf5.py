"""Trained on an HDF5 file, read by rows, a model has the bits that it has with arrays in memory."""

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from nnmpi import data
from nnmpi.commands.evaluate import main as evaluate
from nnmpi.commands.predict import main as predict
from nnmpi.train import inputs
from nnmpi.train.cli import main as train
from nnmpi.train.metrics import read_metrics
from tests.harness.commands import on_ranks
from tests.harness.refusals import data_error, usage_error
from tests.train.jobs import arrays

DRAW = np.random.default_rng(0)
BYTES = DRAW.integers(0, 256, (90, 8, 8, 1), dtype=np.uint8)
FIELDS = DRAW.normal(size=(90, 8, 8, 2)) * 3
SETS = {
    "pictures": {"x": BYTES, "y": np.arange(90) % 3},
    "parts": {
        "x_train": BYTES[:60],
        "y_train": np.arange(60) % 3,
        "X_val": BYTES[60:],
        "Y_val": np.arange(30) % 3,
    },
    "fields": {"x": FIELDS, "y": FIELDS[..., :1] * 2 + FIELDS[..., 1:] + 100},
}
PACKED = {"compression": "gzip", "shuffle": True}


def across(shape):
    return tuple(min(size, most) for size, most in zip(shape, (11, 3, 5, 2), strict=False))


WAYS = {
    "in one piece": lambda shape: {},
    "in chunks": lambda shape: {"chunks": (7, *shape[1:]), **PACKED},
    "across": lambda shape: {"chunks": across(shape)},
}
NET = """
from nnmpi import nn


def net(sample_shape, outputs):
    channels = outputs // 64
    return nn.Sequential(
        nn.Conv2d(sample_shape[-1], 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, channels, 1)
    )
"""
PLAIN = "--batch-size 12 --epochs 2 --log-every 1"
SMALL = f"{PLAIN} --model mlp --hidden 8"
COMMANDS = {
    "pictures": f"{SMALL} --augment shift --class-weights balanced --shuffle-block 5",
    "parts": SMALL,
    "fields": f"{PLAIN} --model net.py:net --loss mse",
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    for name, values in SETS.items():
        np.savez(f"{name}.npz", **values)


def write(name, way):
    """Write a set in an HDF5 file of the same name; fields under names of their own."""
    with h5py.File(f"{name}.h5", "w", userblock_size=512) as file:
        for item, array in SETS[name].items():
            item = {"x": "flow/u", "y": "flow/p"}[item] if name == "fields" else item
            file.create_dataset(item, data=array, **WAYS[way](array.shape))
    return f"{name}.h5" + (":flow/u,flow/p" if name == "fields" else "")


def losses(folder):
    return [row["loss"] for row in read_metrics(Path(folder) / "metrics.jsonl") if "loss" in row]


def run(words, out, ranks=1):
    on_ranks(train, [*f"--backend numpy {words}".split(), "--out", out], ranks)
    return losses(out), arrays(Path(out))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETS)
def test_a_file_read_by_rows_gives_the_bits_of_memory(name, way, capfd, monkeypatch):
    path, words = write(name, way), COMMANDS[name]
    known = run(f"{words} --dataset {name}.npz", "memory", 2)
    monkeypatch.setattr(inputs, "SMALL_BYTES", 0)  # nor are small sets read ahead
    assert run(f"{words} --dataset {path}", "rows", 2) == known
    run(f"{words} --dataset {path} --stop-after 4", "broken", 2)
    moved = Path("elsewhere")
    moved.mkdir()
    shutil.move(f"{name}.h5", moved)
    capfd.readouterr()
    on_ranks(train, f"--resume broken --trust --dataset {moved}/{path}".split(), 2)
    assert (losses("broken"), arrays(Path("broken"))) == known
    said = []
    for folder, dataset in (("memory", f"{name}.npz"), ("rows", f"{moved}/{path}")):
        capfd.readouterr()
        on_ranks(evaluate, [folder, "--trust", "--dataset", dataset, "--json"], 2)
        values = json.loads(capfd.readouterr().out)
        said.append([values[key] for key in ("loss", "samples", "targets", "data")])
        on_ranks(predict, [folder, "--trust", dataset.removesuffix(",flow/p")], 1)
        said[-1].append(capfd.readouterr().out)
    assert said[0] == said[1] and said[0][-1].count("\n") > 29


@pytest.mark.parametrize("layout, ranks", [("--pp 2", 2), ("--tp 2", 2), ("--dp 2 --zero 2", 2)])
def test_layouts_read_a_file_alike(layout, ranks, monkeypatch):
    path = write("pictures", "in chunks")
    monkeypatch.setattr(inputs, "SMALL_BYTES", 0)
    for dataset, out in (("pictures.npz", "memory"), (path, "rows")):
        run(f"{PLAIN} --model mlp --hidden 8 6 --dataset {dataset} {layout}", out, ranks)
    assert (losses("rows"), arrays(Path("rows"))) == (losses("memory"), arrays(Path("memory")))


def test_a_fork_reads_the_same_rows():
    rows = data.load(write("fields", "in chunks"), predicts="quantities")[0]
    chunks = rows.x.source.source  # of the float32 of the part
    chunks.keep(1)
    expected = rows.rows(np.arange(72)).tobytes()
    child = os.fork()
    if not child:
        for _ in range(20):
            if rows.rows(np.arange(72)).tobytes() != expected:
                os._exit(1)
        os._exit(0)
    for _ in range(20):
        chunks.keep(1)
        assert rows.rows(np.arange(72)).tobytes() == expected
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "names, sentence",
    [
        (":flow,y", "flow is a group of arrays; name one: set.h5:flow/..."),
        (
            ":flow/no,y",
            "flow/no is not in the file, which holds flow/ragged, flow/words, one, pairs",
        ),
        (":flow/ragged,y", "flow/ragged is ragged, or of texts; write rows of one length"),
        (":flow/words,y", "flow/words is ragged, or of texts"),
        (":link,y", "link is not in the file"),
        (":one,y", "one is float64 .., needs rows|one is float64 ..; needs rows of real numbers"),
        (":pairs,y", "pairs is .*; needs rows of real numbers"),
        (":y,x", "set.h5: x.* and y.*; needs .n, ....? samples"),
        (":x", "holds .*; needs x and y"),
    ],
)
def test_what_is_no_rows_of_numbers_is_refused(names, sentence):
    with h5py.File("set.h5", "w") as file:
        file["x"], file["y"] = FIELDS, np.arange(90)
        file.create_dataset("flow/ragged", (3,), h5py.vlen_dtype("f4"))
        file["flow/words"] = ["a", "bc"]
        file["one"], file["link"] = 1.0, h5py.SoftLink("/nowhere")
        file["pairs"] = np.zeros(3, [("a", "f4")])
    data_error(sentence, data.load, f"set.h5{names}")


def test_other_numbers_of_names_and_other_files_are_refused():
    write("pictures", "in chunks")
    usage_error("give two names, .* or four", data.load, "pictures.h5:x,y,x")
    usage_error("data set 'none.h5:x,y': no such file", data.load, "none.h5:x,y")
    usage_error("data set 'pictures.npz:x,y': no such file", data.load, "pictures.npz:x,y")
    with h5py.File("named.h5", "w") as file:
        file["u"] = FIELDS
    data_error("named.h5: holds u; name samples .* as in named.h5:u,SAMPLES", data.load, "named.h5")


def test_a_damaged_file_is_one_sentence():
    write("pictures", "in one piece")
    whole = Path("pictures.h5").read_bytes()
    for count in (0, 600, len(whole) // 2, len(whole) - 1):
        Path("cut.h5").write_bytes(whole[:count])
        data_error("cut.h5: not a complete HDF5 file", data.load, "cut.h5")
    write("pictures", "in chunks")
    with h5py.File("pictures.h5") as file:
        where = file["x"].id.get_chunk_info(2)
    whole = bytearray(Path("pictures.h5").read_bytes())
    whole[where.byte_offset :][: where.size] = bytes(where.size)
    at = where.byte_offset
    whole[at : at + where.size] = bytes(where.size)
    Path("pictures.h5").write_bytes(whole)
    damaged = data.load("pictures.h5", seed=1)[0]
    data_error("rows of the Dataset /x cannot be read", damaged.rows, np.arange(72))


def test_an_array_that_nothing_was_written_to_has_its_fill_value():
    with h5py.File("set.h5", "w", userblock_size=512) as file:
        file.create_dataset("x", (30, 3), "f4", fillvalue=7)
        file["y"] = np.arange(30) % 3
    assert (data.load("set.h5")[0].rows(np.arange(3)) == 7).all()


def test_a_small_file_that_promises_much_is_refused():
    with h5py.File("set.h5", "w") as file:
        file.create_dataset("x", (2**40, 64), "f4", chunks=(64, 64), compression="gzip")
        file.create_dataset("y", (2**40,), "i8", chunks=(64,), compression="gzip")
    data_error("set.h5 unpacks to more than", data.load, "set.h5")
