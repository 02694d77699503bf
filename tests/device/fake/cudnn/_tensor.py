"""A tensor of a graph: sizes, strides and a type, no memory."""

from __future__ import annotations

from typing import Any

from cudnn._names import data_type as data_types


class Tensor:
    """A tensor.

    Attributes:
        uid: its number in the graph.
        dim, stride: sizes and strides in elements, in the order n, c, h, w; None where nobody said them.
        data_type: its type, or None.
        virtual: whether it is no output.
        source: the operation that gives it: its name, its tensors, its attributes. None for what the caller gives.
    """

    def __init__(
        self,
        uid: int,
        dim: Any = None,
        stride: Any = None,
        data_type: Any = None,
        source: tuple[str, list[Tensor], dict[str, Any]] | None = None,
    ) -> None:
        self.uid, self.source, self.virtual = uid, source, source is not None
        self.dim: list[int] | None = None
        self.stride: list[int] | None = None
        self.data_type: Any = None
        if dim is not None:
            self.set_dim(dim).set_stride(stride)
        if data_type is not None:
            self.set_data_type(data_type)

    def set_output(self, value: bool) -> Tensor:
        """Say whether the caller gets it."""
        self.virtual = not value
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        """Say the sizes."""
        self.dim = _numbers(dim)
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        """Say the strides."""
        self.stride = _numbers(stride)
        return self

    def set_data_type(self, dtype: Any) -> Tensor:
        """Say the type."""
        if not isinstance(dtype, data_types):
            raise TypeError(f"{dtype!r} is no cudnn.data_type")
        self.data_type = dtype
        return self

    def get_uid(self) -> int:
        """Return its number."""
        return self.uid

    @property
    def packed(self) -> list[int]:
        """The strides of channels-last memory without gaps."""
        assert self.dim is not None
        _, c, h, w = self.dim
        return [h * w * c, 1, w * c, c]


def _numbers(values: Any) -> list[int]:
    if not isinstance(values, list) or len(values) != 4 or not all(type(each) is int and each > 0 for each in values):
        raise TypeError(f"sizes and strides are four positive numbers of Python in a list, not {values!r}")
    return values
