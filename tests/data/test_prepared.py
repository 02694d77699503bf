"""Large data sets are prepared once and mapped: the same numbers as read into memory, and a
sentence where that cannot be.
"""

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from time import time

import h5py
import numpy as np
import pytest
from PIL import Image

import nnmpi
from nnmpi.base.errors import DataError, UsageError
from nnmpi.base.files import locked
from nnmpi.data import Dataset, Normalize, cache, catalogue, facts, load, mapped, prepared
from nnmpi.data.arrays import read_npz
from nnmpi.data.cache import entries, remove_unused
from nnmpi.data.catalogue import Wanted
from nnmpi.data.images import load_classes
from nnmpi.data.lazy import Chosen, is_mapped, read_all
from nnmpi.data.mapped import FileArray, is_local
from nnmpi.data.tables import NO_RULES
from nnmpi.train.inputs import NodeTeam
from tests.data.conftest import idx_bytes

ROWS = 90
DISK_FULL = 73


@pytest.fixture
def all_large(monkeypatch):
    """Every source is large, however small it is."""
    for module in ("catalogue", "arrays"):
        monkeypatch.setattr(f"nnmpi.data.{module}.SMALL_BYTES", 0)


def bytes_of(*shape):
    return np.random.default_rng(len(shape)).integers(0, 256, (ROWS, *shape)).astype(np.uint8)


def labels():
    return np.arange(ROWS) % 3


def npz(folder, save=np.savez, **arrays):
    save(folder / "set.npz", **arrays)
    return folder / "set.npz"


def pictures(folder):
    for number, image in enumerate(bytes_of(7, 6, 3)[:30]):
        place = folder / "pictures" / ("train", "test")[number % 3 == 2] / "abc"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).resize((6 + number % 4, 7)).save(place / f"{number}.png")
    (place / "notes.txt").write_text("beside")
    return folder / "pictures"


def table(folder, suffix=".csv"):
    rows = [
        f"{a:.3f},{'red' if a < 0 else 'green'},{b:.0f}"
        for a, b in np.random.default_rng(1).normal(size=(ROWS, 2))
    ]
    text = "\n".join(["size,colour,kind", *rows]) + "\n"
    opened = gzip.open if suffix.endswith(".gz") else open
    with opened(folder / f"table{suffix}", "wt") as stream:
        stream.write(text)
    return folder / f"table{suffix}"


def json_lines(folder):
    rows = ({"size": number / 7, "kind": "abc"[number % 3]} for number in range(ROWS))
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "lines.jsonl"


def idx(parent):
    folder = parent / "idx"
    folder.mkdir()
    for part, n in (("train", 20), ("t10k", 10)):
        images = np.arange(n * 30, dtype=np.uint8).reshape(n, 6, 5)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            idx_bytes(np.arange(n, dtype=np.uint8) % 4)
        )
    return folder


def arrays_in_files(parent):
    for name, array in (("x", bytes_of(5, 4)), ("y", labels())):
        (parent / "arrays").mkdir(exist_ok=True)
        np.save(parent / "arrays" / f"{name}.npy", array)
    return parent / "arrays"


SOURCES = {
    "bytes": lambda folder: npz(folder, x=bytes_of(5, 4, 3), y=labels()),
    "gray": lambda folder: npz(folder, x=bytes_of(5, 4), y=labels()),
    "packed": lambda folder: npz(folder, np.savez_compressed, x=bytes_of(5, 4, 3), y=labels()),
    "Fortran": lambda folder: npz(folder, x=np.asfortranarray(bytes_of(5, 4, 3)), y=labels()),
    "double": lambda folder: npz(folder, x=bytes_of(6).astype("f8") / 7, y=labels()),
    "single, parts": lambda folder: npz(
        folder,
        x_train=bytes_of(6).astype("f4"),
        y_train=labels(),
        x_test=bytes_of(6).astype("f4")[:9],
        y_test=labels()[:9],
    ),
    "tokens": lambda folder: npz(folder, x=bytes_of(8), y=bytes_of(8).astype("i4") % 5),
    "pictures": pictures,
    "table": table,
    "packed table": lambda folder: table(folder, ".csv.gz"),
    "JSON lines": json_lines,
    "IDX": idx,
    "folder of .npy": arrays_in_files,
}
FIELDS = "name", "classes", "scale", "class_names", "columns", "target", "encoding", "notes"


