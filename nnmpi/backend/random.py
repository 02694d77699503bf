"""Random numbers keyed by their purpose: the same on every rank and in every layout.

`stream` returns a generator keyed by the seed and names. It does not depend on earlier draws:
`stream(seed, "init", "2.weight")` draws a layer's initial weights whichever rank builds the layer.

`random_bits` hashes (key, row of the global batch, column), equally on CPU and GPU. Dropout masks
consist of these bits, so every layout drops the same elements. The hash's 32-bit mix and its
constants are those of "lowbias32", from C. Wellons' search for mixes with little avalanche bias
(https://nullprogram.com/blog/2018/07/31/).
"""

import hashlib
from math import inf
from types import ModuleType
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.base.errors import check_int

ODD = 0x9E3779B9  # 2 ** 32 divided by the golden ratio


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return a generator whose numbers depend on the seed and the names alone.

    The bit generator is Philox, a counter-based one (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", 2011). Its 128-bit key is a BLAKE2b hash of the arguments, so the streams of
    neighbouring seeds are unrelated.
    """
    text = "\x1f".join(
        [str(check_int("seed", seed, -inf)), *(f"{type(name).__name__}:{name}" for name in names)]
    )
    key = _Key(hashlib.blake2b(text.encode(), digest_size=16).digest())
    counter = np.zeros(4, np.uint64)  # Philox takes longer to convert a number
    return np.random.Generator(np.random.Philox(key, counter))  # type: ignore[arg-type]  # it takes any ISeedSequence


class _Key(ISeedSequence):
    """A key as a seed sequence.

    Philox's argument `key` would be simpler. But with it Philox also reads the system's entropy,
    which takes longer than everything else here.
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
    """Return the threshold of dropout: elements with `random_bits` from here on are not dropped."""
    return min(round(rate * 2**32), 2**32 - 1)


def place_of(key: Any, first_row: int) -> Any:
    """Return the key that has the same bits from row 0 on."""
    return key if first_row == 0 else (key[0], (first_row + key[1]) & 0xFFFFFFFF)


def random_bits(
    xp: ModuleType, first_row: int, rows: int, columns: int | Array, key: tuple[int, int] | Array
) -> Array:
    """Return 32 random bits for each element of an array (rows, columns), as uint32.

        bits[r, c] = mix(mix(c + key[0]) ^ mix(mix(first_row + r + key[1]) + ODD))    modulo 2 ** 32

    Rows are mixed twice, with ODD in between. If rows and columns were mixed alike, all elements
    with c + key[0] = r + key[1] would get mix(0).

    Args:
        xp: the array module.
        first_row: the number of the first row in the full array.
        rows: the number of rows to return.
        columns: the number of columns; or, for a shard, the numbers of its columns in the full
            array (1-D, uint32).
        key: two 32-bit numbers, of `key_pair`; or (2,) uint32, in the module's memory.
    """
    numbers = xp.arange(columns, dtype=xp.uint32) if isinstance(columns, int) else columns
    first, start = place_of(key, first_row)
    if isinstance(key, tuple):
        first, start = xp.uint32(first), xp.uint32(start)
    across = _mix(numbers + first)
    down = _mix(_mix(xp.arange(rows, dtype=xp.uint32) + start) + xp.uint32(ODD))
    return _mix(across[None, :] ^ down[:, None])


def _mix(x: Array) -> Array:
    """Scramble uint32 numbers in place.

    A bijection; each input bit changes each output bit with a probability close to 1/2.
    """
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
