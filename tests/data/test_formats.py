"""What files hold: CSV, npz, IDX and CIFAR-10, and what is said of those that are damaged."""

import gzip
import io
import os
import shutil
import struct
import tarfile
import zipfile

import numpy as np
import pytest

from nnmpi.base.files import read_lines
from nnmpi.data import Dataset, load
from nnmpi.data.arrays import load_arrays, read_npz, read_samples
from nnmpi.data.columns import plain as plain_rules
from nnmpi.data.images import (
    CIFAR_ARCHIVE,
    CIFAR_FOLDER,
    RECORD,
    load_cifar,
    load_classes,
    load_idx,
    locate_cifar,
    read_idx,
    read_image,
)
from nnmpi.data.readers import read_documents, read_table
from nnmpi.data.tables import TableRules, to_dataset
from tests.data.locked import lock
from tests.harness.refusals import data_error

# ---- CSV ----


def table(tmp_path, text, header=True, **options):
    path = tmp_path / "t.csv"
    path.write_text(text)
    return to_dataset(read_table(path, TableRules(header=header)), "t", **options)


@pytest.mark.parametrize("header", ["", "width,height,kind\n"])
def test_text_labels_and_optional_header(tmp_path, header):
    text = f"{header}1,2.5,cat\n-3e1, 4 ,ant\n\n5,6,cat\n"
    data = table(tmp_path, text, bool(header))
    np.testing.assert_array_equal(data.x, np.array([[1, 2.5], [-30, 4], [5, 6]], np.float32))
    assert (data.x.dtype, data.y.tolist(), data.class_names) == (
        np.float32,
        [1, 0, 1],
        ("ant", "cat"),
    )


@pytest.mark.parametrize(
    "labels, y, names",
    [
        ("10 9 10.0 -2", [2, 1, 2, 0], ("-2", "9", "10")),
        ("1 x 1.0", [0, 2, 1], ("1", "1.0", "x")),  # of which only some are numbers: text
        ("007 042 10", [0, 1, 2], ("007", "042", "10")),
    ],
)
def test_classes_are_the_labels_sorted(tmp_path, labels, y, names):
    data = table(tmp_path, "".join(f"1,{label}\n" for label in labels.split()), header=False)
    assert (data.y.tolist(), data.class_names) == (y, names)


def test_test_table_takes_the_classes_of_the_training_table(tmp_path):
    train = table(tmp_path, "n,k\n1,a\n2,b\n3,1.0\n4,1\n")
    test = table(tmp_path, "n,k\n5,1.0\n6,b\n", class_names=train.class_names)
    assert (test.y.tolist(), test.classes) == ([1, 3], 4)
    assert table(tmp_path, "n,k\n5,7.0\n", class_names=("7", "8")).y.tolist() == [0]
    for label, names in (("d", train.class_names), ("9", ("7", "8")), ("x", ("7", "8"))):
        data_error(
            f"label '{label}' is not among the training labels",
            table,
            tmp_path,
            f"n,k\n5,{label}\n",
            class_names=names,
        )


@pytest.mark.parametrize(
    "text, message",
    [
        ("1\n2\n", "line 1: 1 cell"),
        ("1,2,a\n1,2\n", "line 2: 2 cells, but the first line has 3"),
        (
            "1,2,a\n1,oops,a\n1,3,a\n",
            r"line 2, column 2: 'oops' is no number, as .*leave the column out: drop=\['2'\]",
        ),
        ("1,2,a\n\n1,inf,b\n", r"line 3, column 2: inf is not .*drop=\['2'\]"),
        ("1,2,a\n-inf,inf,b\n", "line 2, column 1"),
        ("1,2,a\n1e39,2,b\n", "line 2, column 1"),
        ("1,2,a\n1,1_0,b\n1,3,b\n", "line 2, column 2: '1_0' is no number"),
        ("oops,2,a\n1,2,b\n1,3,b\n", "line 1, column 1"),
        ("1,2,\n1,2,NA\n", "no row has a label in column '3'; give another column, by target"),
        ("1,2,a\n1,2,a\n", "only one class, 'a', .*target='1', and predicts='quantities'"),
        ("1,2,1.5\n1,2,2\n", "'1.5' is not a whole number"),
        ("1,2,inf\n1,2,2\n", "'inf' is not a whole number.*predicts='quantities'"),
    ],
)
def test_damaged_table_names_line_and_column(tmp_path, text, message):
    data_error(rf"t\.csv.*{message}", table, tmp_path, text, header=False)


