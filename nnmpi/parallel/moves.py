"""One array's way between the ranks that hold it and rank 0, going on in step after a failure.

A rank that fails keeps its error, and from then on says no to each transfer that it has a part in: the others are not
left waiting, and all raise together when everything has been gone through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from nnmpi.backend.array import Array, namespace
from nnmpi.comm.algorithms.tree import tree_broadcast
from nnmpi.comm.mail import Mail
from nnmpi.parallel.pieces import Outline, Place
from nnmpi.shard import Region

T = TypeVar("T")


class Trial:
    """Work that is done until something fails; afterwards nothing is.

    Attributes:
        error: what this rank's own work raised.
        stopped: whether there is no use in going on, for that or another rank's failure.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.stopped = False

    def attempt(self, work: Callable[..., T], *args: Any) -> T | None:
        """Return what the work returns; None if it fails, or something has failed before."""
        if self.stopped:
            return None
        try:
            return work(*args)
        except Exception as error:
            self.error, self.stopped = error, True
            return None

    def need(self, done: bool) -> bool:
        """Go no further if this was not done, by another's fault."""
        self.stopped = self.stopped or not done
        return done


def to_host(array: Array) -> Array:
    """Return the values as a C-contiguous array in host memory, a copy only where one is needed; 0-d stays 0-d."""
    get = getattr(array, "get", None)
    return np.asarray(array if get is None else get(), order="C")


def assemble(place: Place, own: Array | None, mail: Mail, trial: Trial) -> Array | None:
    """Return the whole array on rank 0, from its own part and the other owners'; None after a failure."""
    whole = trial.attempt(_empty, place.outline, None)
    for piece in place.written:
        if piece.rank == 0:
            trial.attempt(_put, whole, piece.region, own)
            continue
        direct = piece.region is None or piece.region.is_whole
        part = whole if direct else trial.attempt(_empty, place.outline, piece.region)
        if trial.need(mail.receive(None if trial.stopped else part, piece.rank)) and not direct:
            trial.attempt(_put, whole, piece.region, part)
    return None if trial.stopped else whole


def give(place: Place, rank: int, own: Array | None, mail: Mail, trial: Trial) -> None:
    """Send what this rank owns of an array to rank 0, where `assemble` runs."""
    if any(piece.rank == rank for piece in place.written):
        part = trial.attempt(to_host, own)
        trial.need(mail.send(part, to=0))


def spread(
    place: Place,
    rank: int,
    region: Region | None,
    holders: Sequence[int],
    whole: Array | None,
    own: Array | None,
    mail: Mail,
    trial: Trial,
) -> None:
    """Give this region of rank 0's whole array to all that hold it, along a binomial tree, and write it there.

    Args:
        holders: the ranks that hold the region; rank 0 may be among them.
        whole: on rank 0; None after a failure.
        own: on the holders, the array that is written.
    """
    chain = [0, *(holder for holder in holders if holder != 0)]
    if rank not in chain:
        return
    part = trial.attempt(_empty, place.outline, region) if rank else trial.attempt(_take, whole, region)
    for step in tree_broadcast(chain.index(rank), len(chain)):
        if step.from_ is not None and not trial.need(mail.receive(part, chain[step.from_])):
            part = None
        if step.to is not None:
            mail.send(part, chain[step.to])
    if rank in holders:
        trial.attempt(_write, own, part)


def _empty(outline: Outline, region: Region | None) -> Array:
    return np.empty(outline.shape if region is None else region.local_shape, outline.dtype)


def _put(whole: Array, region: Region | None, part: Array) -> None:
    if region is None:
        whole[...] = to_host(part)
    else:
        region.put(whole, to_host(part))


def _take(whole: Array, region: Region | None) -> Array:
    return np.asarray(whole if region is None else region.take(whole), order="C")


def _write(own: Array, part: Array) -> None:
    own[...] = namespace(own).asarray(part)