def same(one, other):
    """Whether two data sets hold the same, also what is computed of all samples."""
    assert [getattr(one, name) for name in FIELDS] == [getattr(other, name) for name in FIELDS]
    for a, b in ((one.x, other.x), (one.y, other.y)):
        a, b = map(read_all, (a, b))
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert one.vocabulary == other.vocabulary and one.variance == other.variance
    if not one.is_tokens:
        assert [*map(str, one.moments.values)] == [*map(str, other.moments.values)]
    return True


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_prepared_set_is_the_one_in_memory_and_nothing_is_computed_again(
    source, tmp_path, monkeypatch, all_large
):
    path = str(source(tmp_path))
    with monkeypatch.context() as small:
        small.setattr(catalogue, "SMALL_BYTES", 2**40)
        small.setattr("nnmpi.data.arrays.SMALL_BYTES", 2**40)
        expected = load(path)
    first = load(path)
    assert all(map(same, first, expected))
    for what in ("moments", "content"):
        monkeypatch.setattr(facts, what, None)
        monkeypatch.setattr(prepared, what, None)
    monkeypatch.setattr("nnmpi.data.dataset.moments", None)
    for again, part in zip(load(path), first, strict=True):
        assert same(again, part) and again.identity == part.identity
        source = again.x.source if isinstance(again.x, Chosen) else again.x
        assert isinstance(source, FileArray)


def test_weights_of_a_table_are_prepared_and_stay_with_their_rows(tmp_path, all_large):
    path, weights = table(tmp_path), np.arange(ROWS) % 7
    head, *rows = path.read_text().splitlines()
    rows = [f"{weight},{row}" for weight, row in zip(weights, rows, strict=True)]
    path.write_text("\n".join([f"weight,{head}", *rows]))
    parts = load(path, sample_weight="weight", stratify=True)
    for part in parts:
        assert np.array_equal(part.weights, weights[part.places]) and len(part.columns) == 3
    (tmp_path / "table.csv").write_text(path.read_text().replace("\n3,", "\n4,"))
    again = load(path, sample_weight="weight", stratify=True)
    assert again[0].identity != parts[0].identity
    equal = load(path, stratify=True)
    assert equal[0].weights is None and len(equal[0].columns) == 4


def images_in_files(parent, **labels):
    """A training and a test part of images of floats, in .npy files."""
    x = bytes_of(4, 4, 3).astype("f4") / 255
    (parent / "images").mkdir()
    for part, rows in (("train", slice(60)), ("test", slice(60, 90))):
        np.save(parent / "images" / f"x_{part}.npy", x[rows])
        np.save(parent / "images" / f"y_{part}.npy", labels["y"][rows])
    return str(parent / "images")


@pytest.mark.parametrize(
    "y, predicts",
    [(bytes_of(4, 4).astype("i4") % 5, "classes"), (bytes_of(4, 4, 2).astype("f4"), "quantities")],
    ids=["masks", "fields"],
)
def test_a_second_start_reads_no_sample_of_files_in_place(
    y, predicts, tmp_path, own_cache, monkeypatch, all_large
):
    """Each rank had read all at each start: for the classes, the parts' scales, the targets'."""
    path = images_in_files(tmp_path, y=y)
    first, _ = load(path, predicts=predicts)
    scale = first.target_scale if predicts == "quantities" else None
    read, part, take = [], FileArray.part, FileArray.take
    monkeypatch.setattr(
        FileArray, "part", lambda self, *rows: read.append(rows[1] - rows[0]) or part(self, *rows)
    )
    monkeypatch.setattr(
        FileArray, "take", lambda self, rows, axis=0: read.append(len(rows)) or take(self, rows)
    )
    again, _ = load(path, predicts=predicts)
    assert max(read, default=0) <= 1  # the first row shows what becomes of it
    assert again.classes == first.classes and again.notes == first.notes
    assert (again.identity, again.variance) == (first.identity, first.variance)
    assert str(again.moments) == str(first.moments)
    assert scale is None or [*again.target_scale] == [*scale]
    assert max(read, default=0) <= 1


def test_bytes_of_an_archive_stay_in_it(tmp_path, own_cache, all_large):
    path = npz(tmp_path, x=bytes_of(5, 4, 3), y=labels())
    train, _ = load(str(path))
    assert train.x.source.path == path
    assert sum(entry.nbytes for entry in entries()) < bytes_of(5, 4, 3).nbytes


