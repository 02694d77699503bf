"""Named random streams: the same numbers on every rank and under every layout.

A stream is keyed by the seed and by what it is for, never by how often somebody drew before:
`stream(seed, "init", "2.weight")` gives a layer its initial weights whichever rank builds it.
"""

import hashlib

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return a generator whose numbers depend on the seed and the names alone.

    The bit generator is Philox, which is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    2011); its 128-bit key is a BLAKE2b hash of the arguments, so that neighbouring seeds share nothing.
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(name).__name__}:{name}" for name in names)])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
