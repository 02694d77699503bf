"""Random numbers for single samples: a hash of (seed, epoch, sample, what for), computed for a whole batch at once.

Generator objects, as of `backend.random.stream`, cost 20 us each: too slow for every sample. This is SplitMix64 read
as a counter-based generator: element i of the stream is mix(start + i * GAMMA), and the start is a hash of the rest
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def bits(seed: int, epoch: int, indices: NDArray[np.int64], what: str) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample index: (rows,) uint64. They do not depend on the other indices.

    Args:
        seed: of the run.
        epoch: in which the samples are seen.
        indices: (rows,), the samples' places in the data set.
        what: the bits are for, such as "flip": every purpose has a stream of its own.
    """
    text = f"{int(seed)}\x1f{int(epoch)}\x1f{what}"
    start = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return mix(indices.astype(np.uint64) * GAMMA + np.uint64(start))


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's output function of each state. Arrays of uint64 wrap around, as the algorithm wants."""
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


def integers(seed: int, epoch: int, indices: NDArray[np.int64], what: str, high: int) -> NDArray[np.int64]:
    """Return a number in 0..high-1 for each sample index: (rows,) int64; high at most 2**31 (bias < high / 2**32).

    Args:
        seed, epoch, indices, what: see `bits`.
        high: one more than the largest number.

    Multiplies the upper 32 bits by high and keeps the upper half of the product (Lemire, 2019): no division.
    """
    upper = bits(seed, epoch, indices, what) >> np.uint64(32)
    return ((upper * np.uint64(high)) >> np.uint64(32)).astype(np.int64)