def test_quantities_and_unlabelled_tables(tmp_path):
    assert table(tmp_path, "a,b\n1,0.5\n1,3\n", predicts="any").y.tolist() == [0.5, 3]
    assert table(tmp_path, "a,b\n1,0\n1,3\n", predicts="quantities").y.dtype == np.float32
    data_error(
        "line 3: the target 'x' is not a finite number",
        table,
        tmp_path,
        "a,b\n1,0\n1,x\n",
        predicts="quantities",
    )
    assert table(tmp_path, "a,b\nTrue,x\n False,True\n").x.tolist() == [[1], [0]]
    assert table(tmp_path, "a,b\nTRUE,x\nfalse,y\n").x.tolist() == [[1], [0]]
    data_error(
        "3 columns; the model needs 1, 2, 3, 4, 5",
        lambda: read_table([[1, 2, 3]], TableRules(encoding=plain_rules((), 5)), labelled=False),
    )


# ---- npz ----

X = np.arange(40, dtype=np.float64).reshape(20, 2)
Y = np.arange(20) % 4
TOKENS = np.arange(40).reshape(20, 2)


def pair(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return load(str(folder / "a.npz"))


def test_arrays_become_parts(tmp_path):
    train, test = pair(tmp_path, x=X, y=Y)
    assert (len(train), len(test), train.classes, train.x.dtype) == (16, 4, 4, np.float32)
    for part in (train, test):
        np.testing.assert_array_equal(part.y, part.x[:, 0].astype(int) // 2 % 4)
    assert [len(part) for part in pair(tmp_path, x_train=X, y_train=Y)] == [16, 4]
    train, test = pair(
        tmp_path, x_train=X, y_train=Y[:, np.newaxis], x_test=X[:3], y_test=Y[:3].astype(np.uint8)
    )
    np.testing.assert_array_equal(train.x, X)
    assert (test.y.tolist(), test.classes) == ([0, 1, 2], 4)
    # bytes are images that stay bytes
    train, _ = pair(tmp_path, x=np.full((20, 4, 5), 255, np.uint8), y=Y)
    assert (train.x.dtype, train.sample_shape, train.rows(np.array([0])).max()) == (
        np.uint8,
        (4, 5, 1),
        1.0,
    )
    np.testing.assert_array_equal(
        read_samples(tmp_path / "a.npz", read_npz), np.full((20, 4, 5), 255, np.uint8)
    )


def test_tokens_stay_whole_numbers(tmp_path):
    labels = TOKENS % 5 - 1
    train, test = pair(tmp_path, x=TOKENS % 7, y=labels)
    assert train.is_tokens and (train.classes, train.sample_shape, train.y.shape) == (
        4,
        (2,),
        (16, 2),
    )
    assert sorted(map(tuple, np.concatenate([train.y, test.y]))) == sorted(map(tuple, labels))
    classified, _ = pair(tmp_path, x=TOKENS.astype(np.uint16), y=Y)
    assert classified.is_tokens and classified.targets is None


class Trap:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize(
    "arrays, text",
    [
        ({"x": X}, "needs x and y"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "needs x and y"),
        ({"x": X, "y": Y[:-1]}, r"x \(20, 2\) and y \(19,\)"),
        ({"x": X[:0], "y": Y[:0]}, r"x \(0, 2\)"),
        ({"x": X[:, :0], "y": Y}, r"x \(20, 0\)"),
        ({"x": X, "y": Y + 0.0}, "y is float64; save labels as whole numbers"),
        ({"x": X, "y": Y * 10**12}, "one of them is 3000000000000; number"),
        ({"x": X, "y": Y.astype(np.uint64) + 2**63}, "one of them is 922337203685477581"),
        ({"x": X * 1j, "y": Y}, "x is complex128; needs real numbers"),
        ({"x": np.where(X == 7, np.nan, X), "y": Y}, r"x\[3, 1\]: the value is missing"),
        ({"x": np.array([Trap()], object), "y": np.array([0])}, "pickled objects"),
        ({"x_train": X, "y_train": Y, "x_test": X[:1], "y_test": [9]}, "label 9 of sample 0"),
        ({"x_train": X, "y_train": Y, "x_test": X[:1, :1], "y_test": [1]}, r"shape \(1,\)"),
        (
            {"x_train": X.astype(np.uint8), "y_train": Y, "x_test": X, "y_test": Y},
            "uint8 and x_test holds float64",
        ),
        ({"x": X + [0, 1e9], "y": Y}, r"x\[:, 1\]: float32 cannot tell its values apart, from 1"),
        ({"x": X.astype(int) + 10**9, "y": Y}, r"x\[:, 0\]: float32 cannot tell its values apart"),
        ({"x": TOKENS - 4, "y": TOKENS}, "token -4"),
        ({"x": TOKENS, "y": np.where(TOKENS == 5, -2, TOKENS)}, "label -2 of sample 2"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, text):
    data_error(text, pair, tmp_path, **arrays)


def rewritten(content, **options):
    """Return the members of an archive, written again as zipfile is told."""
    result = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(result, "w", **options) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return result.getvalue()


def altered(content, place, byte):
    return content[:place] + bytes([byte]) + content[place + 1 :]


DIRECTORY = b"PK\x01\x02"


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda content, keep=keep: content[:keep] for keep in (0, 10, 300, -5)),
        # among the values of x: the checksum finds it
        lambda content: altered(content, 250, content[250] ^ 255),
        lambda content: altered(rewritten(content, compression=zipfile.ZIP_LZMA), 65, 255),
        lambda content: altered(content, content.index(DIRECTORY) + 8, 1),  # encrypted
        # packed by no known method
        lambda content: altered(content, content.index(DIRECTORY) + 10, 77),
        lambda content: content.replace(b"(20, 2), }", b"(20**9,), }"),
        lambda content: content.replace(b"y.npy", b"y.txt"),
    ],
)
def test_damaged_archive_is_named(tmp_path, damage):
    pair(tmp_path, x=X, y=Y)
    path = tmp_path / "a.npz"
    path.write_bytes(damage(path.read_bytes()))
    data_error(r"a\.npz: (not a complete \.npz|holds)", load_arrays, path, "a", read_npz)


def test_a_small_file_does_not_fill_the_memory(tmp_path, monkeypatch):
    """Beyond a hundred times its size it is refused, by what it says of itself or while it
    unpacks.
    """
    monkeypatch.setattr("nnmpi.base.files.UNPACKED_BYTES", 2**16)
    zeros = bytes(2**24)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a,b\n" + zeros))
    (tmp_path / "images.gz").write_bytes(
        gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 4) + zeros)
    )
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((2**20, 2)), y=np.zeros(2**20, int))
    monkeypatch.setattr("nnmpi.base.files.TEXT_BYTES", 2**16)
    for times, read in (
        (30, lambda: read_table(tmp_path / "a.csv.gz")),
        (100, lambda: read_idx(tmp_path / "images.gz", 1)),
        (100, lambda: load_arrays(tmp_path / "b.npz", "b", read_npz)),
    ):
        data_error(f"unpacks to more than {times} times its size", read)
    np.savez_compressed(tmp_path / "c.npz", x=X, y=Y, junk=np.zeros(2**22))  # of which nobody asks
    assert len(load_arrays(tmp_path / "c.npz", "c", read_npz)[0]) == 20