def test_small_and_bundled_sets_leave_the_cache_alone(tmp_path, own_cache):
    assert type(load(str(SOURCES["bytes"](tmp_path)))[0].x) is np.ndarray
    assert type(load("digits")[0].x) is np.ndarray
    assert not own_cache.exists()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("source", ["pictures", "bytes", "double", "table"])
def test_ranks_that_share_the_work_make_the_same(source, ranks, tmp_path, own_cache, all_large):
    path = str(SOURCES[source](tmp_path))
    expected = load(path)
    known = next(own_cache.rglob("known-*.json")).read_bytes()
    for entry in entries():
        cache.remove_folder(entry.folder)

    def program(group):
        wanted = Wanted(path, None, 0, 0.2, "classes", NO_RULES)
        return wanted.load(wanted.prepare(NodeTeam(group, print)))

    for pair in nnmpi.simulate(program, ranks=ranks):
        assert all(map(same, pair, expected))
    assert next(own_cache.rglob("known-*.json")).read_bytes() == known


def test_an_error_of_one_rank_is_that_of_all(tmp_path, own_cache, all_large):
    folder = pictures(tmp_path)
    damaged = sorted(folder.rglob("*.png"))[-1]  # of the last rank's share
    damaged.write_bytes(damaged.read_bytes()[:40])

    def program(group):
        with pytest.raises(DataError, match=f"^{damaged}: cannot be read as an image"):
            Wanted(str(folder), None, 0, 0.2, "classes", NO_RULES).prepare(NodeTeam(group, print))

    nnmpi.simulate(program, ranks=2)
    assert not [*own_cache.glob("sets/*")]


def test_means_do_not_depend_on_blocks_or_places(monkeypatch):
    x = bytes_of(5, 4, 3)
    order = np.random.default_rng(0).permutation(ROWS)
    exact = facts.moments(x)
    assert exact.values == facts.moments(x[order], order).values
    assert np.allclose(exact.mean, x.mean((0, 1, 2))) and np.allclose(exact.std, x.std((0, 1, 2)))
    floats = facts.moments(x.astype("f4"))
    monkeypatch.setattr(facts, "SEGMENT_ROWS", 7)
    monkeypatch.setattr(facts, "FLOAT_BYTES", 2000)
    assert facts.moments(x).values == exact.values
    assert np.allclose(facts.moments(x.astype("f4")).std, floats.std, rtol=1e-14)


# ---- files that change, or are lost ----


@pytest.mark.parametrize("by_calls", [False, True])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda path: os.truncate(path, 500), "it had [0-9]+ bytes, and has 500"),
        (lambda path: os.utime(path, (1, 1)), "it was written at another time"),
        (lambda path: path.unlink(), "cannot be read any more"),
    ],
    ids=["cut", "another time", "lost"],
)
def test_a_file_that_changes_in_the_middle_is_named(change, what, by_calls, tmp_path):
    path = npz(tmp_path, x=bytes_of(64, 64), y=labels())
    offset = path.read_bytes().index(b"\n") + 1
    array = FileArray(path, np.uint8, (ROWS, 64, 64), offset, by_calls=by_calls)
    assert np.array_equal(array[3:8], bytes_of(64, 64)[3:8])
    assert np.array_equal(array.take(np.array([8, 3])), bytes_of(64, 64)[[8, 3]])
    change(path)
    with pytest.raises(DataError, match=f"{path}.*{what}"):
        array.take(np.array([ROWS - 1]))
    with pytest.raises(DataError, match=f"{path}.*{what}"):
        array[5:6]


def test_a_file_that_is_cut_while_it_is_read_by_calls_is_named(tmp_path, monkeypatch):
    path = npz(tmp_path, x=bytes_of(64, 64), y=labels())
    array = FileArray(path, np.uint8, (ROWS, 64, 64), 128, by_calls=True)
    monkeypatch.setattr(array, "_check", lambda: None)
    os.truncate(path, 500)
    with pytest.raises(DataError, match="was cut while it was in use"):
        array[5:6]
    monkeypatch.setattr(
        os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.ESTALE, "stale"))
    )
    with pytest.raises(DataError, match="cannot be read any more .stale"):
        array[5:6]


