"""Data sets by name or path: `load` reads one, `prepare` downloads its files.

bundled                  iris, digits                   in the package; split by seed
downloaded, or data_dir  mnist, fashion-mnist, cifar10  have a published test part
text                     paradise-lost                  in the package; see `text`
PATH                     a file                         see `readers`; split by seed, unless an
                                                        .npz has a test part
DataFrame                                               split by seed
PATH                     folder                         IDX files; CIFAR batches; train.csv and
                                                        test.csv; a folder of images per class
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import numpy as np

from nnmpi.base.errors import DataError, UsageError, raised_as
from nnmpi.base.files import VARIABLE, cache_folder, expand, locked
from nnmpi.base.units import format_bytes
from nnmpi.base.words import nearest
from nnmpi.data.arrays import load_arrays, npy_files, read_npy
from nnmpi.data.cache import DATA, SETS, entry_of
from nnmpi.data.columns import Encoding
from nnmpi.data.dataset import (
    HELD_OUT,
    TRAIN,
    Dataset,
    LabelKind,
    check_pair,
    check_scales,
    split,
)
from nnmpi.data.images import (
    CIFAR_ARCHIVE,
    CIFAR_EXPECTED,
    IDX_EXPECTED,
    IDX_FILES,
    OTHERS,
    SUFFIXES,
    find_part,
    has_idx,
    is_image,
    load_cifar,
    load_classes,
    load_idx,
    locate_cifar,
)
from nnmpi.data.prepared import (
    FORMAT,
    SMALL_BYTES,
    Pair,
    ReadSet,
    key_of,
    known_file,
    load_set,
    measure,
    prepare_set,
    read_known,
)
from nnmpi.data.readers import find_reader, load_table, split_names, suffixes_of, unread
from nnmpi.data.tables import TableRules, is_frame, refuse_rules
from nnmpi.data.team import ALONE, Team

TrainAndTest = tuple[Dataset, Dataset]

BUNDLED = {
    name: Path(__file__).parent / "bundled" / file
    for name, file in {
        "iris": "iris.csv.gz",
        "digits": "digits.npz",
        "paradise-lost": "paradise-lost.txt",
    }.items()
}
TEXTS = ("paradise-lost",)
STALL_S = 30.0  # after this silence the download tries the next mirror
CHUNK_BYTES = 2**16


@dataclass(frozen=True)
class Source:
    """A file to download: its name, mirrors in order of preference, size and hash."""

    filename: str
    mirrors: tuple[str, ...]
    size: int
    sha256: str


# mirrors in order of preference
MIRRORS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist"
    " https://storage.googleapis.com/cvdf-datasets/mnist",
    "fashion-mnist": "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data"
    "/fashion http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "cifar10": "https://www.cs.toronto.edu/~kriz"
    " https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10",
}
# sizes and hashes of the compressed files, from TensorFlow Datasets' url_checksums
SUMS = {
    "mnist": """\
9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6""",
    "fashion-mnist": """\
26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5""",
    "cifar10": """\
