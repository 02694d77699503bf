import gzip
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi.data import catalogue
from nnmpi.data.catalogue import load, prepare
from nnmpi.data.files import read_bytes
from nnmpi.data.sources import Source
from nnmpi.errors import DataError, UsageError
from tests.data.locked import lock


def serve(site: Any, monkeypatch: pytest.MonkeyPatch, parts: dict[str, bytes]) -> None:
    """Let the made-up MNIST be downloaded from the site."""
    files = tuple(
        Source(f"{name}.gz", (site.put(f"/{name}", gzip.compress(content)),), len(content), digest, unpacked=True)
        for name, content in parts.items()
        for digest in [hashlib.sha256(content).hexdigest()]
    )
    monkeypatch.setattr(catalogue, "sources", lambda name: {"mnist": files}[name])


def test_iris_is_the_known_table() -> None:
    train, test = load("iris")
    assert (len(train), len(test), train.classes) == (120, 30, 3)
    assert train.class_names == ("setosa", "versicolor", "virginica")
    x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
    np.testing.assert_array_equal(np.bincount(y), [50, 50, 50])
    np.testing.assert_allclose(x.mean(0), [5.843333, 3.057333, 3.758, 1.199333], rtol=1e-6)
    np.testing.assert_allclose(x[y == 1].mean(0), [5.936, 2.77, 4.26, 1.326], rtol=1e-6)


def test_digits_are_the_known_images() -> None:
    train, test = load("digits", test_fraction=0.25)
    assert (len(train), len(test), train.classes, train.sample_shape) == (1348, 449, 10, (8, 8, 1))
    x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
    assert x.dtype == np.uint8
    assert int(x.sum()) == 561718
    np.testing.assert_array_equal(np.bincount(y), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    assert train.rows(np.arange(len(train))).max() == 1.0


def test_digits_equal_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    train, test = load("digits")
    rows = {(tuple(x.ravel()), int(y)) for part in (train, test) for x, y in zip(part.x, part.y, strict=True)}
    known = sklearn.load_digits()
    assert rows == {(tuple(x.astype(int)), int(y)) for x, y in zip(known.data, known.target, strict=True)}


def test_seed_moves_the_split_of_bundled_sets() -> None:
    assert not np.array_equal(load("iris", seed=1)[1].x, load("iris", seed=2)[1].x)
    np.testing.assert_array_equal(load("iris", seed=1)[1].x, load("iris", seed=1)[1].x)


@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
def test_mnist_from_local_files(idx_folder: Path, tmp_path: Path, below: str) -> None:
    place = tmp_path / "local" / below
    place.parent.mkdir(parents=True, exist_ok=True)
    idx_folder.rename(place)
    train, test = load("mnist", tmp_path / "local")
    assert (len(train), len(test), train.class_names[9]) == (20, 10, "9")
    assert prepare("mnist", tmp_path / "local") == place


def test_download_once_then_load(
    site: Any, monkeypatch: pytest.MonkeyPatch, idx_parts: dict[str, bytes], own_cache: Path
) -> None:
    serve(site, monkeypatch, idx_parts)
    with pytest.raises(DataError, match=r"mnist is not in .*cache/mnist; let nnmpi.data.prepare\('mnist'\)"):
        load("mnist")
    said: list[str] = []
    for _ in range(2):
        assert prepare("mnist", report=said.append) == own_cache / "mnist"
    assert len(site.requests) == len(said) == 4
    assert len(load("mnist")[0]) == 20


def test_nodes_that_share_a_folder_download_once(
    site: Any, monkeypatch: pytest.MonkeyPatch, idx_parts: dict[str, bytes]
) -> None:
    serve(site, monkeypatch, idx_parts)
    failed: list[BaseException] = []

    def node() -> None:
        try:
            prepare("mnist")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=node) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failed == []
    assert len(site.requests) == 4


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize("function", [load, prepare])
def test_wrong_data_dir_says_what_was_looked_for(name: str, function: Any, tmp_path: Path) -> None:
    wanted = "test_batch.bin" if name == "cifar10" else "train-images-idx3-ubyte"
    with pytest.raises(UsageError, match=f"data_dir {tmp_path} lacks them: looked there for {wanted}"):
        function(name, tmp_path)
    with pytest.raises(UsageError, match=f"data_dir {tmp_path}/none does not exist: looked there for {wanted}"):
        function(name, tmp_path / "none")


