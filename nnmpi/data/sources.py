"""Where the well-known data sets are downloaded from, and the sizes and checksums of their files."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One file to download.

    Attributes:
        filename: its name in the download folder.
        urls: mirrors, in the order in which they are tried.
        size_bytes: size of what the checksum covers.
        sha256: checksum, in hexadecimal.
        unpacked: whether size and checksum are of the content unpacked from gz (True) or of the file as it is (False).
    """

    filename: str
    urls: tuple[str, ...]
    size_bytes: int
    sha256: str
    unpacked: bool


def _gz(bases: tuple[str, ...], unpacked: bool, files: dict[str, tuple[int, str]]) -> tuple[Source, ...]:
    """Return the sources of NAME.gz for each name: (size, SHA-256), with the same folders as mirrors."""
    return tuple(
        Source(f"{name}.gz", tuple(f"{base}/{name}.gz" for base in bases), size_bytes, sha256, unpacked)
        for name, (size_bytes, sha256) in files.items()
    )


# Sizes and checksums of the UNPACKED files, which equal the originals of http://yann.lecun.com/exdb/mnist/: the gz
# wrapping differs among mirrors.
_MNIST = _gz(
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    unpacked=True,
    files={
        "train-images-idx3-ubyte": (47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        "train-labels-idx1-ubyte": (60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        "t10k-images-idx3-ubyte": (7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        "t10k-labels-idx1-ubyte": (10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    },
)

# Sizes and checksums of the GZ files, as TensorFlow Datasets lists them (url_checksums/fashion_mnist.txt); other
# projects list the same ones for the copies in the authors' GitHub repository.
_FASHION_MNIST = _gz(
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ),
    unpacked=False,
    files={
        "train-images-idx3-ubyte": (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        "train-labels-idx1-ubyte": (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        "t10k-images-idx3-ubyte": (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        "t10k-labels-idx1-ubyte": (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
)

# Size and checksum of the ARCHIVE, as TensorFlow Datasets lists them (url_checksums/cifar10.txt). The second mirror is
# the copy that the Swift for TensorFlow project kept.
_CIFAR10 = (
    Source(
        "cifar-10-binary.tar.gz",
        (
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/cifar-10-binary.tar.gz",
        ),
        170052171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        unpacked=False,
    ),
)


def sources(name: str) -> tuple[Source, ...]:
    """Return the files to download for a data set; none when it has no download."""
    return {"mnist": _MNIST, "fashion-mnist": _FASHION_MNIST, "cifar10": _CIFAR10}.get(name, ())
