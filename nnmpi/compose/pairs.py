"""What goes with what: a worker's options, its arrangement, the precision, the backend."""

from __future__ import annotations

import numpy as np

from nnmpi.backend.precision import MODES, low_dtype
from nnmpi.backend.record import Backend
from nnmpi.comm.group import Group
from nnmpi.compose.arrange import Arrangement
from nnmpi.errors import UsageError
from nnmpi.nn.chain import Part
from nnmpi.nn.module import Module


def check_precision(mode: str, model: Module, backend: Backend, group: Group) -> None:
    """Refuse a precision that this model or backend cannot have; collective.

    Raises:
        UsageError: on all ranks, where they ask for different ones; for an unknown one, bf16 without ml_dtypes, tf32
            without a device, and any but float32 for a model of float64.
    """
    modes = group.gather(mode)
    other = next((rank for rank, each in enumerate(modes) if each != modes[0]), None)
    if other is not None:
        raise UsageError(
            f"the ranks compute in different precisions: rank 0 in {modes[0]}, rank {other} in {modes[other]}; "
            "give all the same"
        )
    if mode not in MODES:
        raise UsageError(f"precision {mode!r} is unknown; choose one of {', '.join(MODES)}")
    low_dtype(mode)
    if mode == "tf32" and not backend.is_device:
        raise UsageError(
            f"precision tf32 needs a CUDA device, and backend {backend.name} has none; use float32, bf16 or fp16, "
            "or backend cupy"
        )
    if mode != "float32" and any(array.dtype == np.float64 for array in model.storage.data):
        raise UsageError(
            f"precision {mode} is for models of float32, and this one is of float64, which nothing rounds; "
            "use one of the two"
        )


def check_housing(fused_update: bool | None, backend: Backend) -> None:
    """Refuse a fused update of a model that does not live in the host's memory.

    Raises:
        UsageError: saying so.
    """
    if fused_update and backend.is_device:
        raise UsageError(
            f"the fused update works on weights in memory that the ranks of a node share, and these live on "
            f"{backend.device}; leave it out"
        )


def refuse_scaling(mode: str, what: str) -> None:
    """Refuse fp16 where ranks do not decide together, step by step, whether an update is made.

    Raises:
        UsageError: naming what does so.
    """
    if mode == "fp16":
        raise UsageError(
            f"with fp16 all ranks leave out an update that overflows on one of them, and {what} they do not meet in "
            "every step; use bf16, which needs no loss scaling, or a synchronous run without servers"
        )


def has_whole_model(arrangement: Arrangement | None) -> bool:
    """Whether every rank has all of the model, and sums are taken as they come."""
    if arrangement is None:
        return True
    mesh = arrangement.mesh.mesh
    return mesh.pp == 1 and mesh.tp == 1 and not arrangement.layout.fixed


def check_pairs(
    model: Module, arrangement: Arrangement | None, fused_update: bool | None, clip: float | None, scaled: bool
) -> None:
    """Refuse options that do not go together.

    Args:
        scaled: whether losses are scaled.

    Raises:
        UsageError: saying which.
    """
    if arrangement is None:
        if isinstance(model, Part) or any(parameter.region is not None for parameter in model.parameters()):
            raise UsageError(
                "this rank has a part of the model alone, which the other ranks do not share; give the Worker the "
                "arrangement that made it: arrangement=where"
            )
        return
    layout, mesh = arrangement.layout, arrangement.mesh.mesh
    if model is not arrangement.model:
        raise UsageError("the model is not the arrangement's; initialize and use arrangement.model")
    if fused_update and not has_whole_model(arrangement):
        raise UsageError(
            f"the fused update is for replicas of a whole model, summed as they come, not for {mesh} with reduction "
            f"{layout.reduction}; leave it out"
        )
    if layout.asynchronous and scaled:
        raise UsageError(
            "with fp16 an update whose gradient overflows is left out on all ranks, but with pipedream each stage "
            "updates when its own gradient is there; use bf16, or another schedule, such as 1f1b"
        )
    if layout.asynchronous and mesh.pp > 1 and clip is not None:
        raise UsageError(
            "clipping needs the gradient of all stages at once, but with pipedream each stage updates when its own is "
            "there; leave one of them out"
        )