def test_a_packed_text_is_measured_before_it_is_parsed(tmp_path, monkeypatch):
    """Parsing takes a hundred times as long as unpacking: few lines are parsed of one too long."""
    monkeypatch.setattr("nnmpi.base.files.PROBED", 2**16)
    monkeypatch.setattr("nnmpi.base.files.TEXT_BYTES", 2**19)
    line, file = "1,2,setosa\n", tmp_path / "a.csv.gz"
    file.write_bytes(gzip.compress(line.encode() * 2**16))
    parsed = 0

    def parse():
        nonlocal parsed
        for _ in read_lines(file):
            parsed += 1

    data_error("unpacks to more than 30 times its size", parse)
    assert parsed * len(line) < 2**18
    file.write_bytes(gzip.compress(line.encode() * 2**15))
    parsed = 0
    parse()
    assert parsed == 2**15


def test_an_archive_within_the_archive_is_not_unpacked(tmp_path):
    """The limit counts the bytes of the outer one."""
    path = archive(tmp_path, test_batch=bytes(RECORD), data_batch_1=bytes(RECORD))
    assert len(load_cifar(path, "cifar")[0]) == 1
    path.write_bytes(gzip.compress(path.read_bytes()))
    data_error("not a complete tar archive", load_cifar, path, "cifar")


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl"])
def test_heaps_of_nothing_end_early(tmp_path, monkeypatch, name):
    """Every text is read by the same lines, whatever becomes of them."""
    monkeypatch.setattr("nnmpi.base.files.BLANK_LINES", 1000)
    monkeypatch.setattr("nnmpi.base.files.LINE", 1000)
    file = tmp_path / name
    good = '{"text": "a"}\n' if name == "a.jsonl" else "a,b\n1,0\n"
    read = {"a.csv": lambda: read_table(file)}.get(name, lambda: [*read_documents(file, (), False)])
    file.write_text(good + "\n" * 1000 + "2,1\n" * (name == "a.csv"))
    read()
    file.write_text(good + " \n" * 1001 + good if name == "a.txt" else good + "\n" * 1001 + good)
    data_error("more than 1,000 blank lines in a row", read)
    file.write_text("1" * 1001 + "\n")
    data_error("a line of more than 1,000 characters", read)


