"""Moving a model and its optimizer into memory that the ranks of a node share, for the fused update, and back."""

from __future__ import annotations

from dataclasses import dataclass

from nnmpi.comm.group import Group
from nnmpi.comm.sharing.memory import SharedMemory
from nnmpi.errors import DeviceError
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.parallel.fused import FusedUpdate, house, unhouse


@dataclass(frozen=True)
class Housing:
    """A fused update and the shared memory that was taken for it."""

    fused: FusedUpdate
    memory: SharedMemory
    allocations: range

    def release(self, model: Module, optimizer: Optimizer) -> None:
        """Give the model and the optimizer memory of their own, and the shared memory back."""
        unhouse(model.storage, optimizer, self.memory)
        self.memory.drop_allocations(self.allocations)
        self.memory.close()


def fuse(model: Module, optimizer: Optimizer, group: Group) -> tuple[Housing | None, str]:
    """Move the model and its optimizer to shared memory; return the fused update, or None and why there is none."""
    try:
        memory = group.memory().twin(group)
    except DeviceError as error:
        return None, f"the update is not fused: {error}"
    first = memory.allocations
    try:
        house(model.storage, memory)
        fused = FusedUpdate(optimizer, memory)
    except DeviceError as error:
        unhouse(model.storage, optimizer, memory)
        memory.drop_allocations(range(first, memory.allocations))
        memory.close()
        return None, f"the update is not fused: {error}"
    return Housing(fused, memory, range(first, memory.allocations)), ""
