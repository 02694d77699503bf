"""The models as numbers: the CPU benchmark's, and larger ones that fill a card.

| case      | model                                    | batch | expected limit on a large card      |
|-----------|------------------------------------------|-------|-------------------------------------|
| mlp-fill  | linear 4096-8192-8192-10                 | 4096  | products: 2.2 TFLOP a step          |
| gpt-fill  | block of 2048 features, 16 heads, T 1024 | 16    | products: 5.2 TFLOP a step; softmax |
| cnn-1024  | `models.cnn` on 28 x 28 pixels           | 1024  | memory: activations of convolutions |
| cnn       | the same                                 | 64    | kernel launches                     |
| mlp-large | linear 784-2048-2048-10                  | 256   | kernel launches                     |
| gpt-block | block of 256 features, 4 heads, T 128    | 8     | kernel launches                     |
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from benchmarks.training.cases import BLOCK, CNN, MLP, SQUARED, Case
from benchmarks.training.cases import CASES as ON_CPU
from benchmarks.training.trainer_nnmpi import first_weights

FLOAT32, TF32, BF16 = "float32", "tf32", "bf16"
MODES = (FLOAT32, TF32, BF16)

CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("mlp-fill", MLP, 4096, (4096, 8192, 8192, 10)),
            Case("gpt-fill", BLOCK, 16, (1024, 2048, 16, 8192), SQUARED),
            replace(ON_CPU["cnn"], name="cnn-1024", batch=1024),
            ON_CPU["cnn"],
            ON_CPU["mlp-large"],
            ON_CPU["gpt-block"],
        )
    }
)
# The same models in tiny sizes, for checks of the benchmark itself.
TINY: Mapping[str, Case] = MappingProxyType(
    {
        "mlp-fill": Case("mlp-fill", MLP, 6, (12, 16, 16, 10)),
        "gpt-fill": Case("gpt-fill", BLOCK, 2, (8, 16, 2, 32), SQUARED),
        "cnn": Case("cnn", CNN, 4, (8, 8, 1, 10)),
    }
)


class CaseArrays:
    """A case in host memory, for every contestant: its batch, and its first weights.

    Attributes:
        case: the argument.
        x, y: the batch, see `Case.data`.
        weights: the first ones, float32, in nnmpi's order and layout.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.x, self.y = case.data()
        self.weights = first_weights(case)

    def batch(self, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the batch with floating-point numbers of a dtype."""
        return self.x.astype(dtype, copy=False), self.y.astype(
            dtype if self.y.dtype.kind == "f" else self.y.dtype
        )
