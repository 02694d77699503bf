"""How much a step has to do at the least, from a case's sizes: what the fractions of the ceilings are taken of.

Floating-point operations are those of products of matrices and convolutions alone, an addition and a multiplication
being two: forward, gradient of the inputs (not of the data's own), gradient of the weights. Causal attention counts
half of its scores.

Bytes are those that must cross the device's memory even if everything that can be fused is: each product's operands and
result once for each of its three products; weights, gradients and their update by SGD (read both, write one) once.
"""

from dataclasses import dataclass
from math import prod

from benchmarks.gpu.cases import BF16
from benchmarks.training.cases import BLOCK, CNN, Case

WIDTH = 4  # bytes of a float32, in which weights and gradients are kept


@dataclass(frozen=True)
class Product:
    """One layer's product with its weight: (rows, inputs) @ (inputs, outputs).

    Attributes:
        reads: elements of the layer's input, which a convolution reads several times as rows of windows.
        first: whether its input is data, of which no gradient is computed.
    """

    rows: int
    inputs: int
    outputs: int
    reads: int
    first: bool = False

    @property
    def flops(self) -> int:
        """Operations of its two or three products."""
        return 2 * self.rows * self.inputs * self.outputs * (2 if self.first else 3)

    def bytes(self, width: int) -> int:
        """Bytes of its operands and results, whose elements are `width` bytes each."""
        passes = 2 if self.first else 3
        activations = passes * (self.reads + self.rows * self.outputs) * width
        weights = self.inputs * self.outputs
        return activations + (passes - 1) * weights * width + 4 * weights * WIDTH


def products(case: Case) -> list[Product]:
    """Return a case's products with weights."""
    if case.model == BLOCK:
        time, features, _, hidden = case.sizes
        rows = case.batch * time
        pairs = [(features, 3 * features), (features, features), (features, hidden), (hidden, features)]
        return [Product(rows, i, o, rows * i) for i, o in pairs]
    if case.model == CNN:
        height, width, channels, classes = case.sizes
        found, inputs, pixels = [], channels, case.batch * height * width
        for outputs in (32, 64):
            found.append(Product(pixels, 9 * inputs, outputs, pixels * inputs, first=not found))
            inputs, pixels = outputs, pixels // 4
        sizes = [height // 4 * (width // 4) * inputs, 128, 64, classes]
        return found + [Product(case.batch, i, o, case.batch * i) for i, o in zip(sizes, sizes[1:], strict=False)]
    pairs = list(zip(case.sizes, case.sizes[1:], strict=False))
    return [Product(case.batch, i, o, case.batch * i, first=not n) for n, (i, o) in enumerate(pairs)]


def flops(case: Case) -> int:
    """Return the operations of a step's products."""
    found = sum(each.flops for each in products(case))
    if case.model == BLOCK:
        time, features, _, _ = case.sizes
        found += 6 * case.batch * time * time * features  # two products, thrice each, half of them masked
    return found


def moved(case: Case, mode: str) -> int:
    """Return the bytes that a step must move within the device's memory."""
    width = 2 if mode == BF16 else WIDTH
    return sum(each.bytes(width) for each in products(case))


def uploaded(case: Case) -> int:
    """Return the bytes of a batch: float32 samples, and labels of 8 bytes or float32 targets."""
    samples = case.batch * prod(case.sample) * WIDTH
    return samples + (case.batch * 8 if case.elements == 1 else case.batch * case.elements * WIDTH)
