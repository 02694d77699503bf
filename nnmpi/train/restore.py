"""Saving and restoring a run over all ranks: rank 0 reads and writes, so that no shared file system is needed."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.comm.group import Group
from nnmpi.compose.worker import Worker
from nnmpi.errors import CheckpointError
from nnmpi.train.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    Checkpoint,
    check_fit,
    load_checkpoint,
    save_checkpoint,
)
from nnmpi.train.folder import RunFolder
from nnmpi.train.recorder import Recorder
from nnmpi.train.root import on_root
from nnmpi.train.state import State


def save(worker: Worker, state: State, folder: RunFolder, recorder: Recorder, group: Group, keep: int) -> None:
    """Write a checkpoint of this state. Collective.

    Raises:
        CheckpointError: on all ranks, when it cannot be written; older ones are intact.
    """
    arrays, scalars = worker.optimizer_state()
    algorithms = [choice.algorithm for choice in worker.parallel.exchange.choices]
    values = {
        **state.to_json(),
        "seed": worker.seed,
        "ranks": group.size,
        "optimizer": scalars,
        "algorithms": algorithms,
    }

    def write() -> None:
        try:
            recorder.sync()
            save_checkpoint(folder.checkpoints, Checkpoint(worker.model.state(), arrays, values), keep)
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint of step {state.step} can be written into {folder.checkpoints} "
                f"({error.strerror or error}); older ones are intact"
            ) from None

    on_root(group, write)


def restore(worker: Worker, folder: RunFolder, group: Group, samples: int) -> tuple[State, list[str]]:
    """Give the worker the run's last good checkpoint; return the state, and what there is to say. Collective.

    Without a checkpoint the worker stays as it is and the state is the start.

    Args:
        samples: rows of the training set.

    Raises:
        CheckpointError: on all ranks, when none is whole or it does not fit the model or the data.
    """
    own = (worker.model.state(), worker.optimizer_state()[0])
    parts = [own]  # on rank 0 replaced by the checkpoint's; elsewhere the arrays that its values are written into

    def read() -> dict[str, Any] | None:
        loaded = load_checkpoint(folder.checkpoints)
        if loaded is None:
            return None
        found, place, notices = loaded
        if found.state["samples"] != samples:
            raise CheckpointError(
                f"{place} is of a run with {found.state['samples']} training samples, but the data set now gives "
                f"{samples}; resume with the data that it began with, or start a new run with another --out"
            )
        check_fit(found.model, own[0], place / MODEL_FILE)
        check_fit(found.optimizer, own[1], place / OPTIMIZER_FILE)
        parts[0] = (dict(found.model), dict(found.optimizer))
        return {"values": dict(found.state), "notices": [*notices, f"resuming from {place}"]}

    answer: dict[str, Any] | None = on_root(group, read)
    if answer is None:
        return State(samples=samples), [f"{folder.path} has no checkpoint yet: starting at the beginning"]
    values, notices = answer["values"], answer["notices"]
    model, optimizer = (_broadcast(arrays, group) for arrays in parts[0])
    worker.model.load_state(model)
    worker.load_optimizer_state(optimizer, values["optimizer"])
    if values["ranks"] != group.size:
        notices.append(f"the run had {values['ranks']} ranks and goes on with {group.size}: equal up to rounding")
    return State.from_json(values), notices


def kept_algorithms(folder: RunFolder, group: Group) -> list[str] | None:
    """Return the all-reduce of each bucket that the run's last good checkpoint was made with. Collective.

    Another one adds in another order. None without a checkpoint, or with another number of ranks, when nothing can be
    kept.

    Raises:
        CheckpointError: on all ranks, when no checkpoint is whole.
    """

    def read() -> list[str] | None:
        loaded = load_checkpoint(folder.checkpoints)
        if loaded is None or loaded[0].state["ranks"] != group.size:
            return None
        kept: list[str] = loaded[0].state.get("algorithms") or []
        return kept or None  # a fused update has none

    algorithms: list[str] | None = on_root(group, read)
    return algorithms


def _broadcast(arrays: Mapping[str, Array], group: Group) -> dict[str, Array]:
    """Return rank 0's arrays on every rank; the others give arrays of the same names, shapes and dtypes."""
    copies = {name: np.array(arrays[name], order="C") for name in sorted(arrays)}
    for array in copies.values():
        group.broadcast(array)
    return copies
