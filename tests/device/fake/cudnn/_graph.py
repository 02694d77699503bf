"""Graphs: written down, built, and run on addresses."""

from __future__ import annotations

import time
from typing import Any

from cudnn._compute import run
from cudnn._handle import Handle
from cudnn._names import check, data_type, heur_mode, numerical_note, snapshot
from cudnn._settings import settings
from cudnn._tensor import Tensor

WORKSPACE = 4096 + 32  # bytes: what every graph wants
TYPES = {"HALF", "BFLOAT16", "FLOAT"}  # of channels-last convolutions; not double


class cudnnGraphNotSupportedError(Exception):
    """No engine supports a graph."""


class pygraph:
    """A graph."""

    def __init__(self, **options: Any) -> None:
        check("pygraph.__init__", options)
        if not isinstance(options.get("handle"), Handle):
            raise TypeError("the double wants a handle")
        self._io, self._inner = options["io_data_type"], options["intermediate_data_type"]
        if options["compute_data_type"] is not self._inner:
            raise ValueError("the double computes in the type of intermediate results")
        self._tensors: list[Tensor] = []
        self._operations: list[str] = []
        self._refused: set[Any] = set()
        self._built = False
        self._plan = 0

    # ---- what a graph consists of

    def tensor(self, **options: Any) -> Tensor:
        """Return a tensor that the caller gives."""
        check("pygraph.tensor", options)
        options.pop("name", None)
        return self._add(Tensor(len(self._tensors) + 1, **options))

    def conv_fprop(self, **options: Any) -> Tensor:
        """Return a convolution."""
        return self._operation("conv_fprop", options)

    def conv_dgrad(self, **options: Any) -> Tensor:
        """Return the gradient of a convolution's images."""
        return self._operation("conv_dgrad", options)

    def conv_wgrad(self, **options: Any) -> Tensor:
        """Return the gradient of a convolution's kernels."""
        return self._operation("conv_wgrad", options)

    def bias(self, **options: Any) -> Tensor:
        """Return input + bias."""
        return self._operation("bias", options)

    def relu(self, **options: Any) -> Tensor:
        """Return the positive part of the input."""
        check("pygraph.relu", options)
        return self._add(Tensor(len(self._tensors) + 1, source=("relu", [options["input"]], {})), "relu")

    def _operation(self, name: str, options: dict[str, Any]) -> Tensor:
        known, given = snapshot()["operations"][name], dict(options)
        inputs = [given.pop(each) for each in known["inputs"]]
        unknown = set(given) - set(known["attributes"]) - {"name", "compute_data_type"}
        if unknown or not all(isinstance(each, Tensor) for each in inputs):
            raise TypeError(f"{name}() got unexpected arguments {sorted(options)}")
        if name.startswith("conv"):
            missing = {"pre_padding", "post_padding", "stride", "dilation"} - set(given)
            if missing or not all(type(value) is list and len(value) == 2 for value in given.values()):
                raise ValueError(f"{name}() wants paddings, stride and dilation as lists of two, not {given}")
        return self._add(Tensor(len(self._tensors) + 1, source=(name, inputs, given)), name)

    def _add(self, tensor: Tensor, operation: str | None = None) -> Tensor:
        if self._built:
            raise RuntimeError("the graph is frozen")
        self._tensors.append(tensor)
        self._operations += [] if operation is None else [operation]
        return tensor

    # ---- building

    def deselect_numeric_notes(self, notes: list[Any]) -> pygraph:
        """Exclude plans that have one of these notes."""
        if not isinstance(notes, list) or not all(isinstance(each, numerical_note) for each in notes):
            raise TypeError(f"{notes!r} is no list of cudnn.numerical_note")
        self._refused.update(notes)
        return self

    def build(self, heuristics: list[Any]) -> None:
        """Make the graph ready, or say that no engine supports it."""
        if not all(isinstance(each, heur_mode) for each in heuristics) or self._built:
            raise RuntimeError("a graph is built once, with modes of heuristics")
        words = self._words()
        self._check_tensors(words)
        if settings().refuses(words):
            raise cudnnGraphNotSupportedError("No valid engine configs for " + " ".join(words))
        self._built = True
        settings().built["+".join(self._operations)] += 1

    def get_execution_plan_count(self) -> int:
        """Return how many plans there are."""
        return len(settings().plans) if self._built else 0

    def build_plan_at_index(self, index: int) -> pygraph:
        """Build a plan and take it."""
        if settings().plans[index] is None:
            raise cudnnGraphNotSupportedError("Deselecting execution plan")
        self._plan = index
        return self

    def _words(self) -> tuple[str, ...]:
        """Return the operations, the type of the inputs and that of the output."""
        return (*self._operations, self._io.name, *(each.data_type.name for each in self._outputs()))

    def _outputs(self) -> list[Tensor]:
        return [each for each in self._tensors if each.source is not None and not each.virtual]

    def _check_tensors(self, words: tuple[str, ...]) -> None:
        outputs = self._outputs()
        if len(outputs) != 1 or outputs[0] is not self._tensors[-1]:
            raise ValueError("the double wants one output, the last tensor")
        for tensor in (each for each in self._tensors if not each.virtual):
            if tensor.dim is None or tensor.stride is None or tensor.data_type is None:
                raise ValueError(f"tensor {tensor.uid} lacks sizes, strides or a type")
            if tensor.dim[2:] != [1, 1] and tensor.stride != tensor.packed:
                raise cudnnGraphNotSupportedError(f"strides {tensor.stride} are not channels-last")
            wide = tensor in outputs and self._operations == ["conv_wgrad"] and tensor.data_type is data_type.FLOAT
            if tensor.data_type is not self._io and not wide or tensor.data_type.name not in TYPES:
                raise cudnnGraphNotSupportedError(f"no engine for {words} with a tensor of {tensor.data_type.name}")

    def get_workspace_size(self) -> int:
        """Return how many bytes of scratch memory a run wants."""
        self._ready()
        return settings().scratch.get(self._plan, WORKSPACE)

    def _ready(self) -> None:
        if not self._built:
            raise RuntimeError("Call build() first")

    # ---- running

    def execute(self, tensor_dict: dict[int, int], workspace: int, handle: Handle) -> None:
        """Compute on the addresses that the tensors' numbers are given."""
        self._ready()
        if settings().fails(self._words()):
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        rounded = self._io is data_type.FLOAT and numerical_note.TENSOR_CORE not in self._refused
        run(self._tensors, tensor_dict, workspace, WORKSPACE, handle, rounded)
        time.sleep(settings().plans[self._plan] or 0)
        settings().executed["+".join(self._operations)] += 1
        settings().ran[self._plan] += 1
