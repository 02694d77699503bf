"""The saved fit for these ranks, nodes and MPI: the core reads it, and others measure it."""

import platform
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from nnmpi.base.errors import UsageError
from nnmpi.comm.fit import Fit, default_file, load_fit
from nnmpi.comm.group import Group


def find_fit(group: Group, otherwise: str = "fit") -> Fit | None:
    """Return the saved fit for these ranks, nodes and MPI; else None. Collective.

    Rank 0 reads: so the ranks agree, and need no common file system.

    Args:
        otherwise: the name of another kind of file to try (see `default_file`).
    """
    known, saved = facts(group), None
    if group.is_root:
        with suppress(UsageError, OSError):
            files = [
                file for name in ("fit", otherwise) if (file := default_file(known, name)).exists()
            ]
            fit = load_fit(files[0]) if files else None
            if fit is not None and all(
                fit.facts[name] == known[name] for name in ("ranks", "nodes", "mpi")
            ):
                saved = fit.to_json()
    answer = group.share(saved)
    return None if answer is None else Fit.from_json(answer)


def facts(group: Group) -> dict[str, Any]:
    """Return the conditions of a fit, and the date. Collective."""
    return {
        "ranks": group.size,
        "nodes": group.nodes(),
        "mpi": group.comm.world.library,
        "host": group.share(platform.node()),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
