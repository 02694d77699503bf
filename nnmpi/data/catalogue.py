"""Data sets by name: `load` reads one, `prepare` downloads what it needs.

bundled                     iris, digits                      in the package, split by seed
downloaded, or data_dir     mnist, fashion-mnist, cifar10     with their own test part
text                        paradise-lost                     in the package; see `text`
PATH                        .csv[.gz], .npz                   split by seed, unless the .npz has a test part
                            .txt, .jsonl, .csv                texts, see `documents`
                            folder                            of IDX files, CIFAR batches, or train.csv and test.csv
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nnmpi.data.cifar import ARCHIVE as CIFAR_ARCHIVE
from nnmpi.data.cifar import FOLDER as CIFAR_FOLDER
from nnmpi.data.cifar import load_cifar, locate_cifar
from nnmpi.data.csvfile import read_csv, to_dataset
from nnmpi.data.dataset import Dataset, Wanted, check_pair, split
from nnmpi.data.documents import is_text
from nnmpi.data.files import find
from nnmpi.data.idx import has_idx, load_idx
from nnmpi.data.npz import load_npz, load_npz_whole
from nnmpi.data.sources import sources
from nnmpi.errors import DataError, UsageError
from nnmpi.files import VARIABLE, cache_folder, expand, locked

Pair = tuple[Dataset, Dataset]

BUNDLED = ("iris", "digits")
DOWNLOADED = ("mnist", "fashion-mnist", "cifar10")
TEXTS = ("paradise-lost",)
NAMES = BUNDLED + DOWNLOADED + TEXTS

CLASS_NAMES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
}
# Where the files may lie below data_dir, beside the folder itself: a folder of that name, or torchvision's.
BELOW = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw"),
    "cifar10": ("cifar10",),
}
IDX_WANTED = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (plain or .gz)"
)
CIFAR_WANTED = (
    f"test_batch.bin and at least one data_batch_N.bin (plain or .gz), also in {CIFAR_FOLDER}, or {CIFAR_ARCHIVE}"
)


def load(
    name_or_path: str,
    data_dir: str | Path | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    wanted: Wanted = "classes",
    target: str = "",
) -> Pair:
    """Return the training and test parts of a data set. Downloads nothing: see `prepare`.

    Args:
        name_or_path: one of NAMES that is no text, or the path of a .csv, .csv.gz or .npz file or of a folder.
        data_dir: the folder with the files of mnist, fashion-mnist or cifar10, or with a folder mnist, ... in it;
            without it the download folder is read.
        seed, test_fraction: the split of sets that come without a test part (iris, digits, .csv, .npz).
        wanted: what the labels in a file are: classes, quantities, or any, as they look.
        target: the column of a table's labels, by name or number; empty for the last.

    Raises:
        UsageError: for an unknown name, a data_dir that is not needed or lacks the files, or a folder that may not be
            entered.
        DataError: for a file that is damaged, or not downloaded yet; the message names it.
    """
    if target and name_or_path in NAMES:
        raise UsageError(f"data set {name_or_path!r} knows its labels itself; leave the target out")
    if name_or_path in DOWNLOADED:
        return _load_files(name_or_path, _place(name_or_path, data_dir))
    _refuse_data_dir(name_or_path, data_dir)
    if name_or_path == "iris":
        return split(to_dataset(read_csv(_bundled("iris.csv.gz")), "iris"), test_fraction, seed)
    if name_or_path == "digits":
        return split(load_npz_whole(_bundled("digits.npz"), "digits", scale=1 / 16), test_fraction, seed)
    if find_text(name_or_path) is not None:
        raise UsageError(f"data set {name_or_path!r} is a text: see nnmpi.data.load_text")
    path = _existing(name_or_path)
    with _allowed(f"data set {name_or_path!r}"):
        return _load_path(path, seed, test_fraction, wanted, target)


def find_text(name_or_path: str, columns: Sequence[str] = ()) -> Path | None:
    """Return the file of a text; None for what is no text.

    Args:
        name_or_path: one of TEXTS, or a path.
        columns: of a table that are the text.

    Raises:
        UsageError: for a file that is not there, and for columns of what is no table.
    """
    if name_or_path in TEXTS:
        return _bundled(f"{name_or_path}.txt")
    if name_or_path not in NAMES and is_text(Path(name_or_path), columns):
        return _existing(name_or_path)
    if columns:
        raise UsageError(f"data set {name_or_path!r} has no columns of text; give a .csv or .jsonl file")
    return None


def prepare(
    name: str, data_dir: str | Path | None = None, *, report: Callable[[str], None] | None = None
) -> Path | None:
    """Return the folder (or archive) that `load` will read, after downloading what is missing there.

    One rank per node calls this, before all of them load; several at once wait for one another. With data_dir, or for
    a bundled set or a path, nothing is downloaded and only the arguments are checked; None is returned where there is
    no folder.

    Args:
        name: one of NAMES, or a path.
        data_dir: the folder with local files of a set that would be downloaded.
        report: called with a sentence when a transfer begins; None for nobody.

    Raises:
        UsageError: as `load`.
        DataError: when a file cannot be downloaded.
    """
    if name not in DOWNLOADED:
        _refuse_data_dir(name, data_dir)
        return None if name in BUNDLED else _existing(name)
    if data_dir is None:
        folder = cache_folder() / name
        if _look(name, folder) is None:
            from nnmpi.data.download import download, silent

            with locked(folder):
                for source in sources(name):
                    download(source, folder, report=report or silent)
    return _place(name, data_dir)


def _bundled(filename: str) -> Path:
    return Path(__file__).parent / "bundled" / filename


def _refuse_data_dir(name: str, data_dir: str | Path | None) -> None:
    if data_dir is not None:
        kind = "is bundled" if name in BUNDLED else "names its files itself"
        raise UsageError(f"data set {name!r} {kind}; leave out data_dir, which is for {', '.join(DOWNLOADED)}")


def _place(name: str, data_dir: str | Path | None) -> Path:
    """Return where the files of a downloadable set are."""
    folder = cache_folder() / name if data_dir is None else expand(Path(data_dir), "data_dir")
    place = _look(name, folder) if data_dir is None else _look(name, folder, "data_dir")
    if place is None and data_dir is None:
        raise DataError(
            f"{name} is not in {folder}; let nnmpi.data.prepare({name!r}) download it, set ${VARIABLE}, or name "
            "local files as data_dir"
        )
    if place is None:
        wanted = CIFAR_WANTED if name == "cifar10" else IDX_WANTED
        state = "does not exist" if not folder.exists() else "is not a folder" if folder.is_file() else "lacks them"
        raise UsageError(f"data_dir {folder} {state}: looked there for {wanted}")
    return place


def _look(name: str, folder: Path, what: str = "the folder for downloads") -> Path | None:
    with _allowed(f"{what} {folder}"):
        for place in (folder, *(folder / below for below in BELOW[name])):
            if name == "cifar10":
                found = locate_cifar(place)
                if found:
                    return found
            elif has_idx(place):
                return place
    return None


@contextmanager
def _allowed(what: str) -> Iterator[None]:
    """Turn the system's refusal to say what there is (a folder that may not be entered) into a sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{what} cannot be read ({reason}); make it readable, or give another") from None


