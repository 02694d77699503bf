"""Images in MNIST's format (IDX), in CIFAR-10's, and in folders: bytes with labels.

IDX: unsigned bytes behind a header of sizes (http://yann.lecun.com/exdb/mnist/).

    byte  0  1  2     3     4..7    8..11   ...
          0  0  type  dims  size 0  size 1  ...   big-endian 32-bit sizes; then values, C order

CIFAR-10's binary version: records of one label byte and three 32 x 32 colour planes in C order
(https://www.cs.toronto.edu/~kriz/cifar.html). The Python version is refused: it contains pickles.

    record   label   1024 bytes red   1024 bytes green   1024 bytes blue      3073 bytes
"""

import importlib
import importlib.util
import io
import math
import os
import re
import tarfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import DataError, UsageError
from nnmpi.base.files import check_unpacked, foreign, read_bytes
from nnmpi.data.dataset import HELD_OUT, TRAIN, Dataset
from nnmpi.data.team import ALONE, Team

# For each part: the published names of the file of images and the file of labels.
IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IDX_EXPECTED = f"{', '.join(name for names in IDX_FILES.values() for name in names)} (plain or .gz)"

CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_EXPECTED = (
    f"test_batch.bin and at least one data_batch_N.bin (plain or .gz), also in {CIFAR_FOLDER}, or"
    f" {CIFAR_ARCHIVE}"
)
_CIFAR_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR_CLASSES = tuple(_CIFAR_NAMES.split())
RECORD = 1 + 3 * 32 * 32
BATCH = re.compile(r"(data_batch_\d+|test_batch)\.bin(\.gz)?")


