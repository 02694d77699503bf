"""Waiting that leaves the core to others: MPI's own waiting spins, and would slow down whoever computes."""

from __future__ import annotations

import time

from nnmpi.comm.group import Group

NAP_S = 0.0005


def rest_until(group: Group) -> None:
    """Return when all ranks have come here; who comes early sleeps. Collective."""
    request = group.comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)
