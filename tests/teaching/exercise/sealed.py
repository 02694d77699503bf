"""The archive of solutions: text that is not to be read by accident, nor found by a search.

Its word stands here, since tests run for everybody: so it keeps nobody out who wants to get in.
"""

from base64 import b64decode, b64encode
from hashlib import shake_256
from pathlib import Path
from textwrap import wrap
from zlib import compress, decompress

ARCHIVE = Path(__file__).with_name("solutions.sealed")
WORD = b"who has solved it needs no archive"


def _mixed(data):
    return bytes(a ^ b for a, b in zip(data, shake_256(WORD).digest(len(data)), strict=True))


def seal(text):
    """Write the archive anew."""
    ARCHIVE.write_text(
        "\n".join([*wrap(b64encode(_mixed(compress(text.encode(), 9))).decode(), 100), ""])
    )


def unseal():
    """Return the text in the archive."""
    return decompress(_mixed(b64decode(ARCHIVE.read_text()))).decode()