170052171 c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd""",
}
IDX_PACKED = [f"{name}.gz" for names in IDX_FILES.values() for name in names]
SOURCES = {
    name: tuple(
        Source(file, tuple(MIRRORS[name].split()), int(size), sha256)
        for file, (size, sha256) in zip(
            [CIFAR_ARCHIVE] if name == "cifar10" else IDX_PACKED,
            map(str.split, sums.splitlines()),
            strict=True,
        )
    )
    for name, sums in SUMS.items()
}
DOWNLOADED = tuple(SOURCES)
NAMES = ("iris", "digits", *DOWNLOADED, *TEXTS)
_FASHION_NAMES = "T-shirt/top,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot"
CLASS_NAMES = {"mnist": tuple("0123456789"), "fashion-mnist": tuple(_FASHION_NAMES.split(","))}
# Folders searched below data_dir: itself, one with the set's name, torchvision's.
BELOW = {
    "mnist": ("", "mnist", "MNIST/raw"),
    "fashion-mnist": ("", "fashion-mnist", "FashionMNIST/raw"),
    "cifar10": ("", "cifar10"),
}


def load(
    name_or_path: Any,
    data_dir: str | Path | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    predicts: LabelKind = "classes",
    target: str | int = "",
    *,
    drop: str | Sequence[str | int] = (),
    text_columns: str | Sequence[str | int] = (),
    sample_shape: Sequence[int] = (),
    encoding: Encoding = (),
    as_bytes: bool | None = None,
    class_names: Sequence[str] = (),
    decimal: str = "",
    header: bool = True,
    stratify: bool = False,
    sample_weight: str | int = "",
) -> TrainAndTest:
    """Return the training and test parts of a data set. Downloads nothing: see `prepare`.

    Args:
        name_or_path: one of NAMES except texts, or the path of a table, of a file of arrays or of a
            folder, see `readers.READERS`; or a DataFrame of pandas or polars.
        data_dir: the folder with the files of mnist, fashion-mnist or cifar10, or its parent; by
            default the download cache.
        seed, test_fraction: of the split of a set without a test part (iris, digits, .csv, .npz).
        predicts: the kind of labels in a file: "classes", "quantities", or "any" to infer it.
        target: the column of a table's labels, by name or number from 1; empty for the last.
        drop: columns of a table to leave out, by name or number.
        text_columns: columns of documents, whose words become features.
        sample_shape: of a row of a table, such as (28, 28, 1) for pixels.
        encoding: of the columns, that of a training set for another table; empty to make one.
        as_bytes: whether samples are bytes as those of the training set; None to find out.
        class_names: of a training table, whose numbers the classes of another one get, which may
            lack some; empty to find them.
        decimal: the decimal mark of a table, "." or ","; empty for the one that its numbers show.
        header: whether the first row of a table names its columns.
        stratify: hold out the same share of each class, see `split`.
        sample_weight: the column of a table with the samples' weights, by name or number; see
            `Dataset`.

    Raises:
        UsageError: for an unknown name, a data_dir that is not needed or lacks the files, or an
            unreadable folder.
        DataError: for a file that is damaged or not downloaded yet; the message names it.

    Example:
        >>> train, test = data.load("digits")
        >>> len(train), len(test), train.sample_shape, train.classes
        (1438, 359, (8, 8, 1), 10)
    """
    if predicts not in get_args(LabelKind):
        raise UsageError(
            f"predicts={predicts!r} is none of {', '.join(map(repr, get_args(LabelKind)))}"
        )
    label = "" if target is None else str(target)
    columns = _texts(drop), _texts(text_columns), tuple(sample_shape)
    rules = TableRules(label, *columns, encoding, as_bytes, tuple(class_names), decimal, header)
    rules = replace(rules, sample_weight=str(sample_weight))
    wanted = Wanted(name_or_path, data_dir, seed, test_fraction, predicts, rules, stratify)
    return wanted.load(wanted.prepare())


@dataclass(frozen=True)
class Wanted:
    """A data set that is asked for, by the arguments of `load`."""

    name: Any
    data_dir: str | Path | None
    seed: int
    test_fraction: float
    predicts: LabelKind
    rules: TableRules
    stratify: bool = False

    def prepare(self, team: Team = ALONE) -> Path | None:
        """Return the cache's entry of a large data set, made if it is missing. Collective.

        Returns None for a small one, which `load` reads from its source.

        Args:
            team: of the ranks that share the work.

        Raises:
            UsageError, DataError: see `load`; also when the cache cannot be written.
        """
        if not isinstance(self.name, str | PathLike) or self.name in BUNDLED:
            return None
        with team.agreed():
            form = self._find_form()
        entry = team.first(lambda: self._find_entry(form))
        if not entry:
            return None
        if not form.stays:
            prepare_set(Path(entry), form.read, form.is_shared, team)
        known = self._known(Path(entry))
        if not team.first(known.is_file):
            with team.agreed():
                parts = self._parts(Path(entry))
            measure(known, parts, team)
        return Path(entry)

    def load(self, entry: Path | None = None) -> TrainAndTest:
        """Return the training and test parts; see `load`.

        Args:
            entry: that `prepare` returned.
        """
        if entry is not None:
            known = read_known(self._known(entry))
            parts = self._parts(entry, known[0]["classes"] if known else 0)
            for part, values in zip(parts, known, strict=False):
                vars(part).update(values)  # so that none computes it
            return parts
        if is_frame(self.name):
            frame = type(self.name).__name__
            _refuse_data_dir(frame, self.data_dir)
            if not self.rules.header:
                raise UsageError(f"a {frame} has names of its columns; leave header out")
            return self._split(load_table(self.name, frame, self.predicts, self._split_rules), None)
        if not isinstance(self.name, str | PathLike):
            raise UsageError(
                f"{type(self.name).__name__} is no data set; give a name, a path or a DataFrame, or"
                " make one of arrays: nnmpi.data.Dataset(name, x, y, classes)"
            )
        pair = self._split(*self._find_form().read(ALONE))
        check_scales(*pair)
        return pair

    @property
    def _split_rules(self) -> TableRules:
        """The rules of a table that will be split."""
        by = self.test_fraction, self.seed
        return replace(self.rules, split=by, stratify=self.stratify)

    def _split(self, train: Dataset, test: Dataset | None) -> TrainAndTest:
        if test is None:
            return check_pair(*split(train, self.test_fraction, self.seed, self.stratify))
        if self.stratify:
            raise UsageError(
                f"{train.name} has a test part of its own, so it is not split; leave stratify out"
            )
        return check_pair(train, test)

    def _parts(self, entry: Path, classes: int = 0) -> TrainAndTest:
        """Return the parts of a set in the cache, or of one that stays in its files.

        Args:
            entry: of the cache.
            classes: their number, if it is known.
        """
        folder = entry / DATA
        if folder.is_dir():
            return self._split(*load_set(folder))
        return self._split(*self._find_form().read(ALONE, classes))

    def _known(self, entry: Path) -> Path:
        return known_file(entry, self.test_fraction, self.seed, self.stratify)

    def _find_entry(self, form: "_Form") -> str:
        """Return the folder in the cache; nothing for a source that is small."""
        with _allowed(f"data set {str(self.name)!r}"):
            files = _files_of(form.path)
            if sum(file.stat().st_size for file in files) <= SMALL_BYTES:
                return ""
            names = split_names(str(self.name))[1]
            key = [FORMAT, key_of(files), names, repr(form.rules), self.predicts]
            return str(entry_of(SETS, key))

    def _find_form(self) -> "_Form":
        """Return the form of a data set in files.

        Raises:
            UsageError, DataError: see `load`.
        """
        name, rules = self.name, self.rules
        if name in NAMES:
            refuse_rules(f"data set {name!r}", rules)
        if name in DOWNLOADED:
            path = _place(name, self.data_dir)
            if name == "cifar10":
                return _Form(path, rules, lambda team: load_cifar(path, name))
            return _Form(path, rules, lambda team: load_idx(path, name, CLASS_NAMES[name]))
        _refuse_data_dir(name, self.data_dir)
        # columns of texts are features here
        if find_text(name, has_label=bool(rules.target or rules.text_columns)) is not None:
            raise UsageError(
                f"data set {name!r} is a text: see nnmpi.data.load_text; if it is a table of JSON"
                " lines, name its column of labels, target=..."
            )
        with _allowed(f"data set {name!r}"):
            path = BUNDLED[name] if name in BUNDLED else _existing(name)
            kind: LabelKind = "classes" if name in BUNDLED else self.predicts
            stem = path.name.split(".")[0]
            if path.is_dir():
                return _form_of_folder(path, kind, rules)
            reader = find_reader(path, has_label=True)
            if reader and reader.gives == "table":
                by = self._split_rules
                return _Form(path, by, lambda team: (load_table(path, stem, kind, by, team), None))
            if not reader or reader.gives != "arrays":
                raise unread(path)
            scale = 1 / 16 if name == "digits" else None
            given = split_names(str(name))[1]

            def read(team: Team, classes: int = 0) -> Pair:
                options: dict[str, Any] = {"given": given} if given else {}
                if not reader.stays:
                    options["team"] = team
                function = partial(reader.read, **options)
                return load_arrays(path, stem, function, kind, rules, scale, classes)

            return _Form(path, rules, read, stays=reader.stays)


@dataclass(frozen=True)
class _Form:
    """The form of a data set in files.

    Attributes:
        path: of the file or the folder.
        rules: of a table.
        read: the function that reads it; of one that stays, also with the number of classes if it
            is known.
        is_shared: whether all ranks of a team read it, each its part.
        stays: whether arrays stay in the file, in whatever form they are there.
    """

    path: Path
    rules: TableRules
    read: ReadSet
    is_shared: bool = False
    stays: bool = False


def _files_of(path: Path) -> list[Path]:
    """Return a file, or all files in a folder that are not hidden, sorted as texts."""
    if not path.is_dir():
        return [path]
    result = list[str]()
    for place, folders, names in os.walk(path):
        folders[:] = [folder for folder in folders if folder[0] != "."]
        result += [os.path.join(place, name) for name in names if name[0] != "."]
    return [*map(Path, sorted(result))]


def _texts(columns: str | Sequence[str | int]) -> tuple[str, ...]:
    """Return the names or numbers of columns as texts, also of one alone."""
    return (columns,) if isinstance(columns, str) else tuple(map(str, columns))


def find_text(
    name_or_path: str, columns: Sequence[str] = (), has_label: bool = False
) -> Path | None:
    """Return the file of a text; None if the name or path is another kind of data set.

    Args:
        name_or_path: one of NAMES, or a path.
        columns: the columns of a table that hold the text.
        has_label: whether a column is named that holds labels; see `find_reader`.

    Raises:
        UsageError: for a missing file, and for columns without a table.
    """
    if name_or_path in TEXTS:
        return BUNDLED[name_or_path]
    reader = None
    if name_or_path not in NAMES:
        path = expand(Path(split_names(str(name_or_path))[0]), "data set")
        with _allowed(f"data set {name_or_path!r}"):
            reader = None if path.is_dir() else find_reader(path, columns, has_label)
    if reader is not None and reader.gives == "text":
        return _existing(name_or_path)
    if columns and not (has_label and reader is not None and reader.gives == "table"):
        raise UsageError(
            f"data set {name_or_path!r} has no columns of text; give a .csv or .jsonl file"
        )
    return None


def prepare(
    name: str, data_dir: str | Path | None = None, *, report: Callable[[str], None] | None = None
) -> Path | None:
    """Download missing files of a data set; return the folder or archive for `load`.

    One rank per node calls this before any rank loads. Concurrent callers wait for a file lock.
    With data_dir, or for a bundled set or a path, it downloads nothing, and only checks the
    arguments. For a bundled set it returns None.

    Args:
        name: one of NAMES, or a path.
        data_dir: the folder with local files of a downloadable set.
        report: called with a sentence when a transfer begins.

    Raises:
        UsageError: see `load`.
        DataError: when a file cannot be downloaded.
    """
    if name not in DOWNLOADED:
        _refuse_data_dir(name, data_dir)
        return None if name in BUNDLED else _existing(name)
    if data_dir is None:
        folder = cache_folder() / name
        if _look(name, folder, "the folder for downloads") is None:
            with locked(folder):
                for source in SOURCES[name]:
                    download(source, folder, report)
    return _place(name, data_dir)


class _Limit:
    """Stop a transfer that exceeds the expected size, by posing as pooch's progress bar.

    pooch checks the hash only after the transfer. A broken mirror could fill the disk before that.
    """

    def __init__(self, most: int) -> None:
        self.total, self.most, self.done = 0, most, 0

    def update(self, nbytes: int) -> None:
        self.done += nbytes  # pooch counts full chunks, so the last one may overshoot
        if self.done >= self.most + CHUNK_BYTES:
            raise ValueError(f"it sends more than {self.most} bytes")

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def download(source: Source, folder: Path, report: Callable[[str], None] | None = None) -> Path:
    """Return the file in the folder, downloaded by pooch, verified and complete.

    Raises:
        DataError: when every mirror failed (the message gives each mirror's error) or the folder
            is not writable.
    """
    import pooch

    pooch.get_logger().setLevel("ERROR")
    problems = []
    for mirror in source.mirrors:
        if report is not None and not (folder / source.filename).is_file():
            report(
                f"downloading {source.filename} ({format_bytes(source.size)}) from"
                f" {urlsplit(mirror).netloc}"
            )
        by = pooch.HTTPDownloader(_Limit(source.size), CHUNK_BYTES, timeout=STALL_S)
        try:
            return Path(
                pooch.retrieve(
                    f"{mirror}/{source.filename}",
                    f"sha256:{source.sha256}",
                    source.filename,
                    folder,
                    downloader=by,
                )
            )
        except (OSError, ValueError) as error:  # the errors of `requests` are OSErrors
            problems.append(f"{mirror}: {error}")
    raise DataError(
        f"{source.filename} ({source.size} bytes) could not be downloaded to {folder}"
        f" ({'; '.join(problems)}); try again later, or get the file by other means and name its"
        " folder as data_dir"
    )


def _refuse_data_dir(name: str, data_dir: str | Path | None) -> None:
    if data_dir is not None:
        raise UsageError(
            f"data set {name!r} is {'bundled' if name in BUNDLED else 'a path'}; leave out"
            f" data_dir, which is for {', '.join(DOWNLOADED)}"
        )


def _place(name: str, data_dir: str | Path | None) -> Path:
    if data_dir is None:
        path = _look(name, folder := cache_folder() / name, "the folder for downloads")
        if path is None:
            raise DataError(
                f"{name} is not in {folder}; let nnmpi.data.prepare({name!r}) download it, set"
                f" ${VARIABLE}, or name local files as data_dir"
            )
        return path
    path = _look(name, folder := expand(Path(data_dir), "data_dir"), "data_dir")
    if path is None:
        expected = CIFAR_EXPECTED if name == "cifar10" else IDX_EXPECTED
        raise UsageError(f"data_dir {folder} lacks the files of {name}; it needs {expected}")
    return path


def _look(name: str, folder: Path, what: str) -> Path | None:
    with _allowed(f"{what} {folder}"):
        candidates = [folder / below for below in BELOW[name]]
        if name == "cifar10":
            return next(filter(None, map(locate_cifar, candidates)), None)
        return next(filter(has_idx, candidates), None)


def _allowed(what: str) -> AbstractContextManager[None]:
    return raised_as(UsageError, f"{what} cannot be read", "make it readable, or give another")


def _existing(text: str) -> Path:
    """Return the path if it exists; else raise UsageError, with a guess at the intended name.

    Args:
        text: a path, which may have names of arrays; see `readers.split_names`.
    """
    path = expand(Path(split_names(str(text))[0]), "data set")
    with _allowed(f"data set {text!r}"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"data set {text!r} is neither an ordinary file nor a folder")
        if path.exists():
            return path
    if path.suffix or len(path.parts) > 1:
        raise UsageError(f"data set {text!r}: no such file or folder")
    near = nearest(text.lower().replace("_", "-"), NAMES, 2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"data set {text!r} is unknown; {hint}choose one of {', '.join(NAMES)}, or the path of a"
        " .csv, .npz or .txt file or of a folder"
    )


def _tables_in(folder: Path) -> tuple[Path, Path] | None:
    """Return the tables of the training and of the held-out part, or None.

    Raises:
        UsageError: if there are several pairs, in files of several kinds.
    """
    pairs = list[tuple[Path, Path]]()
    for suffix in suffixes_of("table"):
        train, test = (find_part(folder, parts, suffix) for parts in (TRAIN, HELD_OUT))
        if train and test:
            pairs.append((train, test))
    if len(pairs) > 1:
        raise UsageError(
            f"data set {folder} has tables in {pairs[0][0].name} and in {pairs[1][0].name}; move"
            " one kind elsewhere"
        )
    return pairs[0] if pairs else None


def _form_of_folder(folder: Path, predicts: LabelKind, rules: TableRules) -> _Form:
    """Return the form of a folder.

    Raises:
        UsageError: for rules of tables without a table.
    """
    name = folder.resolve().name
    if tables := _tables_in(folder):
        return _Form(folder, rules, lambda team: _load_tables(tables, name, predicts, rules, team))
    if npy_files(folder):
        arrays = folder, name, read_npy, predicts, rules, None
        return _Form(
            folder, rules, lambda team, classes=0: load_arrays(*arrays, classes), stays=True
        )
    refuse_rules(f"data set {folder}", rules)
    if has_idx(folder):
        return _Form(folder, rules, lambda team: load_idx(folder, name))
    if path := locate_cifar(folder):
        return _Form(path, rules, lambda team: load_cifar(path, name))
    return _Form(folder, rules, lambda team: _load_images(folder, name, team), is_shared=True)


def _load_tables(
    tables: tuple[Path, Path], name: str, predicts: LabelKind, rules: TableRules, team: Team
) -> TrainAndTest:
    train = load_table(tables[0], name, predicts, rules, team)
    kind: LabelKind = "classes" if train.predicts == "classes" else "quantities"
    rules = replace(
        rules,
        target=train.target,
        encoding=train.encoding,
        as_bytes=train.x.dtype == np.uint8,
        class_names=train.class_names,
    )
    return train, load_table(tables[1], name, kind, rules, team)


def _load_images(folder: Path, name: str, team: Team) -> Pair:
    if result := load_classes(folder, name, team):
        return result
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    images = (file for file in files if is_image(file) or file.suffix.lower() in OTHERS)
    if image := next(images, None):
        raise UsageError(
            f"data set {folder}: {image} is not in a folder of images per class"
            f" ({', '.join(SUFFIXES)}); move or convert the images, or in a program train on"
            " nnmpi.data.Loader([(numpy.asarray(PIL.Image.open(file)), number) for file, number in"
            " ...], 32)"
        )
    raise UsageError(
        f"data set {folder}: the folder has neither {IDX_EXPECTED}, nor {CIFAR_EXPECTED}, nor"
        " train.csv and test.csv (or val.csv ...; plain or .gz), nor x.npy and y.npy, nor a folder"
        " of images per class"
    )