def read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """Return the array of an IDX file, plain or .gz: read-only uint8 with `dims` dimensions."""
    content, header = read_bytes(path), 4 + 4 * dims
    if content[:4] != bytes([0, 0, 8, dims]) or len(content) < header:
        raise DataError(
            f"{path}: not an IDX file of bytes in {dims} dimensions (it begins with"
            f" {content[:4].hex(' ')})"
        )
    sizes = np.frombuffer(content, ">u4", dims, offset=4).tolist()
    if len(content) - header != math.prod(sizes):
        raise DataError(
            f"{path}: the header promises {math.prod(sizes)} bytes of values"
            f" ({' x '.join(map(str, sizes))}), but {len(content) - header} follow"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def find(folder: Path, name: str) -> Path | None:
    """Return the file of this name, plain before .gz, or None.

    Some unpackers name IDX files `train-images.idx3-ubyte`; these names are found, too.
    """
    other = re.sub(r"-(?=idx\d)", ".", name)
    candidates = (folder / f"{item}{end}" for item in (name, other) for end in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def has_idx(folder: Path) -> bool:
    """Return whether the folder has all four IDX files."""
    return all(find(folder, name) for names in IDX_FILES.values() for name in names)


def load_idx(folder: Path, name: str, class_names: tuple[str, ...] = ()) -> tuple[Dataset, Dataset]:
    """Return both parts of a folder of IDX files: x (n, height, width, 1) uint8, scale 1/255.

    Args:
        class_names: one per class; without them, the number of classes is the largest training
            label plus one.
    """
    arrays = {
        part: [
            read_idx(find(folder, file) or folder / file, dims)
            for file, dims in zip(files, (3, 1), strict=True)
        ]
        for part, files in IDX_FILES.items()
    }
    classes = len(class_names) or int(arrays["train"][1].max(initial=0)) + 1
    train, test = (
        Dataset(name, images[..., None], labels, classes, 1 / 255, class_names)
        for images, labels in arrays.values()
    )
    return train, test


def locate_cifar(folder: Path) -> Path | None:
    """Return the path to read: the folder, the official folder in it, the archive, or None.

    The test batch and at least one training batch must be there.
    """
    for inner in (folder, folder / CIFAR_FOLDER):
        names = {match[1] for file in inner.glob("*.bin*") if (match := BATCH.fullmatch(file.name))}
        if "test_batch" in names and len(names) > 1:
            return inner
    archive = folder / CIFAR_ARCHIVE
    return archive if archive.is_file() else None


def load_cifar(path: Path, name: str) -> tuple[Dataset, Dataset]:
    """Return both parts of CIFAR-10: x (n, 32, 32, 3) uint8, scale 1/255.

    Args:
        path: the folder or archive that `locate_cifar` returns.
        name: of the data sets.
    """
    result: dict[str, bytes] = {}
    if path.is_dir():
        for file in sorted(path.glob("*.bin*")):  # a plain file comes before its .gz and is read
            if (match := BATCH.fullmatch(file.name)) and match[1] not in result:
                result[match[1]] = read_bytes(file)
    else:
        packed = io.BytesIO(read_bytes(path))
        with (
            foreign(path, DataError, "not a complete tar archive"),
            # ":" unpacks nothing more: a gz within the gz would escape the limit of `read_bytes`
            tarfile.open(fileobj=packed, mode="r:") as archive,
        ):
            for member in archive:
                match = BATCH.fullmatch(Path(member.name).name)
                if match and not member.issparse() and (stream := archive.extractfile(member)):
                    result[match[1]] = stream.read()
    tests = [item for item in result if item == "test_batch"]
    # by length first: data_batch_10 after data_batch_9
    trains = sorted(result.keys() - tests, key=lambda batch: (len(batch), batch))
    if not trains or not tests:
        raise DataError(f"{path}: needs {CIFAR_EXPECTED}, but has {sorted(result)}")
    for batch, content in result.items():
        if len(content) % RECORD:
            raise DataError(
                f"{path}, {batch}.bin: {len(content)} bytes are not a multiple of {RECORD}, a"
                " record's length"
            )
    parts = []
    for batches in (trains, tests):
        content = b"".join(result[batch] for batch in batches)
        records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
        images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        about = len(CIFAR_CLASSES), 1 / 255, CIFAR_CLASSES
        parts.append(Dataset(name, images, records[:, 0], *about))
    return parts[0], parts[1]


# An image has one of these suffixes, or its content is known to Pillow.
_IMAGES = ".png .jpg .jpeg .jfif .bmp .gif .webp .tif .tiff .tga .pgm .ppm .pbm .pnm"
# What people keep beside images is left out, which is said. Any other file must be an image.
_BESIDE = ".txt .md .csv .tsv .json .jsonl .xml .html .yaml .yml .log .db .ini .py"
# Images that Pillow may not know: a hint calls them so.
_OTHERS = ".heic .heif .avif .jp2 .dcm .psd .svg .exr"
SUFFIXES, BESIDE, OTHERS = (tuple(words.split()) for words in (_IMAGES, _BESIDE, _OTHERS))
PIXEL_BYTES = 8  # of a pixel while it is read, at most
WIDE = re.compile("I;16.*|I")  # modes of 16 bits; PNG's were "I" in older versions of Pillow


@contextmanager
def open_image(file: Path) -> Iterator[Any]:
    """Yield a Pillow image, opened lazily: only the header has been read.

    Raises:
        UsageError: without Pillow.
        DataError: for a file that is no image, or has far more pixels than bytes, and for what
            fails with the image.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UsageError(
            f"{file}: images are read by Pillow, which is not installed (pip install pillow)"
        )
    if file.exists() and not file.is_file():  # who opens a pipe waits for its writer
        raise DataError(f"{file} is no file; remove it")
    what = "cannot be read as an image"
    with foreign(file, DataError, what), _module("Image").open(file) as image:
        check_unpacked(file, PIXEL_BYTES * image.width * image.height)
        yield image


def read_image(file: Path, shape: Sequence[int]) -> NDArray[np.uint8]:
    """Return an image resized to `shape`: (height, width, channels), with 1 or 3 channels.

    16 bits become 8: 0 stays black, 65535 white. Transparent pixels show white.

    Raises:
        DataError: for a file that is no image, has several, or whose pixels have no largest value.
    """
    with open_image(file) as image:
        several = getattr(image, "n_frames", 1)
        if several > 1 and image.format != "MPO":  # a photo with its preview
            raise DataError(f"{file} has {several} images; save each in a file of its own")
        if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
            kind = "floating-point" if image.mode == "F" else "32-bit"
            raise DataError(
                f"{file} has {kind} pixels, whose white is unknown; save it with 8 or 16"
                " bits, or give the arrays in an .npz"
            )
        if WIDE.fullmatch(image.mode):
            wide = np.asarray(image).astype(np.int64)
            # Pillow's own conversion cuts off above 255: nearly every pixel would be white
            image = _module("Image").fromarray(((wide + 128) // 257).astype(np.uint8))
        if "A" in image.mode or "transparency" in image.info:
            # `convert` would show what the transparent pixels hide
            image = _module("Image").alpha_composite(
                _module("Image").new("RGBA", image.size, "white"), image.convert("RGBA")
            )
        plain = image.convert("L" if shape[2] == 1 else "RGB").resize((shape[1], shape[0]))
        return np.asarray(plain).reshape(shape)


def _module(name: str) -> Any:
    return importlib.import_module(f"PIL.{name}")


def find_classes(folder: Path, besides: Path | None = None) -> dict[str, list[Path]]:
    """Return {subfolder: its image files}, both sorted, or nothing if no subfolder has images.

    Hidden files, hidden subfolders, those that archives of macOS have, and `besides` do not count.

    Raises:
        DataError: if some subfolders have images and others have none; for images in folders below
            them or beside them, and for files that are neither images nor `BESIDE`.
    """
    result = {item.name: _images_in(item) for item in _folders_in(folder) if item != besides}
    empty = [name for name, files in result.items() if not files]
    if len(empty) == len(result):
        return {}
    if empty:
        raise DataError(
            f"{folder / empty[0]} has no images, but other folders beside it have; remove it, or"
            f" put its images there ({', '.join(SUFFIXES)})"
        )
    if stray := _images_in(folder):
        raise DataError(
            f"{stray[0]} is in no class's folder and would be left out; move it into one, or"
            " elsewhere"
        )
    for name, images in result.items():
        known = {*images}
        folders, files = _listed(folder / name)
        left = [item for item in folders if _has_images(item)]
        left += [item for item in files if item not in known and item.suffix.lower() not in BESIDE]
        if left:
            raise DataError(
                f"{left[0]} would be left out of the class {name!r}: images are read from its own"
                f" folder, in the formats that Pillow knows ({', '.join(SUFFIXES)} and others);"
                " move or convert it, or remove it"
            )
    return result


def left_beside(classes: Mapping[str, Sequence[Path]], folder: Path) -> list[str]:
    """Return a sentence about files in classes' folders that are no images, or nothing."""
    known = {*chain.from_iterable(classes.values())}
    left = [
        file
        for images in classes.values()
        for file in _files_in(images[0].parent)
        if file not in known
    ]
    if not left:
        return []
    some = "a file that is no image" if len(left) == 1 else f"{len(left)} files that are no images"
    return [f"{some}, such as {left[0].relative_to(folder)}"]


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return a folder's subfolders and its other items, sorted, without hidden ones.

    The listing tells them apart: to ask the file system of each of many images takes as long as to
    read their headers.
    """
    folders, files = list[str](), list[str]()
    with os.scandir(folder) as items:
        for item in items:
            # a link that leads to itself is an error to `scandir`
            is_folder = Path(item).is_dir() if item.is_symlink() else item.is_dir()
            hidden = (".", "__") if is_folder else "."
            if not item.name.startswith(hidden):
                (folders if is_folder else files).append(item.name)
    return [folder / name for name in sorted(folders)], [folder / name for name in sorted(files)]


def _folders_in(folder: Path) -> list[Path]:
    return _listed(folder)[0]


def _files_in(folder: Path) -> list[Path]:
    return _listed(folder)[1]


def _images_in(folder: Path) -> list[Path]:
    return [file for file in _files_in(folder) if is_image(file)]


def _has_images(folder: Path) -> bool:
    """Return whether a folder, or one below it, has an image."""
    if any(map(is_image, _files_in(folder))):
        return True
    # a link to a folder may lead back to one above it
    return any(_has_images(item) for item in _folders_in(folder) if not item.is_symlink())


def is_image(file: Path) -> bool:
    """Return whether a file is an image by its suffix or, with another or none, by its content."""
    suffix = file.suffix.lower()
    if suffix in SUFFIXES or suffix in BESIDE:
        return suffix in SUFFIXES
    # who opens a pipe waits for its writer
    if importlib.util.find_spec("PIL") is None or not file.is_file():
        return False
    try:
        with warnings.catch_warnings(action="ignore"), _module("Image").open(file):
            return True
    except Exception:  # Pillow's readers raise what they like for a file that is none of theirs
        return False


def find_part(folder: Path, names: Sequence[str], suffix: str = "") -> Path | None:
    """Return the subfolder, or the file with a suffix, of the first of these names that there is.

    In any capitals; a plain file comes before its .gz.
    """
    items = (item for item in sorted(folder.iterdir()) if item.is_dir() != bool(suffix))
    found = {item.name.lower(): item for item in items}
    files = (f"{name}{suffix}{end}" for name in names for end in ("", ".gz"))
    return next((found[file] for file in files if file in found), None)


def load_classes(
    folder: Path, name: str, team: Team = ALONE
) -> tuple[Dataset, Dataset | None] | None:
    """Return the parts of a folder CLASS/*.png or train/CLASS/*.png: uint8, scale 1/255.

    Beside train/, the held-out part is the first of HELD_OUT that there is. Each rank of the team
    decodes its part of the images. Collective.

    Returns None for a folder without such images. All images are resized to the median height and
    width of the training images. They are gray if all training images are, else RGB.
    """
    with team.agreed():
        found = _find_parts(folder)
    if found is None:
        return None
    train, test = found
    files = [*chain.from_iterable(train.values())]
    with team.agreed():
        own = [_measure(files[number]) for number in team.share(len(files))]
    looks = [*chain.from_iterable(team.gather(own))]
    width, height = np.median([size for size, _, _ in looks], axis=0).astype(int).tolist()
    is_gray = all(mode in ("1", "L") or WIDE.fullmatch(mode) for _, mode, _ in looks)
    shape = height, width, 1 if is_gray else 3
    with team.agreed():
        packed_bytes = sum(nbytes for _, _, nbytes in looks)
        check_unpacked(folder, len(files) * math.prod(shape), packed_bytes)

    def part(classes: Mapping[str, Sequence[Path]]) -> Dataset:
        files = [*chain.from_iterable(classes.values())]
        x = team.array((len(files), *shape), np.uint8)
        with team.agreed():
            for number in team.counted(len(files), f"decoding images of {folder}"):
                x[number] = read_image(files[number], shape)
        counts = [len(files) for files in classes.values()]
        y = np.repeat([[*train].index(class_) for class_ in classes], counts)
        notes = tuple(left_beside(classes, folder))
        return Dataset(name, x, y, len(train), 1 / 255, tuple(train), notes=notes)

    return part(train), part(test) if test else None


def _measure(file: Path) -> tuple[tuple[int, int], str, int]:
    """Return the size and the mode of an image, of which only the header is read, and its bytes."""
    with open_image(file) as image:
        return image.size, image.mode, file.stat().st_size


def _find_parts(folder: Path) -> tuple[dict[str, list[Path]], dict[str, list[Path]] | None] | None:
    """Return the files of the classes of both parts; None without images of classes."""
    local, held_out = find_part(folder, TRAIN), find_part(folder, HELD_OUT)
    test = find_classes(held_out) if held_out else None
    train = find_classes(local or folder, held_out if test else None)
    if not train:
        return None
    for other in _folders_in(folder) if not test else ():
        if local and other != local and any(map(_images_in, _folders_in(other))):
            raise DataError(
                f"{other} has images beside {local.name}/, but not the name of a held-out part;"
                f" call it {HELD_OUT[0]}, or move it elsewhere"
            )
    if test and (strange := test.keys() - train.keys()):
        raise DataError(
            f"{folder}: class {min(strange)!r} of the test part is not in the training part; give"
            " both the same"
        )
    return train, test