def test_images_of_far_more_pixels_than_bytes_are_refused(tmp_path, monkeypatch):
    """One alone by its header, and many of few bytes before they are held together."""
    images = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("nnmpi.base.files.UNPACKED_BYTES", 2**16)
    file = tmp_path / "1.png"
    images.fromarray(np.zeros((2000, 2000), np.uint8)).save(file)
    data_error("unpacks to more than 100 times its size", read_image, file, (8, 8, 1))
    monkeypatch.setattr("nnmpi.base.files.UNPACKED", 1)
    for number in range(9):
        place = tmp_path / "all" / f"{number % 2}" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        images.fromarray(np.zeros((90, 90), np.uint8)).save(place)
    data_error("all unpacks to more than 1 times its size", load_classes, tmp_path / "all", "all")


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    lock(tmp_path, monkeypatch)
    data_error(
        r"a\.npz: cannot be read \(Permission denied\)",
        load_arrays,
        tmp_path / "a.npz",
        "a",
        read_npz,
    )


# ---- IDX ----

LABELS, IMAGES = "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"


def test_images_and_labels_come_as_they_are(idx_folder, idx_parts):
    _, test = load_idx(idx_folder, "made up")
    assert (test.x.shape, test.x.dtype, test.classes) == ((10, 6, 5, 1), np.uint8, 10)
    assert test.x.tobytes() == idx_parts[IMAGES][16:] and test.y.tolist() == list(range(10))
    assert test.rows(np.arange(10)).max() <= 1.0
    (idx_folder / LABELS).rename(idx_folder / LABELS.replace("-idx", ".idx"))
    assert load_idx(idx_folder, "made up")[0].classes == 10


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    "damage, text",
    [
        (lambda good: b"", "empty"),
        (lambda good: good[:10], "not an IDX file"),
        (lambda good: good[:-1], "promises 300 bytes of values .10 x 6 x 5.*but 299 follow"),
        (lambda good: good + b"\0", "but 301 follow"),
        (lambda good: altered(good, 0, 1), "not an IDX file"),
        (lambda good: altered(good, 2, 13), "not an IDX file of bytes"),
        (lambda good: altered(good, 3, 1), "not an IDX file of bytes in 3 dimensions"),
        (
            lambda good: good[:4] + struct.pack(">I", 2**32 - 1) + good[8:],
            "promises 128849018850 bytes",
        ),
        (lambda good: b"<html>not found</html>", "begins with 3c 68 74 6d"),
    ],
)
def test_damaged_idx_is_named(tmp_path, idx_parts, suffix, damage, text):
    path, content = tmp_path / f"damaged{suffix}", damage(idx_parts[IMAGES])
    path.write_bytes(gzip.compress(content) if suffix else content)
    data_error(f"{path}.*{text}", read_idx, path, 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[: len(packed) // 2],
        lambda packed: packed[:-4],
        lambda packed: altered(packed, 40, packed[40] ^ 255),
        lambda packed: packed + b"garbage",
        lambda packed: b"plain text",
    ],
)
def test_damaged_gz_is_named(tmp_path, idx_parts, damage):
    (tmp_path / "damaged.gz").write_bytes(damage(gzip.compress(idx_parts[IMAGES])))
    data_error("damaged.gz: not a complete gz file", read_idx, tmp_path / "damaged.gz", 3)