@pytest.mark.parametrize("function", [load, prepare])
def test_a_folder_that_may_not_be_entered_is_one_sentence(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = r"cannot be read \(Permission denied\); make it readable, or give another$"
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    lock(tmp_path, monkeypatch)
    for name in ("mnist", "cifar10"):
        with pytest.raises(UsageError, match=rf"^data_dir {tmp_path} {reason}"):
            function(name, tmp_path)
        with pytest.raises(UsageError, match=rf"^the folder for downloads {tmp_path}/{name} {reason}"):
            function(name)
    with pytest.raises(UsageError, match=rf"^data set '{tmp_path}/x.csv' {reason}"):
        function(str(tmp_path / "x.csv"))


@pytest.mark.parametrize("function", [load, prepare])
def test_the_home_of_nobody_is_one_sentence(function: Any) -> None:
    sentence = "~no-such-user/x.csv: the system knows no home folder ~no-such-user; write it out$"
    with pytest.raises(UsageError, match=f"^data set {sentence}"):
        function("~no-such-user/x.csv")
    with pytest.raises(UsageError, match=f"^data_dir {sentence}"):
        function("mnist", "~no-such-user/x.csv")


def test_a_folder_of_tables_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=rf"^data set '{tmp_path}' cannot be read \(Permission denied\)"):
        load(str(tmp_path))
    with pytest.raises(UsageError, match=r"a' cannot be read \(File name too long\)"):
        load("a" * 300)


@pytest.mark.parametrize("name", ["iris", "digits", "table.csv"])
def test_data_dir_where_it_does_nothing_is_refused(name: str, tmp_path: Path) -> None:
    for function in (load, prepare):
        with pytest.raises(UsageError, match="leave out data_dir"):
            function(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mnsit", r"'mnsit' is unknown; did you mean mnist.*\? choose one of iris, digits"),
        ("MNIST", "did you mean mnist"),
        ("fashion_mnist", "did you mean fashion-mnist"),
        ("cifar-10", "did you mean cifar10"),
        (
            "zebra",
            "'zebra' is unknown; choose one of iris, digits, mnist, fashion-mnist, cifar10, paradise-lost, or the path",
        ),
        ("none.csv", "'none.csv': no such file"),
        ("some/folder", "'some/folder': no such file"),
    ],
)
def test_unknown_name_is_a_usage_error(name: str, text: str) -> None:
    for function in (load, prepare):
        with pytest.raises(UsageError, match=text):
            function(name)


def test_csv_and_npz_by_path(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("".join(f"{i},{i % 2}\n" for i in range(10)))
    np.savez(tmp_path / "arrays.npz", x=np.zeros((10, 3)), y=np.arange(10))
    for name in ("table.csv", "arrays.npz"):
        train, test = load(str(tmp_path / name), test_fraction=0.3)
        assert (train.name, len(train), len(test)) == (name.split(".")[0], 7, 3)
        assert prepare(str(tmp_path / name)) == tmp_path / name


def test_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    with pytest.raises(UsageError, match=r"a\.json: files of this kind are not read; .* of texts \.txt, \.jsonl or"):
        load(str(tmp_path / "a.json"))


def test_folder_of_tables(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("1,a\n2,b\n")
    with pytest.raises(UsageError, match="has neither"):
        load(str(tmp_path))
    (tmp_path / "test.csv.gz").write_bytes(gzip.compress(b"3,b\n"))
    train, test = load(str(tmp_path))
    assert (train.name, len(train), test.y.tolist()) == (tmp_path.name, 2, [1])


def test_folder_of_idx_files_counts_the_training_classes(idx_folder: Path) -> None:
    train, test = load(str(idx_folder))
    assert (train.classes, test.classes, train.name) == (10, 10, "idx")


def test_real_mnist(real_data: Path) -> None:
    train, test = load("mnist", real_data / "mnist")
    assert (train.x.shape, test.x.shape, train.x.dtype) == ((60000, 28, 28, 1), (10000, 28, 28, 1), np.uint8)
    assert train.y[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert test.y[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]


def test_real_subset_of_cifar10(real_data: Path) -> None:
    for parts in (load("cifar10", real_data), load(str(real_data / "cifar10"))):
        for part, n in zip(parts, (5000, 1000), strict=True):
            assert part.x.shape == (n, 32, 32, 3)
            assert np.bincount(part.y).tolist() == [n // 10] * 10
            # Neighbouring pixels of a photograph are alike; with rows, columns or channels mixed up they are not.
            pixels = part.x[:200].astype(float)
            assert np.abs(np.diff(pixels, axis=1)).mean() < 20
            assert np.abs(np.diff(pixels, axis=2)).mean() < 20


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "table.csv"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is neither an ordinary file nor a folder"):
        load(str(pipe))
    with pytest.raises(DataError, match=r"table\.csv: cannot be read .not an ordinary file"):
        read_bytes(pipe)
