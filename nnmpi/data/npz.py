"""NumPy archives: x and y, or x_train, y_train, x_test and y_test. Pickled objects are refused."""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.data.dataset import IGNORED, Dataset, Wanted, check_pair, split
from nnmpi.data.files import opened
from nnmpi.errors import DataError

SURE_CLASSES = 1000  # so many may be meant even if there are fewer labels
MOST_CLASSES = 10**6  # a model has an output for each; a label beyond is a number that is no class


def load_npz(
    path: Path, name: str, *, seed: int, test_fraction: float, wanted: Wanted = "classes"
) -> tuple[Dataset, Dataset]:
    """Return the training and test parts of an .npz file.

    The file holds x and y (split by `dataset.split`), x_train and y_train (split likewise), or these and x_test and
    y_test. x: (n, ...), any real dtype; uint8 stays uint8 with scale 1/255, everything else becomes float32. A 3-D x
    is grayscale images (n, height, width) and gets its channel. y: (n,) or (n, 1), whole numbers from 0 on; or
    (n, ...), several labels for each sample, where -1 is what is not to be predicted. Where quantities are wanted, y
    is any real dtype.

    x holds tokens, which stay whole numbers, if it is uint16 or uint32, or of whole numbers (n, time) with several
    labels for each sample.

    Args:
        path: the file.
        name: of the data set.
        seed, test_fraction: of the split, where the file has no test part.
        wanted: what y is to be; "any" takes floats for quantities and whole numbers for classes.

    Raises:
        DataError: for a damaged file, missing or pickled arrays, wrong dtypes, NaN, or labels out of range.
    """
    arrays = _read(path)
    names = ("x_train", "y_train") if "x_train" in arrays else ("x", "y")
    if not {*names} <= {*arrays}:
        raise DataError(f"{path}: holds {sorted(arrays)}; needs x and y, or x_train, y_train, x_test and y_test")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path}: x_test and y_test must come together")
    train = _part(path, name, arrays, *names, classes=0, wanted=wanted)
    if "x_test" not in arrays:
        return check_pair(*split(train, test_fraction, seed))
    test = _part(path, name, arrays, "x_test", "y_test", classes=train.classes, wanted=wanted)
    if train.scale != test.scale:
        kinds = f"x_train holds {arrays['x_train'].dtype} and x_test {arrays['x_test'].dtype}"
        raise DataError(f"{path}: {kinds}; bytes are divided by 255, other numbers are not: save both in one dtype")
    return check_pair(train, test)


def load_npz_whole(path: Path, name: str, *, scale: float) -> Dataset:
    """Return the whole of an .npz file of x and y as one data set.

    Args:
        path: the file.
        name: of the data set.
        scale: what x is multiplied by to become model input.

    Raises:
        DataError: as `load_npz`.
    """
    whole = _part(path, name, _read(path), "x", "y", classes=0)
    return Dataset(name, whole.x, whole.y, whole.classes, scale)


def read_samples(path: Path) -> Array:
    """Return x of an .npz file, as it is.

    Raises:
        DataError: for a damaged file, one without x or x_test, or numbers that are not finite.
    """
    arrays = _read(path)
    name = next((name for name in ("x", "x_test") if name in arrays), None)
    if name is None:
        raise DataError(f"{path}: holds {sorted(arrays)}; needs x, the samples")
    x = arrays[name]
    return x if x.dtype.kind in "iu" else _samples(path, name, x)


def _read(path: Path) -> dict[str, Array]:
    with opened(path) as stream:
        whole = zipfile.is_zipfile(stream)
    if not whole:
        raise DataError(f"{path}: not an .npz file, or cut off; write it with numpy.savez")
    try:
        # The file is ours: np.load leaves it open where the archive's directory is damaged.
        with opened(path) as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # whatever zipfile, its decompressors and the reader of headers make of damage
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: damaged, or holds pickled objects, which are not read ({reason})") from error
    other = next((name for name, array in arrays.items() if not isinstance(array, np.ndarray)), None)
    if other is not None:
        raise DataError(f"{path}: {other} is no array; write the file with numpy.savez")
    return arrays


