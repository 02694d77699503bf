"""Measures nothing: a job that only tells which MPI and BLAS run here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnmpi.comm.group import Group


def measure(group: Group, settings: Mapping[str, Any]) -> None:
    """Return nothing."""