def _load_files(name: str, place: Path) -> Pair:
    if name == "cifar10":
        return check_pair(*load_cifar(place, name))
    return check_pair(*(load_idx(place, part, name, CLASS_NAMES[name]) for part in ("train", "test")))


def _existing(text: str) -> Path:
    """Return the path, or say which known name may have been meant."""
    path = expand(Path(text), "data set")
    with _allowed(f"data set {text!r}"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"data set {text!r} is neither an ordinary file nor a folder")
        if path.exists():
            return path
    if path.suffix or len(path.parts) > 1:
        raise UsageError(f"data set {text!r}: no such file or folder")
    near = difflib.get_close_matches(text.lower().replace("_", "-"), NAMES, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"data set {text!r} is unknown; {hint}choose one of {', '.join(NAMES)}, or the path of a .csv, .npz or .txt "
        "file or of a folder"
    )


def _load_path(path: Path, seed: int, test_fraction: float, wanted: Wanted, target: str) -> Pair:
    name = path.name.split(".")[0] or path.resolve().name
    if path.is_dir():
        return _load_folder(path, path.resolve().name, wanted, target)
    if path.name.endswith((".csv", ".csv.gz")):
        return split(to_dataset(read_csv(path, target), name, wanted=wanted), test_fraction, seed)
    if target:
        raise UsageError(f"data set {path} has no columns of labels to choose from; leave the target out")
    if path.suffix == ".npz":
        return load_npz(path, name, seed=seed, test_fraction=test_fraction, wanted=wanted)
    raise UsageError(
        f"data set {path}: files of this kind are not read; give .csv, .csv.gz, .npz or a folder; of texts .txt, "
        ".jsonl or .csv"
    )


def _load_folder(folder: Path, name: str, wanted: Wanted, target: str) -> Pair:
    tables = [find(folder, (f"{part}.csv",)) for part in ("train", "test")]
    if tables[0] and tables[1]:
        train = to_dataset(read_csv(tables[0], target), name, wanted=wanted)
        kind: Wanted = "classes" if train.predicts == "classes" else "quantities"
        return check_pair(train, to_dataset(read_csv(tables[1], target), name, train.class_names, kind))
    if has_idx(folder):
        train = load_idx(folder, "train", name)
        classes = tuple(str(label) for label in range(train.classes))
        return check_pair(train, load_idx(folder, "test", name, classes))
    place = locate_cifar(folder)
    if place:
        return check_pair(*load_cifar(place, name))
    raise UsageError(
        f"data set {folder}: the folder has neither {IDX_WANTED}, nor {CIFAR_WANTED}, nor train.csv and "
        "test.csv (plain or .gz)"
    )
