"""Random numbers by purpose alone: the same on every rank and under every layout.

`stream` gives a generator, keyed by the seed and by names, never by how many times somebody drew
before: `stream(seed, "init", "2.weight")` gives a layer its initial weights whichever rank builds
it.

`random_bits` hashes (key, row of the global batch, column), on CPU and GPU alike. Dropout masks are
made of these bits, so that every layout drops the same elements. The hash's 32-bit mix, and its
constants, are those of "lowbias32", found by C. Wellons' search for mixes with little avalanche
bias (https://nullprogram.com/blog/2018/07/31/).
"""

import hashlib
from types import ModuleType
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from nnmpi.backend.array import Array

ODD = 0x9E3779B9  # 2 ** 32 divided by the golden ratio


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return a generator whose numbers depend on the seed and the names alone.

    The bit generator is Philox, which is counter-based (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011); its 128-bit key is a BLAKE2b hash of the arguments, so that
    neighbouring seeds share nothing.
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(name).__name__}:{name}" for name in names)])
    key = _Key(hashlib.blake2b(text.encode(), digest_size=16).digest())
    return np.random.Generator(np.random.Philox(key))  # type: ignore[arg-type]  # it takes any ISeedSequence


class _Key(ISeedSequence):
    """A key, as it is. (Philox asks the system for entropy beside `key=`, which takes longer than
    all the rest.)
    """

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> NDArray[np.uint64]:
        """Return the key."""
        return np.frombuffer(self._digest, "<u8", n_words)


def key_pair(*parts: str | int) -> tuple[int, int]:
    """Return two 32-bit keys from names and numbers."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def least_kept(rate: float) -> int:
    """Return the smallest `random_bits` that keep an element dropped with this probability."""
    return min(round(rate * 2**32), 2**32 - 1)


def random_bits(
    xp: ModuleType, first_row: int, rows: int, columns: int | Array, key: tuple[int, int]
) -> Array:
    """Return 32 random bits for each place of a (rows, columns) array, as uint32.

    bits[r, c] = mix(mix(c + key[0]) ^ mix(mix(first_row + r + key[1]) + ODD)), all modulo 2 ** 32.
    Were rows and columns mixed alike, the places with c + key[0] = r + key[1] would all get mix(0).

    Args:
        xp: the array module that computes.
        first_row: number of the first row in the whole array.
        rows: how many rows to return.
        columns: how many columns; or, for a part of an array, the numbers of its columns in the
            whole one (1-D, uint32).
        key: two 32-bit numbers, of `key_pair`.
    """
    numbers = xp.arange(columns, dtype=xp.uint32) if isinstance(columns, int) else columns
    across = _mix(xp, numbers + xp.uint32(key[0]))
    start = (first_row + key[1]) & 0xFFFFFFFF
    down = _mix(xp, _mix(xp, xp.arange(rows, dtype=xp.uint32) + xp.uint32(start)) + xp.uint32(ODD))
    return _mix(xp, across[None, :] ^ down[:, None])


def _mix(xp: ModuleType, x: Array) -> Array:
    """Scramble uint32 numbers in place: a bijection in which every input bit changes every output
    bit half the time.
    """
    x ^= x >> xp.uint32(16)
    x *= xp.uint32(0x7FEB352D)
    x ^= x >> xp.uint32(15)
    x *= xp.uint32(0x846CA68B)
    x ^= x >> xp.uint32(16)
    return x