@pytest.mark.parametrize(
    "labels, text",
    [
        (
            lambda good: b"\0\0\x08\x01" + struct.pack(">I", 19) + good[8:-1],
            r"shape \(20, .* and labels of shape \(19",
        ),
        (lambda good: good[:-1] + b"\x0a", "label 10 of sample 19 is not in 0..9"),
    ],
)
def test_labels_must_fit_the_images(idx_folder, idx_parts, labels, text):
    (idx_folder / LABELS).write_bytes(labels(idx_parts[LABELS]))
    data_error(text, lambda: load_idx(idx_folder, "made up", tuple("0123456789")))


# ---- CIFAR-10 ----


def records(labels, seed=0):
    pixels = (
        np.random.default_rng(seed).integers(0, 256, (len(labels), RECORD - 1)).astype(np.uint8)
    )
    return np.concatenate([np.array(labels, np.uint8)[:, np.newaxis], pixels], axis=1).tobytes()


@pytest.fixture
def cifar(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(records([1, 2, 3], 1))
    (tmp_path / "data_batch_1.bin.gz").write_bytes(b"never read")
    (tmp_path / "data_batch_2.bin.gz").write_bytes(gzip.compress(records([4, 5], 2)))
    (tmp_path / "data_batch_10.bin").write_bytes(records([7]))
    (tmp_path / "test_batch.bin").write_bytes(records([9], 3))
    return tmp_path


def archive(folder, **members):
    path = folder / CIFAR_ARCHIVE
    with tarfile.open(path, "w:gz") as out:
        for name, content in members.items():
            info = tarfile.TarInfo(f"{CIFAR_FOLDER}/{name}.bin")
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def test_planes_become_channels_and_batches_come_by_their_numbers(cifar):
    train, test = load_cifar(cifar, "cifar10")
    assert (train.x.shape, test.x.shape, train.x.dtype) == (
        (6, 32, 32, 3),
        (1, 32, 32, 3),
        np.uint8,
    )
    assert train.y.tolist() == [1, 2, 3, 4, 5, 7]
    content = records([1, 2, 3], 1)
    for image, channel, row, column in [(0, 0, 0, 0), (0, 2, 31, 31), (2, 1, 5, 17)]:
        place = image * RECORD + 1 + channel * 1024 + row * 32 + column
        assert train.x[image, row, column, channel] == content[place]


def test_archive_gives_the_same_as_the_folder(cifar, tmp_path_factory):
    batches = {
        "data_batch_10": records([7]),
        "data_batch_2": records([4, 5], 2),
        "data_batch_1": records([1, 2, 3], 1),
    }
    path = archive(
        tmp_path_factory.mktemp("outer"), test_batch=records([9], 3), readme=b"<html>", **batches
    )
    assert (locate_cifar(path.parent), locate_cifar(cifar)) == (path, cifar)
    for packed, plain in zip(
        load_cifar(path, "cifar10"), load_cifar(cifar, "cifar10"), strict=True
    ):
        np.testing.assert_array_equal(packed.x, plain.x)
        np.testing.assert_array_equal(packed.y, plain.y)
    cifar.rename(path.parent / CIFAR_FOLDER)
    assert locate_cifar(path.parent) == path.parent / CIFAR_FOLDER


@pytest.mark.parametrize(
    "name, content, text",
    [
        (
            "data_batch_1.bin",
            records([1, 2])[:-1],
            "data_batch_1.bin: 6145 bytes are not a multiple of 3073",
        ),
        ("data_batch_1.bin", records([1, 10]), "label 10 of sample 1 is not in 0..9"),
        ("test_batch.bin", b"", "test_batch.bin: the file is empty"),
        (
            "data_batch_2.bin.gz",
            gzip.compress(records([4]))[:-9],
            "data_batch_2.bin.gz: not a complete gz file",
        ),
    ],
)
def test_damaged_batch_is_named(cifar, name, content, text):
    (cifar / name).write_bytes(content)
    data_error(text, load_cifar, cifar, "cifar10")


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda content, keep=keep: content[:keep] for keep in (0, 20, 1000, -10)),
        # random pixels do not pack, so the byte in the middle is one of them
        lambda content: altered(content, len(content) // 2, content[len(content) // 2] ^ 1),
    ],
)
def test_damaged_cifar_archive_is_named(tmp_path, damage):
    path = archive(tmp_path, data_batch_1=records([1] * 9), test_batch=records([2]))
    path.write_bytes(damage(path.read_bytes()))
    data_error(r"tar\.gz: (not a complete|the file is empty)", load_cifar, path, "cifar10")
    data_error(
        r"needs test_batch.bin .* has \['data_batch_1'\]",
        lambda: load_cifar(archive(tmp_path, data_batch_1=records([1])), "cifar10"),
    )


