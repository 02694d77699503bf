"""The kernels that operations compute with, as one typed interface; here computed by the array library's functions.

There is a class per family. `Kernels` is all of them, and what every other implementation derives from.
"""

from nnmpi.backend.kernels.attention import AttentionKernels
from nnmpi.backend.kernels.norm import NormKernels
from nnmpi.backend.kernels.pooling import PoolingKernels
from nnmpi.backend.kernels.recurrent import RecurrentKernels
from nnmpi.backend.kernels.softmax import SoftmaxKernels
from nnmpi.backend.kernels.tables import TableKernels
from nnmpi.backend.kernels.updates import UpdateKernels


class Kernels(TableKernels, NormKernels, SoftmaxKernels, AttentionKernels, PoolingKernels, RecurrentKernels):
    """All kernels, for arrays of any library.

    Attributes:
        is_device: whether the kernels run on a device, where looking at a value means waiting for all that was asked
            for before; such kernels also read float16 and bfloat16 as they are, and add up in float32. Others are
            given float32 in their place, see `tensor.convert.in_float32`.
    """

    __slots__ = ()

    is_device = False

    @property
    def updates(self) -> UpdateKernels | None:
        """Optimizers' updates in one pass; None where there are none, and optimizers compute step by step."""
        return None