def _part(
    path: Path,
    name: str,
    arrays: dict[str, Array],
    x_name: str,
    y_name: str,
    *,
    classes: int,
    wanted: Wanted = "classes",
) -> Dataset:
    x, y = arrays[x_name], arrays[y_name]
    if len(x.shape) < 2 or len(x) == 0 or len(y.shape) < 1 or len(y) != len(x) or 0 in (x.size, y.size):
        raise DataError(
            f"{path}: {x_name} {x.shape} and {y_name} {y.shape}; needs (n, ...) samples and (n,) or (n, ...) labels"
        )
    y = y.reshape(-1) if y.size == len(x) else y
    if wanted == "quantities" or (wanted == "any" and y.dtype.kind == "f"):
        samples = _samples(path, x_name, x)
        scale = 1 / 255 if samples.dtype == np.uint8 else 1.0
        return Dataset(name, samples, _quantities(path, y_name, y), 0, scale)
    if y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {y_name} is {y.dtype}; save the labels as whole numbers (an integer dtype), or predict numbers: "
            "wanted='quantities', as the losses mse, mae and huber do"
        )
    classes = classes or _count_classes(path, y_name, y)
    least = IGNORED if y.ndim > 1 else 0
    wrong = np.argwhere((y < least) | (y >= classes))  # before the conversion, in which a large number turns negative
    if wrong.size:
        place = tuple(int(i) for i in wrong[0])
        where = ", ".join(map(str, place))
        raise DataError(f"{path}: {y_name}[{where}] is {y[place]}, not a label in 0..{max(classes - 1, 0)}")
    labels = y.astype(np.int64)
    if x.dtype in (np.uint16, np.uint32) or (x.dtype.kind in "iu" and x.ndim == 2 and y.ndim > 1):
        return Dataset(name, _tokens(path, x_name, x), labels, classes)
    samples = _samples(path, x_name, x)
    return Dataset(name, samples, labels, classes, 1 / 255 if samples.dtype == np.uint8 else 1.0)


def _count_classes(path: Path, y_name: str, y: Array) -> int:
    """Return how many classes labels from 0 on speak of."""
    largest = int(y.max())
    if largest >= max(y.size, SURE_CLASSES):
        raise DataError(
            f"{path}: {y_name} has {y.size} labels, and one of them is {largest}; number the classes from 0 on"
        )
    return min(largest + 1, MOST_CLASSES)


def _tokens(path: Path, x_name: str, x: Array) -> Array:
    if x.min() < 0:
        row = int(np.argwhere(x < 0)[0][0])
        raise DataError(f"{path}: {x_name}[{row}] has the token {x[row].min()}; tokens are whole numbers from 0 on")
    return np.ascontiguousarray(x.astype(np.uint16) if x.dtype == np.uint8 else x)


def _quantities(path: Path, y_name: str, y: Array) -> NDArray[np.float32]:
    """Return numbers that are predicted as float32."""
    if y.dtype.kind not in "biuf":
        raise DataError(f"{path}: {y_name} is {y.dtype}; needs real numbers")
    with np.errstate(over="ignore"):  # the check below names the place
        found = np.ascontiguousarray(y, np.float32)
    bad = np.argwhere(~np.isfinite(found))
    if bad.size:
        place = tuple(int(i) for i in bad[0])
        raise DataError(f"{path}: {y_name}{list(place)} is {y[place]}; targets must be finite float32 numbers")
    return found


def _samples(path: Path, x_name: str, x: Array) -> Array:
    if x.dtype.kind not in "biuf":
        raise DataError(f"{path}: {x_name} is {x.dtype}; needs real numbers")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # the check below names the place
            x = x.astype(np.float32)
        bad = np.argwhere(~np.isfinite(x))
        if bad.size:
            place = tuple(int(i) for i in bad[0])
            raise DataError(f"{path}: {x_name}{list(place)} is {x[place]}; samples must be finite float32 numbers")
    if x.ndim == 3:
        x = x[..., np.newaxis]
    return np.ascontiguousarray(x)
