import gzip
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from nnmpi.base.files import read_bytes
from nnmpi.data import catalogue
from nnmpi.data.catalogue import Source, download, load, prepare
from tests.data.locked import lock
from tests.harness.refusals import data_error, usage_error


def test_iris_is_the_known_table():
    train, test = load("iris")
    assert (len(train), len(test), train.classes) == (120, 30, 3)
    assert train.class_names == ("setosa", "versicolor", "virginica")
    x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
    np.testing.assert_array_equal(np.bincount(y), [50, 50, 50])
    np.testing.assert_allclose(x.mean(0), [5.843333, 3.057333, 3.758, 1.199333], rtol=1e-6)
    np.testing.assert_allclose(x[y == 1].mean(0), [5.936, 2.77, 4.26, 1.326], rtol=1e-6)


def test_digits_are_the_known_images():
    train, test = load("digits", test_fraction=0.25)
    assert (len(train), len(test), train.classes, train.sample_shape) == (1348, 449, 10, (8, 8, 1))
    assert train.x.dtype == np.uint8
    assert int(train.x.sum() + test.x.sum()) == 561718
    counts = np.bincount(train.y) + np.bincount(test.y)
    np.testing.assert_array_equal(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    assert train.rows(np.arange(len(train))).max() == 1.0


@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
def test_mnist_from_local_files(idx_folder, tmp_path, below):
    place = tmp_path / "local" / below
    place.parent.mkdir(parents=True, exist_ok=True)
    idx_folder.rename(place)
    train, test = load("mnist", tmp_path / "local")
    assert (len(train), len(test), train.class_names[9]) == (20, 10, "9")
    assert prepare("mnist", tmp_path / "local") == place


def test_nodes_that_share_a_folder_download_once_then_load(site, monkeypatch, idx_parts, own_cache):
    sources = []
    for name, content in idx_parts.items():
        packed = gzip.compress(content)
        mirrors = (site.put(f"/{name}.gz", packed),)
        sources.append(
            Source(f"{name}.gz", mirrors, len(packed), hashlib.sha256(packed).hexdigest())
        )
    monkeypatch.setitem(catalogue.SOURCES, "mnist", tuple(sources))
    data_error(r"mnist is not in .*cache/mnist; let nnmpi.data.prepare\('mnist'\)", load, "mnist")
    text = []
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda _: prepare("mnist", report=text.append), range(4)))
    assert result == [own_cache / "mnist"] * 4
    assert len(site.requests) == len(text) == 4
    assert text[0].startswith(
        f"downloading {sources[0].filename} ({sources[0].size} B) from 127.0.0.1:"
    )
    assert len(load("mnist")[0]) == 20


CONTENT = bytes(range(256)) * 2000


@pytest.mark.parametrize(
    "content, manner",
    [(CONTENT, manner) for manner in ("404", "500", "cut", "silent", "endless")]
    + [(wrong, "plain") for wrong in (CONTENT[::-1], CONTENT[:-1], CONTENT + b"x" * 5, b"")],
)
def test_what_is_wrong_sends_to_the_next_mirror(site, tmp_path, monkeypatch, content, manner):
    monkeypatch.setattr(catalogue, "STALL_S", 0.5)
    mirrors = site.put("/a/file.bin", content, manner), site.put("/b/file.bin", CONTENT)
    source = Source("file.bin", mirrors, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    data_error(
        r"file.bin \(512000 bytes\) could not be downloaded",
        lambda: download(replace(source, mirrors=mirrors[:1]), tmp_path),
    )
    assert download(source, tmp_path).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]
    assert site.requests == ["/a/file.bin"] * 2 + ["/b/file.bin"]


@pytest.mark.parametrize("function", [load, prepare])
def test_what_cannot_be_read_is_one_sentence(function, tmp_path, monkeypatch):
    for name, expected in (("mnist", "train-images-idx3-ubyte"), ("cifar10", "test_batch.bin")):
        for folder in (tmp_path, tmp_path / "none"):
            usage_error(f"data_dir {folder} lacks .*; it needs {expected}", function, name, folder)
    for name in ("iris", "digits", "table.csv"):
        usage_error("leave out data_dir", function, name, tmp_path)
    for given in (("~no-such-user/x.csv",), ("mnist", "~no-such-user/x.csv")):
        usage_error(
            "the system has no home folder ~no-such-user; give the full path$", function, *given
        )
    reason = r"cannot be read \(Permission denied\); make it readable, or give another$"
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    lock(tmp_path, monkeypatch)
    usage_error(rf"^data_dir {tmp_path} {reason}", function, "mnist", tmp_path)
    usage_error(rf"^the folder for downloads {tmp_path}/mnist {reason}", function, "mnist")
    for path in (tmp_path / "x.csv", tmp_path):
        usage_error(rf"^data set '{path}' {reason}", load, str(path))