# ---------------------------------------------------------------- folders of images
def drawn(folder, classes, shape):
    """Save images of one brightness each, by class."""
    images = pytest.importorskip("PIL.Image")
    for name, value in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(3):
            images.fromarray(np.full(shape, value + i, np.uint8)).save(folder / name / f"{i}.png")


def test_a_folder_for_each_class(tmp_path):
    """Split by seed, or with a test part, of which a class may be missing; colour and the median
    size are kept.
    """
    drawn(tmp_path / "plain", {"cat": 10, "dog": 200}, (4, 6))
    train, test = load(str(tmp_path / "plain"), test_fraction=1 / 3)
    assert (len(train), len(test), train.x.shape[1:], train.class_names) == (
        4,
        2,
        (4, 6, 1),
        ("cat", "dog"),
    )
    np.testing.assert_array_equal(train.x[:, 0, 0, 0] > 100, train.y)
    drawn(tmp_path / "two/train", {"b": 50, "a": 20}, (4, 6, 3))
    drawn(tmp_path / "two/train", {"c": 90}, (9, 3))
    drawn(tmp_path / "two/val", {"c": 90}, (5, 5))
    train, test = load(str(tmp_path / "two"))
    assert train.x.shape == (9, 4, 6, 3)
    assert train.x[:, 0, 0, 0].tolist() == [c + i for c in (20, 50, 90) for i in range(3)]
    assert test.x.shape == (3, 4, 6, 3) and test.y.tolist() == [2, 2, 2] and test.scale == 1 / 255
    drawn(tmp_path / "two/val", {"strange": 90}, (5, 5))
    data_error(
        "class 'strange' of the test part is not in the training part", load, str(tmp_path / "two")
    )
    (tmp_path / "plain/cat/1.png").write_bytes(b"no image")
    data_error(r"cat/1\.png.*cannot be read as an image", load, str(tmp_path / "plain"))


