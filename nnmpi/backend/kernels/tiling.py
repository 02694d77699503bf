"""How many tiles of Winograd's convolution are worked on at a time."""

from __future__ import annotations

from dataclasses import dataclass

# For V and M. Measured (Xeon with 2 MB of second-level cache, images (64, 14, 14, 32), 64 outputs, pooled, forward and
# backward): 8.8 ms with 256 KB, 8.4 with 384, 8.3 with 512 and with 768; in another run 7.8 with 512 KB, 8.1 with 1 MB,
# 8.7 with 2 MB, 13.6 with 4 MB.
CACHE_BYTES = 3 << 18


@dataclass(frozen=True)
class Sizes:
    """What a kernel is made for.

    Attributes:
        h, w: the images' height and width, even.
        c, o: channels of the input and the output.
        images: images that are worked on at a time.
        rows: rows of tiles that are worked on at a time, of these images.
    """

    h: int
    w: int
    c: int
    o: int
    images: int
    rows: int

    @property
    def tiles(self) -> int:
        """Tiles that are worked on at a time."""
        return self.rows * (self.w // 2)

    @property
    def scratch(self) -> tuple[int, int, int]:
        """Elements of V, of M, and of the images with their border."""
        v, m = 16 * self.tiles * self.c, 16 * self.tiles * self.o
        return v, m, self.images * (self.h + 2) * (self.w + 2) * self.c


def sizes(h: int, w: int, c: int, o: int) -> Sizes:
    """Return the sizes for images (h, w, c) and o kernels: as many tile rows at a time as the cache holds."""
    row_bytes = 16 * 4 * (w // 2) * (c + o)
    rows = max(1, CACHE_BYTES // row_bytes)
    images = max(1, rows // (h // 2))
    return Sizes(h, w, c, o, images, min(rows, h // 2) if images == 1 else images * (h // 2))