@pytest.mark.parametrize(
    "name, text",
    [
        ("mnsit", r"'mnsit' is unknown; did you mean mnist.*\? choose one of iris, digits"),
        ("MNIST", "did you mean mnist"),
        ("fashion_mnist", "did you mean fashion-mnist"),
        ("cifar-10", "did you mean cifar10"),
        (
            "zebra",
            (
                "'zebra' is unknown; choose one of iris, digits, mnist, fashion-mnist, cifar10,"
                " paradise-lost, or the path"
            ),
        ),
        ("none.csv", "'none.csv': no such file"),
        ("some/folder", "'some/folder': no such file"),
    ],
)
def test_unknown_name_is_a_usage_error(name, text):
    for function in (load, prepare):
        usage_error(text, function, name)


def test_csv_and_npz_by_path(tmp_path):
    (tmp_path / "table.csv").write_text("a,k\n" + "".join(f"{i},{i % 2}\n" for i in range(10)))
    np.savez(tmp_path / "arrays.npz", x=np.zeros((10, 3)), y=np.arange(10))
    for name in ("table.csv", "arrays.npz"):
        train, test = load(str(tmp_path / name), test_fraction=0.3)
        assert (train.name, len(train), len(test)) == (name.split(".")[0], 7, 3)
        assert prepare(str(tmp_path / name)) == tmp_path / name


def test_other_kinds_of_file_are_refused(tmp_path):
    (tmp_path / "a.json").touch()
    usage_error(
        r"a\.json: \.json files are not read; .*read_json\(", load, str(tmp_path / "a.json")
    )


def test_images_that_lie_in_no_folder_of_a_class(tmp_path):
    """Such as Kaggle's, beside a table of their labels; or in a format that is not read."""
    for number, name in enumerate(("a.png", "train/cat.0.jpg", "cats/1.avif", "train/cats/1.jp2")):
        file = tmp_path / str(number) / name
        file.parent.mkdir(parents=True)
        file.touch()
        (tmp_path / str(number) / "train.csv").write_text("id,label\n1,2\n")
        usage_error(
            f"{name} is not in a folder of images per class .*convert.*Loader",
            load,
            str(tmp_path / str(number)),
        )


def test_folder_of_tables(tmp_path):
    (tmp_path / "train.csv").write_text("v,k\n1,a\n2,b\n")
    usage_error("has neither", load, str(tmp_path))
    (tmp_path / "test.csv.gz").write_bytes(gzip.compress(b"v,k\n3,b\n"))
    train, test = load(str(tmp_path))
    assert (train.name, len(train), test.y.tolist()) == (tmp_path.name, 2, [1])


def test_folder_of_idx_files_counts_the_training_classes(idx_folder):
    train, test = load(str(idx_folder))
    assert (train.classes, test.classes, train.name) == (10, 10, "idx")


def test_real_mnist(real_data):
    train, test = load("mnist", real_data / "mnist")
    assert (train.x.shape, test.x.shape, train.x.dtype) == (
        (60000, 28, 28, 1),
        (10000, 28, 28, 1),
        np.uint8,
    )
    assert train.y[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert test.y[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]


def test_real_subset_of_cifar10(real_data):
    for parts in (load("cifar10", real_data), load(str(real_data / "cifar10"))):
        for part, n in zip(parts, (5000, 1000), strict=True):
            assert part.x.shape == (n, 32, 32, 3)
            assert np.bincount(part.y).tolist() == [n // 10] * 10
            # Neighbouring pixels of a photograph are alike; with rows, columns or channels mixed up
            # they are not.
            pixels = part.x[:200].astype(float)
            assert np.abs(np.diff(pixels, axis=1)).mean() < 20
            assert np.abs(np.diff(pixels, axis=2)).mean() < 20


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "table.csv")
    usage_error("is neither an ordinary file nor a folder", load, str(tmp_path / "table.csv"))
    data_error(
        r"table\.csv: cannot be read .not an ordinary file", read_bytes, tmp_path / "table.csv"
    )


def test_another_table_numbers_its_classes_as_the_training_table(tmp_path):
    """It lacks one of them, and called the last one 1."""
    for name, labels in (("train", "xyz"), ("other", "xz")):
        rows = [f"{i},{labels[i % len(labels)]}" for i in range(12)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,kind", *rows]))
    train, _ = load(str(tmp_path / "train.csv"))
    for part in load(str(tmp_path / "other.csv"), class_names=train.class_names):
        assert part.class_names == ("x", "y", "z") and set(part.y.tolist()) <= {0, 2}
    data_error(
        "label 'y' is not among the training labels",
        load,
        str(tmp_path / "train.csv"),
        class_names=["x", "z"],
    )
    usage_error("leave class_names out", load, "digits", class_names=train.class_names)