@pytest.mark.parametrize("by_calls", [False, True])
def test_rows_of_a_slow_disk_are_asked_for_at_once(by_calls, tmp_path, monkeypatch):
    path = npz(tmp_path, x=bytes_of(64, 64), y=labels())
    array = FileArray(path, np.uint8, (ROWS, 64, 64), 128, by_calls=by_calls)
    asked, seconds = [], [0.0]
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: asked.append(words[1:3]))

    def clock():
        seconds[0] += took
        return seconds[0]

    monkeypatch.setattr(mapped, "perf_counter", clock)
    for took, expected in ((0.0, 2), (0.0, 0), (1.0, 0), (0.0, 2), (0.0, 0)):
        rows = array.take(np.array([7, 3]))
        assert np.array_equal(rows, array[3:8][[4, 0]])
        places = [(128 + 7 * 4096, 4096), (128 + 3 * 4096, 4096)]
        assert asked == places[:expected], took
        asked.clear()


def test_rows_that_follow_one_another_survive_a_file_that_is_cut(tmp_path, monkeypatch):
    """They may be many and be used for long: a page behind the end would be SIGBUS."""
    path = npz(tmp_path, x=bytes_of(64, 64), y=labels())
    array = FileArray(path, np.uint8, (ROWS, 64, 64), 128, by_calls=False)
    rows = array[5:ROWS]
    assert not is_mapped(rows) and np.array_equal(rows, array.take(np.arange(5, ROWS)))
    monkeypatch.setattr(array, "_check", lambda: None)
    os.truncate(path, 500)
    assert rows.any()
    with pytest.raises(DataError, match="was cut while it was in use"):
        array[5:ROWS]


@pytest.mark.parametrize("options", [{}, {"chunks": (4, 64, 64), "compression": "gzip"}])
def test_an_hdf5_file_that_changes_in_the_middle_is_named(options, tmp_path):
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=bytes_of(64, 64), **options)
        file["y"] = labels()
    sets = load(path)[0], Dataset("own", h5py.File(path, locking=False)["x"], labels(), 3)
    for train in sets:
        train.x[:2]
    os.utime(path, (1, 1))
    for train in sets:
        with pytest.raises(DataError, match=f"{path} was changed while it was in use"):
            train.x[ROWS // 2 : ROWS // 2 + 2]


def test_a_folder_of_many_pictures_is_listed_and_not_asked_of_each(tmp_path, monkeypatch):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("L", (4, 4), number).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cat/again").symlink_to("again")
    with pytest.raises(DataError, match="cat/again would be left out of the class 'cat'"):
        load_classes(tmp_path, "pets")
    (tmp_path / "cat/again").unlink()
    asked, is_dir = [], Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: asked.append(path) or is_dir(path))
    assert len(load_classes(tmp_path, "pets")[0]) == 20
    assert not [path for path in asked if path.suffix]


def test_a_source_that_changed_is_another_one(tmp_path, own_cache, all_large):
    path = npz(tmp_path, x=bytes_of(5, 4, 3), y=labels())
    before = load(str(path))[0].identity
    os.utime(path, (1, 1))  # only its time: prepared anew, and found equal
    assert load(str(path))[0].identity == before
    npz(tmp_path, x=bytes_of(5, 4, 3)[::-1], y=labels())
    assert load(str(path))[0].identity != before
    assert len(entries()) == 3


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_archive_is_refused_as_in_memory(save, tmp_path, all_large, own_cache):
    path = npz(tmp_path, save, x=bytes_of(5, 4, 3), y=labels())
    content = bytearray(path.read_bytes())
    content[400] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a complete .npz file"):
        load(str(path))
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="truncated"):
        load(str(path))
    assert not [*own_cache.glob("sets/*")]


def test_a_damaged_entry_says_what_to_remove(tmp_path, own_cache, all_large):
    path = str(npz(tmp_path, np.savez_compressed, x=bytes_of(5, 4, 3), y=labels()))
    load(path)
    known = next(own_cache.rglob("known-*.json"))
    known.write_text("[{}]")
    with pytest.raises(DataError, match=f"is damaged .*remove {known.parent}"):
        load(path)
    known.unlink()
    array = next(own_cache.rglob("0.npy"))
    os.truncate(array, 700)
    with pytest.raises(DataError, match=f"is damaged .*truncated.*remove {known.parent}"):
        load(path)
    cache.remove_folder(array.parents[1])
    load(path)


