import zipfile
from pathlib import Path

import numpy as np
import pytest

from nnmpi.data.npz import load_npz
from nnmpi.errors import DataError
from tests.data.locked import lock

X = np.arange(40, dtype=np.float64).reshape(20, 2)
Y = np.arange(20) % 4


def load(path: Path, **arrays: object) -> tuple:
    np.savez(path / "a.npz", **arrays)
    return load_npz(path / "a.npz", "a", seed=0, test_fraction=0.2)


def test_x_and_y_are_split(tmp_path: Path) -> None:
    train, test = load(tmp_path, x=X, y=Y)
    assert (len(train), len(test), train.classes, train.x.dtype) == (16, 4, 4, np.float32)
    for part in (train, test):
        np.testing.assert_array_equal(part.y, part.x[:, 0].astype(int) // 2 % 4)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(tmp_path, monkeypatch)
    with pytest.raises(DataError, match=r"a\.npz: cannot be read \(Permission denied\)"):
        load_npz(tmp_path / "a.npz", "a", seed=0, test_fraction=0.2)


def test_own_test_part_is_kept(tmp_path: Path) -> None:
    train, test = load(tmp_path, x_train=X, y_train=Y[:, np.newaxis], x_test=X[:3], y_test=Y[:3].astype(np.uint8))
    np.testing.assert_array_equal(train.x, X)
    np.testing.assert_array_equal(test.y, [0, 1, 2])
    assert test.classes == 4


def test_training_part_alone_is_split(tmp_path: Path) -> None:
    assert [len(part) for part in load(tmp_path, x_train=X, y_train=Y)] == [16, 4]


def test_bytes_are_images_that_stay_bytes(tmp_path: Path) -> None:
    train, _ = load(tmp_path, x=np.full((20, 4, 5), 255, np.uint8), y=Y)
    assert (train.x.dtype, train.sample_shape) == (np.uint8, (4, 5, 1))
    assert train.rows(np.array([0])).max() == 1.0


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": X}, r"holds \['x'\]; needs x and y"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "must come together"),
        ({"x": X, "y": Y[:-1]}, r"x \(20, 2\) and y \(19,\)"),
        ({"x": X[:, 0], "y": Y}, r"x \(20,\) and y"),
        ({"x": X, "y": Y + 0.0}, "y is float64; save the labels as whole numbers"),
        ({"x": X, "y": Y - 1}, r"y\[0\] is -1, not a label in 0..2"),
        ({"x": X, "y": Y * 10**12}, r"y has 20 labels, and one of them is 3000000000000; number"),
        ({"x": X, "y": Y.astype(np.uint64) + 2**63}, "y has 20 labels, and one of them is 922337203685477581"),
        ({"x": X * 1j, "y": Y}, "x is complex128; needs real numbers"),
        ({"x": np.where(X == 7, np.nan, X), "y": Y}, r"x\[3, 1\] is nan"),
        ({"x": X * 1e40, "y": Y}, r"x\[0, 1\] is inf"),
        ({"x": X.astype(object), "y": Y}, "pickled objects"),
        ({"x_train": X, "y_train": Y, "x_test": X[:1], "y_test": [9]}, r"y_test\[0\] is 9, not a label in 0..3"),
        ({"x_train": X, "y_train": Y, "x_test": X[:1, :1], "y_test": [1]}, r"shape \(2,\) and test samples \(1,\)"),
        ({"x": X[:0], "y": Y[:0]}, r"x \(0, 2\)"),
        ({"x": X[:, :0], "y": Y}, r"x \(20, 0\)"),
        (
            {"x_train": X.astype(np.uint8), "y_train": Y, "x_test": X, "y_test": Y},
            "uint8 and x_test float64; bytes are",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        load(tmp_path, **arrays)


@pytest.mark.parametrize("keep", [0, 10, 300, -5])
def test_cut_file_is_named(tmp_path: Path, keep: int) -> None:
    load(tmp_path, x=X, y=Y)
    path = tmp_path / "a.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.npz: not an \.npz file, or cut off"):
        load_npz(path, "a", seed=0, test_fraction=0.2)


def test_altered_file_is_named(tmp_path: Path) -> None:
    load(tmp_path, x=X, y=Y)
    path = tmp_path / "a.npz"
    content = bytearray(path.read_bytes())
    content[250] ^= 0xFF  # among the values of x: the archive's own checksum finds it
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz: damaged"):
        load_npz(path, "a", seed=0, test_fraction=0.2)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    with pytest.raises(DataError, match="pickled objects"):
        load(tmp_path, x=np.array([Trap()], object), y=np.array([0]))
    assert not (tmp_path / "sprung").exists()


def test_tokens_stay_whole_numbers(tmp_path: Path) -> None:
    tokens, labels = np.arange(40).reshape(20, 2) % 7, np.arange(40).reshape(20, 2) % 5 - 1
    train, test = load(tmp_path, x=tokens, y=labels)
    assert train.is_tokens and (train.classes, train.sample_shape, train.y.shape) == (4, (2,), (16, 2))
    assert sorted(map(tuple, np.concatenate([train.y, test.y]))) == sorted(map(tuple, labels))
    classified, _ = load(tmp_path, x=tokens.astype(np.uint16), y=Y)
    assert classified.is_tokens and classified.targets is None
    with pytest.raises(DataError, match=r"x\[3\] has the token -4; tokens are whole numbers from 0 on"):
        load(tmp_path, x=np.where(tokens == 6, -4, tokens), y=labels)
    with pytest.raises(DataError, match=r"y\[2, 1\] is -2, not a label"):
        load(tmp_path, x=tokens, y=np.where(np.arange(40).reshape(20, 2) == 5, -2, labels))


def rewritten(path: Path, **options: int) -> None:
    """Write the members of an archive again, as zipfile is told."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("kind", ["lzma", "encrypted", "method", "huge", "text"])
def test_damage_of_every_kind_is_named(tmp_path: Path, kind: str) -> None:
    """Damage in each layer: a decompressor's, zipfile's, a header's, and members that are something else."""
    load(tmp_path, x=X, y=Y)
    path = tmp_path / "a.npz"
    if kind == "lzma":
        rewritten(path, compression=zipfile.ZIP_LZMA)
    content = bytearray(path.read_bytes())
    if kind == "lzma":
        content[60:70] = b"\xff" * 10
    elif kind in ("encrypted", "method"):
        place = content.index(b"PK\x01\x02") + (8 if kind == "encrypted" else 10)  # flags, or the method
        content[place] = 1 if kind == "encrypted" else 77
    path.write_bytes(content)
    if kind in ("huge", "text"):
        header = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,), }"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header.ljust(127) + b"\n" if kind == "huge" else b"text")
            archive.writestr("y.npy" if kind == "huge" else "y.txt", b"text")
    with pytest.raises(DataError, match=r"a\.npz: (damaged|. is no array)"):
        load_npz(path, "a", seed=0, test_fraction=0.2)