def test_images_of_16_bits_keep_their_values(tmp_path):
    """Pillow alone makes everything above 255 white."""
    images = pytest.importorskip("PIL.Image")
    for name, value in {"dim": 2570, "bright": 65535}.items():
        for i, ending in enumerate(("png", "tif", "pgm")):
            (tmp_path / name).mkdir(exist_ok=True)
            file = tmp_path / name / f"{i}.{ending}"
            images.fromarray(np.full((4, 4), value, np.uint16)).save(file)
    parts = load(str(tmp_path), test_fraction=0.3)
    x = np.concatenate([part.x for part in parts])
    assert x.shape == (6, 4, 4, 1) and parts[0].class_names == ("bright", "dim")
    assert sorted({*x.flatten().tolist()}) == [10, 255]
    images.fromarray(np.full((4, 4), 70000, np.int32)).save(tmp_path / "dim" / "3.tif")
    data_error(r"3\.tif has 32-bit pixels, .*; save it with 8", load, str(tmp_path))
    images.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "dim" / "3.tif")
    data_error("floating-point pixels, whose white is unknown", load, str(tmp_path))


def test_every_folder_beside_classes_is_one_or_is_named(tmp_path):
    drawn(tmp_path, {"cat": 10, "dog": 200, ".cache": 1, "__MACOSX": 1}, (4, 4))
    assert load(str(tmp_path))[0].class_names == ("cat", "dog")
    (tmp_path / "owl/more").mkdir(parents=True)
    data_error("owl has no images, but other folders beside it have", load, str(tmp_path))


@pytest.mark.parametrize("name", ["Test", "valid", "Validation", "eval", "dev", "holdout"])
def test_a_held_out_part_has_any_usual_name(name, tmp_path):
    drawn(tmp_path / "Train", {"cat": 10, "dog": 200}, (4, 4))
    drawn(tmp_path / name, {"cat": 10, "dog": 200}, (4, 4))
    assert [len(part) for part in load(str(tmp_path))] == [6, 6]


def test_an_image_is_what_pillow_opens(tmp_path):
    """Whatever its suffix; and a broken one with a usual suffix is named, not left out."""
    images = pytest.importorskip("PIL.Image")
    names = {"a.jpe": "JPEG", "b.apng": "PNG", "c.dib": "DIB", "d.jpg_large": "JPEG", "0007": "PNG"}
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for name, form in names.items():
            images.new("RGB", (4, 4)).save(tmp_path / label / name, form)
    assert sum(map(len, load(str(tmp_path)))) == 2 * len(names)
    (tmp_path / "cat/0008.png").write_bytes(b"cut off")
    data_error(r"cat/0008\.png: cannot be read as an image", load, str(tmp_path))