def test_files_of_servers_are_read_by_calls(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    line = "36 35 98:0 / {} rw,noatime master:1 - {} server rw\n"
    mounts.write_text(line.format("/", "ext4") + line.format(tmp_path, "nfs4"))
    monkeypatch.setattr(mapped, "MOUNTS", mounts)
    mapped._mounts.cache_clear()
    assert not is_local(tmp_path / "set.npz") and is_local(Path("/usr"))
    mounts.write_text(mounts.read_text() + line.format(tmp_path, "xfs"))
    mapped._mounts.cache_clear()
    assert is_local(tmp_path / "set.npz")
    monkeypatch.undo()
    mapped._mounts.cache_clear()


# ---- the cache ----


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("source", ["packed", "pictures", "table"])
def test_no_room_is_a_status_and_leaves_nothing(
    source, tmp_path, own_cache, monkeypatch, all_large
):
    path = str(SOURCES[source](tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    with pytest.raises(
        UsageError, match=r"cannot be written .*No space left.*\$NNMPI_DATA"
    ) as caught:
        load(path)
    assert caught.value.exit_status == DISK_FULL
    assert not [*own_cache.glob("sets/*")]
    monkeypatch.undo()
    monkeypatch.setenv("NNMPI_DATA", str(own_cache))
    load(path)


def test_what_was_not_used_for_a_month_makes_room(tmp_path, own_cache, monkeypatch, all_large):
    (tmp_path / "other").mkdir()
    old = str(SOURCES["packed"](tmp_path / "other"))
    load(old)
    load(str(table(tmp_path / "other")))
    first, second = entries()
    month = time() - 31 * 86400
    for entry in (first, second):
        os.utime(entry.folder, (month, month))
    really, calls = os.posix_fallocate, []

    def until_removed(*args):
        calls.append(args)
        return full_disk() if first.folder.exists() else really(*args)

    monkeypatch.setattr(os, "posix_fallocate", until_removed)
    with locked(second.folder):  # one in work stays
        load(str(SOURCES["packed"](tmp_path)))
        assert second.folder.exists() and not first.folder.exists()
    assert remove_unused() == second.nbytes and len(entries()) == 1


def test_use_is_noted(tmp_path, own_cache, all_large):
    path = str(SOURCES["packed"](tmp_path))
    load(path)
    os.utime(entries()[0].folder, (1, 1))
    load(path)
    assert entries()[0].unused_days < 1 and not remove_unused()


def test_another_version_prepares_for_itself(tmp_path, own_cache, monkeypatch, all_large):
    path = str(SOURCES["packed"](tmp_path))
    load(path)
    monkeypatch.setattr(cache, "VERSION", "0.0.9")
    load(path)
    assert len(entries()) == 2


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, all_large):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot be written .*\$NNMPI_DATA"):
        load(str(SOURCES["packed"](tmp_path)))


def test_two_jobs_at_once_prepare_once(tmp_path, own_cache):
    path = npz(
        tmp_path,
        np.savez_compressed,
        x=np.resize(bytes_of(64, 64), (900, 64, 64)),
        y=np.arange(900) % 3,
    )
    code = (
        "import sys; from nnmpi.data import load, cache\n"
        "write = cache.folder_atomically\n"
        "def noted(folder): print('wrote'); return write(folder)\n"
        "cache.folder_atomically = noted\n"
        "print(load(sys.argv[1])[0].identity)"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [job.communicate()[0].split() for job in jobs]
    assert sorted(map(len, outputs)) == [1, 2] and outputs[0][-1] == outputs[1][-1]


def test_known_rows_normalize_as_all_rows_do(tmp_path, all_large):
    train, _ = load(str(SOURCES["double"](tmp_path)))
    x = read_all(train.x)
    normal = Normalize.fit(train)
    assert np.allclose(normal.mean, x.mean(0, dtype="f8")) and np.allclose(
        normal.std, x.std(0, dtype="f8")
    )


def test_read_npz_gives_large_arrays_in_their_file(tmp_path, all_large):
    arrays, has = read_npz(npz(tmp_path, x=bytes_of(5), y=labels()), ["x", "y"])
    assert isinstance(arrays["x"], FileArray) and has == "x, y"
    assert np.array_equal(arrays["y"][:], labels())