def test_images_that_would_be_left_out_or_hide_something_are_named(tmp_path):
    """A part under a strange name, formats and folders that are not read, several images in a
    file; transparent pixels are white, whatever colour they hide.
    """
    images = pytest.importorskip("PIL.Image")
    drawn(tmp_path / "train", {"cat": 10, "dog": 200}, (4, 4))
    drawn(tmp_path / "extra", {"cat": 10}, (4, 4))
    data_error("extra has images beside train/, .*; call it test, or", load, str(tmp_path))
    (tmp_path / "extra").rename(tmp_path / "test")
    dog = tmp_path / "train/dog"
    (dog / "._0.png").write_text("macOS leaves such files")
    drawn(dog, {"more": 10}, (4, 4))
    data_error("dog/more would be left out of the class 'dog'", load, str(tmp_path))
    (dog / "deep").mkdir()
    (dog / "more").rename(dog / "deep/more")
    (dog / "deep/back").symlink_to(dog)
    data_error("dog/deep would be left out of the class 'dog'", load, str(tmp_path))
    (dog / "deep").rename(tmp_path / "elsewhere")
    (dog / "1.HEIC").write_text("a phone's photo")
    data_error(r"dog/1\.HEIC would be left out .*; move or convert it", load, str(tmp_path))
    (dog / "1.HEIC").rename(dog / "notes")  # a file without a suffix is an image or is named, too
    data_error(r"dog/notes would be left out .*; move or convert it", load, str(tmp_path))
    (dog / "notes").rename(dog / "notes.txt")
    for pipe, match in ((dog / "pipe", "would be left out"), (dog / "pipe.png", "is no file")):
        os.mkfifo(pipe)  # nobody writes into it
        data_error(f"{pipe.name} {match}", load, str(tmp_path))
        pipe.unlink()
    shutil.copy(dog / "0.png", tmp_path / "train/more.png")
    data_error(r"train/more\.png is in no class's folder", load, str(tmp_path))
    (tmp_path / "train/more.png").unlink()
    assert load(str(tmp_path))[0].notes == ("a file that is no image, such as train/dog/notes.txt",)
    stroke = np.zeros((4, 4, 4), np.uint8)
    stroke[0, :, 3] = 255, 255, 0, 0
    images.fromarray(stroke).save(dog / "0.png")
    row = load(str(tmp_path))[0].x[:, 0]
    assert any(np.array_equal(item[:, 0], [0, 0, 255, 255]) for item in row)
    pages = [images.new("L", (4, 4))] * 3
    pages[0].save(dog / "0.tif", save_all=True, append_images=pages[1:])
    data_error(r"0\.tif has 3 images; save each in a file of its own", load, str(tmp_path))


def test_parts_of_arrays_and_tables_have_any_usual_name(tmp_path):
    """A held-out part is not passed over for a fifth of train; other names are listed."""
    for names in ("X_train y_train X_test y_test", "x_training y_training x_val y_val"):
        parts = dict(zip(names.split(), (X, Y, X[:7], Y[:7]), strict=True))
        assert [len(part) for part in pair(tmp_path, **parts)] == [20, 7], names
        assert len(read_samples(tmp_path / "a.npz", read_npz)) == 7
    assert [len(part) for part in pair(tmp_path, x=X, y=Y, x_valid=X, y_valid=Y)] == [20, 20]
    data_error(
        "holds train_images, train_labels; needs x and y",
        pair,
        tmp_path,
        train_images=X,
        train_labels=Y,
    )
    pixels = np.random.default_rng(0).random((20, 4, 4))
    data_error(
        "up to 1, and the test part up to 255; give the im",
        lambda: pair(
            tmp_path,
            x_train=pixels / pixels.max(),
            y_train=Y,
            x_val=np.rint(pixels / pixels.max() * 255),
            y_val=Y,
        ),
    )
    for name, rows in (("Train", 30), ("VAL", 5)):
        file = tmp_path / "tables" / f"{name}.csv"
        file.parent.mkdir(exist_ok=True)
        file.write_text("a,b\n" + "".join(f"{i},{i % 2}\n" for i in range(rows)))
    assert [len(part) for part in load(str(tmp_path / "tables"))] == [30, 5]


def test_targets_that_float32_cannot_tell_apart_are_refused(tmp_path):
    """As features are; in tables and arrays."""
    file, y = tmp_path / "t.csv", 1e6 + 0.01 * np.arange(40)
    file.write_text("a,y\n" + "".join(f"{i},{value:.6f}\n" for i, value in enumerate(y)))
    np.savez(tmp_path / "t.npz", x=np.ones((40, 2)), y=y)
    for path, what in ((file, "the target"), (tmp_path / "t.npz", "y")):
        data_error(
            f"{what}: float32 cannot tell its values apart", load, str(path), predicts="quantities"
        )
    data_error("float32 cannot tell", Dataset, "own", np.ones((40, 2)), y, 0)
    file.write_text("a,y\n" + "".join(f"{i},{['none', 'crack'][i % 2]}\n" for i in range(40)))
    assert load(str(file))[0].class_names == ("crack", "none")
